"""The short forms of benchmarks/chaos.py and benchmarks/soak.py: every episode ends, whatever happens; nothing is left."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.virtual_time import run_virtual

pytestmark = pytest.mark.chance

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what a process holds is read from /proc")
async def test_chaos_leaves_nothing_and_names_every_failure():
    chaos = load("chaos")
    result = await chaos.measure(chaos.SHORT, compares=False)
    assert chaos.problems(result) == []
    assert result["engine_kills"] >= 1
    assert {"timeout", "exception", "too_large", "bad_json", "unknown_tool", "schema"} <= result["failed_calls"].keys()


def test_soak_leaves_no_instance_and_no_task():
    soak = load("soak")
    result = run_virtual(soak.soak(1000, warm_up=0, every=500))
    assert result["left"] == 0
    assert {"cancelled", "error", "stop", "max_turns", "env_done"} <= result["ends"].keys()
