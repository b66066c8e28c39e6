"""A run that is interrupted goes on as if it had not been: Ctrl-C, SIGTERM, kill -9, in a process of its own.

Every test compares with one run that was never stopped: the same steps, the same trajectories, the same weights to the bit.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from polyturn.training.checkpoint import Checkpoints
from support.forked import ONE_THREAD, Forked, run_program
from support.runs import call_command, write_tiny_run
from support.states import tensors_in

call = functools.partial(call_command, main)

STEPS, WARM_STEPS = 16, 150
SETTINGS = [
    f"train.steps={STEPS}",
    "train.checkpoint_every=3",
    "train.keep_checkpoints=3",
    "engine.deterministic=true",
    "evaluation.every=7",
    "rollout.sanity_every=1",
    "warm_start.steps=2",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    called = call("train", write_tiny_run(folder), *SETTINGS)
    assert called.code == 0, called.err
    return folder / "runs" / "tiny"


def has_step(run: Path, step: int) -> bool:
    return (run / "metrics.jsonl").is_file() and any(line["step"] >= step for line in lines(run))


def wait_for_step(run: Path, step: int, process: Forked) -> None:
    process.wait_until(lambda: has_step(run, step))


def lines(run: Path) -> list[dict[str, Any]]:
    found = []
    for text in (run / "metrics.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:  # half a line: the process is writing it, or was killed there
            continue
    return found


def training_lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run) if "rollout/turns" in line]


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers that do not depend on the clock or on what the KV cache still held."""
    machine = ("time/", "system/", "engine/queue", "engine/kv_use")
    varying = (*machine, "tokens/prefilled", "rollout/resumed_episodes", "rollout/restarted_episodes")
    return {k: v for k, v in line.items() if not k.startswith(varying) and not k.endswith("time_s")}


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    return dict(tensors_in(latest / "policy", "model/"))


def check_is_like(run: Path, whole: Path) -> None:
    assert [line["step"] for line in training_lines(run)] == list(range(1, STEPS + 1)), "every step once"
    for mine, theirs in zip(map(timeless, training_lines(run)), map(timeless, training_lines(whole)), strict=True):
        different = {k: (mine.get(k), theirs.get(k)) for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)}
        assert not different, f"step {mine['step']}"
    of_run, of_whole = ({(r["split"], r["step"], r["id"]) for r in open_store(f).table().to_pylist()} for f in (run, whole))
    assert of_run == of_whole, "every trajectory is recorded"
    left, expected = weights(run), weights(whole)
    assert all(torch.equal(left[name], expected[name]) for name in expected), "the weights are the same to the bit"


def resume(config: Path) -> None:
    called = call("train", config, *SETTINGS, "--resume")
    assert called.code == 0, called.err
    assert "before and after" in called.out


@pytest.mark.slow
def test_a_run_goes_on_to_its_checkpoint_although_nobody_hears_it_any_more(tmp_path: Path, whole: Path):
    """As where its terminal is closed, or a program that its lines are piped into has ended."""
    config = write_tiny_run(tmp_path)
    run = tmp_path / "runs" / "tiny"
    command = [sys.executable, "-m", "polyturn", "train", str(config), *SETTINGS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **ONE_THREAD})
    while not has_step(run, 1):  # early: at its end a run would tell nobody how it went
        assert process.poll() is None
        time.sleep(0.01)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    code = process.wait(120)
    assert code == 128 + signal.SIGHUP, f"behind step {len(training_lines(run))} of {STEPS}"
    latest = Checkpoints(run / "checkpoints").latest()
    assert latest is not None and latest.name == f"step-{len(training_lines(run)):06d}"
    resume(config)
    check_is_like(run, whole)


