"""Metrics merge by their own reduction."""

from __future__ import annotations

import math

import pytest

from polyturn.core.metrics import Max, Mean, Sum, merge, reduce


def test_each_kind_merges_its_own_way() -> None:
    parts = [{"m": Mean(2.0), "s": Sum(1.0), "x": Max(-3.0)}, {"m": Mean(8.0, 3.0), "s": Sum(4.0), "x": Max(-5.0)}]
    assert reduce(merge(parts)) == {"m": 2.5, "s": 5.0, "x": -3.0}


def test_a_name_that_only_one_part_has_is_kept() -> None:
    assert merge([{"a": Sum(1.0)}, {"b": Sum(2.0)}]) == {"a": Sum(1.0), "b": Sum(2.0)}


def test_nothing_merges_to_nothing_and_the_parts_stay_as_they_were() -> None:
    assert merge([]) == {}
    part = {"a": Sum(1.0)}
    merge([part, {"a": Sum(2.0)}])
    assert part == {"a": Sum(1.0)}


def test_the_mean_of_nothing_is_nan_and_adds_nothing() -> None:
    assert math.isnan(Mean(0.0, 0.0).value)
    assert merge([{"a": Mean(0.0, 0.0)}, {"a": Mean(3.0)}])["a"].value == 3.0


def test_one_name_with_two_reductions_is_refused() -> None:
    with pytest.raises(TypeError, match="the metric 'loss/kl' is a Mean in one place and a Sum in another"):
        merge([{"loss/kl": Mean(1.0)}, {"loss/kl": Sum(1.0)}])
