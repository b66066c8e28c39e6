"""A simulated server that dies, hangs and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from polyturn.core.errors import EngineLostError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.engines.simulated import SimulatedEngine


class FailingEngine(SimulatedEngine):
    """A `SimulatedEngine` with faults."""

    def __init__(self, *arguments: Any, timeout_s: float = 600.0, **options: Any) -> None:
        """See `SimulatedEngine`; `timeout_s` is how long a server that hangs is waited for."""
        super().__init__(*arguments, **options)
        self._timeout_s = timeout_s
        self._is_dead = self._hangs = False

    def kill(self) -> None:
        """Die: everything in flight and everything that follows is lost."""
        self._is_dead, self._hangs = True, False
        self._lose_all(f"{self.name} was killed")

    def hang(self) -> None:
        """Accept everything from now on and answer nothing."""
        self._hangs = True
        self._empty()
        for run in self._live.values():
            self._fail_late(run)

    def restart(self, *, version: int | None = None) -> None:
        """Come back empty, with the weights that it had, or with those of `version`."""
        self._is_dead = self._hangs = False
        self._lose_all(f"{self.name} was restarted")
        self._version = self._version if version is None else version

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample, or fail with the server."""
        self._check()
        return await super().generate(request)

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Change the weights, or fail with the server."""
        self._check()
        await super().update_weights(version, weights=weights)

    def _check(self) -> None:
        if self._is_dead:
            raise EngineLostError(f"{self.name} cannot be reached")

    def _take(self, run: Any) -> None:
        if self._hangs:
            self._fail_late(run)
        else:
            super()._take(run)

    def _fail_late(self, run: Any) -> None:
        why = f"{self.name} did not answer within {self._timeout_s:g} s"
        asyncio.get_running_loop().call_later(self._timeout_s, self._fail, run, why)
