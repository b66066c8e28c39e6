"""Every argument of ms-swift's reinforcement learning is mapped, ignored with a reason, or refused.

tests/data/swift/args.tsv has one case a line: the command (swift rlhf, swift rollout, megatron rlhf), what becomes of its
flags, and the native values as JSON, or what the message of the refusal must name beside the flag.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.swift import command as module
from polyturn.compat.swift.args.arguments import (
    MEGATRON_DEFAULTS,
    megatron_table,
    megatron_to_native,
    parse,
    read,
    read_command,
    read_value,
    rollout_table,
    rollout_to_native,
    table,
    to_native,
)
from polyturn.compat.swift.command import dispatch, read_swift, rlhf
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.config.translate.translation import Translation
from polyturn.core.errors import ConfigError
from support.refusals import refuses

CASES = Path(__file__).parents[2] / "data" / "swift" / "args.tsv"
ROWS = {"--dataset": "rows.jsonl", "--reward_funcs": "accuracy"}
FLAGS = {
    "rlhf": {"--model": "m/x", **ROWS, "--per_device_train_batch_size": "8"},
    "rollout": {"--model": "m/x"},
    "megatron": {"--model": "m/Small-1B", **ROWS, "--train_iters": "10"},
}
"""The flags of a whole command; a case's own flags replace them."""


def translate(command: str, flags: str) -> Translation:
    words = shlex.split(flags)
    base = {flag: value for flag, value in FLAGS[command].items() if flag not in words}
    line = [*(part for pair in base.items() for part in pair), *words]
    if command == "rollout":
        return rollout_to_native(line)
    return to_native(parse(line)) if command == "rlhf" else megatron_to_native(parse(line, MEGATRON_DEFAULTS))


def load(found: Translation) -> RunConfig:
    """Return the native configuration; the keys of a rollout server are read by the server."""
    return load_values(RunConfig, {k: v for k, v in found.native.items() if k != "serve"}, origin=found.origin).config


def at(native: Any, path: str) -> Any:
    for part in path.split("."):
        native = native[part]
    return native


def names_of(flags: str) -> list[str]:
    return [word[2:] for word in shlex.split(flags) if word.startswith("--")]


def cases(fate: str) -> list[Any]:
    """Return the (command, flags, expected) of each line of args.tsv with a fate."""
    with CASES.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    found = [(row["command"], row["flags"] or "", row["expected"] or "") for row in rows if row["fate"] == fate]
    return [pytest.param(*case, id=f"{case[0]} {case[1]}") for case in found]


@pytest.mark.parametrize(("command", "flags", "expected"), cases("mapped"))
def test_mapped_argument_sets_its_native_keys(command: str, flags: str, expected: str) -> None:
    found = translate(command, flags)
    wanted = json.loads(expected)
    for path, value in wanted.items():
        assert at(found.native, path) == (pytest.approx(value) if isinstance(value, float) else value)
    load(found)


@pytest.mark.parametrize(("command", "flags", "_"), cases("ignored"))
def test_ignored_argument_gives_its_reason(command: str, flags: str, _: str) -> None:
    notices = "\n".join(translate(command, flags).notices())
    assert [name for name in names_of(flags)[:3] if name not in notices] == []


def test_ignored_argument_gives_its_reason_and_the_remedy() -> None:
    notices = translate("rlhf", "--split_dataset_ratio 0.1").notices()
    assert any("training tasks are not split" in line and "set val_dataset" in line for line in notices)


@pytest.mark.parametrize(("command", "flags", "_"), cases("accepted"))
def test_refused_argument_may_ask_for_nothing(command: str, flags: str, _: str) -> None:
    assert translate(command, flags).notices() == translate(command, "").notices()


