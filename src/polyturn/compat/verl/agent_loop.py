"""verl.experimental.agent_loop: a user's agent loop, which runs as the scheduler of a native episode.

    @register("mine")
    class Mine(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
            turn = await self.server_manager.generate(request_id="r", prompt_ids=ids, sampling_params=sampling_params)
            return AgentLoopOutput(prompt_ids=ids, response_ids=turn.token_ids, response_mask=[1] * len(turn.token_ids))

Every `generate` is a turn of the episode: the prompt is used unchanged, the episode's limits apply, and the ids and logprobs
come from the engine. A sampled token is trained if the output's mask is 1 there; no other token is trained.
See `agent_scheduler.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)
from polyturn.compat.verl.tool_parser import FunctionCall, ToolParser
from polyturn.core.errors import ConfigError, UnknownNameError, did_you_mean
from polyturn.core.messages import Message
from polyturn.core.task import NATIVE_AGENTS
from polyturn.infra.plugin_shape import CallShape, Shape, check_class
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder

__all__ = [
    "AgentData", "AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "AgentState", "AsyncLLMServerManager",
    "DictConfigWrap", "FunctionCall", "TokenOutput", "ToolListWrap", "ToolParser", "get_agent_loop_class",
    "get_trajectory_info", "register",
]  # fmt: skip

_Class = TypeVar("_Class", bound="type[AgentLoopBase]")

_REGISTERED: dict[str, type[AgentLoopBase]] = {}


class TokenOutput(BaseModel):
    """The result of one `generate`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any | None = None
    stop_reason: str | None = None
    """Always "completed" here, because an abort ends the episode."""
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class TokenList(list[int]):
    """The result of `generate` for loops written for verl 0.5, which expect a list of ids."""

    def __init__(self, output: TokenOutput) -> None:
        super().__init__(output.token_ids)
        self.token_ids, self.log_probs, self.stop_reason = output.token_ids, output.log_probs, output.stop_reason
        self.extra_fields = output.extra_fields


class AgentLoopMetrics(BaseModel):
    """Seconds and counts that a loop measured."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = -1
    compute_score: float = 0.0


class AgentLoopOutput(BaseModel):
    """The result of `run`: a prompt, the tokens after it, and a mask that is 1 at tokens that the model wrote."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: Any | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return self.model_dump()


class AgentState(Enum):
    """States of an agent loop written as a state machine."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


class AgentData:
    """The state of one trajectory, for loops that keep it in one object."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        image_data: Any = None,
        video_data: Any = None,
        metrics: dict[str, Any] | None = None,
        request_id: str = "",
        tools_kwargs: dict[str, Any] | None = None,
        interaction: Any = None,
        interaction_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.messages = messages
        self.image_data = image_data
        self.video_data = video_data
        self.metrics = {} if metrics is None else metrics
        self.request_id = request_id
        self.tools_kwargs = tools_kwargs or {}
        self.interaction = interaction
        self.interaction_kwargs = interaction_kwargs or {}
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.turn_scores: list[float] = []
        self.scored_turns: list[int] = []  # the index of each score's assistant turn
        self.tool_rewards: list[float] = []
        self.user_turns = 0
        self.assistant_turns = 0
        self.tool_calls: list[FunctionCall] = []
        self.extra_fields: dict[str, Any] = dict(kwargs)


class DictConfigWrap:
    """Wraps a config, as loops written for verl expect."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """Wraps tools, as loops written for verl expect."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


