"""WeightChecksums: what a server holds against what was sent, tensor by tensor, by checksums, once it came or came back.

A probe of logprobs cannot see one optimizer step, and a version tag is a name that was given, not a look at the weights. A
checksum sees a single bit. It is asked of servers that can say it (`engines/weight_checksums.py`); the canary shows which of
the trainer's tensors each of theirs is made of.

A checksum reads all weights a second time, which between ranks takes as long as the sync. So a server is checked at the
start, and at the first sync after it was lost or left out; its later weights come the same way into the same process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from torch import Tensor

from polyturn.core.aio import OneThread, first_error
from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.protocols import Engine
from polyturn.engines.weight_checksums import Checked, Composition, Folds, floating_names, fold_all

logger = logging.getLogger(__name__)


class WeightChecksums:
    """Compares the checksums of an engine's tensors with those of the weights that were sent."""

    def __init__(self, thread: OneThread) -> None:
        """Read weights in `thread`, the trainer's."""
        self._thread = thread
        self._made_of: dict[Engine, Composition] = {}
        self._version = -1
        self._folds: Folds = {}
        """Of the weights of that version."""
        self._right: set[Engine] = set()
        """Engines that held what they were sent, and were not left out since."""

    async def learn(self, engines: Mapping[str, Engine], weights: Mapping[str, Tensor]) -> None:
        """Find out what the tensors of each engine are made of, while all serve `weights`, no two of which are equal.

        Raises:
            EngineLostError: one did not answer.
        """
        for name, engine in engines.items():
            checksums = await engine.checksums() if isinstance(engine, Checked) else None
            if checksums is None:
                logger.info("no checksums are compared of %s, which gives none; see docs/guides/engines.md", name)
                continue
            composition = self._made_of[engine] = await self._thread.run(partial(Composition.find, checksums, weights))
            logger.info(
                "checksums of %d of %d tensors are compared now and whenever it comes back, of %s",
                len(composition.names),
                len(floating_names(weights)),
                name,
            )

    def forget(self, engine: Engine) -> None:
        """Check `engine` again at the next sync: it has come back."""
        self._right.discard(engine)

    def keep(self, live: Iterable[Engine]) -> None:
        """Check all but the `live` ones again once they serve: where weights go to a server that was down, it may be a new
        process."""
        self._right &= set(live)

    async def _sent(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Compute the checksums that every engine's tensors should have now."""
        wanted = frozenset().union(*(composition.needed for composition in self._made_of.values()))
        # In a thread: the sums run over all weights, and episodes go on meanwhile.
        self._folds, self._version = await self._thread.run(partial(fold_all, weights, wanted)), version

    async def problems(
        self, version: int, weights: Mapping[str, Tensor], engines: Mapping[str, Engine]
    ) -> dict[str, EngineError]:
        """Return which engines do not hold `weights`, just sent as `version`, or could not be asked; with the reason.

        Of `engines`, all that serve, those are asked that were not found right before, or did not serve since.
        """
        self.keep(engines.values())
        compared = self._made_of.keys() - self._right
        to_check = {name: engine for name, engine in engines.items() if engine in compared}
        if not to_check:
            return {}
        await self._sent(version, weights)
        problems_found: dict[str, EngineError] = {}

        async def check(name: str, engine: Engine) -> None:
            try:
                await self.check(engine, version)
            except EngineError as problem:
                problems_found[name] = problem
            else:
                self._right.add(engine)

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for name, engine in to_check.items():
                    tasks.create_task(check(name, engine))
        return problems_found

    async def check(self, engine: Engine, version: int) -> None:
        """Compare an engine's checksums with those of `version`; do nothing where either is unknown.

        Raises:
            EngineLostError: it did not answer.
            EngineError: it holds others; the message names the tensors.
        """
        composition = self._made_of.get(engine)
        # Nothing to compare with is not a failure: the probe of logprobs looks at every engine too.
        if composition is None or not composition.parts or version != self._version or not isinstance(engine, Checked):
            return
        checksums = await engine.checksums()
        if checksums is None:
            raise EngineLostError("it gives no checksums any more; was it started again, without its plug-in?")
        if (wrong := composition.problem(checksums, self._folds)) is not None:
            raise EngineError(
                f"it does not hold the weights that were sent as version {version}: checksums differ in {wrong}"
            )
