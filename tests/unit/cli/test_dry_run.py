"""The dry run: Python and the command line show one report, and a run that cannot start here is one sentence."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import polyturn
from polyturn.api.dry_run import DryRunReport
from polyturn.build import memory_plan
from polyturn.cli.main import main
from polyturn.core.errors import ConfigError
from polyturn.infra.machine_memory import machine_memory
from polyturn.testing.tiny_models import tiny_tokenizer
from support.models import tiny_model
from support.refusals import refuses
from support.runs import call_command, write_tiny_run

GB = 10**9


def test_python_prints_and_returns_the_report_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_tiny_run(tmp_path)
    report = polyturn.train(config=config, dry_run=True)
    assert isinstance(report, DryRunReport) and str(report) in capsys.readouterr().out
    assert report.first_task.id == "mouse-0" and report.settings["train"]["group_size"] == 3
    called = call_command(main, "train", config, "--dry-run")
    assert called.code == 0, called.err
    timed = "time of a step"
    assert [line for line in str(report).splitlines() if timed not in line] == [
        line for line in called.out.rstrip("\n").splitlines() if timed not in line
    ]
    assert not (tmp_path / "runs").exists()


def test_time_of_a_step_is_of_the_shortest_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.accumulate(itertools.chain([0.5] * 7, itertools.repeat(0.125)))  # a busy machine during two passes
    monkeypatch.setattr("polyturn.api.dry_run.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    estimate = polyturn.train(config=write_tiny_run(tmp_path), dry_run=True).estimates["time of a step"]
    assert "forward 0.125 s, backward 0.125 s" in estimate


def test_settings_leave_out_the_defaults_of_optional_sections(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "purr"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    warm_start = {"conversations": "talk.jsonl", "steps": 3, "optim": {"lr": 1e-4, "warmup_steps": 2}}
    settings = polyturn.train(config=write_tiny_run(tmp_path), warm_start=warm_start, dry_run=True).settings
    assert settings["warm_start"] == {"conversations": "talk.jsonl", "steps": 3, "optim": {"warmup_steps": 2}}


def test_turn_longer_than_the_context_is_warned_of(tmp_path: Path) -> None:
    limits = "rollout.limits={max_context: 500, max_tokens_per_turn: 500}"
    called = call_command(main, "train", write_tiny_run(tmp_path), "--dry-run", limits)
    assert called.code == 0 and "max_tokens_per_turn is 500, which has no effect while max_context is 500" in called.err


def test_late_sum_of_one_ranks_gradients_is_logged(tmp_path: Path) -> None:
    called = call_command(main, "train", write_tiny_run(tmp_path), "--dry-run", "train.distributed.gradient_sync=last")
    assert called.code == 0 and "train.distributed.gradient_sync is last, which has no effect" in called.err


@pytest.mark.parametrize(("is_folder", "words"), [(False, "one copy of the whole model"), (True, "no weights")])
def test_cluster_driver_holds_weights_only_without_a_folder(tmp_path: Path, is_folder: bool, words: str) -> None:
    model = {}
    if is_folder:
        tokenizer = tiny_tokenizer()
        tiny_model(tokenizer).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        model = {"model": str(tmp_path / "model")}
    report = polyturn.train(config=write_tiny_run(tmp_path), ray="auto", dry_run=True, **model)
    assert report.estimates["driver"].endswith(words)


def test_dry_run_elsewhere_is_refused() -> None:
    refuses(lambda: polyturn.evaluate(model="mine", dry_run=True), ConfigError, "'dry_run'", "polyturn.train")


def test_own_engine_that_shares_weights_is_reported_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text(
        "from polyturn.core.protocols import EngineCapabilities\nfrom polyturn.engines.scripted import ScriptedEngine\n"
        "class Constant(ScriptedEngine):\n    @property\n    def capabilities(self):\n"
        "        return EngineCapabilities(seeded=True, logprobs=True, shares_weights=True)\n"
        "def build(setup):\n    return Constant([])\n"
    )
    engine = "engine={kind: 'constant.py:build', num_slots: null}"
    called = call_command(main, "train", write_tiny_run(tmp_path), "--dry-run", engine)
    assert called.code == 0, called.err
    assert "first task     mouse-0" in called.out and "KV cache" not in called.out


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_missing_server_is_refused_behind_the_report(tmp_path: Path, kind: str) -> None:
    if importlib.util.find_spec(kind) is not None:
        pytest.skip(f"{kind} is installed here")
    changed = [f"engine={{kind: {kind}, num_slots: null}}"]
    called = call_command(main, "train", write_tiny_run(tmp_path), "--dry-run", *changed)
    assert called.code != 0 and "first task     mouse-0" in called.out
    for words in (f"engine.kind is {kind}", f"{kind}==", "engine.launch.python", "engine.urls"):
        assert words in called.err


@pytest.mark.parametrize(
    ("script", "words"),
    [("exit 1", "has no vllm"), ("echo 0.9.1", "vllm 0.9.1 is too old")],
    ids=["not installed", "too old"],
)
def test_environment_without_a_usable_server_is_refused(tmp_path: Path, script: str, words: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    changed = [f"engine={{kind: vllm, num_slots: null, launch: {{python: {python}}}}}"]
    called = call_command(main, "train", write_tiny_run(tmp_path), "--dry-run", *changed)
    assert called.code != 0 and words in called.err and "vllm==" in called.err


def test_memory_is_compared_with_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_tiny_run(tmp_path)
    report = polyturn.train(config=config, dry_run=True)
    assert report.verdict is not None and report.verdict.fits and "fits: about" in str(report)
    monkeypatch.setattr(memory_plan, "machine_memory", lambda: 2**20)
    report = polyturn.train(config=config, dry_run=True, num_slots=4096)
    assert report.verdict is not None and not report.verdict.fits
    assert "does not fit" in str(report) and "engine.num_slots" in str(report.verdict)


def test_model_too_large_is_refused_before_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.write_bytes(b"not read")
    monkeypatch.setattr(memory_plan, "machine_memory", lambda: 500)
    with pytest.raises(ConfigError, match=r"model\.path is .*weights, gradients and the optimizer.*this machine"):
        polyturn.train(model=tmp_path / "model", tasks=["Hello"], reward=lambda trajectory: 0.0, out=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_memory_of_a_container_counts(tmp_path: Path) -> None:
    whole = machine_memory(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_memory(tmp_path) == whole > GB
    (tmp_path / "memory.max").write_text(f"{GB}\n")
    assert machine_memory(tmp_path) == GB