@pytest.mark.parametrize(("command", "flags", "name"), cases("refused"))
def test_refused_argument_is_named_with_the_remedy(command: str, flags: str, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        translate(command, flags)
    assert any(flag in str(refused.value) for flag in names_of(flags))
    assert name in str(refused.value)


DOCUMENTED = """
model model_type template enable_thinking max_length external_plugins multi_turn_scheduler max_turns gym_env use_gym_env
context_manager vllm_use_async_engine vllm_enable_lora vllm_max_lora_rank vllm_pipeline_parallel_size vllm_max_num_seqs
vllm_reasoning_parser vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_data_parallel_size vllm_max_model_len
vllm_enable_expert_parallel vllm_disable_custom_all_reduce vllm_enforce_eager vllm_limit_mm_per_prompt vllm_quantization
vllm_enable_prefix_caching vllm_disable_cascade_attn vllm_mm_processor_cache_gb vllm_speculative_config vllm_engine_kwargs
"""
OF_ROLLOUT = "host port log_level verbose log_interval max_logprobs api_key"
OF_RLHF = """
use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_server_group_port
enable_flattened_weight_sync async_generate sleep_level move_model_batches offload_optimizer offload_model
structured_outputs_regex generation_batch_size steps_per_generation top_k top_p min_p repetition_penalty stop_words lora_rank
wandb_log_unique_prompts completion_length_limit_scope vllm_server_pass_dataset num_generations num_generations_eval
max_completion_length temperature beta num_iterations epsilon epsilon_high delta scale_rewards advantage_estimator
kl_in_reward loss_type importance_sampling_level rollout_importance_sampling_mode rollout_importance_sampling_threshold
log_rollout_offpolicy_metrics off_policy_sequence_mask_delta dynamic_sample max_resample_times overlong_filter
soft_max_length soft_cache_length cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct
cosine_max_len_value_correct cosine_max_len repetition_n_grams repetition_max_penalty reward_funcs reward_weights
reward_model reward_model_plugin log_completions log_entropy top_entropy_quantile sync_ref_model ref_model_sync_steps
ref_model_mixup_alpha tau_pos tau_neg real_tau truncation_strategy loss_scale dataset_shuffle teacher_kl_coef
advantage_reweight sdar_loss_coef num_infer_workers vllm_device ckpt_dir add_non_thinking_prefix
"""


@pytest.mark.parametrize(("rows", "more"), [(table, OF_RLHF), (rollout_table, OF_ROLLOUT), (megatron_table, OF_RLHF)])
def test_every_documented_argument_has_a_row(rows: Any, more: str) -> None:
    found = {name: rows().find(name) for name in (DOCUMENTED + more).split()}
    assert [n for n, row in found.items() if row is None or not (row.to or row.says or row.means or row.native)] == []


# How flags and files are read


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--reward_funcs accuracy format", "reward_funcs", ["accuracy", "format"]),
        ("--learning_rate 1e-6", "learning_rate", 1e-6),
        ("--use_vllm", "use_vllm", True),
        ("--max-turns=3", "max_turns", 3),
        ("--api_key 0123", "api_key", "0123"),
        ("--model_revision 12e45678", "model_revision", "12e45678"),
        ("--system={'a':1}", "system", "{'a':1}"),
        ("--system null", "system", None),
        ("--stop_words Observation:", "stop_words", "Observation:"),
        ("--stop_words [/INST] 007", "stop_words", ["[/INST]", "007"]),
        ('--stop_words ["a","b"]', "stop_words", ["a", "b"]),
        ("--seed 007", "seed", 7),
    ],
)
def test_flag_is_read_as_its_type(line: str, name: str, value: Any, tmp_path: Path) -> None:
    assert parse(line.split()).values[name] == value
    if len(line.split()) == 2 and "-turns" not in line:
        (tmp_path / "run.yaml").write_text("model: m\n")
        assert read(tmp_path / "run.yaml", [line.removeprefix("--").replace(" ", "=", 1)]).values[name] == value


