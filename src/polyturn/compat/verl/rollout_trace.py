"""verl.utils.rollout_trace: decorators in code written for verl, which have no effect here.

A run stores every trajectory with its turns and tool results (`polyturn show`) instead of sending traces to a backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from polyturn.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class RolloutTraceConfig:
    """The settings of verl's tracing, which is always off."""

    project_name: str | None = None
    experiment_name: str | None = None
    max_samples_per_step_per_worker: int | None = None

    @classmethod
    def get_instance(cls) -> type[RolloutTraceConfig]:
        """Return the class itself, which has the settings."""
        return cls

    @classmethod
    def init(cls, project_name: str, experiment_name: str, backend: str | None, *options: Any, **more: Any) -> None:
        """Accept settings without a backend.

        Raises:
            ConfigError: a backend is named.
        """
        if backend is not None:
            raise ConfigError(
                f"the trace backend {backend!r} is not available; a run stores every trajectory (polyturn show RUN)"
            )

    @classmethod
    def get_backend(cls) -> None:
        """Return None: there is no backend."""

    @classmethod
    def get_client(cls) -> None:
        """Return None: there is no client."""

    @classmethod
    def enable_token2text(cls) -> bool:
        """Return whether ids are traced as text."""
        return False

    @classmethod
    def reset(cls) -> None:
        """Do nothing."""


def rollout_trace_attr(*attributes: Any, **more: Any) -> contextlib.nullcontext[None]:
    """Return a context without tracing."""
    return contextlib.nullcontext()


def rollout_trace_op(func: F) -> F:
    """Return the function unchanged."""
    return func
