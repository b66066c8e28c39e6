"""Every argument of ms-swift's reinforcement learning is mapped, ignored with a reason, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.swift.args.arguments import (
    parse,
    read,
    read_value,
    rollout_table,
    rollout_to_native,
    table,
    to_native,
)
from polyturn.compat.swift.command import dispatch, read_swift, rlhf
from polyturn.compat.verl_config.translate import Translation
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError

ROW = {"model": "m/x", "dataset": "rows.jsonl", "reward_funcs": ["accuracy"]}

DOCUMENTED = """
use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
vllm_server_group_port enable_flattened_weight_sync async_generate sleep_level move_model_batches
offload_optimizer offload_model structured_outputs_regex generation_batch_size steps_per_generation top_k
top_p min_p repetition_penalty stop_words vllm_enable_lora lora_rank vllm_enable_prefix_caching
vllm_max_num_seqs wandb_log_unique_prompts multi_turn_scheduler max_turns completion_length_limit_scope
vllm_server_pass_dataset use_gym_env gym_env num_generations num_generations_eval max_completion_length
temperature beta num_iterations epsilon epsilon_high delta scale_rewards advantage_estimator kl_in_reward
loss_type importance_sampling_level rollout_importance_sampling_mode rollout_importance_sampling_threshold
log_rollout_offpolicy_metrics off_policy_sequence_mask_delta dynamic_sample max_resample_times overlong_filter
soft_max_length soft_cache_length cosine_min_len_value_wrong cosine_max_len_value_wrong
cosine_min_len_value_correct cosine_max_len_value_correct cosine_max_len repetition_n_grams
repetition_max_penalty reward_funcs reward_weights reward_model reward_model_plugin log_completions
log_entropy top_entropy_quantile sync_ref_model ref_model_sync_steps ref_model_mixup_alpha tau_pos tau_neg
real_tau truncation_strategy loss_scale dataset_shuffle teacher_kl_coef advantage_reweight sdar_loss_coef
model model_type template enable_thinking max_length vllm_use_async_engine external_plugins vllm_max_lora_rank
vllm_pipeline_parallel_size vllm_reasoning_parser context_manager vllm_gpu_memory_utilization
vllm_tensor_parallel_size vllm_data_parallel_size vllm_enable_expert_parallel vllm_max_model_len
vllm_disable_custom_all_reduce vllm_enforce_eager vllm_limit_mm_per_prompt vllm_quantization
vllm_disable_cascade_attn vllm_mm_processor_cache_gb vllm_speculative_config vllm_engine_kwargs
""".split()  # noqa: SIM905


def translate(**arguments: Any) -> Translation:
    from polyturn.compat.swift.args.arguments import over_defaults

    values = {**ROW, **arguments}
    return to_native(over_defaults(values, dict.fromkeys(values, "in the test")))


def at(native: Any, path: str) -> Any:
    for part in path.split("."):
        native = native[part]
    return native


def test_every_documented_argument_has_a_row_that_says_something() -> None:
    rows = {name: table().find(name) for name in DOCUMENTED}
    assert [name for name, row in rows.items() if row is None or not (row.to or row.says or row.means or row.native)] == []


@pytest.mark.parametrize(
    ("arguments", "native"),
    [
        ({"model": "m/y"}, {"model.path": "m/y"}),
        ({"enable_thinking": False}, {"model.template_kwargs.enable_thinking": False}),
        ({"torch_dtype": "bfloat16"}, {"model.dtype": "bfloat16"}),
        ({"system": "You are kind."}, {"data.train.system": "You are kind."}),
        ({"external_plugins": ["a.py", "b.py"]}, {"plugins": ["a.py", "b.py"]}),
        ({"custom_register_path": "a.py"}, {"plugins": ["a.py"]}),
        ({"dataset": "a.jsonl#500"}, {"data.train.files": ["a.jsonl"], "data.train.limit": 500}),
        (
            {"val_dataset": ["v.jsonl"], "num_generations_eval": 4},
            {"evaluation.data.files": ["v.jsonl"], "evaluation.sets.val.samples": 4},
        ),
        ({"dataset_shuffle": False}, {"data.shuffle": False}),
        ({"max_length": 2048}, {"rollout.limits.max_prompt_tokens": 2048}),
        ({"truncation_strategy": "delete"}, {"data.drop_long_prompts": True}),
        ({"multi_turn_scheduler": "mine", "max_turns": 3}, {"rollout.scheduler": "mine", "rollout.limits.max_turns": 3}),
        ({"multi_turn_scheduler": "mine"}, {"rollout.limits.max_turns": 100}),
        ({}, {"rollout.scheduler": "single_turn", "rollout.limits.max_turns": 1}),
        (
            {"gym_env": "lake"},
            {
                "rollout.scheduler": "gym_scheduler",
                "rollout.scheduler_kwargs": {"gym_env": "lake"},
                "reward.function.use_gym_env": True,
            },
        ),
        (
            {"multi_turn_scheduler": "s", "stop_words": ["Observation:"]},
            {"rollout.scheduler_kwargs": {"stop_words": ["Observation:"]}},
        ),
        ({"max_completion_length": 64}, {"rollout.limits.max_tokens_per_turn": 64}),
        ({"completion_length_limit_scope": "total"}, {"rollout.limits.max_tokens": 512}),
        ({"vllm_max_model_len": 4096}, {"rollout.limits.max_context": 4096}),
        (
            {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
            {"rollout.sampling": {"temperature": 1.0, "top_p": 0.9, "top_k": 50}},
        ),
        ({}, {"rollout.sampling.temperature": 0.9, "seed": 42, "algorithm.kl.coef": 0.04}),
        ({"async_generate": True}, {"train.max_staleness": 1}),
        ({"loss_scale": "last_round"}, {"algorithm.loss_scale": "last_round"}),
        (
            {"num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
            {"train.group_size": 4, "train.groups_per_step": 4, "train.minibatches": 1},
        ),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 40},
            {"train.groups_per_step": 4, "train.minibatches": 4, "train.steps": 10},
        ),
        (
            {"generation_batch_size": 64, "per_device_train_batch_size": 16},
            {"train.groups_per_step": 8, "train.minibatches": 4},
        ),
        ({"num_train_epochs": 2}, {"train.epochs": 2}),
        ({"save_steps": 50}, {"train.checkpoint_every": 50}),
        ({"eval_steps": 20, "val_dataset": "val.jsonl"}, {"evaluation.every": 20}),
        ({"save_total_limit": 2}, {"train.keep_checkpoints": 2}),
        ({"output_dir": "out/mine"}, {"out": "out", "name": "mine"}),
        ({"learning_rate": 5e-7}, {"train.optim.lr": 5e-7}),
        ({"adam_beta2": 0.99}, {"train.optim.betas": [0.9, 0.99]}),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.0}, {"train.optim.schedule": "constant"}),
        ({"beta": 0.0}, {"algorithm.kl.coef": 0.0}),
        ({"epsilon": 0.1}, {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.1}),
        ({"epsilon_high": 0.28}, {"algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.28}),
        ({"loss_type": "dapo"}, {"algorithm.aggregate": "token-mean"}),
        ({"loss_type": "dr_grpo"}, {"algorithm.aggregate": "seq-mean-token-sum-norm"}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"algorithm.loss.name": "cispo", "algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 4.0},
        ),
        ({"loss_type": "sapo", "tau_neg": 1.1}, {"algorithm.loss.name": "sapo", "algorithm.loss.tau_neg": 1.1}),
        ({"importance_sampling_level": "sequence"}, {"algorithm.loss.name": "gspo_sequence"}),
        ({"importance_sampling_level": "sequence_token"}, {"algorithm.loss.name": "gspo"}),
        ({"delta": 1.5}, {"algorithm.loss.dual_clip": 1.5}),
        (
            {"rollout_importance_sampling_mode": "sequence_mask", "off_policy_sequence_mask_delta": 0.1},
            {"algorithm.loss.correction": {"weight": "geometric", "cap": 2.0, "beyond": "drop", "negative_bound": 0.1}},
        ),
        (
            {"train_type": "lora", "lora_rank": 16, "target_modules": ["q_proj", "v_proj"]},
            {
                "model.lora.rank": 16,
                "model.lora.alpha": 32,
                "model.lora.dropout": 0.05,
                "model.lora.target_modules": ["q_proj", "v_proj"],
            },
        ),
        ({"ref_model": "other"}, {"model.reference": "other"}),
        (
            {"teacher_model": "large", "teacher_kl_coef": 0.5},
            {"algorithm.loss.distill": {"teacher": "large", "coef": 0.5}},
        ),
        ({"scale_rewards": "none"}, {"algorithm.advantage.norm_by_std": False}),
        ({"advantage_estimator": "rloo"}, {"algorithm.advantage.name": "rloo"}),
        ({"kl_in_reward": True, "beta": 0.01}, {"algorithm.kl.coef": 0.01, "algorithm.kl.place": "reward"}),
        ({"dynamic_sample": True}, {"train.dynamic_sampling": 3, "algorithm.drop_zero_variance": True}),
        (
            {"dynamic_sample": True, "max_resample_times": 5},
            {"train.dynamic_sampling": 5, "algorithm.drop_zero_variance": True},
        ),
        ({"overlong_filter": True}, {"algorithm.drop_truncated": True}),
        (
            {"reward_funcs": ["accuracy", "cosine"], "reward_weights": [1, 0.5], "cosine_max_len": 100},
            {
                "reward.function.names": ["accuracy", "cosine"],
                "reward.function.weights": [1.0, 0.5],
                "reward.function.options.cosine_max_len": 100,
            },
        ),
        (
            {"columns": {"q": "query", "answer": "solution", "id": "id"}, "val_dataset": "held.jsonl"},
            {
                "data.train.columns": {"prompt": "q", "solution": "answer"},
                "evaluation.data.columns": {"prompt": "q", "solution": "answer"},
            },
        ),
        ({"columns": None}, {"data.train": {"files": ["rows.jsonl"]}}),
        ({"columns": {"query": "query"}}, {"data.train.columns": {"prompt": "query"}}),
        ({"polyturn": {"engine": {"num_slots": 8}}}, {"engine.num_slots": 8}),
        (
            {"dataset": "AI-MO/NuminaMath-TIR#9"},
            {"data.train": {"dataset": "AI-MO/NuminaMath-TIR", "split": "train", "limit": 9}},
        ),
        ({"dataset": "hf::a/b:main"}, {"data.train": {"dataset": "a/b", "subset": "main", "split": "train"}}),
    ],
)
def test_arguments_that_are_mapped(arguments: dict[str, Any], native: dict[str, Any]) -> None:
    device = (
        {}
        if {"generation_batch_size", "per_device_train_batch_size"} & set(arguments)
        else {"per_device_train_batch_size": 8}
    )
    found = translate(**device, **arguments)
    for path, value in native.items():
        assert at(found.native, path) == value
    load_values(RunConfig, found.native, origin=found.origin)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"train_type": "longlora"}, "is not available"),
        ({"adapters": ["a", "b"], "tuner_type": "lora"}, "one is trained"),
        ({"system": "nowhere.txt"}, "there is no such file"),
        ({"fp16": True}, "use bf16"),
        ({"columns": {"question": "query", "task": "prompt"}}, "two columns would be 'prompt'"),
        *[({"columns": wrong}, "give the names of the files") for wrong in ("q", ["q", "query"], {"q": 3}, {"q": ""}, True)],
        ({"dataset": "ms::AI-MO/NuminaMath-TIR"}, "ModelScope, which is not read"),
        ({"dataset": "a.csv"}, "neither a file of rows nor a data set"),
        ({"dataset": "rows.jsonl#x"}, "is a number of rows"),
        ({"dataset": ["a/b", "rows.jsonl"]}, "name it alone"),
        *[({"reward_weights": [wrong]}, "a weight is a finite number") for wrong in ("a", float("nan"))],
        *[
            ({name: 2.5, "multi_turn_scheduler": "mine"}, "must be a whole number")
            for name in ("max_turns", "num_generations", "steps_per_generation", "max_completion_length", "max_steps")
        ],
        ({"per_device_train_batch_size": 0}, "must be a whole number, 1 or more"),
        ({"polyturn": 3}, "it is a section of native keys"),
        ({"soft_cache_length": None, "reward_funcs": ["soft_overlong"]}, "must be set when using soft overlong rewards"),
        ({"adapters": ["a"]}, "merge them into the model"),
        ({"quant_bits": 4}, "merge them into the model"),
        ({"reward_model": ["r"]}, "no reward model yet"),
        ({"min_p": 0.1}, "there is no min_p"),
        ({"repetition_penalty": 1.1}, "know no penalty"),
        ({"structured_outputs_regex": "a"}, "not constrained"),
        ({"vllm_reasoning_parser": "deepseek_r1"}, "as they were written"),
        ({"num_iterations": 2}, "trained on once"),
        ({"resume_from_checkpoint": "c"}, "pass --resume"),
        *[({"loss_type": kind}, "is not available; there are grpo") for kind in ("real", "fipo")],
        ({"importance_sampling_level": "sequences"}, "is none of token, sequence"),
        ({"rollout_importance_sampling_mode": "turn_mask"}, "is none of token or sequence"),
        ({"teacher_model_server": "http://h"}, "name it with teacher_model"),
        ({"top_entropy_quantile": 0.2}, "all tokens are trained"),
        ({"sync_ref_model": True}, "stays as the model was"),
        ({"advantage_reweight": "rlsd"}, "teacher"),
        ({"sdar_loss_coef": 0.1}, "self-distillation"),
        ({"chord_sft_dataset": ["d"]}, "warm_start"),
        ({"rlhf_type": "dpo"}, "that value is not known here"),
        ({"dataset": ["rows"]}, "neither a file of rows"),
        ({"stop_words": ["x"]}, "need a multi_turn_scheduler"),
        ({"reward_weights": [1, 2]}, "give as many weights"),
        ({"reward_funcs": []}, "there is no reward"),
        ({"num_generations": 3}, "must be a multiple of it; possible are [2, 4, 8]"),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "keep one of them"),
        ({"num_generation": 4}, "Did you mean 'num_generations'"),
    ],
)
def test_arguments_that_ask_for_what_is_not_here(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as problem:
        translate(**{"per_device_train_batch_size": 8, **arguments})
    assert says in str(problem.value)
    assert next(iter(arguments)) in str(problem.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_vllm", True),
        ("vllm_mode", "server"),
        ("vllm_server_host", "127.0.0.1"),
        ("vllm_server_pass_dataset", True),
        ("vllm_use_async_engine", True),
        ("vllm_gpu_memory_utilization", 0.5),
        ("deepspeed", "zero2"),
        ("report_to", "wandb"),
        ("sleep_level", 1),
        ("vllm_enable_lora", True),
        ("split_dataset_ratio", 0.1),
    ],
)
def test_arguments_that_are_ignored_say_why(name: str, value: Any) -> None:
    notices = translate(per_device_train_batch_size=8, **{"multi_turn_scheduler": None, name: value}).notices()
    assert any(name in notice for notice in notices), notices


@pytest.mark.parametrize("name", ["min_p", "delta", "reward_model", "structured_outputs_regex", "ref_model"])
def test_a_refused_argument_that_asks_for_nothing_is_no_error(name: str) -> None:
    without, asked = translate(per_device_train_batch_size=8), translate(per_device_train_batch_size=8, **{name: None})
    assert asked.notices() == without.notices()


def test_flags_are_read_as_the_command_line_writes_them() -> None:
    line = (
        "--model m/x --reward_funcs accuracy format --learning_rate 1e-6 --use_vllm --stop_words Observation: --max_turns=3"
    )
    values = parse(line.split()).values
    assert values["reward_funcs"] == ["accuracy", "format"]
    assert values["learning_rate"] == 1e-6
    assert values["use_vllm"] is True
    assert values["stop_words"] == "Observation:"
    assert values["max_turns"] == 3
    assert read_value('{"image": 10}') == {"image": 10}
    assert read_value("none") == "none" and read_value("None") is None and read_value("true") is True
    with pytest.raises(ConfigError, match="belongs to no flag"):
        parse(["model"])
    with pytest.raises(ConfigError, match="given twice"):
        parse(["--seed", "1", "--seed", "2"])


def test_an_override_that_is_given_twice_counts_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.yaml").write_text("max_turns: 1")
    assert read(tmp_path / "a.yaml", ["max_turns=3", "max_turns=4"]).values["max_turns"] == 4
    assert "overridden more than once: max_turns;" in caplog.text


def test_a_file_is_read_with_overrides_and_numbers_in_any_writing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: m/x\nlearning_rate: 1e-6\nmax_turns: 2\n")
    values = read(tmp_path / "a.yaml", ["max_turns=3", "polyturn.engine.num_slots=4"]).values
    assert (values["learning_rate"], values["max_turns"]) == (1e-6, 3)
    assert values["polyturn"] == {"engine": {"num_slots": 4}}
    with pytest.raises(ConfigError, match=r"does not exist. Did you mean 'a.yaml'"):
        read(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="the argument model is missing"):
        to_native(parse([]))


def test_a_scheduler_that_only_the_server_was_given_is_asked_for_and_episodes_are_single_turns() -> None:
    flags = ["--model", "m/x", "--vllm_mode", "server", "--reward_funcs", "accuracy", "--per_device_train_batch_size", "8"]
    found = to_native(parse(flags))
    assert at(found.native, "rollout.scheduler") == "single_turn"
    assert any("every episode is a single turn; if `swift rollout` was given one" in line for line in found.notices())
    given = to_native(parse([*flags, "--multi_turn_scheduler", "mine"]))
    assert at(given.native, "rollout.scheduler") == "mine"
    chosen = to_native(parse([*flags, "--multi_turn_scheduler", "null"]))
    assert not any("single turn" in line for line in [*given.notices(), *chosen.notices()])


RLHF = ["--model", "m/x", "--reward_funcs", "accuracy", "--per_device_train_batch_size", "8"]


@pytest.mark.parametrize("prefix", [RLHF, ["--model", "m/x"]])
def test_native_flags_are_applied_or_refused_with_the_nearest_name(prefix: list[str], tmp_path: Path) -> None:
    translate_flags = (lambda flags: to_native(parse(flags))) if prefix is RLHF else rollout_to_native
    found = translate_flags([*prefix, "--polyturn.engine.kind", "vllm", "--polyturn.engine.launch.replicas=2"])
    assert found.native["engine"] == {"kind": "vllm", "launch": {"replicas": 2}}
    wrong = translate_flags([*prefix, "--polyturn.engine.kin", "vllm"])
    with pytest.raises(ConfigError, match=r"engine\.kin'.*Did you mean 'engine\.kind'"):
        load_values(RunConfig, {k: v for k, v in wrong.native.items() if k != "serve"}, origin=wrong.origin)
    nonsense = translate_flags([*prefix, "--polyturn.nonsense.key", "3"])
    with pytest.raises(ConfigError, match="nonsense"):
        load_values(RunConfig, nonsense.native, origin=nonsense.origin)
    with pytest.raises(ConfigError, match=r"polyturn\.engine is given twice, as 3 and as"):
        translate_flags([*prefix, "--polyturn.engine", "3", "--polyturn.engine.kind", "vllm"])
    (tmp_path / "a.yaml").write_text("model: m/x\npolyturn.engine.kind: vllm\npolyturn: {engine: {num_slots: 3}}\n")
    assert read(tmp_path / "a.yaml").values["polyturn"] == {"engine": {"num_slots": 3, "kind": "vllm"}}


@pytest.mark.parametrize("prefix", [RLHF, ["--model", "m/x"]])
def test_every_unknown_flag_is_an_error(prefix: list[str]) -> None:
    translate_flags = (lambda flags: to_native(parse(flags))) if prefix is RLHF else rollout_to_native
    for flag in ("--nonsense", "--nonsense.key", "--engine.kind", "--polytorn.engine.kind", "--max_turn"):
        with pytest.raises(ConfigError, match=f"unknown key '{flag[2:]}'"):
            translate_flags([*prefix, flag, "3"])
    assert at(translate_flags([*prefix, "--max-turns", "3", "--gym-env", "lake"]).native, "rollout.limits.max_turns") == 3


def test_a_server_option_that_is_unknown_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'serve\.prt'.*'serve\.port'"):
        read_swift(["--model", "m/x", "--polyturn.serve.prt", "3"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--port abc", "port (from the argument '--port') is 'abc'"),
        ("--polyturn.serve.grace_s soon", "serve.grace_s; it must be a valid number"),
        ("--polyturn.serve 3", "serve; it must be a section"),
        ("--polyturn.engine x", "engine; it must be a section"),
    ],
)
def test_a_native_key_of_another_type_is_told_as_such(flags: str, says: str) -> None:
    with pytest.raises(ConfigError) as told:
        read_swift(["--model", "m/x", *flags.split()])
    assert says in str(told.value)


@pytest.mark.parametrize("line", [[], ["--help"], ["rlhf", "-h"], ["rollout", "--help"]])
def test_a_question_for_help_is_answered_with_where_it_is(line: list[str]) -> None:
    with pytest.raises(ConfigError, match="migrate/swift-args lists each argument"):
        dispatch(line)


@pytest.mark.parametrize(
    ("processes", "flags", "groups", "minibatches"),
    [
        (8, "--per_device_train_batch_size 1", 1, 1),
        (4, "--per_device_train_batch_size 8 --gradient_accumulation_steps 2", 8, 1),
        (2, "--per_device_train_batch_size 4 --steps_per_generation 4", 4, 4),
        (2, "--per_device_train_batch_size 4 --generation_batch_size 16", 2, 2),
    ],
)
def test_a_batch_is_that_of_all_processes(processes: int, flags: str, groups: int, minibatches: int) -> None:
    tree = parse(["--model", "m/x", "--reward_funcs", "accuracy", *flags.split()])
    train = to_native(tree, num_processes=processes).native["train"]
    assert (train["groups_per_step"], train["minibatches"]) == (groups, minibatches)


def test_a_batch_that_no_number_of_processes_divides_says_how_it_is_counted() -> None:
    tree = parse(["--model", "m/x", "--reward_funcs", "accuracy", "--per_device_train_batch_size", "1"])
    with pytest.raises(ConfigError, match=r"a rollout has 3 completions .* x 3 processes"):
        to_native(tree, num_processes=3)


@pytest.mark.parametrize("prefix", [RLHF, ["--model", "m/x"]])
def test_sizes_of_vllm_start_servers_where_vllm_is_the_engine(prefix: list[str]) -> None:
    translate_flags = (lambda flags: to_native(parse(flags))) if prefix is RLHF else rollout_to_native
    sizes = ["--vllm_data_parallel_size", "2", "--vllm_tensor_parallel_size", "4"]
    found = translate_flags([*prefix, *sizes, "--polyturn.engine.kind", "vllm"])
    assert found.native["engine"]["launch"] == {"replicas": 2, "args": ["--tensor-parallel-size", "4"]}
    embedded = translate_flags([*prefix, *sizes])
    assert "engine" not in embedded.native
    assert any("vllm_data_parallel_size" in line and "one process" in line for line in embedded.notices())


# swift rollout


def rollout(line: str) -> Translation:
    return rollout_to_native(["--model", "m/x", *line.split()])


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("", {"model.path": "m/x", "rollout.scheduler": "single_turn"}),
        ("--host 0.0.0.0 --port 8100 --api_key secret", {"serve": {"host": "0.0.0.0", "port": 8100, "token": "secret"}}),
        (
            "--multi_turn_scheduler mine --max_turns 3 --use_async_engine true --external_plugins a.py b.py",
            {"rollout.scheduler": "mine", "rollout.limits.max_turns": 3, "plugins": ["a.py", "b.py"]},
        ),
        ("--gym_env lake", {"rollout.scheduler": "gym_scheduler", "rollout.scheduler_kwargs": {"gym_env": "lake"}}),
        ("--vllm_max_model_len 4096 --max_length 1024", {"rollout.limits.max_context": 4096}),
        ("--vllm_max_num_seqs 64", {"engine.num_slots": 64}),
        ("--vllm_gpu_memory_utilization 0.8 --vllm_tensor_parallel_size 1 --log_level info", {}),
        ("--enable_thinking false", {"model.template_kwargs.enable_thinking": False}),
        ("--max_new_tokens 64 --temperature 1.0", {"rollout.limits.max_tokens_per_turn": 64}),
    ],
)
def test_arguments_of_a_rollout_server_that_are_mapped(line: str, native: dict[str, Any]) -> None:
    found = rollout(line)
    for path, value in native.items():
        assert at(found.native, path) == value
    load_values(RunConfig, {k: v for k, v in found.native.items() if k != "serve"}, origin=found.origin)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--vllm_enable_lora true", "adapters are not served"),
        ("--vllm_pipeline_parallel_size 2", "no pipeline stages"),
        ("--vllm_reasoning_parser qwen3", "as they were written"),
        ("--ssl_keyfile k", "put a proxy with TLS before it"),
        (
            "--multi_turn_scheduler s --vllm_use_async_engine false",
            "please set vllm_use_async_engine to True with",
        ),
        ("--max_turn 3", "Did you mean 'max_turns'"),
    ],
)
def test_arguments_of_a_rollout_server_that_are_refused(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as problem:
        rollout(line)
    assert says in str(problem.value)


ROLLOUT_DOCUMENTED = """
model model_type template enable_thinking max_length host port log_level verbose log_interval max_logprobs api_key
vllm_use_async_engine multi_turn_scheduler max_turns gym_env use_gym_env external_plugins vllm_enable_lora
vllm_max_lora_rank vllm_pipeline_parallel_size vllm_reasoning_parser context_manager vllm_gpu_memory_utilization
vllm_tensor_parallel_size vllm_data_parallel_size vllm_enable_expert_parallel vllm_max_num_seqs vllm_max_model_len
vllm_disable_custom_all_reduce vllm_enforce_eager vllm_limit_mm_per_prompt vllm_enable_prefix_caching
vllm_quantization vllm_disable_cascade_attn vllm_mm_processor_cache_gb vllm_speculative_config vllm_engine_kwargs
""".split()  # noqa: SIM905


def test_every_documented_argument_of_a_rollout_server_has_a_row() -> None:
    rows = {name: rollout_table().find(name) for name in ROLLOUT_DOCUMENTED}
    assert [name for name, row in rows.items() if row is None or not (row.to or row.says)] == []


def test_a_rollout_server_says_that_its_trainer_reads_the_rows() -> None:
    found = rollout_to_native(["--model", "m/x", "--dataset", "rows.jsonl", "--columns", '{"q": "query"}'])
    assert found.notices() == [
        "dataset, columns: ignored: a rollout server reads no rows; its trainer reads them and sends each conversation"
    ]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--api_key 0123", "api_key", "0123"),
        ("--model_revision 12e45678", "model_revision", "12e45678"),
        ("--system true", "system", "true"),
        ("--system={'a':1}", "system", "{'a':1}"),
        ("--stop_words [/INST] 007", "stop_words", ["[/INST]", "007"]),
        ('--stop_words ["a","b"]', "stop_words", ["a", "b"]),
        ("--output_dir=2026", "output_dir", "2026"),
        ("--system null", "system", None),
        ("--seed 007", "seed", 7),
    ],
)
def test_an_argument_that_is_a_text_is_taken_as_it_is_written(line: str, name: str, value: Any, tmp_path: Path) -> None:
    assert parse(line.split()).values[name] == value
    path = tmp_path / "run.yaml"
    path.write_text("model: m\n")
    if " " not in line.partition(" ")[2]:
        override = line.removeprefix("--").replace(" ", "=", 1)
        assert read(path, [override]).values[name] == value


def test_a_flag_for_a_text_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"the argument --output_dir has no value; write --output_dir VALUE"):
        parse(["--output_dir", "--max_turns", "3"])


def test_a_native_key_is_given_once_whatever_its_writing(tmp_path: Path) -> None:
    joined = parse(["--polyturn.engine.kind", "vllm", "--polyturn.engine", "{num_slots: 3}"]).values["polyturn"]
    assert joined == {"engine": {"kind": "vllm", "num_slots": 3}}
    for line in (["--polyturn.engine.kind", "vllm", "--polyturn.engine", "{kind: embedded}"],
                 ["--polyturn.engine", "{kind: embedded}", "--polyturn.engine.kind", "vllm"]):  # fmt: skip
        with pytest.raises(ConfigError, match=r"polyturn\.engine\.kind is given twice, as '.*' and as '.*'; keep one"):
            parse(line)
    path = tmp_path / "run.yaml"
    path.write_text("model: m\npolyturn.engine.kind: vllm\n")
    assert read(path, ["polyturn.engine.kind=embedded"]).values["polyturn"] == {"engine": {"kind": "embedded"}}
    path.write_text("model: m\nmax_turns: 3\nmax_turns: 4\n")
    with pytest.raises(ConfigError, match=r"line 3: this is not YAML .found duplicate key max_turns"):
        read(path)


def test_an_override_below_a_value_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\nmax_turns: 3\n")
    with pytest.raises(ConfigError, match=r"the override 'max_turns\.x=3': max_turns is 3, which has no keys to set"):
        read(path, ["max_turns.x=3"])


def test_a_flag_of_our_own_takes_no_value_and_gives_none_to_another() -> None:
    with pytest.raises(ConfigError, match=r"--resume takes no value, and 'last' stands behind it"):
        rlhf(["--model", "m", "--resume", "last", "--max_turns", "3"])


def test_variables_of_images_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MAX_PIXELS", "1003520")
    with caplog.at_level("INFO"):
        read_swift(["--model", "m"])
    assert "MAX_PIXELS is 1003520, and nothing reads it here: the size of images is the processor's" in caplog.text