def test_a_signal_in_the_middle_of_a_line_of_the_log_does_not_write_into_it():
    code = """
import logging, os, signal, threading
from polyturn.api.signals import Signals
done = threading.Event()
class Interrupted(logging.Handler):
    depth = 0
    def emit(self, record):
        self.depth += 1
        if record.msg == "first":
            os.kill(os.getpid(), signal.SIGINT)
        os.write(1, f"{self.depth} {record.msg}\\n".encode())
        self.depth -= 1
        if record.msg != "first":
            done.set()
logging.getLogger().addHandler(Interrupted())
with Signals():
    logging.warning("first")
    assert done.wait(60)
"""
    assert run_program(code).out == "1 first\n1 interrupted; a checkpoint is being written\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals):
    """As under `nohup`, or of a job that a script put into the background."""
    code = (
        f"import os, signal; signal.signal({int(number)}, signal.SIG_IGN)\n"
        "from polyturn.api.signals import Signals\n"
        f"with Signals() as noted:\n    os.kill(os.getpid(), {int(number)})\n    print(noted.received)"
    )
    assert run_program(code).out == "[]\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_leaves_a_checkpoint_and_resume_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, whole: Path, number: int, code: int
):
    config = write_tiny_run(tmp_path)
    run = tmp_path / "runs" / "tiny"
    process = Forked("train", config, *SETTINGS)
    wait_for_step(run, 4, process)
    process.send_signal(number)
    ended, err = process.wait(120), process.err
    assert ended == code, err
    assert "interrupted at step" in err and "Traceback" not in err
    assert f"polyturn train {config} " in err and err.rstrip().endswith("--resume"), "the sentence says how to go on"
    latest = Checkpoints(run / "checkpoints").latest()
    assert latest is not None
    done = len(training_lines(run))
    assert 4 <= done < STEPS and latest.name == f"step-{done:06d}"
    resume(config)
    check_is_like(run, whole)


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(tmp_path: Path, whole: Path):
    config = write_tiny_run(tmp_path)
    run = tmp_path / "runs" / "tiny"
    process = Forked("train", config, *SETTINGS)
    wait_for_step(run, 5, process)
    process.kill()
    process.wait(120)
    latest = Checkpoints(run / "checkpoints").latest()
    assert latest is not None and int(latest.name.removeprefix("step-")) >= 3
    resume(config)
    check_is_like(run, whole)


WARM = ["train.steps=1", f"warm_start.steps={WARM_STEPS}", "warm_start.batch_size=2", "engine.deterministic=true"]

WAITS = """

import time
from pathlib import Path

said = score


def score(trajectory):
    while Path(__file__).with_name("waits").exists():
        time.sleep(0.05)
    return said(trajectory)
"""


