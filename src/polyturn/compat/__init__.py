"""Support for projects written for other libraries: their import paths, their file formats, their classes.

    polyturn.compat.install("verl")      "import verl.interactions.base" now finds polyturn's own module

A namespace is put in place only where the library itself is not installed. It happens by itself when a configuration names
a class whose module needs it: `core.plugins` finds the installer as an entry point of the group `polyturn.namespaces`.
"""

from __future__ import annotations

import functools

from polyturn.compat.finder import AliasFinder
from polyturn.compat.namespaces import NAMESPACES
from polyturn.core.errors import UnknownNameError, did_you_mean


def install(name: str) -> bool:
    """Put the modules of the library `name` in place; calling it again changes nothing.

    Returns:
        Whether imports under `name` are answered here; False where the library itself is installed, which then wins.

    Raises:
        UnknownNameError: there is no such namespace.
    """
    return finder(name).install()


def uninstall(name: str) -> None:
    """Take the modules of `name` away again, as if they had never been imported."""
    finder(name).uninstall()


@functools.cache
def finder(name: str) -> AliasFinder:
    """Return the one finder of a namespace.

    Raises:
        UnknownNameError: there is no such namespace.
    """
    if name not in NAMESPACES:
        raise UnknownNameError(f"compat has no namespace {name!r}.{did_you_mean(name, NAMESPACES)}")
    return AliasFinder(NAMESPACES[name])
