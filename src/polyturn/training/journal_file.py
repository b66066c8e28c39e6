"""JournalFile: conversations in flight, written turn by turn, so that a killed run can continue them.

    runs/x/journal/step-000040.jsonl      sampled by the weights of checkpoint 40 or before, not yet trained
                   {"s": "g81/3", "begun": "5e1…", "why_not": null}              an episode is in flight
                   {"s": "g81/3", "line": 1, "versions": [40], "events": […], "state": {…}}      after a complete turn
                   {"s": "g81/3", "line": 2, "versions": [40], "trajectory": {…}}                finished and scored

`rollout/journal.py` defines the content of a line. This module decides which lines a resumed run may use: lines of groups
that the checkpoint has not trained, sampled by weights up to the checkpoint's. A thread hands each line to the operating
system before the episode continues, so that the line survives kill -9 and a slow disk delays only its episode.

Useless lines are removed once they are more than half of the file. A journal without conversations in flight is removed with
the last checkpoint of a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import to_json

from polyturn.core.errors import SnapshotError, most_common
from polyturn.infra.aio import OneThread
from polyturn.rollout.journal import JournaledEpisode

logger = logging.getLogger(__name__)

FOLDER = "journal"
"""Name of the folder in the run's folder."""
_TICKET = re.compile(r"g(\d+)(?:r\d+)?/")
"""Prefix of the ids of training episodes; the ids of evaluation episodes have another one."""
_MIN_WASTE = 1 << 20
"""Smallest number of bytes of useless lines at which a journal is rewritten, if they are also more than half of it."""
_METRICS = {
    "resumed": "rollout/resumed_episodes",
    "restarted": "rollout/restarted_episodes",
    "failed": "rollout/failed_snapshots",
}


class Line(NamedTuple):
    """One line of an episode, encoded."""

    data: bytes
    begins: bool
    """Whether it is the first line of an episode that starts at its task."""


class _LineSpan(NamedTuple):
    """The position of a line in the file, in bytes."""

    offset: int
    length: int


_Lines = dict[int, dict[str, list[_LineSpan]]]
"""Ticket -> episode -> its lines."""


@dataclass(slots=True, kw_only=True)
class _EpisodeLines:
    """The usable lines of one episode in the file."""

    state: JournaledEpisode
    first: _LineSpan
    """Position of its first line."""
    others: list[tuple[Mapping[str, Any], _LineSpan]] = field(default_factory=list)
    why_not_span: _LineSpan | None = None
    """Position of the line that says why the episode cannot be continued."""