def check_warm_start_is_like(run: Path, whole: Path) -> None:
    steps = [json.loads(line)["step"] for line in (run / "sft_metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, WARM_STEPS + 1)), "every step once"
    assert not (run / "warm_start").exists()
    left, expected = weights(run), weights(whole)
    assert all(torch.equal(left[name], expected[name]) for name in expected), "the weights are the same to the bit"


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose warm start was never stopped."""
    folder = tmp_path_factory.mktemp("warmed")
    called = call("train", write_tiny_run(folder), *WARM)
    assert called.code == 0, called.err
    return folder / "runs" / "tiny"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_warm_start_that_is_interrupted_goes_on_where_it_was(tmp_path: Path, warmed: Path, number: signal.Signals):
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    settings = [*WARM, "train.checkpoint_every=0.001s"]
    process = Forked("train", config, *settings)
    process.wait_until(lambda: Checkpoints(run / "warm_start").latest() is not None)
    process.send_signal(number)
    code, err = process.wait(120), process.err
    if number == signal.SIGINT:
        assert code == 130, err
        assert re.search(r"of the warm start; go on with: \S*polyturn train", err) and "Traceback" not in err
    called = call("train", config, *settings, "--resume")
    assert called.code == 0, called.err
    check_warm_start_is_like(run, warmed)


def test_a_second_process_is_kept_out_of_a_runs_folder_until_the_first_one_dies(tmp_path: Path, warmed: Path):
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    settings = [*WARM, "train.checkpoint_every=0.001s"]
    (tmp_path / "waits").touch()
    plugins = tmp_path / "plugins.py"
    plugins.write_text(plugins.read_text() + WAITS)
    process = Forked("train", config, *settings)
    process.wait_until(lambda: Checkpoints(run / "checkpoints").latest() is not None)
    before = (run / "config.yaml").read_text()
    refused = call("train", config, *settings, "train.optim.lr=1", "--resume")
    assert refused.code == 2, refused.err
    assert f"process {process.pid} on {socket.gethostname()} trains into {run} at this moment" in refused.err
    assert (run / "config.yaml").read_text() == before and process.poll() is None
    process.kill()
    process.wait()
    (tmp_path / "waits").unlink()
    assert call("train", config, *settings, "--resume").code == 0
    check_warm_start_is_like(run, warmed)


def test_a_warm_start_that_cannot_go_on_leaves_the_settings_that_the_run_had(tmp_path: Path):
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    settings = [*WARM, "train.checkpoint_every=0.001s"]
    process = Forked("train", config, *settings)
    process.wait_until(lambda: Checkpoints(run / "warm_start").latest() is not None)
    process.kill()
    process.wait()
    before = (run / "config.yaml").read_text()
    for change, says in (
        ("model.init.hidden_size=32", "is of another model"),
        ("warm_start.steps=0", "warm_start.steps is 0"),
    ):
        refused = call("train", config, *settings, change, "--resume")
        assert refused.code == 2 and says in refused.err, refused.err
        assert (run / "config.yaml").read_text() == before


def test_supervised_training_that_is_interrupted_goes_on_in_its_folder(tmp_path: Path, warmed: Path):
    config = write_tiny_run(tmp_path)
    run = tmp_path / "runs" / "tiny-sft"
    process = Forked("sft", config, *WARM)
    process.wait_until((run / "sft_metrics.jsonl").is_file)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143, process.err
    (again,) = re.findall(r"go on with: (.*)", process.err)
    called = call(*shlex.split(again)[1:])
    assert called.code == 0, called.err
    steps = [json.loads(line)["step"] for line in (run / "sft_metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, WARM_STEPS + 1)) and sorted(p.name for p in run.parent.iterdir()) == ["tiny-sft"]
    assert (run / "model" / "config.json").is_file() and not (run / "warm_start").exists()


@pytest.mark.parametrize(
    "place",
    [
        "polyturn.build:build_trainer",
        pytest.param("polyturn.training.weight_sync:SharedWeights.start", marks=pytest.mark.slow),
    ],
)
def test_a_signal_between_warm_start_and_training_leaves_a_checkpoint(
    tmp_path: Path, warmed: Path, place: str, monkeypatch: pytest.MonkeyPatch
):
    """Where nothing is on disk yet, and the event loop of training may not have begun."""
    config, run = write_tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    for name in path.split(".")[:-1]:
        owner = getattr(owner, name)
    called = getattr(owner, path.rpartition(".")[2])

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return called(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, path.rpartition(".")[2], interrupted)
        stopped = call("train", config, *WARM)
    assert stopped.code == 130, stopped.err
    assert call("train", config, *WARM, "--resume").code == 0
    check_warm_start_is_like(run, warmed)


def test_the_model_that_is_left_loads_with_transformers_alone(whole: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    latest = Checkpoints(whole / "checkpoints").latest()
    assert latest is not None and latest.name == f"step-{STEPS:06d}"
    model = AutoModelForCausalLM.from_pretrained(latest / "model")
    tokenizer = AutoTokenizer.from_pretrained(latest / "model")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    loaded, trained = model.state_dict(), weights(whole)
    assert loaded.keys() - trained.keys() <= {"lm_head.weight"}, "which is tied"
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in trained.items())
    assert model(**tokenizer(text, return_tensors="pt")).logits.shape[-1] == len(tokenizer)


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(tmp_path: Path, whole: Path):
    short = [*SETTINGS, "train.steps=3", "evaluation.every=0"]
    for seed in (0, 1):
        called = call("train", write_tiny_run(tmp_path / str(seed)), *short, f"seed={seed}")
        assert called.code == 0, called.err
    first, other = ([timeless(x) for x in training_lines(tmp_path / str(seed) / "runs" / "tiny")] for seed in (0, 1))
    assert first == [timeless(x) for x in training_lines(whole)[:3]]
    assert first != other
