"""WeightChecksums: compare a server's tensors with the sent weights by checksums, when the server starts or returns.

A probe of logprobs cannot detect one optimizer step, and a version tag does not depend on the weights. A checksum detects a
single bit. It works with servers that can compute checksums (`engines/weights/checksums.py`). The canary weights show which
of the trainer's tensors each server tensor consists of.

A checksum reads all weights again, which takes as long as the sync if they are spread over ranks. So a server is checked
only at the start, and at the first sync after it was lost or left out: later syncs take the same path into the same process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from torch import Tensor

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.protocols import Engine
from polyturn.engines.weights.checksums import Checked, Composition, Folds, floating_names, fold_all
from polyturn.infra.aio import OneThread, first_error

logger = logging.getLogger(__name__)


class WeightChecksums:
    """Compares the checksums of an engine's tensors with the checksums of the sent weights."""

    def __init__(self, thread: OneThread) -> None:
        """Read weights in `thread`, the trainer's thread."""
        self._thread = thread
        self._compositions: dict[Engine, Composition] = {}
        self._version = -1
        self._folds: Folds = {}
        """Checksums of the weights of that version."""
        self._passed: set[Engine] = set()
        """Engines whose last check passed and that have not been left out since."""

    async def learn(self, engines: Mapping[str, Engine], weights: Mapping[str, Tensor]) -> None:
        """Find the trainer's tensors that each engine tensor consists of, while all engines serve `weights`, whose tensors
        differ.

        Raises:
            EngineLostError: an engine did not answer.
        """
        for name, engine in engines.items():
            checksums = await engine.checksums() if isinstance(engine, Checked) else None
            if checksums is None:
                logger.info("%s reports no checksums, so its weights are not compared; see docs/guides/engines.md", name)
                continue
            composition = self._compositions[engine] = await self._thread.run(partial(Composition.find, checksums, weights))
            logger.info(
                "checksums of %d of %d tensors are compared now and whenever %s comes back",
                len(composition.names),
                len(floating_names(weights)),
                name,
            )

    def forget(self, engine: Engine) -> None:
        """Check `engine`, which has come back, again at the next sync."""
        self._passed.discard(engine)

    def keep(self, live: Iterable[Engine]) -> None:
        """Check all engines but the `live` ones again once they serve: a server that was down may be a new process."""
        self._passed &= set(live)

    async def _sent(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Compute the checksums that the tensors of each engine should have."""
        wanted = frozenset().union(*(composition.needed for composition in self._compositions.values()))
        # In a thread, because this reads all weights while episodes continue.
        self._folds, self._version = await self._thread.run(partial(fold_all, weights, wanted)), version

    async def problems(
        self, version: int, weights: Mapping[str, Tensor], engines: Mapping[str, Engine]
    ) -> dict[str, EngineError]:
        """Return engine -> error for engines that do not hold `weights`, just sent as `version`, or did not answer.

        `engines` are all engines that serve. One that has passed and served ever since is not checked again.
        """
        self.keep(engines.values())
        compared = self._compositions.keys() - self._passed
        to_check = {name: engine for name, engine in engines.items() if engine in compared}
        if not to_check:
            return {}
        await self._sent(version, weights)
        failures: dict[str, EngineError] = {}

        async def check(name: str, engine: Engine) -> None:
            try:
                await self.check(engine, version)
            except EngineError as problem:
                failures[name] = problem
            else:
                self._passed.add(engine)

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for name, engine in to_check.items():
                    tasks.create_task(check(name, engine))
        return failures

    async def check(self, engine: Engine, version: int) -> None:
        """Compare an engine's checksums with the checksums of `version`; do nothing if either are unknown.

        Raises:
            EngineLostError: the engine did not answer.
            EngineError: the engine holds other weights; the message names the tensors.
        """
        composition = self._compositions.get(engine)
        # A missing checksum is not a failure, because the probe of logprobs checks every engine too.
        if composition is None or not composition.parts or version != self._version or not isinstance(engine, Checked):
            return
        checksums = await engine.checksums()
        if checksums is None:
            raise EngineLostError("the engine no longer reports checksums; its server may run without polyturn's plug-in")
        if (wrong := composition.problem(checksums, self._folds)) is not None:
            raise EngineError(f"the engine does not hold the weights sent as version {version}: checksums differ in {wrong}")
