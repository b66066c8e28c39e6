"""Collects the turns of a scheduler in ms-swift's form: ids, masks and logprobs, one list per assistant message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from polyturn.core.errors import SchedulerError
from polyturn.serving.rollout_protocol import (
    ChatCompletionResponseChoice,
    Messages,
    RolloutInferRequest,
    RolloutOutput,
)


class Turns:
    """Collects ids, masks and logprobs: one list per assistant message."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.masks: list[list[int]] = []
        self.logprobs: list[list[float]] = []

    def add(
        self,
        choice: ChatCompletionResponseChoice,
        *,
        ids: list[int] | None,
        mask: list[int] | None,
        logprobs: Sequence[float] | None,
        goes_on: bool,
    ) -> None:
        """Add a turn; the step's values override the sampled ones."""
        own = list(ids or choice.token_ids or [])
        trained = list(mask) if mask is not None else [1] * len(own)
        probs = list(logprobs or extract_logprobs_from_choice(choice))
        if goes_on and self.ids:
            self.ids[-1] += own
            self.masks[-1] += trained
            self.logprobs[-1] += probs
        else:
            self.ids.append(own)
            self.masks.append(trained)
            self.logprobs.append(probs)

    def output(self, response: Any, *, messages: Messages, infos: dict[str, Any]) -> RolloutOutput:
        """Return the whole trajectory; logprobs are left out unless there is one per trained token."""
        trained = sum(map(sum, self.masks))
        is_whole = sum(map(len, self.logprobs)) == trained
        has_ids = any(self.ids)
        return RolloutOutput(
            response=response,
            messages=messages,
            response_token_ids=self.ids if has_ids else [],
            response_loss_mask=self.masks if has_ids else [],
            rollout_logprobs=self.logprobs if has_ids and is_whole else [],
            rollout_infos=infos,
        )


def ids_of(content: Any) -> list[int] | None:
    """Return the ids that a scheduler put in place of a reply's text, or None."""
    is_ids = isinstance(content, list) and bool(content) and all(isinstance(i, int) for i in content)
    return content if is_ids else None


def as_request(value: Any) -> RolloutInferRequest:
    """Return a request, converting it from a dict if necessary.

    Raises:
        SchedulerError: it is not a request, or one of its messages has no role or another content than text and parts.
    """
    request = RolloutInferRequest(**value) if isinstance(value, Mapping) else value
    if not isinstance(request, RolloutInferRequest):
        raise SchedulerError(f"a request is {value!r:.100}; use a RolloutInferRequest")
    for message in request.messages:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not isinstance(message.get("content"), str | list | tuple | None):
            raise SchedulerError(
                f"the request of trajectory {request.uuid!r} has the message {message!r:.100}; write a dict with a role, "
                "and a content that is a text or a list of parts"
            )
    return request


def as_list(value: Any, *, name: str, where: str) -> list[Any]:
    """Return the ids or the mask of a step as a list; an array or a tensor is converted, None is empty."""
    numbers = value.tolist() if hasattr(value, "tolist") else () if value is None else value
    if not isinstance(numbers, list | tuple) or not all(isinstance(n, Integral | float) for n in numbers):
        raise SchedulerError(f"{name} is {value!r:.100} {where}; return a list with a number for each id")
    return list(numbers)


def extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
    """Return one logprob per sampled token; [] if there are none."""
    return [one["logprob"] for one in (response_choice.logprobs or {}).get("content", [])]
