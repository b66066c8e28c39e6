"""`env: gem:game:GuessTheNumber-v0-easy`: an environment of GEM (`pip install gem-llm`), by the id that `gem.make` takes.

The model sees the observation between the `prefix` and the `suffix` of the environment's info, if it has them. The episode
ends when the environment is terminated or truncated. GEM draws from generators that the whole process shares, so each
environment gets its own random state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from polyturn.environments.base import Adapter, OwnRandom, check_kwargs, known_id, require

INSTALL = "gem-llm"
_SEEDS = 1 << 32
"""Seeds of NumPy's shared generator must be below this."""


@runtime_checkable
class _Closes(Protocol):
    def close(self) -> Any: ...


class Gem(Adapter):
    """Environments of GEM."""

    replays = True

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        with _same_root_logger():
            gem = require("gem", install=INSTALL, needed_by=name)
            registration = require("gem.envs.registration", install=INSTALL, needed_by=name)
        known_id(id, registration.ENV_REGISTRY, name=name)
        self._make: Callable[..., Any] = gem.make
        check_kwargs(self.make, name=name, kwargs=self.kwargs).close()

    def make(self) -> Any:
        """Return a new environment."""
        return GemEnv(lambda: self._make(self.id, **self.kwargs))


class GemEnv:
    """One GEM environment, for one episode."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._random = OwnRandom()
        with self._random.held():
            self._env = make()

    def reset(self, *, seed: int) -> str:
        """Begin with `seed` modulo 2**32."""
        with self._random.held():
            observation, info = self._env.reset(seed=seed % _SEEDS)
        return _observation_text(observation, info)

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Act with the model's text."""
        with self._random.held():
            observation, reward, is_terminated, is_truncated, info = self._env.step(action)
        observed = _observation_text(observation, {} if is_terminated or is_truncated else info)
        return observed, float(reward), bool(is_terminated), bool(is_truncated), {}

    def close(self) -> None:
        """Close the environment if it has a `close`."""
        if isinstance(self._env, _Closes):
            self._env.close()


def _observation_text(observation: Any, info: Mapping[str, Any]) -> str:
    parts = (info.get("prefix"), observation, info.get("suffix"))
    return "\n".join(str(p).strip("\n") for p in parts if p)


@contextmanager
def _same_root_logger() -> Iterator[None]:
    """Undo changes to the root logger that a package's import makes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
