"""Support for projects written for other libraries: their import paths, file formats and classes.

    polyturn.compat.install("verl")      "import verl.interactions.base" now imports polyturn's own module

A namespace is installed only if the library itself is not. If a configuration names a class whose module needs a namespace,
this happens automatically: `infra.plugins` finds the installer as an entry point of the group `polyturn.namespaces`.
"""

from __future__ import annotations

import functools

from polyturn.compat.finder import AliasFinder
from polyturn.compat.namespaces import NAMESPACES
from polyturn.core.errors import UnknownNameError, did_you_mean


def install(name: str) -> bool:
    """Install the modules that replace the library `name`; further calls have no effect.

    Returns:
        Whether imports under `name` find polyturn's modules; False if the library itself is installed.

    Raises:
        UnknownNameError: there is no such namespace.
    """
    return finder(name).install()


def uninstall(name: str) -> None:
    """Remove the modules of `name`, as if they had never been imported."""
    finder(name).uninstall()


@functools.cache
def finder(name: str) -> AliasFinder:
    """Return the finder of a namespace; there is one per namespace.

    Raises:
        UnknownNameError: there is no such namespace.
    """
    if name not in NAMESPACES:
        raise UnknownNameError(f"compat has no namespace {name!r}.{did_you_mean(name, NAMESPACES)}")
    return AliasFinder(NAMESPACES[name])
