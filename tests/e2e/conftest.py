"""What all whole runs have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the picture of the curve out: it takes as long as a run of one step, and has tests of its own."""
    monkeypatch.setattr("polyturn.api.training.plot_learning_curve", lambda metrics, out, *, title: out)
