"""swift.rewards.orm: the base classes of reward functions, the shipped functions, and the registries.

    class Countdown(ORM):
        def __call__(self, completions, target, nums, **kwargs) -> list[float | None]: ...
    orms["external_countdown"] = Countdown              reward_funcs: [external_countdown]

`completions` has the last assistant message of each sample. All other arguments are lists of the same length, with the row's
columns and information about the rollout (`reward_adapter.py`). None means that a function does not score a sample.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from polyturn.compat.swift.registry import PluginDict
from polyturn.core.tagged import between
from polyturn.rewards import math as math_reward

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_TO_ANSWER = re.compile(r"</think>\s*<answer>")
_TO_ACTION = re.compile(r"</think>\s*Action:")
_NEXT = re.compile(r"\nObservation:|\nThought:|\nAction:")


class ORM:
    """A reward function. `__init__` may take the run's arguments; `__call__` scores a list of completions."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Return one score, or None, for each completion."""
        raise NotImplementedError


class AsyncORM(ORM):
    """An async reward function; several of them run concurrently."""

    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        """Return one score, or None, for each completion."""
        raise NotImplementedError


class PRM:
    """A scorer of steps for ms-swift's sampling tool, which a run does not use. Files that define one can be loaded."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the scores."""
        raise NotImplementedError


