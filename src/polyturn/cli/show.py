"""`polyturn show`: recorded trajectories in the terminal, as a list, a conversation, or tokens.

    polyturn show RUN --where "reward < 1"     the newest trajectories that match
    polyturn show RUN g5/2                     as a conversation
    polyturn show RUN g5/2 --tokens            token by token: sampled and trained, sampled and not, observation, prompt

A run that is damaged, incomplete or empty is shown as far as possible, with a message about the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow.compute as pc
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyturn.cli import list_runs
from polyturn.cli.arguments import declare
from polyturn.cli.console import Output, command
from polyturn.core.errors import ConfigError, DataError, did_you_mean
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory
from polyturn.store.run_folders import find_runs
from polyturn.store.schema import StoredTrajectory
from polyturn.store.stored_run import StoredRun, open_store
from polyturn.viewer.tokens import DROPPED, STOPPED, TokenTexts, is_trained, why

COLOURS = {"system": "dim", "user": "cyan", "tool": "yellow", "assistant": "green"}
BAD = (("failed", "error", "error is not null"), ("with a tool call that failed", "num_tool_errors", "num_tool_errors > 0"))
"""Counts below a list: (name, column, SQL condition)."""
MAX_TRUTH = 200
"""Largest number of characters of a ground truth to show; programs and tests are longer."""
MAX_ROWS = 20
"""Number of trajectories to list by default."""
TRAINED, UNTRAINED = "black on green", "green"
TOKEN_COLOURS = {SpanSource.PROMPT: "cyan", SpanSource.OBSERVATION: "yellow"}


@declare("show")
def main(
    folder: Annotated[
        Path, typer.Argument(metavar="[RUN|FOLDER]", help="Folder of a run, or a folder of runs to list.")
    ] = Path("runs"),
    trajectory: Annotated[str | None, typer.Argument(help="Id of a trajectory, as the list shows it.")] = None,
    named: Annotated[str | None, typer.Option("--trajectory", help="The same as the second argument.")] = None,
    split: Annotated[str | None, typer.Option(help="Only this split: train, or eval/NAME.")] = None,
    step: Annotated[int | None, typer.Option(help="Only this step; evaluations of several steps use the same ids.")] = None,
    where: Annotated[
        str | None, typer.Option(help="Only trajectories that match an SQL condition: reward < 1 and num_turns > 2.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show the trajectory token by token, with its mask.")] = False,
    limit: Annotated[
        int | None, typer.Option("-n", min=1, help="Number of trajectories (default 20) or runs (default all) to list.")
    ] = None,
) -> None:
    """List the runs of a folder, or a run's trajectories, or show one."""
    if None not in (named, trajectory) and named != trajectory:
        raise ConfigError(f"--trajectory {named} and {trajectory} are two trajectories; show one of them")
    trajectory = named or trajectory
    if trajectory is not None and limit is not None:
        raise ConfigError("-n sets the length of a list, and one trajectory is shown; remove it")
    if tokens and trajectory is None:
        raise ConfigError("--tokens shows one trajectory; give its id from the list of `polyturn show RUN`")
    if trajectory is None and split is None and step is None and where is None and _holds_runs(folder):
        list_runs.run(folder, limit=limit)
        return
    out = Output()
    stored = open_store(folder)
    if where is not None:
        stored = stored.filter(where)
    try:
        if trajectory is not None:
            _one(out, stored, folder, trajectory, split=split, step=step, tokens=tokens)
            return
        rows = [r for r in stored.table().to_pylist() if split in (None, r["split"]) and step in (None, r["step"])]
        if not rows:
            raise DataError(_nothing(folder, stored, split=split, step=step, where=where))
        list_rows(out, folder, rows, limit=limit or MAX_ROWS)
    finally:
        for part, reason in stored.problems.items():
            out.text(f"not shown: {folder / 'trajectories' / part} cannot be read ({reason})", style="red")


def _holds_runs(folder: Path) -> bool:
    try:
        return find_runs([folder], warns=False) != [folder]
    except DataError:
        return False


