"""Metrics merge by their own reduction."""

from __future__ import annotations

import math

from polyturn.core.metrics import Max, Mean, Sum, merge, reduce
from support.refusals import refuses


def test_each_kind_merges_its_own_way() -> None:
    parts = [{"m": Mean(2.0), "s": Sum(1.0), "x": Max(-3.0)}, {"m": Mean(8.0, 3.0), "s": Sum(4.0), "x": Max(-5.0)}]
    assert reduce(merge(parts)) == {"m": 2.5, "s": 5.0, "x": -3.0}
    assert parts[0]["s"] == Sum(1.0)
    assert merge([{"a": Sum(1.0)}, {"b": Sum(2.0)}]) == {"a": Sum(1.0), "b": Sum(2.0)}


def test_mean_of_nothing_is_nan_and_adds_nothing() -> None:
    assert math.isnan(Mean(0.0, 0.0).value)
    assert merge([{"a": Mean(0.0, 0.0)}, {"a": Mean(3.0)}])["a"].value == 3.0


def test_name_with_two_reductions_is_refused() -> None:
    refuses(lambda: merge([{"loss/kl": Mean(1.0)}, {"loss/kl": Sum(1.0)}]), TypeError, "'loss/kl'", " Mean ", " Sum")
