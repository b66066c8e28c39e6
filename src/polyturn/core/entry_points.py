"""Entry points: the plug-ins that installed distributions offer under names, our own parts among them.

    [project.entry-points."polyturn.losses"]          a distribution says this in its pyproject.toml, and
    mine = "my_package.losses:mine"                   `algorithm.loss: mine` then works without any import

Groups: `polyturn.engines`, `.estimators`, `.losses`, `.environments`, `.trackers`, `.config_dialects`, `.namespaces`, and,
for every other `Registry`, one of its kind's name. Nothing is imported before its name is asked for.
"""

from __future__ import annotations

import functools
import logging
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from polyturn.core.errors import ConfigError, MissingAttributeError, MissingModuleError, one_line
from polyturn.core.interrupts import PLUGIN_RAISES, pass_interrupt

logger = logging.getLogger(__name__)

T = TypeVar("T")

OWN = "polyturn"
"""The name of our own distribution."""
_PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


class Offer(NamedTuple):
    """One name that one distribution offers."""

    point: EntryPoint
    distribution: str
    """Its name, and its version where that is known: "some-package 1.0"."""


def offered(group: str) -> Mapping[str, tuple[Offer, ...]]:
    """Return name -> who offers it, of a group such as "polyturn.losses"; our own names first."""
    return _offers(tuple(sys.path)).get(group, {})


def load_offered(group: str, name: str, *, where: str) -> Any:
    """Import what `name` of a group stands for.

    Args:
        group: The group, such as "polyturn.losses".
        name: One of the names of `offered`.
        where: How messages begin: the configuration's key, or the kind.

    Raises:
        ConfigError: several distributions offer the name.
        MissingModuleError, MissingAttributeError: its module cannot be imported, or lacks it.
    """
    offers = offered(group)[name]
    point, distribution = offers[0]
    if len(offers) > 1:
        who = " and ".join(offer.distribution for offer in offers)
        raise ConfigError(
            f"{where}: {name!r} is offered by {who} (entry points of {group!r}); uninstall all but one of them"
        )
    offerer = distribution.split()[0]
    told = f"{where}: {name!r}, which {distribution} offers as {point.value!r},"
    try:
        return point.load()
    except ModuleNotFoundError as problem:
        cure = _cure(name, distribution)
        raise MissingModuleError(f"{told} needs {problem.name}, which is not installed; {cure}") from problem
    except AttributeError as problem:
        raise MissingAttributeError(
            f"{told} cannot be found ({one_line(problem)}); repair or uninstall {offerer}"
        ) from problem
    except PLUGIN_RAISES as problem:
        pass_interrupt(problem)
        raise MissingModuleError(
            f"{told} cannot be imported ({one_line(problem)}); repair or uninstall {offerer}"
        ) from problem


def load_each(group: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield the name and the value of each entry point of a group that is of a kind; one that cannot be loaded is warned of
    once and left out, for nobody has named it."""
    for name in offered(group):
        try:
            found = load_offered(group, name, where=group)
        except ConfigError as problem:
            _warn(str(problem))
            continue
        if isinstance(found, kind):
            yield name, found


@functools.cache
def _warn(problem: str) -> None:
    logger.warning("%s", problem)


def wrong_kind(group: str, name: str, found: object, *, where: str, needs: str) -> ConfigError:
    """Return the error of an entry point that leads to something of another kind than its group holds."""
    offers = offered(group).get(name, ())
    by = f", which {offers[0].distribution} offers as {offers[0].point.value!r}," if offers else ""
    return ConfigError(f"{where}: {name!r}{by} is {found!r:.100}; it must be {needs}")


def _cure(name: str, distribution: str) -> str:
    if distribution != OWN:
        return f"install that, or uninstall {distribution.split()[0]}"
    return f"run: pip install 'polyturn[{name}]'" if name in _own_project().extras else "install it"


class _Project(NamedTuple):
    points: tuple[EntryPoint, ...]
    extras: frozenset[str]


@functools.cache
def _own_project() -> _Project:
    """Return what our own distribution offers.

    A checkout's is what its pyproject.toml says: the metadata of an editable install stays what it was when that was made,
    and would hide a part that was added since.
    """
    if _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == OWN:
            groups = project.get("entry-points", {})
            points = (EntryPoint(n, value, group) for group, names in groups.items() for n, value in names.items())
            return _Project(tuple(points), frozenset(project.get("optional-dependencies", {})))
    found = next(iter(distributions(name=OWN)), None)
    if found is None:
        return _Project((), frozenset())
    return _Project(tuple(found.entry_points), frozenset(found.metadata.get_all("Provides-Extra") or ()))


@functools.lru_cache(maxsize=4)
def _offers(path: tuple[str, ...]) -> dict[str, dict[str, tuple[Offer, ...]]]:
    """Return group -> name -> who offers it, for what is installed under `path` (which is `sys.path`)."""
    found: dict[str, dict[str, tuple[Offer, ...]]] = {}

    def add(point: EntryPoint, distribution: str) -> None:
        group = found.setdefault(point.group, {})
        group[point.name] = (*group.get(point.name, ()), Offer(point, distribution))

    for point in _own_project().points:
        add(point, OWN)
    seen = {OWN}
    for one in distributions():
        points = [point for point in one.entry_points if point.group.startswith("polyturn.")]
        if points and (name := one.metadata["Name"] or "").lower() not in seen:
            seen.add(name.lower())  # of one that lies on the path twice the first is imported
            for point in points:
                add(point, f"{name} {one.version}")
    return found
