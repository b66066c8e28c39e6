"""Fixtures of all whole runs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no curve: it takes as long as a run of one step, and has its own tests."""
    monkeypatch.setattr("polyturn.api.training.plot_learning_curve", lambda metrics, out, *, title: out)