def show_one(console: Console, trajectory: Trajectory) -> None:
    """Print a trajectory as a conversation. Text of the environment is printed without interpreting markup."""
    for message in trajectory.task.prompt:
        _say(console, message.role, _with_media(message))
    has_agents = len({trajectory.agent_of(turn) for turn in trajectory.turns} | {"assistant"}) > 1
    for turn in trajectory.turns:
        sampled = [s for s in (trajectory.span(ref) for ref in turn.spans) if s.source is SpanSource.SAMPLED]
        score = "" if turn.score is None else f"  score {turn.score:g}"
        text = turn.message.text or ""
        for call in turn.message.tool_calls:
            text += f"\n→ {call.name}({dict(call.arguments)})" if call.error is None else f"\n→ {call.raw}  ({call.error})"
        num, untrained = sum(map(len, sampled)), sum(int((_weights(s) == 0).sum()) for s in sampled)
        masked = f", {untrained} of weight 0" if untrained else ""
        agent = f"{trajectory.agent_of(turn)}  " if has_agents else ""
        _say(
            console,
            "assistant",
            text.strip(),
            note=f"{agent}turn {turn.index}  {num} tokens{masked}  {turn.finish_reason.value}{score}",
        )
        failed = {r.call_id: f"failed: {r.error}" for r in turn.tool_results if r.error is not None}
        for message in turn.observation:
            _say(console, message.role, _with_media(message), note=failed.get(message.tool_call_id or "", ""))
    reward = trajectory.reward
    error = f": {trajectory.error}" if trajectory.error else ""
    stopped = trajectory.stop_reason
    console.print(
        Text.assemble(("stopped", "bold"), f" {stopped.value}{error}  ", (STOPPED[stopped], "dim")), soft_wrap=True
    )
    if reward is not None:
        parts = "  ".join(f"{name} {value:g}" for name, value in reward.components.items())
        console.print(Text.assemble(("reward", "bold"), f" {reward.total:g}   {parts}"))
    if trajectory.metrics.get("text_only"):
        console.print("text only: the ids are not the model's tokens, so this trajectory cannot be trained on", style="dim")


def show_tokens(console: Console, record: StoredTrajectory, texts: TokenTexts) -> None:
    """Print every token of a trajectory, coloured by whether it was trained, with the reason for each span."""
    console.print(
        Text.assemble(
            ("sampled, trained", TRAINED), "  ", ("sampled, not trained (weight 0)", UNTRAINED), "  ",
            ("observation", TOKEN_COLOURS[SpanSource.OBSERVATION]), "  ", ("prompt", TOKEN_COLOURS[SpanSource.PROMPT]),
        )
    )  # fmt: skip
    if not texts.is_known:
        console.print("the run's folder has no tokenizer, so tokens are shown as ids", style="dim")
    weights = _trained_weights(record)
    for number, segment in enumerate(record.trajectory.segments):
        begins = "" if segment.parent is None else f", branched off segment {segment.parent[0]} at {segment.parent[1]}"
        of = f" of {segment.agent}" if segment.agent != "assistant" else ""
        console.print(Text.assemble((f"segment {number}", "bold"), f"{of} {len(segment.token_ids)} tokens{begins}"))
        at = 0
        for span in segment.spans:
            inside = weights[number][at : at + len(span)]
            at += len(span)
            _span(console, record, segment, span, inside, texts)


def _span(
    console: Console,
    record: StoredTrajectory,
    segment: Segment,
    span: Span,
    weights: np.ndarray,
    texts: TokenTexts,
) -> None:
    reason = why(record.trajectory, segment, span, record.trained, split=record.split)
    of = "" if span.turn < 0 else f" turn {span.turn}"
    console.print(Text(f"{span.source.value}{of}, {len(span)} tokens: {reason}", style="dim"), soft_wrap=True)
    line = Text()
    for text, weight in zip(texts.texts(span.ids.tolist()), weights, strict=True):
        colour = TOKEN_COLOURS.get(span.source) or (TRAINED if weight else UNTRAINED)
        line.append(text, style=colour)
    console.print(line, soft_wrap=True)


def _one(
    out: Output, stored: StoredRun, folder: Path, trajectory: str, *, split: str | None, step: int | None, tokens: bool
) -> None:
    record = stored.record(trajectory, split=split, step=step)
    location = f"{record.split}, step {record.step}, group {record.group}"
    out.text(f"{record.trajectory.id}  {location}", style="bold")
    same = stored.select(id=trajectory, split=record.split).table()["step"].to_pylist()
    if others := sorted(set(same) - {record.step}):
        out.text(f"the same id at other steps: {', '.join(map(str, others))} (--step)", style="dim")
    if tokens:
        show_tokens(out.console, record, TokenTexts(folder))
        return
    out.text(f"task {_task(record.trajectory.task)}", style="dim")
    show_one(out.console, record.trajectory)
    if record.split.startswith("train"):
        out.text(f"{_learnt(record)}; token by token: {command('show', folder, trajectory, '--tokens')}", style="dim")