class AsyncLLMServerManager(ABC):
    """The server of an agent loop; the native implementation is `agent_scheduler.EpisodeServer`."""

    codec: Any = None
    """The tokenizer and template of the run."""

    @abstractmethod
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue `prompt_ids` by one turn."""


class AgentLoopBase(ABC):
    """An agent with its own loop. One object runs one trajectory."""

    _class_initialized: ClassVar[bool] = False
    """Whether `init_class` has run, for classes that use this flag."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: AsyncLLMServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        dataset_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = _unwrapped(trainer_config)
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        # `dataset_config` is the older name.
        self.data_config = self.dataset_config = _unwrapped(data_config or dataset_config)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.apply_chat_template_kwargs: dict[str, Any] = dict(self.config.data.get("apply_chat_template_kwargs") or {})
        self.loop = asyncio.get_running_loop()
        self.init_class(config=self.config, tokenizer=tokenizer, processor=processor, **kwargs)

    @classmethod  # noqa: B027
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Prepare the state that all trajectories share. Overrides must do nothing on a second call."""

    @property
    def system_prompt(self) -> list[int]:
        """The tokens of the template before the first message."""
        one = self._render([{"role": "user", "content": ""}], add_generation_prompt=False)
        two = self._render([{"role": "user", "content": ""}] * 2, add_generation_prompt=False)
        return one[: len(one) - (len(two) - len(one))]

    async def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        audios: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Return the ids of `messages` and the generation prompt; `remove_system_prompt` removes the template's tokens
        before the first message."""
        self._assert_mm_supported(bool(images or videos or audios))
        ids = self._render(messages, tools=tools, add_generation_prompt=True)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise ConfigError("agent loops with media are not supported; use the native scheduler for such tasks")

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return no media, because only the native scheduler supports them."""
        return {}

    process_multi_modal_info = process_vision_info

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: Any) -> None:
        """Return no payload, because videos are not supported."""
        return None

    async def ct_build_initial_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        audios: Sequence[Any] | None = None,
        mm_inputs_out: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a prompt; `generate` ends the episode if it is too long."""
        return await self.apply_chat_template(messages, tools, images, videos, audios)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[Any, list[int], list[float] | None]:
        """Return the ids (`token_ids`), mask and logprobs with a turn of the model appended."""
        logprobs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or ())]
        mask = [*response_mask, *[1] * len(assistant_token_ids)]
        return SimpleNamespace(token_ids=[*runtime_token_ids, *assistant_token_ids]), mask, logprobs

    async def ct_merge_context_msg(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[Any, list[int], list[float] | None]:
        """Return the ids (`token_ids`), mask and logprobs with the new messages of `updated_messages` appended."""
        codec = self.server_manager.codec or Codec(self.tokenizer, template_kwargs=self.apply_chat_template_kwargs)
        old, new = ([Message.from_openai(m) for m in part] for part in (previous_messages, updated_messages))
        last_id = runtime_token_ids[-1] if runtime_token_ids else None
        added = DeltaEncoder(codec, tools=tools or ()).extend(new[len(old) :], last_id=last_id, history=old).tolist()
        logprobs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(added)]
        return SimpleNamespace(token_ids=[*runtime_token_ids, *added]), [*response_mask, *[0] * len(added)], logprobs

    def _render(self, messages: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            **self.apply_chat_template_kwargs,
        )
        return list(rendered)

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one trajectory.

        Args:
            sampling_params: Passed on to `server_manager.generate`.
            kwargs: The row's fields: raw_prompt, data_source, reward_model, extra_info, tools_kwargs, index, uid, …
        """


AGENT_LOOP = Shape(
    what="an agent loop",
    needs=(("run",),),
    bases=(AgentLoopBase,),
    calls={
        # or_num: run(self, messages, sampling_params), as in verl 0.5
        "run": CallShape(num=1, names=("raw_prompt",), or_num=2, write="async def run(self, sampling_params, **kwargs)")
    },
)
"""The methods that an agent loop's class needs."""


def register(agent_name: str) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a class; rows select it by this `agent_name`."""

    def add(cls: _Class) -> _Class:
        check_class(cls, AGENT_LOOP, where=f"agent_name {agent_name!r}")
        _REGISTERED[agent_name] = cls
        return cls

    return add


def get_agent_loop_class(agent_name: str, *, also: Collection[str] = ()) -> type[AgentLoopBase]:
    """Return a registered class; `also` has further names for the error message.

    Raises:
        UnknownNameError: the name is not registered; import the module that registers it.
    """
    if agent_name not in _REGISTERED:
        known = sorted({*_REGISTERED, *also, *NATIVE_AGENTS})
        raise UnknownNameError(
            f"Agent loop {agent_name} not registered, registered agent loops: {known}.{did_you_mean(agent_name, known)} "
            "Name your own loop in agent_loop_config_path, or import a module that registers it."
        )
    return _REGISTERED[agent_name]


async def get_trajectory_info(step: int, index: Sequence[Any], validate: bool) -> list[dict[str, Any]]:
    """Return {"step", "sample_index", "rollout_n", "validate"} per row; rollout_n counts consecutive equal indices."""
    out: list[dict[str, Any]] = []
    number = 0
    for position, of in enumerate(index):
        number = number + 1 if position and index[position - 1] == of else 0
        out.append({"step": step, "sample_index": of, "rollout_n": number, "validate": validate})
    return out


def _unwrapped(config: Any) -> Any:
    return config.config if isinstance(config, DictConfigWrap) else config
