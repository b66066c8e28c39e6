"""StandIn: our modules in the place of another library's, so that code and command lines written for that one work.

    [project.entry-points."polyturn.namespaces"]
    other = "polyturn_other:STAND_IN"              import other.x    polyturn run-as other -- python train.py

Separate from whatever stands in, so that the code which asks knows no library by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polyturn.core.plugins import NAMESPACES, load_each
from polyturn.core.trajectory import TrajectoryGroup


class AdaptScheduler(Protocol):
    """Takes a scheduler's class that was written for the library."""

    def __call__(self, target: Any, *, where: str) -> Callable[..., Any] | None:
        """Return a factory of schedulers for it; None for another class. Raises `ConfigError` for one that cannot work."""
        ...


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """The modules in the place of one library. Calling it puts them in place, as an entry point must."""

    name: str
    install: Callable[[], bool]
    """Answer imports under the name; False where the library itself is installed, which then goes first."""
    shims: Path | None = None
    """A folder for PYTHONPATH that holds a package of the name; without one there is no `polyturn run-as`."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """The names of the library's programs, each with what runs in its place behind `python -m`."""
    takes_overrides: bool = False
    """Whether its training programs read `--dry-run` and `--set` of `polyturn run-as`."""
    adapt_scheduler: AdaptScheduler | None = None
    schedulers: Callable[[], Mapping[str, Any]] = dict
    """Return name -> the class of a scheduler that a plug-in registered with the library."""
    adapt_estimator: Callable[[Any], Any] | None = None
    """Return an advantage estimator that was written for the library as one of ours; None for another function."""
    adapt_loss: Callable[[Any], Any] | None = None
    """The same of policy losses."""
    eval_metrics: Callable[[Sequence[TrajectoryGroup]], Mapping[str, float]] | None = None
    """Return the metrics of an evaluation under the library's names."""

    def __call__(self) -> bool:
        """Install it."""
        return self.install()


def stand_ins() -> Iterator[StandIn]:
    """Yield what stands in for a library; an entry point that only installs modules is none."""
    for _, stand_in in load_each(NAMESPACES, StandIn):
        yield stand_in


def as_ours(kind: str, target: Any) -> Any:
    """Return an estimator or a loss ("estimator", "loss") as one of ours, whichever library it was written for."""
    for one in stand_ins():
        adapt = one.adapt_estimator if kind == "estimator" else one.adapt_loss
        if adapt is not None and (adapted := adapt(target)) is not None:
            return adapted
    return target
