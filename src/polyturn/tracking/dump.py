"""Writes the trajectories of each step as text to `<step>.jsonl`, one object per line, for scripts and people.

    {"input": "…", "output": "…", "gts": "72", "score": 1.0, "step": 7, "acc": 1.0, "request_id": "g3/0",
     "messages": [{"role": "user", …}, …], "turns": [{"index": 0, "text": "…", "score": 0.0, "observation": […]}, …]}

`input` and `output` are decoded tokens without special tokens, so they do not show roles; `messages` and `turns` do. A key
that a reward function returned keeps its name and replaces a key above, except the keys `FIXED`. A repeated step overwrites
its file, which is written atomically.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyturn.core.messages import to_openai
from polyturn.core.serde import to_json
from polyturn.core.trajectory import Trajectory, TrajectoryGroup, Turn

FIXED = ("input", "output", "gts", "score", "step")
"""Keys that a reward function cannot override."""
Decode = Callable[[Sequence[int]], str]
"""Token ids -> text without special tokens."""


class TrajectoryDump:
    """Writes one file per step."""

    def __init__(self, folder: Path, decode: Decode) -> None:
        self.folder = folder
        self._decode = decode

    def write(self, step: int, groups: Iterable[TrajectoryGroup], *, name: str = "") -> Path:
        """Write the trajectories of a step and return their file.

        Args:
            step: The step.
            groups: The groups of the step.
            name: A subfolder, for instance one per evaluation set.
        """
        pairs = [(g, t) for g in groups for t in g.trajectories]
        extras = sorted({key for _, t in pairs if t.reward is not None for key in t.reward.info})
        path = self.folder / name / f"{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        # `backslashreplace` writes lone surrogates as JSON escapes
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for group, trajectory in pairs:
                info = {} if trajectory.reward is None else trajectory.reward.info
                own = {**self._record(group, trajectory), "step": step}
                line = {
                    key: v if isinstance(v := info.get(key), float) else to_json(v) for key in extras if key not in FIXED
                }
                record = {**own, **line}
                file.write(json.dumps(_plain(record), ensure_ascii=False, default=str) + "\n")
        os.replace(temporary, path)
        return path

    def _record(self, group: TrajectoryGroup, trajectory: Trajectory) -> dict[str, Any]:
        reward = trajectory.reward
        prompt_text, replies = self._texts(trajectory)
        return {
            "input": prompt_text,
            "output": replies,
            "gts": trajectory.task.ground_truth,
            "score": None if reward is None else reward.total,
            "request_id": trajectory.id,
            "uid": group.id,
            "task": trajectory.task.id,
            "data_source": trajectory.task.data_source,
            "stop_reason": trajectory.stop_reason.value,
            "error": trajectory.error,
            "components": {} if reward is None else reward.components,
            "messages": to_openai(trajectory.messages),
            "turns": [_turn(turn) for turn in trajectory.turns],
        }

    def _texts(self, trajectory: Trajectory) -> tuple[str, str]:
        """Return the prompt, and for all segments the text from the first sampled token on."""
        prompt_text, replies = "", []
        for number, segment in enumerate(trajectory.segments):
            ids, sampled = segment.token_ids, segment.sampled_mask
            start = int(sampled.argmax()) if sampled.any() else len(ids)
            prompt_text = self._decode(ids[:start].tolist()) if number == 0 else prompt_text
            replies.append(self._decode(ids[start:].tolist()))
        return prompt_text, "\n".join(replies)


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "index": turn.index,
        "role": turn.message.role,
        "text": turn.message.text,
        "finish_reason": turn.finish_reason.value,
        "score": turn.score,
        "scores": turn.scores,
        "tool_calls": [{"name": r.name, "reward": r.reward, "error": r.error} for r in turn.tool_results],
        "observation": to_openai(turn.observation),
    }


def _plain(value: Any) -> Any:
    """Return `value` for JSON: numbers that are not finite become null."""
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
