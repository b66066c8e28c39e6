"""StandIn: replaces the modules of another library, so that code and command lines written for that library work.

    [project.entry-points."polyturn.namespaces"]
    other = "polyturn_other:STAND_IN"

    ->  `import other.x` works, and so does `polyturn run-as other -- python train.py`

Separate from the stand-ins themselves, so that the rest of polyturn does not depend on a particular library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyturn.core.trajectory import TrajectoryGroup
from polyturn.infra.plugins import NAMESPACES, load_each


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """The replacement of one library. Calling it installs the modules, as `polyturn.namespaces` requires."""

    name: str
    install: Callable[[], bool]
    """Make the library's name importable; return False if the library itself is installed, which is then used."""
    shims: Path | None = None
    """A folder for PYTHONPATH with a package of the library's name; None if `polyturn run-as` is not supported."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Name of a program to replace -> the module, and any arguments, for `python -m`."""
    takes_overrides: bool = False
    """Whether its training programs read `--dry-run` and `--set` of `polyturn run-as`."""
    adapt_scheduler: Callable[..., Callable[..., Any] | None] | None = None
    """Return a factory of adapted schedulers from a scheduler class written for the library, None from any other class; the
    keyword `where` names its source for a ConfigError."""
    schedulers: Callable[[], Mapping[str, Any]] = dict
    """Return name -> scheduler class: the library's own, and those of plug-ins."""
    adapt_estimator: Callable[[Any], Any] | None = None
    """Return ours from an advantage estimator written for the library; None from any other function."""
    adapt_loss: Callable[[Any], Any] | None = None
    """Return ours from a policy loss written for the library; None from any other function."""
    eval_metrics: Callable[[Sequence[TrajectoryGroup]], Mapping[str, float]] | None = None
    """Return the metrics of an evaluation under the library's names."""

    def __call__(self) -> bool:
        """Install it."""
        return self.install()


def stand_ins() -> Iterator[StandIn]:
    """Yield every `StandIn` among the entry points; plain functions are skipped."""
    for _, stand_in in load_each(NAMESPACES, StandIn):
        yield stand_in


def as_ours(kind: str, target: Any) -> Any:
    """Return another library's estimator or loss (`kind`) as ours; any other `target` unchanged."""
    for one in stand_ins():
        adapt = one.adapt_estimator if kind == "estimator" else one.adapt_loss
        if adapt is not None and (adapted := adapt(target)) is not None:
            return adapted
    return target
