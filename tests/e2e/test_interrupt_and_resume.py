"""A run that is interrupted in this process resumes with the same steps, trajectories and weights, to the bit.

`test_kill_and_resume.py` kills processes.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from polyturn import build
from polyturn.cli.main import main
from polyturn.training.checkpoint import Checkpoints
from polyturn.training.journal_file import JournalFile
from polyturn.training.update import Update
from support.cases import each
from support.crash_injection import ledger_problems
from support.resumed_runs import (
    SETTINGS,
    STEPS,
    check_equal_runs,
    check_equal_weights,
    latest_checkpoint,
    reproducible,
    training_lines,
    weights_of,
    write_interrupted_run,
)
from support.runs import SEVERAL_TURNS, call_command, write_tiny_run
from support.states import tensors_in

call = functools.partial(call_command, main)
BARE = ("evaluation.data=null", "warm_start.conversations=null")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    called = call("train", write_tiny_run(folder), *SETTINGS)
    assert called.code == 0, called.err
    return folder / "runs" / "tiny"


def test_sigterm_leaves_a_checkpoint_and_the_run_resumes(tmp_path: Path, whole: Path) -> None:
    config, run = write_interrupted_run(tmp_path, signal.SIGTERM), tmp_path / "runs" / "tiny"
    stopped = call("train", config, *SETTINGS)
    assert stopped.code == 143, stopped.err
    assert "interrupted at step" in stopped.err and "Traceback" not in stopped.err
    assert stopped.err.rstrip().endswith("--resume"), "the message has the command that resumes"
    done = len(training_lines(run))
    assert 3 <= done < STEPS and latest_checkpoint(run).name == f"step-{done:06d}"
    resumed = call("train", config, *SETTINGS, "--resume")
    assert resumed.code == 0 and "before and after" in resumed.out, resumed.err
    check_equal_runs(run, whole)


def test_signal_between_warm_start_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on disk yet, and the event loop of training has not begun."""
    settings = ["train.steps=1", "warm_start.steps=20", "engine.deterministic=true"]
    assert call("train", write_tiny_run(tmp_path / "whole"), *settings).code == 0
    config, make = write_tiny_run(tmp_path / "stopped"), build.build_trainer

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return make(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(build, "build_trainer", interrupted)
        assert call("train", config, *settings).code == 130
    assert call("train", config, *settings, "--resume").code == 0
    check_equal_weights(tmp_path / "stopped/runs/tiny", tmp_path / "whole/runs/tiny")


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_second_interrupt_ends_the_run_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, max_staleness: int
) -> None:
    """It comes within the first update of a resumed run, which an asynchronous run computes in a thread."""
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    settings, is_over = [*BARE, f"train.max_staleness={max_staleness}"], threading.Event()
    assert call("train", config, *settings, "train.steps=1").code == 0
    written = (latest_checkpoint(run) / "state.pt").stat().st_mtime_ns

    def interrupted(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            handler = signal.getsignal(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            while signal.getsignal(signal.SIGINT) is handler:
                time.sleep(0.01)
        is_over.wait(60)

    monkeypatch.setattr(Update, "run", interrupted)
    stopped = call("train", config, *settings, "train.steps=2", "--resume")
    is_over.set()
    assert stopped.code == 130 and (latest_checkpoint(run) / "state.pt").stat().st_mtime_ns == written, stopped.err
    interrupts = stopped.err[stopped.err.index("interrupted") :]  # the second may come before the first is logged
    assert re.search(r"interrupted twice.* at step 1, .*step-000001; resume with: .*--resume\n", interrupts), interrupts
    gc.collect()  # asyncio logs each pending task that is destroyed
    assert not re.search("abandoned|cancelled|fail|raised|Traceback", interrupts) and "pending" not in caplog.text


def test_exported_model_loads_with_transformers_alone(whole: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = latest_checkpoint(whole) / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    loaded, trained = model.state_dict(), weights_of(whole)
    assert loaded.keys() - trained.keys() <= {"lm_head.weight"}, "which is tied"
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in trained.items())
    assert model(**tokenizer(text, return_tensors="pt")).logits.shape[-1] == len(tokenizer)


def test_equal_seeds_give_equal_runs(tmp_path: Path, whole: Path) -> None:
    short = [*SETTINGS, "train.steps=3", "evaluation.every=0"]
    for seed in (0, 1):
        assert call("train", write_tiny_run(tmp_path / str(seed)), *short, f"seed={seed}").code == 0
    first, other = ([reproducible(x) for x in training_lines(tmp_path / str(seed) / "runs" / "tiny")] for seed in (0, 1))
    assert first == [reproducible(x) for x in training_lines(whole)[:3]]
    assert first != other


def forget_steps_after(run: Path, step: int) -> None:
    """Leave the run as after a kill, with the checkpoint of `step` as its last, and parts of later steps."""
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "rollo')


KINDS = {
    "mix": ["train.minibatches=2", "data.sampler={name: mix, weights: {tiny0: 1, tiny1: 2}, by_success: 1.0}"],
    "critic": ["algorithm.advantage=gae", "algorithm.critic.optim.lr=1e-3", "train.minibatches=2",
               "algorithm.kl={place: reward, coef: 0.05, target: 1.0, horizon: 12}"],
    "lora": ["model.lora={rank: 2, dropout: 0.2}", "train.optim.lr=1e-2", "algorithm.kl={coef: 0.05, target: 0.1}",
             "algorithm.entropy_target=20", "algorithm.entropy_step=0.01"],
    "running mean": ["algorithm.advantage={name: rae, decay: 0.5}"],
}  # fmt: skip


@pytest.mark.parametrize("kind", each(3, KINDS))
def test_resumed_state_equals_that_of_a_whole_run(tmp_path: Path, kind: str) -> None:
    settings = [*BARE, *KINDS[kind], "train.steps=3", "train.checkpoint_every=1", "train.keep_checkpoints=9"]
    settings += ["engine.deterministic=true"]
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    if kind == "mix":
        name_two_sources(config)
    assert call("train", config, *settings).code == 0
    whole = everything_in(run / "checkpoints" / "step-000003")
    forget_steps_after(run, 2)
    resumed = call("train", config, *settings, "--resume")
    assert resumed.code == 0, resumed.err
    again = everything_in(run / "checkpoints" / "step-000003")
    for part in ("policy", "update", "sampler", "loop", "shards"):
        assert_same(whole[part], again[part], part)
    assert ledger_problems(run, steps=3) == []


def name_two_sources(config: Path) -> None:
    """Let the tasks come from two data sources."""
    tasks = config.parent / "tasks.jsonl"
    rows = tasks.read_text().splitlines()
    tasks.write_text("".join(row.replace('e": "tiny"', f'e": "tiny{i % 2}"') + "\n" for i, row in enumerate(rows)))
    text = config.read_text()
    config.write_text(text.replace('routes: {tiny: "plugins.py:score"}', 'function: "plugins.py:score"'))


def everything_in(folder: Path) -> dict[str, object]:
    """Return the state in a checkpoint, with the tensors in its shards."""
    shards = {path.parent.name: dict(tensors_in(path.parent)) for path in folder.glob("*/.metadata")}
    assert shards.keys() >= {"policy"}
    return {**Checkpoints(folder.parent).load(folder), "shards": shards}


def assert_same(one: object, other: object, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor) and torch.equal(one, other), f"{where} is the same to the bit"
    elif isinstance(one, dict):
        assert isinstance(other, dict) and one.keys() == other.keys(), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}/{key}")
    else:
        assert one == other or one != one, where


def test_conversations_in_flight_resume_from_their_last_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that the checkpoint's weights sampled are not sampled again; the tokens are the same."""
    monkeypatch.setattr(JournalFile, "settle", lambda self: None)  # a run that ends well leaves no journal
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    settings = [*BARE, *SEVERAL_TURNS, "train.steps=3", "train.checkpoint_every=2", "train.keep_checkpoints=9"]
    assert call("train", config, *settings).code == 0
    monkeypatch.undo()
    journal = (run / "journal" / "step-000002.jsonl").read_text()
    forget_steps_after(run, 2)
    (run / "journal" / "step-000002.jsonl").write_text(journal)
    (run / "journal" / "step-000003.jsonl").unlink(missing_ok=True)
    resumed = call("train", config, *settings, "--resume")
    assert resumed.code == 0, resumed.err
    last = training_lines(run)[-1]
    assert (last["rollout/resumed_episodes"], last["rollout/restarted_episodes"]) == (6, 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of a run that took a step."""
    config = write_tiny_run(tmp_path_factory.mktemp("trained"))
    assert call("train", config, *BARE, "train.steps=1").code == 0
    return config


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("train.group_size=2", "train.group_size"),
        ("seed=5", "seed"),
        ("model.init.hidden_size=32", "another model"),
        ("data.train.limit=3", "size 6"),
        ("algorithm.advantage=gae", "critic"),
    ],
)
def test_resume_of_another_run_is_refused(trained: Path, change: str, key: str) -> None:
    called = call("train", trained, *BARE, "train.steps=2", change, "--resume")
    assert called.code != 0 and key in called.err and "Traceback" not in called.err, called.err


def test_resume_takes_another_learning_rate_with_a_note(trained: Path) -> None:
    (trained.parent / "runs" / "tiny" / "metrics.jsonl").unlink()  # which a resume does not need
    called = call("train", trained, *BARE, "train.steps=2", "train.optim.lr=1e-4", "--resume")
    assert called.code == 0 and "train.optim.lr: 0.001 -> 0.0001" in called.err, called.err
