"""`polyturn train` with `train.backend: megatron` in one process, and the settings that are refused before the run."""

import importlib.util
import os

import pytest
import torch
from cluster_run import metrics_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyturn.build.ranks import check_ranks
from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from support.forked import run_forked
from support.runs import call_command, write_tiny_run

SCORE = '''

def early(trajectory):
    """The share of sampled tokens from the first half of the vocabulary."""
    ids = [id for span in trajectory.segments[0].spans if span.logprobs is not None for id in span.ids]
    return sum(id < 150 for id in ids) / len(ids)
'''
WITHOUT_MORE = ["rollout.interactions=null", "rollout.tools={}", "evaluation={before: false, every: 0}"]
MEGATRON = ["train.backend=megatron", "warm_start.steps=0", "reward.routes={tiny: 'plugins.py:early'}", *WITHOUT_MORE]
LEARNING = [
    *("train.group_size=16", "train.optim.lr=3e-2", "algorithm.kl.coef=0.001", "rollout.limits.max_turns=1"),
    "model.gradient_checkpointing=true",
]


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.slow
def test_run_resumes_with_the_other_backend(tmp_path):
    """A checkpoint does not depend on the backend that wrote it, and has a model of transformers."""
    config = write_tiny_run(tmp_path)
    (tmp_path / "plugins.py").write_text((tmp_path / "plugins.py").read_text() + SCORE)
    done = run_forked("train", config, *MEGATRON, *LEARNING, "train.steps=10", env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "Warning" not in done.err, done.err
    run = tmp_path / "runs" / "tiny"
    steps = metrics_of(run)
    assert len(steps) == 10 and all(step["loss/grad_norm"] > 0 for step in steps)
    assert all(step["policy/rollout_difference_max"] < 1e-4 for step in steps), "the engine samples with what is trained"
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.2, "0.47 to 0.80 where this was written"
    exported = run / "checkpoints" / "step-000010" / "model"
    model = AutoModelForCausalLM.from_pretrained(exported)
    weights = load_file(exported / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items() if name in weights)
    torch_again = [*MEGATRON, *LEARNING, "train.backend=torch", "train.steps=11"]
    again = run_forked("train", config, "--resume", *torch_again, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert again.returncode == 0, again.err
    last = metrics_of(run)[-1]
    assert last["step"] == 11 and last["policy/rollout_difference_max"] < 1e-4


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize(
    "more",
    [[], ["model.lora={rank: 4, dropout: 0.1}"], ["train.distributed={ranks: 2, context_parallel: 2}"]],
    ids=["whole", "adapter", "tokens split"],
)
def test_critic_and_adapter_resume_with_the_other_backend(tmp_path, more):
    config = write_tiny_run(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    critic = [*WITHOUT_MORE, *more, "train.backend=megatron", "warm_start.steps=0", "algorithm.advantage=gae"]
    for steps, resumed in ((2, ()), (3, ("--resume", "train.backend=torch"))):
        done = run_forked("train", config, *critic, f"train.steps={steps}", *resumed, env=environment)
        assert done.returncode == 0, done.err
    steps = metrics_of(tmp_path / "runs" / "tiny")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["critic/grad_norm"] > 0 and step["critic/skipped_steps"] == 0 for step in steps)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_ranks_of_a_row_allow_adapter_dropout(tmp_path):
    """Scripts of ms-swift ask for this: their adapters have a dropout of 0.05 by default."""
    adapter = ["model.lora={rank: 4, dropout: 0.05}", "train.distributed={ranks: 1}", "train.backend=megatron"]
    called = call_command(main, "train", write_tiny_run(tmp_path), "--dry-run", *adapter)
    assert called.code == 0, called.err
    row = ["model.path=none", *adapter, "train.distributed={ranks: 2, tensor_parallel: 2}"]
    for backend in ("megatron", "torch"):
        check_ranks(load_config(RunConfig, None, [*row, f"train.backend={backend}"]).config)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.backend=megatrn"], "megatron"),
        (
            ["train.distributed={ranks: 3, tensor_parallel: 3}"],
            "num_attention_heads is 2; set tensor_parallel to",
        ),
        (["train.distributed.pipeline_parallel=2", "train.distributed.ranks=2"], "train.backend torch has no pipeline"),
        (["train.distributed={ranks: 4, expert_parallel: 3}"], "expert_parallel is 3 and 4 ranks have a layer"),
        (
            ["train.backend=megatron", "train.distributed={ranks: 2, context_parallel: 2}", "train.layout=rows"],
            "splits packed rows",
        ),
    ],
)
def test_impossible_backend_settings_are_refused(tmp_path, overrides, sentence):
    config = write_tiny_run(tmp_path)
    called = call_command(main, "train", config, "--dry-run", *overrides)
    assert called.code == 2 and sentence in called.err, called.err
    assert not (tmp_path / "runs").exists()


def test_missing_backend_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "megatron.core", None)
    monkeypatch.delitem(__import__("sys").modules, "polyturn.training.megatron.placement", raising=False)
    called = call_command(main, "train", write_tiny_run(tmp_path), "--dry-run", "train.backend=megatron")
    assert called.code == 2 and "megatron" in called.err and "polyturn[megatron]" in called.err, called.err
