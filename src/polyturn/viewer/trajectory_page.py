"""The data of a trajectory's page: the conversation, and the tokens with the reasons for their weights.

Long texts are cut, and numbers that JSON cannot represent become strings.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyturn.core.arrays import Floats
from polyturn.core.media import Source
from polyturn.core.messages import Message
from polyturn.core.routing import has_route
from polyturn.core.serde import to_json
from polyturn.core.trajectory import SpanSource, ToolResult, Trajectory
from polyturn.store.schema import StoredTrajectory
from polyturn.viewer.tokens import DROPPED, STOPPED, TokenTexts, is_trained, why, why_weight

MAX_TOKENS = 20_000
"""Largest number of tokens on a page."""
MAX_TEXT = 100_000
"""Largest number of characters of a text on a page."""


def trajectory_page(
    record: StoredTrajectory, tokens: TokenTexts, *, segment: int = 0, start: int = 0, page_size: int = MAX_TOKENS
) -> dict[str, Any]:
    """Return the data of a trajectory's page.

    Args:
        record: The trajectory with its training results.
        tokens: Decodes the run's ids.
        segment: Index of the segment to show from token `start` on; all others are shown from their beginning.
        start: Index of the first token to show in this segment.
        page_size: Number of tokens to show: first of this segment, then of the other segments in order.
    """
    one = record.trajectory
    pages, left = {}, page_size
    for n in sorted(range(len(one.segments)), key=lambda n: n != segment):
        begin = max(0, min(start if n == segment else 0, len(one.segments[n]) - 1))
        pages[n] = slice(begin, min(begin + left, len(one.segments[n])))
        left -= pages[n].stop - begin
    trained = record.trained
    arrays = {
        "advantages": trained.advantages,
        "policy_logprobs": trained.policy_logprobs,
        "entropies": trained.entropies,
        "trained_weights": trained.weights,
    }
    on_tokens = {name: None if array is None else record.on_tokens(array) for name, array in arrays.items()}
    reward = None if one.reward is None else plain(to_json(one.reward))
    task = {
        "id": one.task.id,
        "data_source": one.task.data_source,
        "ground_truth": one.task.ground_truth,
        "extra": one.task.extra,
    }
    return {
        "id": one.id,
        "group": record.group,
        "step": record.step,
        "split": record.split,
        "task": cut(plain(to_json(task))),
        "reward": reward,
        "stop_reason": one.stop_reason.value,
        "stop_meaning": STOPPED[one.stop_reason],
        "error": cut(one.error),
        "dropped": record.trained.dropped,
        "dropped_meaning": DROPPED.get(record.trained.dropped or "", record.trained.dropped),
        "metrics": plain(to_json(one.metrics)),
        "messages": list(_conversation(one)),
        "segments": [_segment(record, n, tokens, pages[n], on_tokens) for n in range(len(one.segments))],
        "page_size": page_size,
        "has_tokenizer": tokens.is_known,
    }


def _segment(
    record: StoredTrajectory,
    number: int,
    tokens: TokenTexts,
    window: slice,
    on_tokens: Mapping[str, Sequence[Floats] | None],
) -> dict[str, Any]:
    segment, trained = record.trajectory.segments[number], record.trained
    ids = segment.token_ids[window].tolist()
    values = {name: None if of is None else of[number][window] for name, of in on_tokens.items()}
    recorded, is_sampled = segment.loss_weights[window], segment.sampled_mask[window]
    used = values.pop("trained_weights")
    if used is None:
        used = recorded * is_trained(record.trajectory, trained, split=record.split)
    used = np.where(is_sampled, used, 0.0)
    spans, at = [], 0
    for span in segment.spans:
        spans.append(
            {
                "source": span.source.value,
                "turn": span.turn,
                "start": at,
                "length": len(span),
                "version": span.policy_version,
                "routed": 0 if span.routed_experts is None else int(has_route(span.routed_experts).sum()),
                "why": why(record.trajectory, segment, span, trained, split=record.split),
            }
        )
        at += len(span)
    notes = {}
    if trained.weights is not None:
        for t in np.flatnonzero(is_sampled).tolist():
            if (note := why_weight(float(recorded[t]), float(used[t]))) is not None:
                notes[window.start + t] = note
    return {
        "agent": segment.agent,
        "parent": None if segment.parent is None else list(segment.parent),
        "num_tokens": len(segment),
        "start": window.start,
        "ids": ids,
        "texts": tokens.texts(ids),
        "weights": recorded.tolist(),
        "used_weights": used.tolist(),
        "spans": spans,
        "notes": notes,
        "logprobs": _numbers(np.where(is_sampled, segment.logprobs[window], np.nan)),
        **{name: None if of is None else _numbers(of) for name, of in values.items()},
    }


def _conversation(trajectory: Trajectory) -> Any:
    """Yield the messages in order, with tool calls and their results."""
    for message in trajectory.task.prompt:
        yield _message(message, turn=-1, results={})
    starts = [list(itertools.accumulate(map(len, segment.spans), initial=0)) for segment in trajectory.segments]
    for number, turn in enumerate(trajectory.turns):
        results = {r.call_id: r for r in turn.tool_results}
        sampled = [ref for ref in turn.spans if trajectory.span(ref).source is SpanSource.SAMPLED]
        yield _message(turn.message, turn=number, results=results) | {
            "finish_reason": turn.finish_reason.value,
            "score": json_number(turn.score),
            "scores": plain(to_json(turn.scores)),
            "timings": plain(to_json(turn.timings)),
            "info": cut(plain(to_json(turn.info))),
            "num_tokens": sum(len(trajectory.span(ref)) for ref in sampled),
            "at": [sampled[0].segment, starts[sampled[0].segment][sampled[0].span]] if sampled else None,
        }
        for message in turn.observation:
            yield _message(message, turn=number, results={})


def _message(message: Message, *, turn: int, results: Mapping[str, ToolResult]) -> dict[str, Any]:
    calls = []
    for call in message.tool_calls:
        result = results.get(call.id)
        calls.append(
            {
                "name": call.name,
                "arguments": _short(json.dumps(to_json(call.arguments), ensure_ascii=False, indent=1)),
                "raw": _short(call.raw),
                "error": call.error,
                "result": None
                if result is None
                else {
                    "text": _short(_text(result.content)),
                    "error": result.error,
                    "reward": json_number(result.reward),
                    "duration_s": json_number(result.duration_s),
                    "metrics": cut(plain(to_json(result.metrics))),
                },
            }
        )
    return {
        "turn": turn,
        "role": message.role,
        "name": message.name,
        "text": _short(message.text),
        "num_characters": len(message.text),
        "reasoning": None if message.reasoning is None else _short(message.reasoning),
        "tool_calls": calls,
        "media": [{"kind": m.kind, "source": _picture(m.source)} for m in message.media],
    }


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(to_json(content))


def _picture(source: Source) -> str | None:
    """Return a picture as a data URI if it was recorded whole; None for files and videos."""
    return source if isinstance(source, str) and source.startswith("data:image/") else None


def plain(value: Any) -> Any:
    """Return data in which numbers that JSON cannot represent are strings."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def json_number(value: Any) -> Any:
    """Return a number for JSON: a string if JSON cannot represent it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: Any) -> list[Any]:
    """Return numbers for JSON: None for NaN (no value), a string for infinity."""
    return [None if v != v else v if math.isfinite(v) else str(v) for v in values.tolist()]


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT]


def cut(value: Any) -> Any:
    """Return JSON data with long texts cut."""
    if isinstance(value, str):
        return value if len(value) <= 2000 else f"{value[:2000]}… ({len(value)} characters)"
    if isinstance(value, dict):
        return {k: cut(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [cut(v) for v in value]
    return value
