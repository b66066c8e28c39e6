"""verl.utils.rollout_trace: decorators that code written for verl carries, and which change nothing here.

A run keeps every trajectory with its turns and tool results (`polyturn show`); no trace is sent to another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from polyturn.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class RolloutTraceConfig:
    """The place where verl's tracing is set up: off, with nothing to set."""

    project_name: str | None = None
    experiment_name: str | None = None
    max_samples_per_step_per_worker: int | None = None

    @classmethod
    def get_instance(cls) -> type[RolloutTraceConfig]:
        """Return the place."""
        return cls

    @classmethod
    def init(cls, project_name: str, experiment_name: str, backend: str | None, *options: Any, **more: Any) -> None:
        """Accept that there is no backend.

        Raises:
            ConfigError: a backend is named.
        """
        if backend is not None:
            raise ConfigError(f"the trace backend {backend!r} is not here; a run keeps every trajectory: see store.folder")

    @classmethod
    def get_backend(cls) -> None:
        """There is no backend."""

    @classmethod
    def get_client(cls) -> None:
        """There is no backend's client."""

    @classmethod
    def enable_token2text(cls) -> bool:
        """Return whether ids are traced as text."""
        return False

    @classmethod
    def reset(cls) -> None:
        """There is nothing to forget."""


def rollout_trace_attr(*attributes: Any, **more: Any) -> contextlib.nullcontext[None]:
    """Return a block of which nothing is traced, whatever trajectory the attributes name."""
    return contextlib.nullcontext()


def rollout_trace_op(func: F) -> F:
    """Return the function as it is."""
    return func
