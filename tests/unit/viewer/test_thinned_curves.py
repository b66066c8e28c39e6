"""Curves thinned to what a chart shows: extremes stay, the part that is looked at is whole, smoothing sees every point."""

from __future__ import annotations

import numpy as np
import pytest

from polyturn.core.errors import DataError
from polyturn.viewer.curves import COLUMNS, Window, draw, thinned
from support.refusals import refuses

LINES = [{"step": s, "reward/mean": float(s), "time/step_s": 0.5} for s in range(10)]


def test_thinned_curve_keeps_extremes_of_every_column():
    rng = np.random.default_rng(0)
    x, y = np.arange(100_000.0), rng.normal(size=100_000)
    kept = thinned(x, y)
    assert len(kept) <= 4 * COLUMNS and kept[0] == 0 and kept[-1] == len(x) - 1
    column = np.minimum(x / x[-1] * COLUMNS, COLUMNS - 1).astype(int)
    for number in range(COLUMNS):
        of = np.flatnonzero(column == number)
        mine = kept[(kept >= of[0]) & (kept <= of[-1])]
        assert (y[mine].min(), y[mine].max()) == (y[of].min(), y[of].max())


def test_curve_is_drawn_over_steps_seconds_or_tokens():
    found = draw(LINES, ["reward/mean"], Window("time", 1.0, 3.0))["reward/mean"]
    assert found["x"] == [1.0, 1.5, 2.0, 2.5, 3.0] and found["y"] == [1, 2, 3, 4, 5] and found["total"] == 5
    assert draw(LINES, ["reward/mean"], Window("tokens"))["reward/mean"]["x"] == [], "the run counted none"
    refuses(lambda: draw(LINES, ["reward/mean"], Window("stpe")), DataError, "'stpe'", "step")


def test_smoothed_constant_stays_constant():
    lines = [line | ({"eval/a/success": 0.5} if line["step"] % 3 == 0 else {}) for line in LINES]
    found = draw(lines, ["eval/a/success", "reward/mean"], Window(smoothing=0.9))
    assert found["eval/a/success"]["is_sparse"] and not found["reward/mean"]["is_sparse"]
    assert found["eval/a/success"]["smooth_y"] == pytest.approx([0.5] * 4)
