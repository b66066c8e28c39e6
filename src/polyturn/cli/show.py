"""`polyturn show`: recorded trajectories in the terminal: a list, or one as a conversation with scores and tool results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyturn.cli.console import Output
from polyturn.core.errors import DataError
from polyturn.core.messages import Message
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.store.stored_run import open_store

COLOURS = {"system": "dim", "user": "cyan", "tool": "yellow", "assistant": "green"}


def run(folder: Path, *, trajectory: str | None, split: str | None, limit: int) -> None:
    """List the newest `limit` trajectories of a run, or show the one with an id."""
    out = Output()
    stored = open_store(folder)
    if trajectory is not None:
        show_one(out.console, stored.trajectory(trajectory, split=split))
        return
    rows = [r for r in stored.table().to_pylist() if split is None or r["split"] == split]
    if not rows:
        raise DataError(f"{folder} has no trajectories{f' of the split {split!r}' if split else ''}")
    table = Table("id", "step", "split", "reward", "turns", "tokens", "stop", "task", box=None, pad_edge=False)
    for row in rows[-limit:]:
        reward = "-" if row["reward"] is None else f"{row['reward']:.2f}"
        table.add_row(
            row["id"], str(row["step"]), row["split"], reward, str(row["num_turns"]), str(row["num_sampled_tokens"]),
            row["stop_reason"], row["task_id"],
        )  # fmt: skip
    out.table(table)
    out.text(f"{len(rows)} trajectories; one of them: polyturn show {folder} {rows[-1]['id']}")


def trajectory_table(trajectories: Sequence[Trajectory]) -> Table:
    """Return one row per trajectory."""
    table = Table("id", "reward", "turns", "tokens", "stop", "task", box=None, pad_edge=False)
    for t in trajectories:
        reward = "-" if t.reward is None else f"{t.reward.total:.2f}"
        table.add_row(t.id, reward, str(len(t.turns)), str(t.num_sampled_tokens), t.error or t.stop_reason.value, t.task.id)
    return table


def show_one(console: Console, trajectory: Trajectory) -> None:
    """Print one trajectory as a conversation. Text of the environment is shown as text, whatever it contains."""
    for message in trajectory.task.prompt:
        _say(console, message.role, _with_media(message))
    for turn in trajectory.turns:
        sampled = sum(len(trajectory.span(r)) for r in turn.spans if trajectory.span(r).source is SpanSource.SAMPLED)
        score = "" if turn.score is None else f"  score {turn.score:g}"
        text = turn.message.text or ""
        for call in turn.message.tool_calls:
            text += f"\n→ {call.name}({dict(call.arguments)})" if call.error is None else f"\n→ {call.raw}  ({call.error})"
        _say(
            console,
            "assistant",
            text.strip(),
            note=f"turn {turn.index}  {sampled} tokens  {turn.finish_reason.value}{score}",
        )
        for message in turn.observation:
            _say(console, message.role, _with_media(message))
    reward = trajectory.reward
    console.print(
        f"[bold]stopped[/] {trajectory.stop_reason.value}" + (f": {escape(trajectory.error)}" if trajectory.error else "")
    )
    if reward is not None:
        parts = "  ".join(f"{name} {value:g}" for name, value in reward.components.items())
        console.print(f"[bold]reward[/] {reward.total:g}   {parts}")


def _with_media(message: Message) -> str:
    """Return the text of a message behind the names of what it shows."""
    return "".join(f"[{medium.kind}] " for medium in message.media) + message.text


def _say(console: Console, role: str, text: str, *, note: str = "") -> None:
    clean = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
    console.print(f"[{COLOURS.get(role, 'white')} bold]{escape(role)}[/] [dim]{note}[/]")
    console.print(escape(clean), style=COLOURS.get(role), markup=True, soft_wrap=True)
