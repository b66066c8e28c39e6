"""Runs first in every process of `polyturn run-as` and makes the shim take precedence over the library on the path.

Otherwise a program that adds its working directory, its own folder or the root of its tests to the path would import the
library from a checkout. polyturn itself is imported only when the program imports the library.
"""

import importlib.machinery
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _StandIn:
    @staticmethod
    def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname in os.environ.get("POLYTURN_RUN_AS", "").split(","):
            return importlib.machinery.PathFinder.find_spec(fullname, [_HERE])
        return None


sys.meta_path.insert(0, _StandIn)  # type: ignore[arg-type]

# The interpreter imports only one module of this name, so the environment's own sitecustomize is run here.
_others = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.origin is not None:
    with open(_next.origin, "rb") as _file:
        exec(compile(_file.read(), _next.origin, "exec"), {"__name__": "sitecustomize", "__file__": _next.origin})
