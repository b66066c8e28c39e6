"""The multi-turn loop. Many episodes run concurrently. Each sends its requests to the engine independently, and no turn
waits for other episodes.

The package is callable: `polyturn.rollout(…)` calls the function of the public API that has the same name.
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
