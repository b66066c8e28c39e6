"""The short forms of benchmarks/chaos.py and benchmarks/soak.py: every episode ends, whatever happens; nothing is left."""

from __future__ import annotations

import logging
import sys

import pytest

from support.benchmark import load_benchmark
from support.virtual_time import run_virtual

pytestmark = pytest.mark.chance


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what a process holds is read from /proc")
async def test_chaos_leaves_nothing_and_names_every_failure():
    chaos = load_benchmark("chaos")
    result = await chaos.measure(chaos.SHORT, compares=False)
    assert chaos.problems(result) == []
    assert result["engine_kills"] >= 1
    assert {"timeout", "exception", "too_large", "bad_json", "unknown_tool", "schema"} <= result["failed_calls"].keys()


@pytest.mark.parametrize("num", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_soak_leaves_no_instance_and_no_task(num: int):
    soak = load_benchmark("soak")
    result = run_virtual(soak.soak(num, warm_up=num // 2, every=500))
    assert result["left"] == 0
    assert num < 20_000 or result["mib_per_10k"] < 10
    assert {"cancelled", "error", "stop", "max_turns", "env_done"} <= result["ends"].keys()
