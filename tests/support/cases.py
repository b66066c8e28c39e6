"""Which cases of a test `make test` runs, which `make verify` alone, and which need a package.

@pytest.mark.parametrize("name", each(4, NAMES))        the first, the fifth, …; the others are slow
pytestmark = needs("gem", extra="environments")         skipped where it is not installed, which imports nothing
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest


def each(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters, all but each `nth` of them marked slow; several arguments of a case are a tuple."""
    return [_case(case, is_slow=index % nth != 0) for index, case in enumerate(cases)]


def _case(case: Any, *, is_slow: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow if is_slow else ())


def needs(*modules: str, extra: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where one of these modules is not installed."""
    is_missing = any(importlib.util.find_spec(module) is None for module in modules)
    return pytest.mark.skipif(is_missing, reason=f"pip install 'polyturn[{extra}]'")