def _task(task: Task) -> str:
    """Return the parts of a task that are needed to judge its episode."""
    parts = [task.id]
    if task.data_source is not None:
        parts.append(f"of {task.data_source}")
    if task.ground_truth is not None:
        truth = str(task.ground_truth)
        parts.append(f"ground truth {truth[:MAX_TRUTH]}{'…' if len(truth) > MAX_TRUTH else ''}")
    if task.interaction is not None:
        parts.append(f"interaction {task.interaction.name}")
    return "  ".join(parts)


def _learnt(record: StoredTrajectory) -> str:
    """Return a summary of the training on an episode."""
    trained = record.trained
    if trained.dropped is not None:
        return f"not trained: {DROPPED.get(trained.dropped, trained.dropped)}"
    if record.trajectory.is_failed or trained.advantages is None or not len(trained.advantages):
        return "not trained"
    low, high = float(trained.advantages.min()), float(trained.advantages.max())
    return f"trained with advantage {low:.3g}" if low == high else f"trained with advantages from {low:.3g} to {high:.3g}"


def list_rows(out: Output, folder: Path, rows: Sequence[dict[str, object]], *, limit: int) -> None:
    """Print the newest `limit` rows of a run's table, and counts of all of them."""
    table = Table("id", "step", "split", "reward", "turns", "tokens", "stop", "task", box=None, pad_edge=False)
    columns = ("id", "step", "split", "reward", "num_turns", "num_sampled_tokens", "stop", "task_id")
    for row in rows[-limit:]:
        row = {**row, "stop": row["error"] or row["stop_reason"]}
        table.add_row(*(_cell(row[name]) for name in columns))
    out.table(table)
    out.text(f"{len(rows)} trajectories; one of them: {command('show', folder, rows[-1]['id'])}")
    ends = Counter(str(row["stop_reason"]) for row in rows)
    facts = [f"{number} ended by {reason}" for reason, number in ends.most_common()]
    for name, column, condition in BAD:
        if number := sum(bool(row[column]) for row in rows):
            facts.append(f'{number} {name} (--where "{condition}")')
    out.text(f"of these: {', '.join(facts)}", style="dim")


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _nothing(folder: Path, stored: StoredRun, *, split: str | None, step: int | None, where: str | None) -> str:
    if stored.problems and not len(stored) and where is None:
        return f"{folder}: none of its {len(stored.problems)} parts of trajectories can be read"
    conditions = f" of the split {split!r}" if split is not None else ""
    conditions += f" of step {step}" if step is not None else ""
    conditions += f" where {where}" if where is not None else ""
    if not conditions:
        hint = "; if it has just started, they appear with its first step"
    elif split is not None and len(stored) and not len(stored.select(split=split)):
        hint = f".{did_you_mean(split, {str(name) for name in stored.table(['split'])['split'].to_pylist()})}"
    elif step is not None and len(chosen := stored.select(split=split)):
        steps = chosen.table(["step"])["step"]
        hint = f"; its steps are from {pc.min(steps)} to {pc.max(steps)}"
    else:
        hint = ""
    return f"{folder} has no trajectories{conditions}{hint}"


def _weights(span: Span) -> np.ndarray:
    return np.ones(len(span), np.float32) if span.weights is None else span.weights


def _trained_weights(record: StoredTrajectory) -> list[np.ndarray]:
    """Return [T] for each segment the weights used in the loss: 0 if the trajectory was not trained, the spans' weights if
    unchanged."""
    weights = [segment.loss_weights for segment in record.trajectory.segments]
    if not is_trained(record.trajectory, record.trained, split=record.split):
        return [np.zeros_like(of) for of in weights]
    if record.trained.weights is None:
        return weights
    return [np.nan_to_num(of) for of in record.on_tokens(record.trained.weights)]


def _with_media(message: Message) -> str:
    """Return the text of a message, preceded by the names of its media."""
    return "".join(f"[{medium.kind}] " for medium in message.media) + message.text


def _say(console: Console, role: str, text: str, *, note: str = "") -> None:
    console.print(Text.assemble((role, f"{COLOURS.get(role, 'white')} bold"), " ", (note, "dim")))
    console.print(Text(text, style=COLOURS.get(role, "")), soft_wrap=True)