class MathAccuracy(ORM):
    """Scores whether the answer equals the row's `solution` mathematically."""

    def __call__(self, completions: list[str], solution: Sequence[Any], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        """Return 1.0 or 0.0."""
        return [
            1.0
            if (answer := _answer(text)) is not None and math_reward.is_equal(answer, _answer(str(gold)) or str(gold))
            else 0.0
            for text, gold in zip(completions, solution, strict=True)
        ]


class Format(ORM):
    """Scores whether the whole text is `<think>…</think><answer>…</answer>`."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Return 1.0 or 0.0."""
        return [float(_is_thought_and(_TO_ANSWER, text, "</answer>") and text.endswith("</answer>")) for text in completions]


class ReActFormat(ORM):
    """Scores whether the whole text is `<think>…</think> Action:… Action Input:…`."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Return 1.0 or 0.0."""
        return [float(_is_thought_and(_TO_ACTION, text, "Action Input:")) for text in completions]


class CosineReward(ORM):
    """Accuracy scaled by length: short right answers score higher, and long wrong answers lose less."""

    def __init__(self, args: Any = None, accuracy_orm: ORM | None = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.min_len_value_wrong = float(_option(args, "cosine_min_len_value_wrong", -0.5))
        self.max_len_value_wrong = float(_option(args, "cosine_max_len_value_wrong", 0.0))
        self.min_len_value_correct = float(_option(args, "cosine_min_len_value_correct", 1.0))
        self.max_len_value_correct = float(_option(args, "cosine_max_len_value_correct", 0.5))
        self.max_len = float(_option(args, "cosine_max_len", None) or _option(args, "max_completion_length", 512))
        self.accuracy_orm = accuracy_orm or MathAccuracy()

    def __call__(self, completions: list[str], solution: Sequence[Any], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        """Return a score for each completion."""
        right = self.accuracy_orm(completions, solution=solution, **kwargs)
        scores: list[float | None] = []
        for is_right, ids in zip(right, kwargs["response_token_ids"], strict=True):
            low, high = (
                (self.max_len_value_correct, self.min_len_value_correct)
                if is_right is not None and is_right >= 1
                else (self.max_len_value_wrong, self.min_len_value_wrong)
            )
            share = min(num_tokens(ids) / self.max_len, 1.0)
            scores.append(low + 0.5 * (high - low) * (1 + math.cos(share * math.pi)))
        return scores


class RepetitionPenalty(ORM):
    """A penalty for repeated n-grams of words."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.ngram_size = int(_option(args, "repetition_n_grams", 3))
        self.max_penalty = float(_option(args, "repetition_max_penalty", -1.0))

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Return 0 or less for each completion."""
        scores: list[float | None] = []
        for text in completions:
            words = text.lower().split()
            grams = [tuple(words[i : i + self.ngram_size]) for i in range(len(words) - self.ngram_size + 1)]
            scores.append((1 - len(set(grams)) / len(grams)) * self.max_penalty if grams else 0.0)
        return scores


class SoftOverlong(ORM):
    """A penalty that grows over the last `soft_cache_length` tokens before `soft_max_length`."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.soft_max_length = int(_option(args, "soft_max_length", None) or _option(args, "max_completion_length", 512))
        self.soft_cache_length = int(_option(args, "soft_cache_length", None) or 0)
        assert 0 < self.soft_cache_length < self.soft_max_length, (
            f"soft_cache_length is {self.soft_cache_length}; it must be above 0 and below {self.soft_max_length}"
        )

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Return 0 or less for each completion."""
        free = self.soft_max_length - self.soft_cache_length
        return [min(-(num_tokens(ids) - free) / self.soft_cache_length, 0.0) for ids in kwargs["response_token_ids"]]


class ReactORM(ORM):
    """Scores whether the last action has the name and input of the solution's last action.

    Inputs are compared as JSON if both are JSON, else word by word.
    """

    def __call__(self, completions: list[str], solution: Sequence[str], **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        """Return 1.0 or 0.0."""
        return [float(_same_action(text, gold)) for text, gold in zip(completions, solution, strict=True)]


class MathORM(ORM):
    """The scorer of ms-swift's sampling tool; it is not a reward of a run."""

    def __call__(self, infer_requests: Any, ground_truths: Any, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        """Score the last message of each request."""
        texts = [
            one["messages"][-1]["content"] if isinstance(one, dict) else one.messages[-1]["content"]
            for one in infer_requests
        ]
        return MathAccuracy()(texts, solution=ground_truths)


class SwiftThinkingTips(ORM):
    """The accuracy of a trajectory's last turn, for every sample of the trajectory."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        self.acc_func = MathAccuracy()

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        """Return 1.0 or 0.0."""
        rows = [kwargs["trajectory_inputs"][request_id][-1] for request_id in kwargs["request_id"]]
        return self.acc_func([row["messages"][-1]["content"] for row in rows], solution=[row["solution"] for row in rows])


ThinkingTips = SwiftThinkingTips  # the name in users' imports


def num_tokens(ids: Sequence[Any]) -> int:
    """Return the number of tokens of a flat list, or of a list per turn."""
    return sum(len(one) if isinstance(one, Sequence) else 1 for one in ids)


def _option(args: Any, name: str, default: Any) -> Any:
    value = vars(args).get(name) if args is not None else None
    return default if value is None else value


def _answer(text: str) -> str | None:
    tagged = between(text, "<answer>", "</answer>")
    if tagged:
        return math_reward.last_boxed(tagged[-1]) or tagged[-1].strip()
    if (boxed := math_reward.last_boxed(text)) is not None:
        return boxed
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


# Regular expressions with several unbounded parts can take minutes on a few hundred line breaks, so texts are parsed from
# left to right.


def _is_thought_and(then: re.Pattern[str], text: str, last: str) -> bool:
    """Return whether a text is `<think>…`, followed by a match of `then`, and later by `last`."""
    match = then.search(text, len("<think>")) if text.startswith("<think>") else None
    return match is not None and text.find(last, match.end()) >= 0


def last_action(text: str) -> tuple[str, str] | None:
    """Return the name and input of the last `Action: …` that is followed by a line `Action Input: …`."""
    last, at = None, 0
    while (start := text.find("Action:", at)) >= 0:
        start += len("Action:")
        mark = start
        while (mark := text.find("Action Input:", mark)) >= 0:
            end = mark
            while end > start and text[end - 1].isspace():
                end -= 1
            if "\n" in text[end:mark]:
                break
            mark += len("Action Input:")
        if mark < 0:
            break
        begin = mark + len("Action Input:")
        while begin < len(text) and text[begin].isspace():
            begin += 1
        following = _NEXT.search(text, begin)
        at = len(text) if following is None else following.start()
        last = text[start:end].strip(), text[begin:at].rstrip()
    return last


def _same_action(text: str, gold: str) -> bool:
    ours, wanted = last_action(text), last_action(gold)
    if ours is None or wanted is None or ours[0] != wanted[0]:
        return False
    mine, right = ours[1], wanted[1]
    try:
        return bool(json.loads(mine) == json.loads(right))
    except (ValueError, RecursionError):
        return mine.split() == right.split()


orms = PluginDict(
    "orms",
    {
        "accuracy": MathAccuracy,
        "format": Format,
        "react_format": ReActFormat,
        "cosine": CosineReward,
        "repetition": RepetitionPenalty,
        "soft_overlong": SoftOverlong,
        "toolbench": ReactORM,
        "math": MathORM,
        "thinking_tips": ThinkingTips,
    },
)
prms = PluginDict("prms")
