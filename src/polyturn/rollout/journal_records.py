"""Turns and trajectories as what a `JournalCodec` can write, and back.

    write_turn        {"index": 0, "message": {"#record": 4}, "finish": "stop", "versions": [[0, 3]], "cut": null, …}
    write_trajectory  {"shown": […], "segments": […], "turns": […], "stop": "env_done", "reward": "[1.0, …]", …}

Separate from the flight, which knows when something is kept: here it is known what of it. A turn's tokens are those of its
spans, which the book has once; only a turn of which some were cut away writes its completion beside them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyturn.core.generation import Completion, FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.reward import Reward
from polyturn.core.task import Task
from polyturn.core.trajectory import Branch, Segment, Span, SpanRef, Trajectory, Turn
from polyturn.rollout.journal_codec import JournalCodec, pack, to_text, unpack
from polyturn.rollout.open_turn import OpenTurn


def write_turn(turn: OpenTurn) -> dict[str, Any]:
    """Return a turn as it is now; its records are named, its tokens are those of its spans unless some were cut."""
    completion = turn.completion
    is_cut = turn.num_tokens != len(completion.token_ids)
    return {
        "index": turn.index,
        "message": turn.message,
        "finish": completion.finish_reason,
        "versions": completion.policy_versions,
        "figures": to_text(completion.info),
        "cut": [pack(completion.token_ids), pack(completion.logprobs)] if is_cut else None,
        "cut_by": turn.cut_by,
        "text": turn.text,
        "said_before": turn.said_before,
        "stopped_by": turn.stopped_by,
        "num_tokens": turn.num_tokens,
        "is_continued": turn.is_continued,
        "tool_results": turn.tool_results,
        "observation": turn.observation,
        "scores": to_text(turn.scores),
        "info": to_text(turn.info),
        "timings": dict(turn.timings),
    }


def read_turn(
    book: JournalCodec, data: Mapping[str, Any], spans: Sequence[Sequence[int]], span: Callable[[SpanRef], Span]
) -> OpenTurn:
    """Return the turn that `write_turn` wrote, which has `spans`; `span` finds them."""
    held = book.decode(data)
    refs = [SpanRef(*ref) for ref in spans]
    versions = tuple((start, version) for start, version in held["versions"])
    if held["cut"] is not None:
        ids, logprobs = unpack(held["cut"][0], np.int32), unpack(held["cut"][1], np.float32)
    else:
        sampled = [span(ref) for ref in refs[: len(versions)]]
        ids = np.concatenate([s.ids for s in sampled])
        given = [s.logprobs for s in sampled if s.logprobs is not None]
        logprobs = np.concatenate(given) if given else None
    completion = Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=FinishReason(held["finish"]),
        policy_versions=versions,
        info=json.loads(held["figures"]),
    )
    same = ("index", "message", "text", "said_before", "stopped_by", "num_tokens", "is_continued", "timings")
    return OpenTurn(
        completion=completion,
        cut_by=StopReason(held["cut_by"]),
        spans=refs,
        tool_results=tuple(held["tool_results"]),
        observation=tuple(held["observation"]),
        scores=json.loads(held["scores"]),
        info=json.loads(held["info"]),
        **{name: held[name] for name in same},
    )


def write_trajectory(book: JournalCodec, trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory that is scored."""
    turns = [
        {
            "index": turn.index,
            "message": turn.message,
            "finish_reason": turn.finish_reason,
            "spans": turn.spans,
            "tool_results": turn.tool_results,
            "observation": turn.observation,
            "scores": to_text(turn.scores),
            "info": to_text(turn.info),
            "timings": dict(turn.timings),
            "is_continued": turn.is_continued,
        }
        for turn in trajectory.turns
    ]
    segments = [{"spans": s.spans, "media": s.media, "agent": s.agent, "parent": s.parent} for s in trajectory.segments]
    reward = trajectory.reward
    return {
        "shown": book.encode(trajectory.task.prompt),
        "segments": book.encode(segments),
        "turns": book.encode(turns),
        "stop": trajectory.stop_reason.value,
        "reward": None if reward is None else to_text([reward.total, reward.components, reward.info]),
        "metrics": to_text(trajectory.metrics),
    }


def read_trajectory(book: JournalCodec, data: Mapping[str, Any], id: str, task: Task) -> Trajectory:
    """Return the trajectory that `write_trajectory` wrote."""
    shown, segments, turns = (book.decode(data[name]) for name in ("shown", "segments", "turns"))
    reward = None if data["reward"] is None else json.loads(data["reward"])
    is_same = len(shown) == len(task.prompt) and all(a is b for a, b in zip(shown, task.prompt, strict=True))
    return Trajectory(
        id=id,
        task=task if is_same else dataclasses.replace(task, prompt=tuple(shown)),
        segments=tuple(
            Segment(
                spans=tuple(s["spans"]),
                media=tuple(s["media"]),
                agent=s["agent"],
                parent=None if s["parent"] is None else Branch(*s["parent"]),
            )
            for s in segments
        ),
        turns=tuple(
            Turn(
                **{
                    **turn,
                    "finish_reason": FinishReason(turn["finish_reason"]),
                    "spans": tuple(SpanRef(*ref) for ref in turn["spans"]),
                    "tool_results": tuple(turn["tool_results"]),
                    "observation": tuple(turn["observation"]),
                    "scores": json.loads(turn["scores"]),
                    "info": json.loads(turn["info"]),
                }
            )
            for turn in turns
        ),
        stop_reason=StopReason(data["stop"]),
        reward=None if reward is None else Reward(total=reward[0], components=reward[1], info=reward[2]),
        metrics=json.loads(data["metrics"]),
    )
