"""The default size of a training step depends on the machine, and a resumed run keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

import polyturn.api.step_size as step_size
from polyturn.api.given import GivenArguments, read
from polyturn.api.training import former_settings
from polyturn.config.load import Loaded, load_config, write_resolved
from polyturn.config.models import RunConfig


class Size(NamedTuple):
    groups: int
    members: int
    tokens: int | None


ON_GPU, ON_CPU = Size(32, 8, 512), Size(4, 8, 128)


def size_of(config: RunConfig) -> Size:
    return Size(config.train.groups_per_step, config.train.group_size, config.rollout.limits.max_tokens_per_turn)


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(step_size, "has_cuda", lambda: request.param)


on_cpu = pytest.mark.parametrize("has_gpu", [False], indirect=True)
on_gpu = pytest.mark.parametrize("has_gpu", [True], indirect=True)


def loaded(*overrides: str) -> Loaded[RunConfig]:
    return load_config(RunConfig, None, ["model.path=none", *overrides])


@on_cpu
@pytest.mark.usefixtures("has_gpu")
def test_step_is_small_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sized = step_size.with_step_size(loaded(), resume=False)
    assert size_of(sized.config) == ON_CPU
    assert sized.resolved["train"]["groups_per_step"] == 4
    assert sized.resolved["rollout"]["limits"]["max_tokens_per_turn"] == 128
    assert "train.groups_per_step 4, rollout.limits.max_tokens_per_turn 128" in caplog.text


@on_gpu
@pytest.mark.usefixtures("has_gpu")
def test_step_is_large_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert size_of(step_size.with_step_size(loaded(), resume=False).config) == ON_GPU
    assert not caplog.text


@on_cpu
@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(
    ("override", "size"),
    [
        ("train.groups_per_step=32", Size(32, 8, 128)),
        ("train={group_size: 16}", Size(4, 16, 128)),
        ("rollout.limits.max_tokens_per_turn=null", Size(4, 8, None)),
        ("cluster.address=auto", ON_GPU),
    ],
)
def test_configured_size_stays_on_a_cpu(override: str, size: Size) -> None:
    assert size_of(step_size.with_step_size(loaded(override), resume=False).config) == size


@on_cpu
@pytest.mark.usefixtures("has_gpu")
def test_resumed_run_keeps_its_size(tmp_path: Path) -> None:
    began = loaded(f"out={tmp_path}", "name=mine", "train.group_size=6", "rollout.limits.max_tokens_per_turn=null")
    write_resolved(began.resolved, tmp_path / "mine" / "config.yaml")
    again = loaded(f"out={tmp_path}", "name=mine")
    assert size_of(step_size.with_step_size(again, resume=True).config) == Size(32, 6, None)
    written = loaded(f"out={tmp_path}", "name=mine", "rollout.limits.max_tokens_per_turn=64")
    assert size_of(step_size.with_step_size(written, resume="auto").config) == Size(32, 6, 64)


@on_cpu
@pytest.mark.usefixtures("has_gpu")
def test_evaluation_keeps_its_length_on_a_cpu() -> None:
    given = GivenArguments(model="none", eval_tasks=["What is 2 + 2?"], evaluates=True)
    assert size_of(read(given)[0].config) == ON_GPU
    assert size_of(read(given, resume=False)[0].config) == ON_CPU


@pytest.mark.parametrize("data", [b"name: \xff\xfe", b"name: [", b"name: \x00"])
def test_damaged_settings_of_a_run_are_a_warning(data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.yaml").write_bytes(data)
    assert former_settings(tmp_path / "config.yaml") == {}
    assert "the former settings of this run cannot be read" in caplog.text
