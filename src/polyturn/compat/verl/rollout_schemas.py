"""verl.workers.rollout.schemas: the request object of verl's first rollout, for code that builds or reads one.

    request = AsyncRolloutRequest(request_id="r", state="pending", messages=[…], processing_class=tokenizer, …)
    request.add_assistant_message(tokenizer, "4")
    request.add_user_message(tokenizer, "Sure?")
    request.finalize(tokenizer, reward_scores={})

A thin facade: nothing in polyturn runs on it, for an episode keeps spans of sampled ids. Here, as there, a message that is
added is what the template adds to a short base conversation, and assistant text becomes tokens anew unless `content_ids` are
given. Text only.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from polyturn.tools.schema import OpenAIFunctionToolCall, OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)

AROUND = 10
"""Characters that are shown before and behind a difference."""

BASE_CHAT_HISTORY = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
]


class FinishReasonTypeEnum(str, Enum):  # noqa: UP042  (users see the text of a member)
    """Why generation stopped."""

    LENGTH = "length"
    STOP = "stop"
    TOOL_CALL = "tool_calls"

    @classmethod
    def from_str(cls, value: str) -> FinishReasonTypeEnum:
        """Return the member of that text.

        Raises:
            ValueError: there is none.
        """
        for member in cls:
            if member.value == value:
                return member
        raise ValueError(f"Unsupported finish reason type: {value}")


class AsyncRolloutRequestStateEnum(str, Enum):  # noqa: UP042
    """The states of a request."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"


class TokenizationSanityCheckModeEnum(str, Enum):  # noqa: UP042
    """The strictness with which held ids are compared with a full render."""

    DISABLE = "disable"
    STRICT = "strict"
    IGNORE_STRIPPABLE = "ignore_strippable"


class VerlMessage(BaseModel):
    """One message of a conversation."""

    role: str
    content: str | dict[str, Any] | list[dict[str, Any]] | ToolResponse
    tool_calls: list[OpenAIFunctionToolCall] | None = None


Message = VerlMessage  # the name that its users import