def test_values_are_json_or_words() -> None:
    texts = ('{"image": 10}', "none", "None", "true", "[1")
    assert [read_value(text) for text in texts] == [{"image": 10}, "none", None, True, "[1"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("model", "'model'"),
        ("--seed 1 --seed 2", "--seed"),
        ("--output_dir --max_turns 3", "--output_dir"),
        ("--polyturn.engine 3 --polyturn.engine.kind vllm", "polyturn.engine"),
        ("--polyturn.engine.kind vllm --polyturn.engine '{kind: embedded}'", "polyturn.engine.kind"),
        ("--polyturn.engine '{kind: embedded}' --polyturn.engine.kind vllm", "polyturn.engine.kind"),
    ],
)
def test_malformed_flags_are_named(line: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse(shlex.split(line))


def test_file_is_read_with_overrides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "model: m/x\nlearning_rate: 1e-6\nmax_turns: 2\npolyturn.engine.kind: vllm\npolyturn: {engine: {a: 3}}\n"
    )
    values = read(path, ["max_turns=3", "max_turns=4", "polyturn.engine.kind=embedded"]).values
    assert (values["learning_rate"], values["max_turns"]) == (1e-6, 4)
    assert "overridden more than once: max_turns;" in caplog.text
    assert values["polyturn"] == {"engine": {"kind": "embedded", "a": 3}}
    refuses(lambda: read(path, ["max_turns.x=3"]), ConfigError, "max_turns.x=3")
    refuses(lambda: read(tmp_path / "b.yaml"), ConfigError, "a.yaml")
    path.write_text("model: m\nmax_turns: 3\nmax_turns: 4\n")
    refuses(lambda: read(path), ConfigError, "line 3", "max_turns")
    refuses(lambda: to_native(parse([])), ConfigError, "model")


@pytest.mark.parametrize("line", ["FILE --max_turns 3 --polyturn.name b", "--polyturn.name b --config FILE --max_turns 3"])
def test_flags_override_those_of_a_file(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: m/x\nmax_turns: 2\npolyturn: {name: a, engine: {kind: vllm}}\n")
    tree = read_command(line.replace("FILE", str(tmp_path / "a.yaml")).split())
    assert (tree.values["model"], tree.values["max_turns"], tree.values["top_k"]) == ("m/x", 3, -1)
    assert tree.values["polyturn"] == {"name": "b", "engine": {"kind": "vllm"}} and "config" not in tree.values
    assert (
        tree.origin["model"] == f"in {tmp_path / 'a.yaml'}" and tree.origin["max_turns"] == "from the argument '--max_turns'"
    )
    refuses(lambda: read_command(["--config"]), ConfigError, "--config")


def test_file_of_a_ray_run_has_sections_for_roles(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "model: m/x\ndataset: rows.jsonl\nuse_gym_env: true\ntrain_iters: 10\ncolocate_groups: [[train, rollout]]\n"
        "train: {gpus: 8, tensor_model_parallel_size: 2}\nrollout: {gpus: 8, vllm_max_model_len: 512}\n"
    )
    found = megatron_to_native(read_command(["--use_ray", "--config", str(tmp_path / "a.yaml")], MEGATRON_DEFAULTS))
    assert at(found.native, "train.distributed.tensor_parallel") == 2
    assert at(found.native, "rollout.limits.max_context") == 512
    assert any("gpus" in notice and "colocate_groups" in notice for notice in found.notices())


def test_variables_of_a_file_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "environ", {"NNODES": "2"})
    (tmp_path / "a.yaml").write_text("model: m/x\nENV: {NPROC_PER_NODE: 4, NNODES: 1}\n")
    assert "ENV" not in read(tmp_path / "a.yaml").values
    assert os.environ == {"NNODES": "2", "NPROC_PER_NODE": "4"}
    assert "NNODES is '2'" in caplog.text


# Native keys and unknown flags


