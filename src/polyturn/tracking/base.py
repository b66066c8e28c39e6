"""RunTracker: the base class of user-defined trackers, and the information about a run that they get.

    class Mine(RunTracker):                            tracking: [{name: mine.py:Mine, url: http://...}]
        def __init__(self, run: RunInfo, *, url: str) -> None: ...
        def log(self, step, values): ...

Each tracker has its own thread (`manager.py`), so it may be slow, raise or hang without affecting the run. The constructor
and all methods are called from that thread, so a tracker needs no locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from polyturn.core.printable import printable
from polyturn.core.trajectory import Trajectory, TrajectoryGroup

MAX_TEXT = 4000
"""Largest number of characters of a conversation in a table of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that is tracked."""

    name: str
    folder: Path
    resumed_step: int | None = None
    """The step after which a resumed run continues; None for a new run."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, for trackers that read standard settings from there."""

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration from the folder, which has no secrets; {} if it is missing."""
        path = self.folder / "config.yaml"
        config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        return config if isinstance(config, dict) else {}

    def kept(self, name: str) -> str | None:
        """Return the value stored with `keep` before this run was interrupted; None in a new run."""
        path = self.folder / "tracking" / name
        return path.read_text(encoding="utf-8").strip() if self.resumed_step is not None and path.is_file() else None

    def keep(self, name: str, value: str) -> str:
        """Store `value`, such as an id, for a resumed run, and return it."""
        path = self.folder / "tracking" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n", encoding="utf-8")
        return value


class Sample(NamedTuple):
    """One row of the table of sample trajectories."""

    step: int
    split: str
    id: str
    task: str
    reward: float | None
    turns: int
    tokens: int
    stop: str
    conversation: str
    """All messages with their roles, cut to `MAX_TEXT` characters. The text is untrusted: do not render it as markup."""


class RunTracker:
    """A tracker that does nothing. Inherit it and override the methods you need."""

    def __init__(self, run: RunInfo, **kwargs: Any) -> None:
        """Start tracking `run`; `kwargs` are the other keys of the entry in `tracking`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step: of training, or of an evaluation before or after it."""

    def log_samples(self, step: int, split: str, rows: Sequence[Sample]) -> None:
        """Record some trajectories of a step, including the worst and the best."""

    def log_groups(self, step: int, split: str, groups: Sequence[TrajectoryGroup]) -> None:
        """Record all trajectories of a step."""

    def close(self) -> None:
        """Flush and close."""


def samples(step: int, split: str, groups: Sequence[TrajectoryGroup], num: int) -> list[Sample]:
    """Return `num` trajectories as rows, evenly spaced from worst to best reward; rows without a reward come first."""
    trajectories = [t for g in groups for t in g.trajectories]
    trajectories.sort(key=lambda t: float("-inf") if t.reward is None else t.reward.total)
    if len(trajectories) > num:
        last = max(1, num - 1)
        trajectories = [trajectories[i * (len(trajectories) - 1) // last] for i in range(num)]
    return [_row(step, split, t) for t in trajectories]


def _row(step: int, split: str, trajectory: Trajectory) -> Sample:
    return Sample(
        step=step,
        split=split,
        id=trajectory.id,
        task=trajectory.task.id,
        reward=None if trajectory.reward is None else trajectory.reward.total,
        turns=len(trajectory.turns),
        tokens=trajectory.num_sampled_tokens,
        stop=trajectory.stop_reason.value if trajectory.error is None else f"failed: {trajectory.error[:200]}",
        conversation=conversation(trajectory),
    )


def conversation(trajectory: Trajectory) -> str:
    """Return all messages with their roles; if the text is long, its beginning and end."""
    parts = []
    for message in trajectory.messages:
        calls = "".join(f"\n-> {call.name}({dict(call.arguments)})" for call in message.tool_calls if call.error is None)
        parts.append(f"[{message.role}]\n{message.text}{calls}")
    text = "\n\n".join(parts)
    half = MAX_TEXT // 2
    if len(text) > MAX_TEXT:
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return printable(text)


def literal(text: str) -> str:
    """Return text escaped for a cell of a Markdown table, so that markup or HTML in it has no effect."""
    marks = "".join(f"&#{ord(c)};" if c in "&<>|`*_[]()!#\\~" else c for c in text)
    return marks.replace("\r", "").replace("\n", "<br>")