class JournalFile:
    """The journal of one run."""

    def __init__(self, folder: Path, *, why_not: str | None = None) -> None:
        """Keep a journal in `folder`. With `why_not`, a reason, it keeps only the names of episodes, which then restart."""
        self.why_not = why_not
        self._folder = folder
        self._thread = OneThread("polyturn-journal")
        self._lock = threading.Lock()
        """Guards the file and the record of its lines."""
        self._file: int | None = None
        self._size = 0
        self._step = 0
        """The step of the journal's checkpoint."""
        self._live: _Lines = {}
        self._trained: _Lines = {}
        """The lines of groups that were trained or cut off since the checkpoint, if its weights may have sampled them."""
        self._cut_off: set[int] = set()
        """Tickets that were cut off; their later lines are dropped."""
        self._unstarted: dict[str, JournaledEpisode] = {}
        """Episodes in flight when the previous run ended, which have not started again yet."""
        self._counts: Counter[str] = Counter()
        self._unlogged: Counter[str] = Counter()
        """Outcome -> number of episodes since the last report."""
        self._reasons: Counter[str] = Counter()
        self._warned: set[str] = set()

    # Called by the loop.

    def begin(self, step: int, *, last: int | None = None) -> None:
        """Start the journal of the checkpoint of `step`, which is about to be written. If the file cannot be written, no
        line is kept until the next checkpoint.

        Args:
            step: Step of the checkpoint.
            last: Step of the newest complete checkpoint, whose journal stays; None keeps the previous journal.
        """
        with self._lock:
            kept = self._path(self._step if last is None else last)
            # A run that resumes here trains no group from before this checkpoint, but continues the episodes in flight.
            self._step, self._trained = step, {}
            if self._file is None:
                self._live = {}
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                for old in self._folder.glob("step-*.jsonl"):
                    if old != kept:
                        old.unlink(missing_ok=True)
                self._rewrite(self._path(step))
            except OSError as problem:
                self._end(problem)

    def settle(self) -> None:
        """Remove older journals after the run's last checkpoint, and this one if no episode is in flight."""
        with self._lock:
            for path in self._folder.glob("*step-*.jsonl"):
                if path != self._path(self._step) or not self._live:
                    path.unlink(missing_ok=True)
            if not self._live and self._folder.is_dir():
                self._close()
                with contextlib.suppress(OSError):  # the folder contains a user's file
                    self._folder.rmdir()

    def resume(self, step: int, *, oldest: Callable[[int], int]) -> None:
        """Read the episodes in flight at the checkpoint of `step`.

        Args:
            step: Step of the checkpoint. Lines sampled by later weights are dropped, because the resumed run will train
                other weights in these steps.
            oldest: Ticket -> the oldest policy version that its tokens may have.
        """
        path = self._path(step)
        with self._lock:
            self._step = step
            self._folder.mkdir(parents=True, exist_ok=True)
            for episode, entries in (_read(path) if path.is_file() else {}).items():
                ticket = _ticket(episode)
                if ticket is None:
                    continue
                spans = [entries.first, *([] if entries.why_not_span is None else [entries.why_not_span])]
                spans += _choose(entries, step=step, oldest=oldest(ticket))
                self._unstarted[episode] = entries.state
                self._live.setdefault(ticket, {})[episode] = spans
            self._open(path)
            self._put(b"\n")  # the last line may be incomplete

    def forget(self, tickets: Iterable[int], *, oldest: int = 0, are_cut: bool = False) -> None:
        """Drop the lines of the groups of `tickets`, which were trained or cut off.

        Args:
            tickets: Tickets of the groups.
            oldest: The oldest policy version that their tokens may have. If it is newer than the checkpoint, a run resumed
                from the checkpoint cannot use the lines.
            are_cut: Whether the groups were cut off.
        """
        with self._lock:
            for ticket in tickets:
                lines = self._live.pop(ticket, None)
                if lines is not None and oldest <= self._step:
                    self._trained[ticket] = lines
                if are_cut:
                    self._cut_off.add(ticket)
            groups = [*self._live.values(), *self._trained.values()]
            useful = sum(span.length for group in groups for spans in group.values() for span in spans)
            if self._file is None or self._size - useful <= max(_MIN_WASTE, useful):
                return
            try:
                self._rewrite(self._path(self._step))
            except OSError as problem:
                logger.warning(
                    "the journal of conversations in flight cannot be rewritten (%s), so the file keeps growing; free space "
                    "on the disk of the run's folder",
                    problem,
                )

    def read_metrics(self) -> Mapping[str, float]:
        """Return the numbers of episodes that continued, restarted, and could not be kept since the last call."""
        counts = {metric: float(self._counts[name]) for name, metric in _METRICS.items()}
        is_over = not self._unstarted or not self._counts  # otherwise episodes in `_unstarted` may start in a later step
        self._unlogged += self._counts
        self._counts = Counter()
        if is_over and (self._unlogged["resumed"] or self._unlogged["restarted"]):
            why = most_common(self._reasons, 5)
            logger.info(
                "conversations in flight: %d continued from their last complete turn, %d restarted from their tasks%s",
                self._unlogged["resumed"],
                self._unlogged["restarted"],
                f" ({why})" if why else "",
            )
            self._unlogged, self._reasons = Counter(), Counter()
        return counts

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    # Called by episodes.

    def takes(self, episode: str) -> bool:
        """Return whether `episode` is a training episode."""
        return is_of_training(episode)

    def recall(self, episode: str) -> JournaledEpisode | None:
        """Return the recorded part of an episode, once."""
        return self._unstarted.pop(episode, None)

    def recall_lost(self, episode: str) -> JournaledEpisode | None:
        """Return the recorded part of an episode of this run whose process died."""
        with self._lock:
            ticket = _ticket(episode)
            if self._file is None or ticket is None or ticket in self._cut_off:
                return None
            spans = self._live.get(ticket, {}).get(episode, [])
            lines = _read_lines((os.pread(self._file, p.length, p.offset), p) for p in spans).get(episode)
        if lines is None:
            return None
        lines.state.lines = [line for line, _ in lines.others]
        return lines.state

    async def write(self, episode: str, line: Callable[[], Mapping[str, Any]]) -> None:
        """Append a line, which is made in the thread.

        Raises:
            SnapshotError: the line cannot be made.
        """
        await self._thread.submit(lambda: self._append(episode, to_line(episode, line)))

    async def append(self, episode: str, line: Line) -> None:
        """Append an encoded line."""
        await self._thread.submit(partial(self._append, episode, line))

    def count(self, name: str, *, reason: str = "") -> None:
        """Count an episode that was "resumed" or "restarted", or whose snapshot "failed"."""
        self._counts[name] += 1
        if name == "restarted":
            self._reasons[reason] += 1
        elif name == "failed" and reason not in self._warned:
            self._warned.add(reason)
            logger.warning("a conversation cannot be saved (%s); a resumed run restarts it from its task", reason)

    # Called in the thread.

    def _append(self, episode: str, line: Line) -> None:
        ticket = _ticket(episode)
        with self._lock:
            if self._file is None or ticket is None or ticket in self._cut_off:
                return
            span = self._put(line.data)
            if span is not None:
                spans = self._live.setdefault(ticket, {}).setdefault(episode, [])
                if line.begins:
                    spans.clear()
                spans.append(span)

    # Called with the lock held.

    def _rewrite(self, path: Path) -> None:
        """Write the useful lines to `path`, the new journal."""
        draft = path.with_name(f".{path.name}")  # renamed when complete, so that a kill leaves one of the two
        with draft.open("wb") as file:
            self._trained, self._live = self._copy(self._trained, file), self._copy(self._live, file)
        draft.replace(path)
        self._open(path)

    def _copy(self, lines: _Lines, file: BinaryIO) -> _Lines:
        """Copy lines, and return their new positions."""
        moved: _Lines = {}
        for ticket, episodes in lines.items():
            for episode, spans in episodes.items():
                there = moved.setdefault(ticket, {}).setdefault(episode, [])
                for span in spans:
                    assert self._file is not None
                    there.append(_LineSpan(file.tell(), span.length))
                    file.write(os.pread(self._file, span.length, span.offset))
        return moved

    def _open(self, path: Path) -> None:
        self._close()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = os.fstat(self._file).st_size

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _put(self, data: bytes) -> _LineSpan | None:
        """Append bytes. A write error ends the journal, not the run."""
        assert self._file is not None
        span, left = _LineSpan(self._size, len(data)), memoryview(data)
        try:
            while left:
                done = os.write(self._file, left)
                self._size += done
                left = left[done:]
        except OSError as problem:
            self._end(problem)
            return None
        return span

    def _end(self, problem: OSError) -> None:
        logger.warning("conversations in flight are not kept any more (%s); a resumed run restarts them", problem)
        self._close()

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.jsonl"


