"""verl.utils.rollout_trace: decorators that code written for verl carries, which record what passes through them.

    RolloutTraceConfig.init("project", "experiment", backend="log")
    with rollout_trace_attr(step=1, sample_index=0, rollout_n=0):
        await op(...)                                     an operation decorated with @rollout_trace_op

Without a backend the decorators cost one look at a variable. Backends: "log" (a DEBUG line per operation), or an object with
`record(name, inputs, outputs, error, seconds, attributes)`. Weave and mlflow are not spoken to from here.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyturn.core.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

_attributes: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("attributes", default=None)
_is_on: contextvars.ContextVar[bool] = contextvars.ContextVar("is_on", default=True)


class TraceBackend:
    """The destination of recorded operations; this one writes a DEBUG line per operation."""

    def record(
        self,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Any,
        error: BaseException | None,
        seconds: float,
        attributes: Mapping[str, Any],
    ) -> None:
        """Keep one operation."""
        end = f"raised {one_line(error)}" if error is not None else f"returned {outputs!r:.200}"
        logger.debug("%s %s %s in %.3f s", dict(attributes), name, end, seconds)


class RolloutTraceConfig:
    """The one place where tracing is set up."""

    _instance: RolloutTraceConfig | None = None

    def __init__(self) -> None:
        self.project_name: str | None = None
        self.experiment_name: str | None = None
        self.backend: str | None = None
        self.client: TraceBackend | None = None
        self.token2text = False
        self.max_samples_per_step_per_worker: int | None = None

    @classmethod
    def get_instance(cls) -> RolloutTraceConfig:
        """Return the one object."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | TraceBackend | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        """Set tracing up.

        Raises:
            ConfigError: there is no such backend.
        """
        config = cls.get_instance()
        if isinstance(backend, str):
            if backend != "log":
                raise ConfigError(
                    f"the trace backend {backend!r} is not here; use 'log', or an object with `record` (a run keeps every "
                    "trajectory anyway: see store.folder)"
                )
            config.client = TraceBackend()
        else:
            config.client = backend
        config.project_name, config.experiment_name = project_name, experiment_name
        config.backend = backend if isinstance(backend, str) or backend is None else type(backend).__name__
        config.token2text = token2text
        config.max_samples_per_step_per_worker = max_samples_per_step_per_worker

    @classmethod
    def get_backend(cls) -> str | None:
        """Return the backend's name."""
        return cls.get_instance().backend

    @classmethod
    def get_client(cls) -> TraceBackend | None:
        """Return the backend."""
        return cls.get_instance().client

    @classmethod
    def enable_token2text(cls) -> bool | None:
        """Return whether ids are to be recorded as text too."""
        return cls.get_instance().token2text

    @classmethod
    def reset(cls) -> None:
        """Forget the set-up."""
        cls._instance = None


@contextlib.contextmanager
def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """Let operations inside belong to one trajectory; `trace=False` leaves them out. Restored however the block ends."""
    found: dict[str, Any] = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n}
    found["experiment"] = RolloutTraceConfig.get_instance().experiment_name
    attributes = {"name": name, "validate": validate, **{k: v for k, v in found.items() if v is not None}}
    tokens = _attributes.set(attributes), _is_on.set(trace and _is_on.get())
    try:
        yield
    finally:
        _attributes.reset(tokens[0])
        _is_on.reset(tokens[1])


def rollout_trace_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Record every call of a method or function, plain or async; what it raises is recorded and raised."""
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def traced(*args: Any, **kwargs: Any) -> Any:
            with _recorded(func, args, kwargs) as outputs:
                outputs.append(await func(*args, **kwargs))
            return outputs[0]

        return traced

    @functools.wraps(func)
    def traced_plain(*args: Any, **kwargs: Any) -> Any:
        with _recorded(func, args, kwargs) as outputs:
            outputs.append(func(*args, **kwargs))
        return outputs[0]

    return traced_plain


@contextlib.contextmanager
def _recorded(func: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[list[Any]]:
    """Record the call that the block makes, where a backend listens; the block leaves what it returned in the list."""
    outputs: list[Any] = []
    client = RolloutTraceConfig.get_client() if _is_on.get() else None
    began, error = time.perf_counter(), None
    try:
        yield outputs
    except BaseException as problem:
        error = problem
        raise
    finally:
        if client is not None:
            bound = inspect.signature(func).bind(*args, **kwargs)
            inputs = {k: v for k, v in bound.arguments.items() if k != "self"}
            returned, attributes = outputs[0] if outputs else None, _attributes.get() or {}
            client.record(func.__qualname__, inputs, returned, error, time.perf_counter() - began, attributes)
