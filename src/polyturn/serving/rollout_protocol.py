"""Requests and responses of a rollout server: the inputs of users' schedulers, and the results of their `run`.

    RolloutInferRequest(messages=[{"role": "user", "content": "…"}], data_dict={"solution": "4"}, uuid="g0/1")
    ChatCompletionResponse(choices=[ChatCompletionResponseChoice(message=ChatMessage(…), token_ids=[9, 2], …)])
    RolloutOutput(response=…, messages=[…], response_token_ids=[[9, 2]], response_loss_mask=[[1, 1]])

The classes are mutable because user code edits their values in place.
"""

from __future__ import annotations

import base64
import time
import uuid as unique
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator, model_validator

from polyturn.core.media import to_source

Messages = list[dict[str, Any]]
Tool = dict[str, Any]
MEDIA = {"images": "image", "audios": "audio", "videos": "video"}
"""Media list of a request -> the kind of its items."""


class _Sampled:
    """A sampled value whose object identity marks where it was sampled; copying returns the same object."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class SampledId(_Sampled, int):
    """A token id."""

    __slots__ = ()


class SampledText(_Sampled, str):
    """The text of a turn."""

    __slots__ = ()


def remove_response(messages: Messages) -> str | None:
    """Take the reply off the end of a conversation, in place, and return it; None if there is none."""
    if messages and messages[-1]["role"] == "assistant":
        content: str | None = messages.pop()["content"]
        return content
    return None


@dataclass
class InferRequest:
    """One conversation to continue."""

    messages: Messages
    images: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[Tool] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert isinstance(self.messages, list), f"messages: {self.messages!r:.200}"
        for name in MEDIA:
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, [value])

    remove_response = staticmethod(remove_response)

    def to_printable(self) -> dict[str, Any]:
        """Return the request as plain values; long texts outside the content, such as images, are shortened."""
        return _printable(asdict(self))


def _printable(value: Any, key: str = "") -> Any:
    if isinstance(value, str) and len(value) >= 1000 and key not in ("content", "text"):
        return f"<<<base64:{value[:50]}..>>>"
    if isinstance(value, dict):
        return {k: _printable(v, k) for k, v in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list) else value


@dataclass
class RolloutInferRequest(InferRequest):
    """A conversation of a rollout; `data_dict` has the other columns of its row."""

    data_dict: dict[str, Any] = field(default_factory=dict)
    uuid: str | None = None
    add_eos: bool | str | None = None


@dataclass
class RequestConfig:
    """The sampling settings of a request; None means the run's value."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop: list[str] | None = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    return_details: bool = False
    min_p: float | None = None
    structured_outputs_regex: str | None = None

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = []


@dataclass
class UsageInfo:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class Function:
    """The function of a tool call, and its arguments as JSON text."""

    name: str
    arguments: str | None


@dataclass
class ChatCompletionMessageToolCall:
    """One tool call of a reply."""

    function: Function
    type: str = "function"
    id: str = field(default_factory=lambda: f"toolcall-{unique.uuid4().hex}")


@dataclass
class ChatMessage:
    """A message of the model."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | int | None
    tool_calls: list[ChatCompletionMessageToolCall] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """One reply, with its token ids as sampled."""

    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"] | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None
    messages: Messages | None = None
    """The whole conversation; set when the trajectory has ended."""
    routed_experts: Any = None


@dataclass
class ChatCompletionResponse:
    """The completions of one request."""

    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    id: str = field(default_factory=lambda: f"chatcmpl-{unique.uuid4().hex}")
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None
    images_size: list[Any] | None = None


class RolloutOutput(BaseModel):
    """The result of a `run` for one training sample, or the reply of a rollout server."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    response: ChatCompletionResponse
    messages: list[dict[str, Any]] | None = None
    response_token_ids: list[list[int]] = []
    """The token ids of each turn; a turn that continues the same message extends the last list."""
    response_loss_mask: list[list[int]] = []
    rollout_logprobs: list[list[float]] = []
    rollout_infos: dict[str, Any] = {}
    prompt_logprobs: list[Any] | None = None

    @field_validator("response_token_ids", "response_loss_mask", "rollout_logprobs", mode="wrap")
    @classmethod
    def _one_turn(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """Wrap a flat list of numbers as one turn; sampled ids keep their object identity."""
        if isinstance(value, list) and value and not isinstance(value[0], list | tuple):
            value = [value]
        return [
            [own if isinstance(own, SampledId) else read for own, read in zip(raw, checked, strict=True)]
            for raw, checked in zip(value, check(value), strict=True)
        ]

    @model_validator(mode="after")
    def _media_as_text(self) -> RolloutOutput:
        """Convert media in the infos to strings that survive JSON."""
        for name, kind in MEDIA.items():
            if self.rollout_infos.get(name):
                self.rollout_infos[name] = as_handed_over(kind, self.rollout_infos[name])
        return self


def as_sources(kind: str, items: Any) -> list[Any]:
    """Return one medium, or a list of them, as a list of data URIs, paths and addresses."""
    return [to_source(kind, item) for item in (items if isinstance(items, list | tuple) else [items])]


def as_handed_over(kind: str, items: Any) -> list[Any]:
    """Return one medium, or a list of them, in the form that reward functions get: images in base64."""
    if kind != "image":
        return as_sources(kind, items)
    return [_in_base64(item) for item in (items if isinstance(items, list | tuple) else [items])]


def _in_base64(image: Any) -> Any:
    if isinstance(image, Mapping) and "bytes" in image:
        image = image["bytes"] or image["path"]
    if isinstance(image, str):
        return base64.b64encode(Path(image).read_bytes()).decode() if _is_file(image) else image
    source = to_source("image", image)
    return source.partition(";base64,")[2] if isinstance(source, str) else source


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # too long for a path: it is base64
        return False