@pytest.mark.parametrize("command", ["rlhf", "rollout"])
def test_native_flags_are_applied_and_checked(command: str) -> None:
    found = translate(command, "--polyturn.engine.kind vllm --polyturn.engine.launch.replicas=2")
    assert found.native["engine"] == {"kind": "vllm", "launch": {"replicas": 2}}
    for flag, name in (("--polyturn.engine.kin", r"engine\.kin'.*'engine\.kind'"), ("--polyturn.nonsense.key", "nonsense")):
        with pytest.raises(ConfigError, match=name):
            load(translate(command, f"{flag} vllm"))
    for flag in ("--nonsense", "--nonsense.key", "--engine.kind", "--polytorn.engine.kind", "--max_turn"):
        with pytest.raises(ConfigError, match=f"'{flag[2:]}'"):
            translate(command, f"{flag} 3")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--port abc", ["port", "'abc'"]),
        ("--polyturn.serve.grace_s soon", ["serve.grace_s"]),
        ("--polyturn.serve 3", ["serve"]),
        ("--polyturn.engine x", ["engine"]),
        ("--polyturn.serve.prt 3", ["serve.prt", "serve.port"]),
    ],
)
def test_wrong_server_option_is_named(flags: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_swift(["--model", "m/x", *flags.split()])
    assert [name for name in names if name not in str(refused.value)] == []


def test_own_flag_takes_no_value() -> None:
    refuses(lambda: rlhf(["--model", "m", "--resume", "last", "--max_turns", "3"]), ConfigError, "--resume", "'last'")


# Commands and the environment


@pytest.mark.parametrize("own", [[], ["--polyturn.name", "b"], ["--polyturn.name=b"]])
def test_command_to_resume_names_the_run(own: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(module, "train", lambda translation, *, again, **options: commands.append(again("b-2")))
    rlhf([*(part for pair in FLAGS["rlhf"].items() for part in pair), *own, "--max_turns", "3"])
    assert commands[0][-4:] == ["3", "--polyturn.name", "b-2", "--resume"] and commands[0].count("--polyturn.name") == 1
    assert "--polyturn.name=b" not in commands[0]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        *[(line, "migrate/swift-args") for line in ("", "--help", "rlhf -h", "rollout --help", "megatron rlhf --help")],
        ("megatron", "megatron rlhf"),
        ("megatron sft", "megatron sft"),
        ("megatron rlfh", "'rlhf'"),
    ],
)
def test_other_command_says_where_help_is(line: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        dispatch(line.split())


@pytest.mark.parametrize("program", ["swift", "megatron"])
def test_process_variables_are_reported(
    program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = [*(["megatron"] if program == "megatron" else []), "rlhf", "--model", "m", "--dataset", "rows.jsonl"]
    line += ["--reward_funcs", "accuracy"]
    monkeypatch.setenv("NPROC_PER_NODE", "8")
    monkeypatch.setenv("NNODES", "2")
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=r"train_iters|no such file"):
        dispatch(line)
    (message,) = (one for one in caplog.messages if one.startswith("NPROC_PER_NODE is 8 and NNODES is 2"))
    assert "polyturn.train.distributed.ranks" in message
    assert ("batch sizes are per process" in message) == (program == "swift")  # a batch of Megatron's is that of all
    monkeypatch.setenv("NNODES", "two")
    refuses(lambda: dispatch(line), ConfigError, "NNODES is 'two'")


def test_image_variables_are_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MAX_PIXELS", "1003520")
    with caplog.at_level("INFO"):
        read_swift(["--model", "m"])
    assert "MAX_PIXELS is 1003520" in caplog.text


# Batches, engines and schedulers


@pytest.mark.parametrize(
    ("processes", "flags", "groups", "minibatches"),
    [
        (8, "--per_device_train_batch_size 1", 1, 1),
        (4, "--per_device_train_batch_size 8 --gradient_accumulation_steps 2", 8, 1),
        (2, "--per_device_train_batch_size 4 --steps_per_generation 4", 4, 4),
        (2, "--per_device_train_batch_size 4 --generation_batch_size 16", 2, 2),
        (4, "--gradient_accumulation_steps 4 --generation_batch_size 4 --num_generations 4", 4, 1),
    ],
)
def test_batch_is_that_of_all_processes(processes: int, flags: str, groups: int, minibatches: int) -> None:
    tree = parse(["--model", "m/x", "--reward_funcs", "accuracy", *flags.split()])
    train = to_native(tree, num_processes=processes).native["train"]
    assert (train["groups_per_step"], train["minibatches"]) == (groups, minibatches)
    with pytest.raises(ConfigError, match="3 processes"):
        to_native(parse(["--model", "m/x", "--reward_funcs", "a", "--per_device_train_batch_size", "1"]), num_processes=3)


@pytest.mark.parametrize(
    ("command", "number", "length"),
    [("rlhf", 10, {"epochs": 2}), ("rlhf", 25, {"steps": 50}), ("megatron", 25, {"steps": 25})],
)
def test_short_file_is_repeated(command: str, number: int, length: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n' * 10)
    found = translate(command, f"--dataset {tmp_path}/rows.jsonl#{number} --num_train_epochs 2")
    assert {name: value for name, value in found.native["train"].items() if name in ("epochs", "steps")} == length


@pytest.mark.parametrize("command", ["rlhf", "rollout"])
def test_vllm_sizes_start_servers_where_vllm_is_the_engine(command: str) -> None:
    sizes = "--vllm_data_parallel_size 2 --vllm_tensor_parallel_size 4"
    found = translate(command, f"{sizes} --polyturn.engine.kind vllm")
    assert found.native["engine"]["launch"] == {"replicas": 2, "args": ["--tensor-parallel-size", "4"]}
    embedded = translate(command, sizes)
    assert "engine" not in embedded.native
    assert any("vllm_data_parallel_size" in line for line in embedded.notices())


def test_missing_scheduler_of_a_server_is_asked_for() -> None:
    found = translate("rlhf", "--vllm_mode server")
    assert at(found.native, "rollout.scheduler") == "single_turn"
    assert any("every episode is a single turn" in line for line in found.notices())
    for name in ("mine", "null"):
        chosen = translate("rlhf", f"--vllm_mode server --multi_turn_scheduler {name}")
        assert not any("single turn" in line for line in chosen.notices())


@pytest.mark.parametrize("flags", ["--stop_words Observation:", "--reward_funcs null"])
def test_refusal_may_ask_for_the_flags_of_a_server(flags: str) -> None:
    refuses(lambda: translate("rlhf", f"{flags} --vllm_mode server"), ConfigError, "what `swift rollout` had")


# megatron rlhf


def test_megatron_run_is_as_long_as_there() -> None:
    both = translate("megatron", "--train_iters 120 --max_epochs 2")
    assert both.native["train"]["epochs"] == 2
    assert "steps" not in both.native["train"]
    assert any(line.startswith("train_iters:") for line in both.notices())
    refuses(lambda: translate("megatron", "--train_iters null"), ConfigError, "the length of the run is missing")


@pytest.mark.parametrize(("flags", "is_reported"), [("--tuner_type lora", True), ("", False)])
def test_megatron_difference_is_reported(flags: str, is_reported: bool) -> None:
    notices = "\n".join(translate("megatron", flags).notices())
    assert ("have a pair of matrices each" in notices) == is_reported


def test_megatron_trains_all_turns_of_a_scheduler() -> None:
    assert "loss_scale" not in translate("megatron", "--multi_turn_scheduler mine").native["algorithm"]


def test_megatron_has_all_rows_of_swift() -> None:
    own, shared = megatron_table(), table()
    assert all(own.find(row.key) is not None for row in shared.rows)
    assert own.find("tensor_model_parallel_size") is not None
    assert shared.find("tensor_model_parallel_size") is None
