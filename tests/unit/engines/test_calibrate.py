"""Calibration measures the speed of a simulated server, which is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError, EngineError
from polyturn.engines.calibrate import fit, load, save
from polyturn.engines.simulated import SimulatedEngine, Speed
from polyturn.engines.virtual_time import run_virtual

TRUE = Speed(step_s=0.01, per_sequence_s=0.0005, context_token_s=2e-6, prefill_token_s=0.0001, request_s=0.002, slots=16)


async def measured(true: Speed, **options: int) -> Speed:
    engine = SimulatedEngine(true, plan=lambda request: options.get("says", request.sampling.max_tokens))
    return await fit(engine, vocab_size=100, batches=(1, 4, 16), prompt_tokens=20, long_prompt_tokens=400, repeats=1)


def test_what_is_measured_is_what_the_server_does() -> None:
    found = run_virtual(measured(TRUE))
    assert [b for b, _ in found.table] == [1, 4, 16]
    assert all(found.tau(b) == pytest.approx(TRUE.tau(b), rel=0.02) for b in (1, 4, 10, 16))
    assert found.context_token_s == pytest.approx(2e-6, rel=0.02)
    assert found.prefill_token_s == pytest.approx(0.0001, rel=0.05)
    assert found.request_s == pytest.approx(0.002, rel=0.3)
    assert found.slots == 16


def test_a_server_that_ends_completions_early_cannot_be_timed() -> None:
    with pytest.raises(EngineError, match="ignore the end token"):
        run_virtual(measured(TRUE, says=3))


def test_a_speed_is_read_as_it_was_written(tmp_path: Path) -> None:
    speed = dataclasses.replace(TRUE, table=((1, 0.01), (8, 0.02)), prefix_cache=False)
    save(speed, tmp_path / "speed.yaml")
    assert load(tmp_path / "speed.yaml") == speed


def test_a_file_that_is_no_speed_is_refused_with_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--fit"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("slot: 3\n")
    with pytest.raises(ConfigError, match="slots"):
        load(tmp_path / "bad.yaml")
