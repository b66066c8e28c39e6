"""`polyturn train --nproc 2`: two real processes train, tools run in the process that started them, and a killed rank ends
the run, or restarts it from its latest checkpoint.

A checkpoint of two ranks also resumes in one process, and is exported.
"""

import os
import re
import signal
from pathlib import Path

import pytest
from cluster_run import ADAPTER, assert_adapter_trained, assert_each_call_ran_once, metrics_of, write_run
from transformers import AutoModelForCausalLM

from polyturn import build
from polyturn.api.folders import open_source
from polyturn.cli.main import main
from polyturn.training.hf import save_model
from support.forked import Forked, run_forked
from support.runs import call_command
from support.sandboxes import wait_until
from support.tools_parts import is_alive

pytestmark = pytest.mark.cluster

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

CRITIC = ["algorithm.advantage=gae"]
STEERED_KL = ["algorithm.kl={coef: 0.01, target: 1.0, horizon: 12}"]
ENDLESS = ["train.steps=100000", "warm_start.steps=0"]


def from_a_folder(config):
    """Write the random model of `config` to a folder; return the overrides that make a run read it."""
    place, _ = open_source(config, [])
    tokenizer = build.build_codec(place).tokenizer
    folder = save_model(build.build_model(place, tokenizer), config.parent / "model", tokenizer=tokenizer)
    return [f"model.path={folder}", "model.init=null", "model.tokenizer=null"]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_two_ranks_run_each_tool_call_once(tmp_path):
    config = write_run(tmp_path)
    two_steps = ["name=two", "train.steps=2", "train.layout=packed", *CRITIC, *STEERED_KL, *from_a_folder(config)]
    done = run_forked("train", config, "--nproc", 2, *two_steps, env=ENVIRONMENT)
    assert done.returncode == 0, done.err
    steps = metrics_of(tmp_path / "runs" / "two")
    assert len(steps) == 2 and all(step["loss/grad_norm"] > 0 for step in steps)
    assert steps[0]["critic/value_loss"] > 0, "the critic is trained on all ranks"
    assert abs(steps[0]["policy/kl_to_reference"]) < 1e-4, (
        "the reference is the model as the warm start left it, on all ranks"
    )
    assert steps[0]["policy/kl_coef"] == 0.01 > steps[1]["policy/kl_coef"], "the weight of the KL follows its target"
    assert_each_call_ran_once(tmp_path, "two")
    assert done.err.count("MB of the weights in") >= 1, "each rank reads its part of the model's files"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapter_of_two_ranks_resumes_in_one_process(tmp_path):
    config = write_run(tmp_path)
    done = run_forked("train", config, "--nproc", 2, "train.steps=2", *ADAPTER, env=ENVIRONMENT)
    assert done.returncode == 0, done.err
    called = call_command(main, "train", config, *ADAPTER, "--resume", "train.steps=3")
    assert called.code == 0, called.err
    assert_adapter_trained(tmp_path)


@pytest.mark.timeout(900)
def test_killed_rank_ends_the_run_behind_its_restarts(tmp_path):
    config = write_run(tmp_path)
    settings = ["train.checkpoint_every=1", "cluster.restarts=1"]
    run = Forked("train", config, "--nproc", 2, *ENDLESS, *settings, env=ENVIRONMENT)
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    try:
        run.wait_until(lambda: newest(checkpoints) >= 2)
        kill_rank("1", of=run.pid)
        run.wait_until(lambda: "restarts left after this one: 0" in " ".join((run.out + run.err).split()))
        begun = newest(checkpoints)
        run.wait_until(lambda: newest(checkpoints) > begun)
        kill_rank("0", of=run.pid)
        assert run.wait(280) == 2
    finally:
        run.kill()
    said = run.out + run.err
    assert "rank 1 was killed by SIGKILL" in said and "The last lines of its log" in said
    assert "rank 0 was killed by SIGKILL" in said and "Resume the run" in said
    last = newest(checkpoints)
    done = call_command(main, "train", config, "--resume", f"train.steps={last + 1}")
    assert done.code == 0, done.err
    assert re.search(rf"steps +{last + 1}\n", done.out)
    exported = call_command(main, "export", tmp_path / "runs" / "tiny", "-o", tmp_path / "exported")
    assert exported.code == 0, exported.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.model_type == "qwen3"
    again = call_command(main, "export", tmp_path / "runs" / "tiny", "-o", tmp_path / "exported")
    assert again.code == 2 and "already exists" in again.err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_critic_resumes_with_any_number_of_ranks(tmp_path):
    config = write_run(tmp_path)
    for step, ranks in enumerate((2, 1, 2), start=1):
        resume = ["--resume"] if step > 1 else []
        done = run_forked("train", config, "--nproc", ranks, f"train.steps={step}", *CRITIC, *resume, env=ENVIRONMENT)
        assert done.returncode == 0, done.err
    steps = metrics_of(tmp_path / "runs" / "tiny")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["critic/grad_norm"] > 0 and step["critic/skipped_steps"] == 0 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_of_two_ranks_resume_in_one_process(tmp_path):
    """Policy and critic; the ranks send each other tokens, and the engine reports the experts of each token."""
    config = write_run(tmp_path)
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": "true"}
    experts = ["model.init.model_type=qwen3_moe", *(f"model.init.{name}={value}" for name, value in sizes.items())]
    settings = [*experts, *CRITIC, "algorithm.routing.balance_coef=0.01", "warm_start.steps=0"]
    shared = "train.distributed={ranks: 2, expert_parallel: 2}"
    done = run_forked("train", config, "train.steps=2", shared, *settings, env=ENVIRONMENT)
    assert done.returncode == 0, done.err
    done = run_forked("train", config, "--resume", "train.steps=3", *settings, env=ENVIRONMENT)
    assert done.returncode == 0, done.err
    steps = metrics_of(tmp_path / "runs" / "tiny")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["loss/router_balance"] > 0 and step["critic/grad_norm"] > 0 for step in steps)
    assert all(step["policy/rollout_difference_max"] < 1e-4 for step in steps), "the engine samples with what is trained"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_controller_that_ends_leaves_no_rank_behind(tmp_path, how):
    """Killed at once, or asked to end, which writes a checkpoint first."""
    run = Forked("train", write_run(tmp_path), "--nproc", 2, *ENDLESS, env=ENVIRONMENT)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    ranks = []
    try:
        run.wait_until(lambda: metrics.is_file() and "loss/grad_norm" in metrics.read_text())
        ranks = [pid for pid in children_of(run.pid) if rank_of(pid) is not None]
        assert len(ranks) == 2
        os.kill(run.pid, how)
        run.wait(280)
        wait_until(lambda: not any(is_alive(pid) for pid in ranks))
    finally:
        run.kill()
        for pid in filter(is_alive, ranks):
            os.kill(pid, signal.SIGKILL)
    if how == signal.SIGTERM:
        assert newest(tmp_path / "runs" / "tiny" / "checkpoints") >= 1, run.err


def newest(checkpoints):
    """Return the step of the newest checkpoint, or 0."""
    return max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=0)


def kill_rank(rank, *, of):
    (pid,) = [pid for pid in children_of(of) if rank_of(pid) == rank]
    os.kill(pid, signal.SIGKILL)


def children_of(pid):
    """The children of all threads of a process."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v.decode().removeprefix("RANK=") for v in variables if v.startswith(b"RANK=")), None)
