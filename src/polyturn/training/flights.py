"""Flights: the turns of conversations that are under way, on disk as they are completed, so that a kill costs no whole one.

    runs/x/flights/step-000040.jsonl     what was sampled by the weights of checkpoint 40 or before, and is not yet trained
                   {"s": "g81/3"}                                          an episode asked for its first turn
                   {"s": "g81/3", "k": "9f…", "t": …, "l": …, "v": …}      a completion, by a digest of the request

A run that goes on starts its episodes from their tasks again, and answers from here whatever is asked again: the same
prompt, sampled the same way, by weights that the checkpoint still stands for. Tools, interactions and schedulers live
through their part again and so come back to their state; where one of them answers differently than before, the prompt
differs, and the episode goes on from there with new samples. So what is trained on was sampled from exactly what stands
before it (I1).

Every line is handed to the operating system before the turn is shown to anyone, so that kill -9 keeps it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import Engine, EngineCapabilities

logger = logging.getLogger(__name__)

FOLDER = "flights"
"""The folder in a run's folder."""
_TICKET = re.compile(r"g(\d+)(?:r\d+)?/")
"""How the ids of episodes of training begin; those of evaluations do not."""
_ENDED = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class Flights:
    """What the live episodes of training have sampled, in memory and on disk."""

    def __init__(self, folder: Path, *, keeps_turns: bool = True) -> None:
        """Keep a journal in `folder`; without `keeps_turns` of the names of episodes only, which restart and are counted."""
        self._folder = folder
        self._keeps_turns = keeps_turns
        self._file: TextIO | None = None
        self._step = -1
        self._live: dict[int, list[tuple[int, str]]] = {}
        """Ticket -> (newest policy version, line) of what its episodes sampled."""
        self._asked: set[str] = set()
        """Live episodes that have asked for a turn."""
        self._gone: set[int] = set()
        """Tickets that were cut off; a late answer of theirs is not kept."""
        self._held: dict[tuple[str, str], list[Completion]] = {}
        """(episode, digest of the request) -> completions of a run before this one."""
        self._known: set[str] = set()
        """Episodes that were in flight when that run ended, and did not ask here yet."""
        self._counts = {"rollout/resumed_flights": 0, "rollout/restarted_flights": 0}

    def begin(self, step: int) -> None:
        """Start the journal of the checkpoint of `step`, which is about to be written; that of the one before it stays."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(self._folder.glob("step-*.jsonl"))[:-1]:
            old.unlink(missing_ok=True)
        self._step = step
        path = self._path(step)
        draft = path.with_name(f".{path.name}")
        lines = [line for kept in self._live.values() for version, line in kept if version <= step]
        draft.write_text("".join(lines), encoding="utf-8")
        draft.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def resume(self, step: int, *, oldest: Callable[[int], int]) -> None:
        """Read what was in flight beside the checkpoint of `step`.

        Args:
            step: Of the checkpoint; what later weights sampled is not of use, because those are trained anew.
            oldest: Ticket -> the oldest policy version that its tokens may have.
        """
        path = self._path(step)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._step = step
        if not path.is_file():
            self._file = path.open("a", encoding="utf-8")
            return
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                found = _TICKET.match(line["s"])
                self._known.add(line["s"])
                if "k" not in line or found is None or not self._keeps_turns:
                    continue
                completion = _completion(line)
            except (ValueError, KeyError, TypeError):  # half a line: the kill fell there
                continue
            versions = [version for _, version in completion.policy_versions]
            if max(versions) <= step and min(versions) >= oldest(int(found[1])):
                self._held.setdefault((line["s"], line["k"]), []).append(completion)
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n")  # the last line may be half a one

    def recall(self, request: GenerateRequest) -> Completion | None:
        """Return what was sampled for the same request before the run was resumed; None where there is nothing."""
        episode = request.session_id
        ticket = _ticket(episode)
        if ticket is None:
            return None
        held = self._held.get((episode, _digest(request))) if self._held else None
        if episode in self._known:
            self._known.discard(episode)
            self._counts["rollout/resumed_flights" if held else "rollout/restarted_flights"] += 1
        if episode not in self._asked:
            self._asked.add(episode)
            self._write(ticket, self._step, json.dumps({"s": episode}) + "\n")
        if not held:
            return None
        completion = held.pop(0)
        self.note(request, completion)
        return completion

    def note(self, request: GenerateRequest, completion: Completion) -> None:
        """Keep a completion that has come."""
        ticket = _ticket(request.session_id)
        if ticket is None or not self._keeps_turns or completion.finish_reason not in _ENDED or request.media:
            return
        newest = max(version for _, version in completion.policy_versions)
        self._write(ticket, newest, _line(request, completion))

    def forget(self, tickets: Iterable[int], *, are_cut: bool = False) -> None:
        """Drop what the groups of `tickets` sampled: they are trained, or cut off."""
        for ticket in tickets:
            self._live.pop(ticket, None)
            if are_cut:
                self._gone.add(ticket)
        self._asked = {episode for episode in self._asked if _ticket(episode) in self._live}

    def read_metrics(self) -> Mapping[str, float]:
        """Return how many episodes went on, and how many started again, since this was last asked."""
        counts = {name: float(count) for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counts

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, ticket: int, version: int, line: str) -> None:
        if ticket in self._gone:
            return
        self._live.setdefault(ticket, []).append((version, line))
        if self._file is None or version > self._step:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as problem:
            logger.warning("conversations in flight are not kept any more (%s); a resumed run restarts them", problem)
            self._file = None

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.jsonl"


class JournaledEngine:
    """An engine whose answers to episodes of training are kept, and given again where a resumed run asks the same."""

    def __init__(self, engine: Engine, flights: Flights) -> None:
        self.engine = engine
        self._flights = flights

    @property
    def capabilities(self) -> EngineCapabilities:
        """The engine's."""
        return self.engine.capabilities

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, or return the one that the same request got before the run was resumed.

        Raises:
            EngineError: the engine's.
        """
        if (held := self._flights.recall(request)) is not None:
            return held
        completion = await self.engine.generate(request)
        self._flights.note(request, completion)
        return completion

    async def abort(self, request_id: str) -> None:
        """Tell the engine."""
        await self.engine.abort(request_id)

    async def end_session(self, session_id: str) -> None:
        """Tell the engine."""
        await self.engine.end_session(session_id)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Tell the engine."""
        await self.engine.update_weights(version, weights=weights)

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()


def _ticket(episode: str) -> int | None:
    found = _TICKET.match(episode)
    return None if found is None else int(found[1])


def _digest(request: GenerateRequest) -> str:
    asked = hashlib.blake2b(request.prompt_ids.tobytes(), digest_size=12)
    asked.update(repr(request.sampling).encode())
    return asked.hexdigest()


def _line(request: GenerateRequest, completion: Completion) -> str:
    logprobs = completion.logprobs
    line = {
        "s": request.session_id,
        "k": _digest(request),
        "t": base64.b64encode(completion.token_ids.tobytes()).decode(),
        "l": None if logprobs is None else base64.b64encode(logprobs.tobytes()).decode(),
        "f": completion.finish_reason.value,
        "v": completion.policy_versions,
    }
    return json.dumps(line) + "\n"


def _completion(line: Mapping[str, Any]) -> Completion:
    logprobs = line["l"]
    return Completion(
        token_ids=np.frombuffer(base64.b64decode(line["t"]), np.int32),
        logprobs=None if logprobs is None else np.frombuffer(base64.b64decode(logprobs), np.float32),
        finish_reason=FinishReason(line["f"]),
        policy_versions=tuple((int(start), int(version)) for start, version in line["v"]),
    )
