"""Whatever happens to an episode, its tools and its partner are released."""

from __future__ import annotations

import pytest

from support.benchmark import load_benchmark

pytestmark = pytest.mark.timeout(300)  # a test plays three hundred episodes


async def test_nothing_is_left_after_errors_timeouts_and_cancellations() -> None:
    report = await load_benchmark("compat_leaks").count_leaks(300, seed=1)
    assert report.left == {}
    assert {"error", "env_done", "cancelled"} <= set(report.ends), report.ends
    assert sum(report.ends.values()) == 300
