"""`megatron rlhf`: what it says otherwise than `swift rlhf` is mapped, ignored with a reason, or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from polyturn.compat.swift.args.arguments import MEGATRON_DEFAULTS, megatron_table, megatron_to_native, parse, table
from polyturn.compat.swift.command import dispatch
from polyturn.compat.verl_config.translate import Translation
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError

LINE = "--model m/Small-1B --dataset rows.jsonl --reward_funcs accuracy "


def translate(flags: str) -> Translation:
    return megatron_to_native(parse((LINE + flags).split(), MEGATRON_DEFAULTS))


def at(native: Any, path: str) -> Any:
    for part in path.split("."):
        native = native[part]
    return native


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("", {"train.backend": "megatron", "train.distributed": {"ranks": 1}, "train.optim.lr": 1e-5}),
        ("", {"out": "megatron_output", "name": "Small-1B", "train.groups_per_step": 2, "train.minibatches": 1}),
        ("", {"train.optim.schedule.name": "cosine", "algorithm.loss_scale": "last_round"}),
        (
            "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 4 --expert_model_parallel_size 2",
            {"train.distributed": {"tensor_parallel": 2, "pipeline_parallel": 4, "expert_parallel": 2, "ranks": 8}},
        ),
        (
            "--context_parallel_size 4 --tensor_model_parallel_size 2",
            {"train.distributed": {"tensor_parallel": 2, "context_parallel": 4, "ranks": 8}},
        ),
        ("--tensor_model_parallel_size 2 --polyturn.train.distributed.ranks 8", {"train.distributed.ranks": 8}),
        ("--polyturn.train.backend torch", {"train.backend": "torch"}),
        ("--tuner_type lora", {"train.optim.lr": 1e-4, "model.lora.rank": 8}),
        ("--global_batch_size 64 --steps_per_generation 4", {"train.groups_per_step": 32, "train.minibatches": 4}),
        ("--global_batch_size 64 --generation_batch_size 128", {"train.groups_per_step": 16, "train.minibatches": 2}),
        ("--lr 5e-5 --min_lr 5e-6", {"train.optim.lr": 5e-5, "train.optim.schedule.min_lr_ratio": pytest.approx(0.1)}),
        ("--lr_decay_iters 50 --lr_warmup_iters 3", {"train.optim.schedule.total_steps": 50, "train.optim.warmup_steps": 3}),
        ("--lr_warmup_fraction 0.1", {"train.optim.warmup_steps": 0.1}),
        ("--lr_decay_style constant --min_lr 1e-7", {"train.optim.schedule": {"name": "constant"}}),
        ("--clip_grad 0.5 --adam_eps 1e-6", {"train.optim.max_grad_norm": 0.5, "train.optim.eps": 1e-6}),
        ("--save there/run --save_interval 40", {"out": "there", "name": "run", "train.checkpoint_every": 40}),
        ("--moe_aux_loss_coeff 1e-3", {"algorithm.routing.balance_coef": 1e-3}),
        ("--loss_scale default --multi_turn_scheduler mine", {"algorithm.loss_scale": "default"}),
    ],
)
def test_arguments_that_are_mapped(flags: str, native: dict[str, Any]) -> None:
    found = translate(f"--train_iters 10 {flags}").native
    assert {path: at(found, path) for path in native} == native


def test_a_run_is_as_long_as_it_is_there() -> None:
    """Iterations are updates there, and passes over the tasks go before them."""
    assert at(translate("--train_iters 120 --global_batch_size 64 --steps_per_generation 4").native, "train.steps") == 30
    both = translate("--train_iters 120 --max_epochs 2")
    assert both.native["train"]["epochs"] == 2 and "steps" not in both.native["train"]
    assert any(line.startswith("train_iters: num_train_epochs says") for line in both.notices())
    with pytest.raises(ConfigError, match="how long is the run"):
        translate("")


def test_that_a_fused_layer_has_more_than_one_pair_of_matrices_is_said() -> None:
    assert any("have a pair of matrices each" in line for line in translate("--train_iters 1 --tuner_type lora").notices())


def test_that_the_last_turn_alone_is_trained_is_said() -> None:
    said = "the last turn of a conversation alone is trained"
    assert any(said in line for line in translate("--train_iters 1 --multi_turn_scheduler mine").notices())
    assert not any(said in line for line in translate("--train_iters 1").notices())
    chosen = translate("--train_iters 1 --multi_turn_scheduler mine --loss_scale last_round")
    assert not any(said in line for line in chosen.notices())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--mcore_model there", "checkpoints in Megatron's format are not read"),
        ("--expert_tensor_parallel_size 2", "the matrices of an expert are not split"),
        ("--lr_decay_style WSD", "lr_decay_style is 'WSD'"),
        ("--optimizer muon", "optimizer is 'muon'"),
        ("--fp8_format hybrid", "weights and activations are bfloat16 or float32"),
        ("--router_replay_mode R2", "which is R3"),
        ("--moe_expert_capacity_factor 1.5", "no token is dropped"),
        ("--gradient_accumulation_steps 4", "write global_batch_size"),
        ("--max_steps 4", "calls it train_iters"),
        ("--freeze_parameters_ratio 0.5", "all weights are trained"),
        ("--global_batch_size 6", "num_generations"),
        ("--tensor_model_parallel_size 0", "1 or more"),
        ("--tensor_parallel_size 2", "unknown key 'tensor_parallel_size'"),
        ("--nonsense 3", "unknown key 'nonsense'"),
    ],
)
def test_arguments_that_ask_for_what_is_not_here(flags: str, says: str) -> None:
    with pytest.raises(ConfigError) as told:
        translate(f"--train_iters 10 {flags}")
    assert says in str(told.value)


def test_what_changes_speed_alone_is_ignored_with_the_reason() -> None:
    flags = "--recompute_granularity selective --sequence_parallel true --attention_backend flash --cp_comm_type p2p"
    found = translate(f"--train_iters 10 {flags} --finetune --no_save_optim --padding_free true")
    said = " ".join(found.notices())
    for name in ("recompute_granularity", "sequence_parallel", "cp_comm_type", "finetune", "padding_free"):
        assert name in said
    config = load_values(RunConfig, found.native, origin=found.origin).config
    assert config.train.backend == "megatron"


def test_every_argument_of_swift_rlhf_has_the_row_that_it_has_there_or_one_of_its_own() -> None:
    own, shared = megatron_table(), table()
    assert all(own.find(row.key) is not None for row in shared.rows)
    assert own.find("tensor_model_parallel_size") is not None and shared.find("tensor_model_parallel_size") is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["megatron"], "write `megatron rlhf` with ms-swift's arguments"),
        (["megatron", "rlhf", "--help"], "migrate/swift-args lists each argument"),
        (["megatron", "sft"], "`megatron sft` is not available here"),
        (["megatron", "rlfh"], "Did you mean 'rlhf'"),
    ],
)
def test_other_commands_of_the_program_are_named(line: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as told:
        dispatch(line)
    assert says in str(told.value)


@pytest.mark.parametrize("program", ["swift", "megatron"])
def test_what_the_launcher_of_processes_would_read_is_told(
    program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = [*(["megatron"] if program == "megatron" else []), "rlhf", *LINE.split()]
    monkeypatch.setenv("NPROC_PER_NODE", "8")
    monkeypatch.setenv("NNODES", "2")
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=r"train_iters|no such file"):
        dispatch(line)
    (told,) = (one for one in caplog.messages if one.startswith("NPROC_PER_NODE is 8 and NNODES is 2:"))
    assert "polyturn.train.distributed.ranks says how many train here" in told
    assert ("a batch is counted" in told) == (program == "swift")  # a batch of Megatron's is that of all
    monkeypatch.setenv("NNODES", "two")
    with pytest.raises(ConfigError, match="NNODES is 'two'; it must be a number of nodes"):
        dispatch(line)