def to_line(episode: str, line: Callable[[], Mapping[str, Any]]) -> Line:
    """Make and encode a line of an episode, in the process of the episode.

    Raises:
        SnapshotError: the line cannot be made.
    """
    new_line = line()
    values = {"s": episode, **new_line}
    try:
        try:
            data = to_json(values) + b"\n"  # four times as fast as the standard library
        except ValueError:  # the standard library also writes lone surrogates, and names values that it cannot write
            data = json.dumps(values).encode() + b"\n"
    except (TypeError, ValueError) as problem:
        raise SnapshotError(f"a conversation cannot be written as JSON: {problem}") from problem
    return Line(data, "begun" in new_line)


def is_of_training(episode: str) -> bool:
    """Return whether an episode is a training episode, whose turns are kept."""
    return _ticket(episode) is not None


def _read(path: Path) -> dict[str, _EpisodeLines]:
    """Return the record of each episode since it last started from its task."""
    offset = 0

    def placed(data: bytes) -> tuple[bytes, _LineSpan]:
        nonlocal offset
        span, offset = _LineSpan(offset, len(data)), offset + len(data)
        return data, span

    with path.open("rb") as file:
        return _read_lines(map(placed, file))


def _read_lines(lines: Iterable[tuple[bytes, _LineSpan]]) -> dict[str, _EpisodeLines]:
    entries: dict[str, _EpisodeLines] = {}
    for data, span in lines:
        try:
            line = json.loads(data)
            episode = line["s"]
            if "begun" in line:
                entries[episode] = _EpisodeLines(
                    state=JournaledEpisode(digest=line["begun"], why_not=line["why_not"]), first=span
                )
            elif "line" not in line:
                entries[episode].state.why_not, entries[episode].why_not_span = line["why_not"], span
            else:
                others = entries[episode].others
                while others and others[-1][0]["line"] >= line["line"]:
                    others.pop()  # a run that continued after an earlier turn wrote this line
                others.append((line, span))
        except (ValueError, KeyError, TypeError):  # an incomplete line, written when the run was killed
            continue
    return entries


def _choose(entry: _EpisodeLines, *, step: int, oldest: int) -> list[_LineSpan]:
    """Keep the usable lines of an episode, and return their positions."""
    spans: list[_LineSpan] = []
    state = entry.state
    for line, span in entry.others:
        if line["line"] != len(state.lines) + 1:
            break  # a line is missing: the disk was full for a while
        versions = line["versions"]
        if versions and max(versions) > step:
            if not state.lines:
                state.why_not = state.why_not or "it was sampled by weights after the checkpoint"
            break
        if versions and min(versions) < oldest:
            state.lines, state.why_not = [], state.why_not or "the weights that sampled it are too old to train on"
            return []
        state.lines.append(line)
        spans.append(span)
    return spans


def _ticket(episode: str) -> int | None:
    match = _TICKET.match(episode)
    return None if match is None else int(match[1])
