"""The multi-turn loop: one episode at a time, many at once, everything per request and nothing per batch.

The package can be called: `polyturn.rollout(…)` is the function of the front door, which has this package's name.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Rollout(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("polyturn.api.front").rollout(*args, **kwargs)


sys.modules[__name__].__class__ = _Rollout