class AsyncRolloutRequest(BaseModel):
    """A conversation with its tokens, masks and positions; tensors are [1, L]."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    batch_data_id: int = 0
    rollout_offset: int = 0
    request_id: str
    state: AsyncRolloutRequestStateEnum
    messages: list[Message]
    multi_modal_keys: list[str] = Field(default_factory=lambda: ["image", "video"])
    multi_modal_data: dict[str, Any] = Field(default_factory=lambda: {"image": [], "video": []})
    multi_modal_inputs: dict[str, torch.Tensor] = Field(default_factory=dict)
    tool_schemas: list[OpenAIFunctionToolSchema] | None = None
    tools_kwargs: dict[str, Any] = Field(default_factory=dict)
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict)
    input_ids: torch.Tensor | None = None
    prompt_ids: torch.Tensor | None = None
    response_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    prompt_attention_mask: torch.Tensor | None = None
    response_attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    prompt_position_ids: torch.Tensor | None = None
    response_position_ids: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    prompt_loss_mask: torch.Tensor | None = None
    response_loss_mask: torch.Tensor | None = None
    reward_scores: dict[str, Any] = Field(default_factory=dict)
    max_prompt_len: int
    max_response_len: int = 8192
    max_model_len: int = 32768
    metrics: dict[str, list[Any]] = Field(default_factory=dict)
    output_token_ids: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    use_inference_chat_template: bool = False
    tokenization_sanity_check_mode: TokenizationSanityCheckModeEnum = TokenizationSanityCheckModeEnum.STRICT
    generation_prompt_ids: torch.Tensor | None = None
    base_conv_wo_gen_prompt_end_pos: int = 0
    base_conv_with_gen_prompt_end_pos: int = 0

    @model_validator(mode="before")
    @classmethod
    def initialize_request(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Render the prompt and take its tokens.

        Raises:
            ValueError: messages, the tokenizer or max_prompt_len are missing.
        """
        processing_class = values.pop("processing_class", None)
        for name, value in (
            ("messages", values.get("messages")),
            ("processing_class", processing_class),
            ("max_prompt_len", values.get("max_prompt_len")),
        ):
            if not value:
                raise ValueError(f"{name} is required for AsyncRolloutRequest initialization")
        values["messages"] = [Message.model_validate(m) for m in values["messages"]]
        tools = _plain_tools(values.get("tool_schemas"))
        without = _ids(processing_class, values["messages"], tools=tools)
        prompt = _ids(processing_class, values["messages"], tools=tools, generation=True)
        values["generation_prompt_ids"] = prompt[:, without.shape[-1] :]
        if any(values.get(k) is None for k in ("input_ids", "attention_mask", "position_ids")):
            values["input_ids"] = prompt
            values["attention_mask"] = torch.ones_like(prompt)
            values["position_ids"] = torch.arange(prompt.shape[-1]).unsqueeze(0)
        length = values["input_ids"].shape[-1]
        if length > values["max_prompt_len"]:
            logger.warning(
                "Prompt %s has length %d which is greater than max_prompt_len %d",
                values.get("batch_data_id", 0),
                length,
                values["max_prompt_len"],
            )
        values["loss_mask"] = torch.zeros_like(values["input_ids"])
        for name in ("attention_mask", "position_ids", "loss_mask"):
            values[f"prompt_{name}"] = values[name]
        values["prompt_ids"] = values["input_ids"]
        values["base_conv_wo_gen_prompt_end_pos"] = _ids(processing_class, BASE_CHAT_HISTORY, tools=tools).shape[-1]
        with_prompt = _ids(processing_class, BASE_CHAT_HISTORY, tools=tools, generation=True)
        values["base_conv_with_gen_prompt_end_pos"] = with_prompt.shape[-1]
        return values

    def get_generation_prompt_ids(self, processing_class: Any) -> list[int]:
        """Append the generation prompt if it is not there; return the ids that the engine continues."""
        held, suffix = _tensor(self.input_ids), _tensor(self.generation_prompt_ids)
        if suffix.shape[-1] and not torch.equal(held[:, -suffix.shape[-1] :], suffix):
            self._append(suffix, is_trained=False)
        if self.use_inference_chat_template:
            rendered = _ids(processing_class, self.messages, tools=_plain_tools(self.tool_schemas), generation=True)
            return [int(i) for i in rendered[0]]
        return [int(i) for i in _tensor(self.input_ids)[0]]

    def add_user_message(self, processing_class: Any, content: str) -> None:
        """Append a user message; its tokens are not trained."""
        message = Message(role="user", content=content)
        self.messages.append(message)
        self._append(self._added(processing_class, [message], after_generation=False), is_trained=False)

    def add_assistant_message(
        self,
        processing_class: Any,
        content: str,
        content_ids: torch.Tensor | None = None,
        tool_calls: list[OpenAIFunctionToolCall] | None = None,
    ) -> None:
        """Append an assistant message; its tokens are trained. `content_ids` are its tokens as they were sampled."""
        message = Message(role="assistant", content=content, tool_calls=tool_calls)
        self.messages.append(message)
        if content_ids is None:
            content_ids = self._added(processing_class, [message], after_generation=True)
        self._append(content_ids.reshape(1, -1), is_trained=True)

    def add_tool_response_messages(self, processing_class: Any, contents: list[ToolResponse]) -> None:
        """Append a tool message for each response; nothing if all are empty. Their tokens are not trained.

        Raises:
            ValueError: a response has images or videos.
        """
        if not contents or all(c.is_empty() for c in contents):
            return
        if any(c.image or c.video for c in contents):
            raise ValueError("this request object is text only; run tasks with media natively")
        messages = [Message(role="tool", content=c.text or "") for c in contents]
        self.messages.extend(messages)
        self._remove_generation_prompt()
        self._append(self._added(processing_class, messages, after_generation=False), is_trained=False)

    def update_metrics(self, metrics: Any, tool_id: str) -> None:
        """Keep the metrics of one tool call."""
        self.metrics.setdefault(tool_id, []).append(metrics)

    def finalize(
        self,
        processing_class: Any,
        reward_scores: dict[str, Any],
        finish_reason_type: FinishReasonTypeEnum = FinishReasonTypeEnum.STOP,
    ) -> None:
        """End the request: check its tokens against a full render, split off the response and cut it to its limits.

        Raises:
            ValueError: the finish reason is neither STOP nor LENGTH.
        """
        if finish_reason_type not in (FinishReasonTypeEnum.STOP, FinishReasonTypeEnum.LENGTH):
            raise ValueError(f"Unsupported finalize finish reason type: {finish_reason_type}")
        self.state = AsyncRolloutRequestStateEnum.COMPLETED
        self.reward_scores = reward_scores
        self._remove_generation_prompt()
        if self.tokenization_sanity_check_mode is not TokenizationSanityCheckModeEnum.DISABLE:
            self._check(processing_class)
        start = _tensor(self.prompt_ids).shape[-1]
        self.response_ids = _tensor(self.input_ids)[:, start:]
        for name in ("attention_mask", "position_ids", "loss_mask"):
            setattr(self, f"response_{name}", _tensor(getattr(self, name))[:, start:])
        self.truncate_output_ids(processing_class)

    def truncate_output_ids(self, processing_class: Any) -> None:
        """Cut all sequences to `max_model_len`, and the response to `max_response_len`."""
        for name in ("input_ids", "attention_mask", "position_ids", "loss_mask"):
            setattr(self, name, _tensor(getattr(self, name))[:, : self.max_model_len])
        for name in ("response_ids", "response_attention_mask", "response_position_ids", "response_loss_mask"):
            setattr(self, name, _tensor(getattr(self, name))[:, : self.max_response_len])

    @staticmethod
    def _handle_apply_chat_template(
        processing_class: Any,
        messages: Any,
        multi_modal_data: Mapping[str, Any] | None = None,
        tools: Any = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        return_dict: bool = False,
    ) -> Any:
        plain = [m.model_dump(exclude_none=True) if isinstance(m, BaseModel) else m for m in messages]
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        if not tokenize:
            return processing_class.apply_chat_template(plain, tokenize=False, **options)
        rendered = processing_class.apply_chat_template(
            plain, tokenize=True, return_dict=True, return_tensors="pt", **options
        )
        return rendered if return_dict else rendered["input_ids"]

    def _added(self, processing_class: Any, messages: list[Message], *, after_generation: bool) -> torch.Tensor:
        """Return [1, L] what the template adds for `messages` to the base conversation."""
        start = self.base_conv_with_gen_prompt_end_pos if after_generation else self.base_conv_wo_gen_prompt_end_pos
        return _ids(processing_class, [*BASE_CHAT_HISTORY, *messages], tools=_plain_tools(self.tool_schemas))[:, start:]

    def _append(self, ids: torch.Tensor, *, is_trained: bool) -> None:
        held = _tensor(self.input_ids)
        first = int(_tensor(self.position_ids)[0, -1]) + 1 if held.shape[-1] else 0
        self.input_ids = torch.cat([held, ids], -1)
        self.attention_mask = torch.cat([_tensor(self.attention_mask), torch.ones_like(ids)], -1)
        self.loss_mask = torch.cat([_tensor(self.loss_mask), torch.full_like(ids, int(is_trained))], -1)
        positions = torch.arange(first, first + ids.shape[-1]).unsqueeze(0)
        self.position_ids = torch.cat([_tensor(self.position_ids), positions], -1)

    def _remove_generation_prompt(self) -> None:
        suffix = _tensor(self.generation_prompt_ids)
        size = suffix.shape[-1]
        if size and torch.equal(_tensor(self.input_ids)[:, -size:], suffix):
            for name in ("input_ids", "attention_mask", "position_ids", "loss_mask"):
                setattr(self, name, _tensor(getattr(self, name))[:, :-size])

    def _check(self, processing_class: Any) -> None:
        """Warn where the tokens and a full render of the messages read differently."""
        full = _ids(processing_class, self.messages, tools=_plain_tools(self.tool_schemas))
        whole = processing_class.decode(full[0], skip_special_tokens=False)
        held = processing_class.decode(_tensor(self.input_ids)[0], skip_special_tokens=False)
        codes = difflib.SequenceMatcher(None, whole, held, autojunk=False).get_opcodes()
        found = [(i1, i2, j1, j2) for tag, i1, i2, j1, j2 in codes if tag != "equal"]
        if self.tokenization_sanity_check_mode is TokenizationSanityCheckModeEnum.IGNORE_STRIPPABLE:
            found = [f for f in found if whole[f[0] : f[1]].strip() or held[f[2] : f[3]].strip()]
        if found:
            lines = [_line(whole, held, *places) for places in found]
            logger.warning(
                "Inconsistent training and inference tokenization detected (%s).\n"
                "Showing %d characters before and after the diffs.\nFound differences:\n%s",
                self.tokenization_sanity_check_mode.value,
                AROUND,
                "\n".join(lines),
            )


def _line(whole: str, held: str, i1: int, i2: int, j1: int, j2: int) -> str:
    """Return a difference with the characters around it."""
    i1, i2, j1, j2 = max(0, i1 - AROUND), min(len(whole), i2 + AROUND), max(0, j1 - AROUND), min(len(held), j2 + AROUND)
    chunks = f"full_prompt_chunk: {whole[i1:i2]!r} | current_prompt_chunk: {held[j1:j2]!r}"
    return f"idx {i1}:{i2} -> {j1}:{j2} | {chunks}"


def _ids(processing_class: Any, messages: Any, *, tools: Any = None, generation: bool = False) -> torch.Tensor:
    rendered = AsyncRolloutRequest._handle_apply_chat_template(
        processing_class, messages, tools=tools, add_generation_prompt=generation, tokenize=True
    )
    return torch.as_tensor(rendered, dtype=torch.long).reshape(1, -1)


def _plain_tools(schemas: Any) -> list[dict[str, Any]] | None:
    if not schemas:
        return None
    return [s.to_dict() if isinstance(s, OpenAIFunctionToolSchema) else s for s in schemas]


def _tensor(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value
