"""Which cases of a test `make test` runs, and which `make verify` alone.

@pytest.mark.parametrize("name", each(4, NAMES))        the first, the fifth, …; the others are slow
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def each(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters, all but each `nth` of them marked slow; several arguments of a case are a tuple."""
    return [_case(case, is_slow=index % nth != 0) for index, case in enumerate(cases)]


def _case(case: Any, *, is_slow: bool) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow if is_slow else ())
