"""Every key of a verl config, one by one: it moves to a native key, is ignored with a reason, or is refused with one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.verl_config.compose import compose_file, compose_name
from polyturn.compat.verl_config.convert import CONVERTERS
from polyturn.compat.verl_config.document import key_table
from polyturn.compat.verl_config.table import table
from polyturn.compat.verl_config.translate import Translation, translate
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.config.schema import schema_table
from polyturn.core.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
ACTOR = "actor_rollout_ref.actor"
REQUIRED = ["actor_rollout_ref.model.path=tiny"]


def translated(*overrides: str) -> Translation:
    return translate(compose_name("ppo_trainer", folder=None, overrides=[*REQUIRED, *overrides]))


def native(values: dict[str, Any], key: str) -> Any:
    at: Any = values
    for part in key.split("."):
        at = at[part]
    return at


MAPPED: list[tuple[str, str, Any]] = [
    ("trainer.val_before_train=False", "evaluation.before", False),
    # the loss
    (f"{ACTOR}.policy_loss.loss_mode=mine.py:loss", "algorithm.loss.name", "mine.py:loss"),
    (f"{ACTOR}.policy_loss.loss_mode=clip_cov", "algorithm.loss.name", "clip_cov"),
    (f"{ACTOR}.policy_loss.loss_mode=gspo", "algorithm.aggregate", "seq-mean-token-mean"),
    # many turns
    ("actor_rollout_ref.model.enable_gradient_checkpointing=True", "model.gradient_checkpointing", True),
    (f"{TURNS}.max_assistant_turns=5", "rollout.limits.max_turns", 5),
    (f"{TURNS}.max_turns=6", "rollout.limits.max_turns", 6),
    (f"{TURNS}.max_user_turns=5", "rollout.limits.max_user_turns", 5),
    (f"{TURNS}.tool_config_path=tools.yaml", "rollout.tools.file", "tools.yaml"),
    (f"{TURNS}.function_tool_path=tools.py", "rollout.tools.functions", ["tools.py"]),
    (f"{TURNS}.interaction_config_path=i.yaml", "rollout.interactions", "i.yaml"),
    (f"{TURNS}.max_parallel_calls=1", "rollout.tools.max_parallel_calls", 1),
    (f"{TURNS}.max_tool_response_length=256", "rollout.tools.max_result_chars", 256),
    (f"{TURNS}.tool_response_truncate_side=left", "rollout.tools.truncate_side", "left"),
    (f"{TURNS}.tool_response_truncate_side=middle", "rollout.tools.truncate_side", "middle"),
    (f"{TURNS}.use_inference_chat_template=True", "rollout.use_inference_chat_template", True),
    (f"{TURNS}.tokenization_sanity_check_mode=strict", "rollout.tokenization_sanity_check_mode", "strict"),
    (
        f"{TURNS}.tokenization_sanity_check_mode=ignore_strippable",
        "rollout.tokenization_sanity_check_mode",
        "ignore_strippable",
    ),
    (f"{TURNS}.tokenization_sanity_check_mode=disable", "rollout.tokenization_sanity_check_mode", "disable"),
    (f"{TURNS}.tokenization_sanity_check_mode=off", "rollout.tokenization_sanity_check_mode", "off"),
    (f"{TURNS}.format=hermes", "rollout.parser", "hermes"),
    (f"{ROLLOUT}.tool_kwargs.tools_config_file=tools.yaml", "rollout.tools.file", "tools.yaml"),
    (f"{ROLLOUT}.interaction_config_file=i.yaml", "rollout.interactions", "i.yaml"),
    # rollout
    (f"{ROLLOUT}.temperature=0.7", "rollout.sampling.temperature", 0.7),
    (f"{ROLLOUT}.do_sample=False", "rollout.sampling.temperature", 0.0),
    (f"{ROLLOUT}.top_k=50", "rollout.sampling.top_k", 50),
    (f"{ROLLOUT}.top_k=0", "rollout.sampling.top_k", -1),
    (f"{ROLLOUT}.top_p=0.9", "rollout.sampling.top_p", 0.9),
    (f"{ROLLOUT}.prompt_length=100", "rollout.limits.max_prompt_tokens", 100),
    (f"{ROLLOUT}.response_length=100", "rollout.limits.max_tokens", 100),
    (f"{ROLLOUT}.max_model_len=900", "rollout.limits.max_context", 900),
    (f"{ROLLOUT}.max_model_len=9000", "rollout.limits.max_context", 1024),
    (f"{ROLLOUT}.max_num_seqs=16", "engine.num_slots", 16),
    (f"{ROLLOUT}.n=8", "train.group_size", 8),
    (f"{ROLLOUT}.full_determinism=True", "engine.deterministic", True),
    (f"{ROLLOUT}.val_kwargs.top_k=5", "evaluation.sets.validation.sampling.top_k", 5),
    (f"{ROLLOUT}.val_kwargs.top_p=0.8", "evaluation.sets.validation.sampling.top_p", 0.8),
    (f"{ROLLOUT}.val_kwargs.n=4", "evaluation.sets.validation.samples", 4),
    (f"{ROLLOUT}.val_kwargs.do_sample=False", "evaluation.sets.validation.sampling.temperature", 0),
    # data
    ("data.train_files=[a.parquet,b.parquet]", "data.train.files", ["a.parquet", "b.parquet"]),
    ("data.val_files=a.parquet", "evaluation.data.files", ["a.parquet"]),
    ("data.max_prompt_length=128", "rollout.limits.max_prompt_tokens", 128),
    ("data.max_response_length=128", "rollout.limits.max_tokens_per_turn", 128),
    ("data.train_batch_size=64", "train.groups_per_step", 64),
    ("data.filter_overlong_prompts=True", "data.drop_long_prompts", True),
    ("data.apply_chat_template_kwargs={enable_thinking:false}", "model.template_kwargs", {"enable_thinking": False}),
    ("data.shuffle=False", "data.shuffle", False),
    ("data.seed=3", "seed", 3),
    # reward
    ("custom_reward_function.path=r.py", "reward.function.name", "r.py:compute_score"),
    ("reward.custom_reward_function.path=r.py", "reward.function.name", "r.py:compute_score"),
    ("reward_model.sandbox_fusion.url=http://x/run_code", "reward.sandbox.url", "http://x/run_code"),
    ("reward_model.sandbox_fusion.max_concurrent=9", "reward.sandbox.max_concurrent", 9),
    ("reward_model.sandbox_fusion.memory_limit_mb=99", "reward.sandbox.memory_limit_mb", 99),
    ("reward.sandbox_fusion.url=http://x/run_code", "reward.sandbox.url", "http://x/run_code"),
    ("sandbox_fusion.max_concurrent=3", "reward.sandbox.max_concurrent", 3),
    # actor
    (f"{ACTOR}.ppo_mini_batch_size=128", "train.minibatches", 8),
    (f"{ACTOR}.ppo_mini_batch_size=300", "train.minibatches", 4),
    (f"{ACTOR}.grad_clip=0.5", "train.optim.max_grad_norm", 0.5),
    (f"{ACTOR}.clip_ratio=0.1", "algorithm.loss.clip_low", 0.1),
    (f"{ACTOR}.clip_ratio_low=0.1", "algorithm.loss.clip_low", 0.1),
    (f"{ACTOR}.clip_ratio_high=0.28", "algorithm.loss.clip_high", 0.28),
    (f"{ACTOR}.clip_ratio_c=4.0", "algorithm.loss.dual_clip", 4.0),
    (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", "algorithm.aggregate", "seq-mean-token-sum"),
    (f"{ACTOR}.entropy_coeff=0.01", "algorithm.entropy_coef", 0.01),
    (f"{ACTOR}.use_kl_loss=True", "algorithm.kl.coef", 0.001),
    (f"{ACTOR}.use_kl_loss=", "algorithm.kl.coef", 0.0),
    (f"{ACTOR}.kl_loss_type=mse", "algorithm.kl.estimator", "k2"),
    (f"{ACTOR}.kl_loss_type=low_var_kl+", "algorithm.kl.estimator", "k3+"),
    (f"{ACTOR}.loss_scale_factor=3000", "algorithm.aggregate.norm_length", 3000),
    (f"{ACTOR}.tis_imp_ratio_cap=2.5", "algorithm.loss.correction", {"weight": "token", "cap": 2.5}),
    ("actor_rollout_ref.model.lora_rank=8", "model.lora.rank", 8),
    (
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.loss.correction",
        {"weight": "sequence", "cap": 2.0, "normalize": False},
    ),
    (
        "algorithm.rollout_correction.rollout_rs=geometric",
        "algorithm.loss.correction",
        {"weight": "none", "reject": {"seq_mean_k1": 2.0}},
    ),
    (f"{ACTOR}.optim.lr=1e-5", "train.optim.lr", 1e-5),
    (f"{ACTOR}.optim.weight_decay=0.1", "train.optim.weight_decay", 0.1),
    (f"{ACTOR}.optim.betas=[0.9,0.95]", "train.optim.betas", [0.9, 0.95]),
    (f"{ACTOR}.optim.clip_grad=2.0", "train.optim.max_grad_norm", 2.0),
    (f"{ACTOR}.optim.lr_warmup_steps=7", "train.optim.warmup_steps", 7),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "train.optim.warmup_steps", 0.1),
    (f"{ACTOR}.optim.warmup_style=cosine", "train.optim.schedule.name", "cosine"),
    (f"{ACTOR}.optim.lr_scheduler_type=cosine", "train.optim.schedule.name", "cosine"),
    (f"{ACTOR}.optim.min_lr_ratio=0.1", "train.optim.schedule.min_lr_ratio", 0.1),
    # algorithm, trainer, model
    ("algorithm.adv_estimator=grpo", "algorithm.advantage.name", "grpo"),
    ("algorithm.adv_estimator=opo", "algorithm.advantage.name", "opo"),
    ("algorithm.adv_estimator=rloo_vectorized", "algorithm.advantage.name", "rloo"),
    ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.advantage.name", "reinforce_plus_plus"),
    ("algorithm.adv_estimator=remax", "algorithm.advantage.name", "remax"),
    ("algorithm.adv_estimator=gae", "algorithm.advantage.outcome", "end"),
    ("algorithm.use_kl_in_reward=True", "algorithm.kl.coef", 0.001),
    ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.advantage.norm_by_std", False),
    ("algorithm.filter_groups.enable=True", "algorithm.drop_zero_variance", True),
    ("algorithm.rollout_correction.bypass_mode=True", "algorithm.old_logprobs", "engine"),
    ("trainer.total_epochs=15", "train.epochs", 15),
    ("trainer.total_training_steps=9", "train.steps", 9),
    ("trainer.default_local_dir=out/one", "name", "one"),
    ("trainer.project_name=shop", "out", "checkpoints/shop"),
    ("trainer.experiment_name=lamp", "name", "lamp"),
    ("trainer.save_freq=10", "train.checkpoint_every", 10),
    ("trainer.test_freq=20", "evaluation.every", 20),
    ("trainer.max_actor_ckpt_to_keep=3", "train.keep_checkpoints", 3),
    ("trainer.rollout_data_dir=dump", "dump.train", "dump"),
    ("trainer.validation_data_dir=dump", "dump.evaluation", "dump"),
    ("actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct", "model.path", "Qwen/Qwen2.5-3B-Instruct"),
    ("actor_rollout_ref.model.tokenizer_path=Qwen/Qwen2.5-3B", "model.tokenizer", "Qwen/Qwen2.5-3B"),
    ("data.tokenizer=Qwen/Qwen2.5-3B", "model.tokenizer", "Qwen/Qwen2.5-3B"),
]

IGNORED = [
    f"{ROLLOUT}.mode=async",
    f"{ROLLOUT}.mode=sync",
    f"{ROLLOUT}.max_num_batched_tokens=8192",
    f"{ROLLOUT}.over_sample_rate=0.1",
    f"{ROLLOUT}.calculate_log_probs=True",
    f"{ROLLOUT}.enable_rollout_routing_replay=True",
    f"{ACTOR}.router_replay.mode=R3",
    f"{ROLLOUT}.agent.num_workers=8",
    f"{ROLLOUT}.trace.backend=weave",
    f"{ROLLOUT}.trace.token2text=True",
    f"{ROLLOUT}.trace.max_samples_per_step_per_worker=2",
    f"{ROLLOUT}.skip_dump_dir=dump",
    f"{ROLLOUT}.skip_tokenizer_init=True",
    f"{ROLLOUT}.checkpoint_engine.backend=naive",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=2048",
    f"{ROLLOUT}.prometheus.enable=True",
    f"{ROLLOUT}.prometheus.port=9090",
    f"{ROLLOUT}.prometheus.file=p.yml",
    f"{ROLLOUT}.prometheus.served_model_name=m",
    f"{ROLLOUT}.enable_prefix_caching=True",
    f"{ROLLOUT}.enable_chunked_prefill=True",
    f"{ROLLOUT}.free_cache_engine=True",
    f"{ROLLOUT}.load_format=dummy",
    f"{ROLLOUT}.scheduling_policy=fcfs",
    f"{ROLLOUT}.seed=42",
    f"{ROLLOUT}.nnodes=0",
    f"{ROLLOUT}.disaggregation.enabled=False",
    f"{ROLLOUT}.disaggregation.prefill_replicas=1",
    f"{ROLLOUT}.disaggregation.decode_replicas=1",
    f"{ROLLOUT}.disaggregation.transfer_backend=nixl",
    f"{ROLLOUT}.gpu_memory_utilization=0.5",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
    "data.return_raw_chat=True",
    "data.truncation=error",
    "data.tool_config_path=tools.yaml",
    "data.filter_overlong_prompts_workers=8",
    "actor_rollout_ref.hybrid_engine=True",
    "actor_rollout_ref.model.use_remove_padding=True",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
    f"{ACTOR}.fsdp_config.param_offload=True",
    f"{ACTOR}.fsdp_config.optimizer_offload=True",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    f"{ROLLOUT}.use_torch_compile=True",
    "reward.num_workers=8",
    "reward.reward_model.model_path=null",
    "critic.strategy=fsdp",
    "trainer.profile_steps=[1]",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.log_val_generations=10",
    "trainer.resume_mode=auto",
    "trainer.resume_mode=disable",
    "hydra.run.dir=out",
    f"{TURNS}._target_=verl.workers.config.MultiTurnConfig",
    "ray_init.num_cpus=4",
]

ASKS_FOR_NOTHING = [
    f"{TURNS}.completion_callback=null",
    f"{TURNS}.num_repeat_rollouts=null",
    f"{ROLLOUT}.agent.agent_loop_config_path=null",
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
    f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent",
    f"{ROLLOUT}.agent.custom_async_server.path=null",
    f"{ROLLOUT}.skip_rollout=False",
    f"{ROLLOUT}.router_config_path=null",
    "data.prompt_key=prompt",
    "data.reward_fn_key=data_source",
    "data.image_key=images",
    "data.video_key=videos",
    "data.train_max_samples=-1",
    "data.val_max_samples=-1",
    "data.custom_cls.path=null",
    "data.datagen.path=null",
    "data.sampler.class_path=null",
    "reward_model.reward_manager=naive",
    "reward_model.reward_kwargs={}",
    "reward_model.enable=False",
    f"{ACTOR}.ppo_epochs=1",
]

REJECTED = [
    (f"{TURNS}.completion_callback=my.Callback", "rollout.scheduler"),
    (f"{TURNS}.num_repeat_rollouts=4", "lookahead forks"),
    (f"{TURNS}.format=hermez", "Did you mean 'hermes'"),
    (f"{ROLLOUT}.name=trtllm", "TensorRT"),
    (f"{ROLLOUT}.name=sglangs", "Did you mean 'sglang"),
    (f"{ROLLOUT}.agent.default_agent_loop=react_agent", "agent_loop_config_path does not name it"),
    (f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml", "list of {name, _target_}"),
    (f"{ROLLOUT}.agent.agent_loop_manager_class=x.Y", "rollout.scheduler"),
    (f"{ROLLOUT}.agent.custom_async_server.path=x", "rollout.name"),
    (f"{ROLLOUT}.agent.custom_async_server.name=x", "rollout.name"),
    (f"{ROLLOUT}.skip_rollout=True", "stored"),
    (f"{ROLLOUT}.router_config_path=r.yaml", "one engine"),
    ("data.prompt_key=question", "must be called prompt"),
    ("data.reward_fn_key=source", "must be called data_source"),
    ("data.image_key=pictures", "must be called images"),
    ("data.video_key=films", "must be called videos"),
    ("data.train_files=7", "a file, or a list of files"),
    ("data.val_files={a: b}", "a file, or a list of files"),
    ("data.truncation=left", "filter_overlong_prompts"),
    ("data.truncation=right", "filter_overlong_prompts"),
    ("data.truncation=middle", "filter_overlong_prompts"),
    ("data.custom_cls.path=rows.py", "path and name belong together"),
    ("data.custom_cls.name=Rows", "path and name belong together"),
    ("data.datagen.path=gen.py", "generator"),
    ("data.datagen.name=Gen", "generator"),
    ("data.sampler.class_path=s.py", "class_path and class_name"),
    ("data.sampler.class_name=S", "class_path and class_name"),
    ("reward_model.reward_manager=gdpo", "no such reward manager"),
    ("reward_model.reward_kwargs={colour: red}", "'colour'"),
    ("reward_model.enable=True", "custom_reward_function"),
    (f"{ACTOR}.strategy=torchtitan", "strategy"),
    (f"+{ACTOR}.megatron.tensor_model_parallel_size=2", "strategy is megatron"),
    (f"+{ACTOR}.megatron.dtype=float16", "model.dtype"),
    (f"+{ACTOR}.optim.lr_decay_style=cosine", "lr_scheduler_type"),
    (f"+{ACTOR}.optim.lr_warmup_init=1e-8", "begins at 0"),
    (f"+{ACTOR}.megatron.use_dist_checkpointing=True", "option of Megatron's"),
    (f"{ACTOR}.ppo_epochs=2", "ppo_mini_batch_size"),
    (f"{ACTOR}.ppo_mini_batch_size=2000", "from 1 to data.train_batch_size, which is 1024"),
    (f"{ACTOR}.policy_loss.loss_mode=gspoo", "Did you mean 'gspo'"),
    ("+actor_rollout_ref.model.lora.rank=8", "read where actor.strategy is megatron"),
    ("+actor_rollout_ref.model.lora.adapter_path=there", "write lora_adapter_path"),
    ("actor_rollout_ref.model.lora_adapter_path=somewhere", "lora_rank"),
    ("actor_rollout_ref.model.trust_remote_code=True", "never run"),
    ("algorithm.adv_estimator=grop", "Did you mean"),
    ("algorithm.rollout_correction.rollout_is=turn", "token or sequence"),
    ("algorithm.rollout_correction.loss_type=reinforce", "gpg is the plain policy gradient"),
    ("trainer.val_only=True", "polyturn eval"),
    ("trainer.resume_mode=resume_path", "default_local_dir"),
    ("trainer.v1.trainer_mode=separate_async", "max_staleness"),
    (f"{ACTOR}.optim.optimizer=SGD", "the optimizer is AdamW"),
    (f"{ACTOR}.optim.override_optimizer_config={{eps:1}}", "torch.optim.AdamW"),
    ("distillation.enabled=True", "no distillation"),
    (f"{ROLLOUT}.stop_token_ids=[3]", "end token"),
    ("skip.rollout.enable=True", "stored"),
    ("model_engine=veomni", "VeOmni"),
    ("trainer.v1.sampler.sync_refill_failed_groups=True", "is left out and counted"),
    (f"{ACTOR}.checkpoint.save_contents=[modle]", "'modle' is not known here. Did you mean 'model'"),
    ("hydra.job.chdir=True", "stays in its working directory"),
    ("hydra.job.env_set.A=1", "in the shell"),
    ("hydra.mode=MULTIRUN", "a command is one run"),
    ("hydra.rnu.dir=x", "Did you mean 'hydra.run.dir'"),
    ("actor_rollout_ref.rollout=null", "empties a whole section"),
    ("data=[]", "empties a whole section"),
    (f"{ACTOR}.entropy_coeff=null", "no release of verl has null there"),
    ("reward.reward_manager.name=null", "no release of verl has null there"),
    (f"{ACTOR}.optim.lr=fast", "it must be a number"),
    (f"{ROLLOUT}.n=True", "it must be a number"),
    (f"{ROLLOUT}.do_sample=wrong", "it must be true or false"),
    (f"{ROLLOUT}.prompt_length=3.5", "it must be a whole number, 1 or more"),
    ("data.train_max_samples=-7", "it must be a whole number, -1 or more"),
    ("data.train_files=[]", "it names no file"),
    ("data.tokenizer=[a]", "it must be a text"),
    ("custom_reward_function.path=reward", "a file of Python"),
    (f"{ACTOR}.kl_loss_type=low_var", "no such estimator of the KL. Did you mean 'low_var_kl'"),
]

UNREAD = [
    "algorithm.lam=0.9",
    f"{ACTOR}.kl_loss_coef=0.01",
    f"{ACTOR}.ppo_max_token_len_per_gpu=9",
    f"{ACTOR}.tau_pos=2",
    f"{TURNS}.max_user_turns=3",
    "actor_rollout_ref.model.target_modules=[q_proj]",
    "critic.optim.lr=1",
    "custom_reward_function.name=mine",
    "reward_model.max_rpm=3",
]
"""What only speaks with another key."""


@pytest.mark.parametrize(("override", "key", "value"), MAPPED)
def test_a_key_moves_to_its_native_key(override: str, key: str, value: Any):
    needs = {".max_": f"{TURNS}.enable=True", ".kl_loss_type": f"{ACTOR}.use_kl_loss=True"}
    made = translated(override, *(other for part, other in needs.items() if part in override))
    assert native(made.native, key) == value
    fate = next(f for f in made.fates if f.key == override.partition("=")[0])
    assert fate.kind == "mapped" and fate.where == f"from the override {override!r}"
    assert any(key == to or key.startswith(f"{to}.") or to.startswith(f"{key}.") for to in fate.to) or len(fate.to) > 1, fate


@pytest.mark.parametrize("override", IGNORED)
def test_a_key_is_ignored_with_its_reason_said_once(override: str):
    made = translated(f"+{override}")
    key = override.partition("=")[0]
    fate = next(f for f in made.fates if key == f.key or key.startswith(f"{f.key}."))
    assert fate.kind == "ignored" and len(fate.says) > 10
    assert sum(fate.says in line for line in made.notices()) == 1


@pytest.mark.parametrize("override", ASKS_FOR_NOTHING)
def test_a_value_that_asks_for_nothing_is_accepted_without_a_word(override: str):
    assert translated(f"++{override}").notices() == []


@pytest.mark.parametrize(("override", "says"), REJECTED)
def test_a_key_is_refused_in_one_sentence(override: str, says: str):
    with pytest.raises(ConfigError) as refused:
        translated(override)
    key, _, value = override.partition("=")
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert key.rpartition(".")[0] in str(refused.value) or value in str(refused.value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        (f"{TURNS}.max_asistant_turns", f"{TURNS}.max_assistant_turns"),
        (f"{ROLLOUT}.interaction_config_path", f"{TURNS}.interaction_config_path"),
        (f"{ROLLOUT}.temprature", f"{ROLLOUT}.temperature"),
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("dta.train_files", "data.train_files"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_known_one(key: str, nearest: str):
    with pytest.raises(ConfigError, match=f"unknown key '{key}', set to 3.*Did you mean '{nearest}'"):
        translated(f"+{key}=3")


@pytest.mark.parametrize("override", UNREAD)
def test_what_nothing_reads_is_told(override: str):
    line = f"{override.partition('=')[0]}: ignored: nothing that this config asks for reads it"
    assert line in translated(f"++{override}").notices()


def test_a_notice_names_the_keys_that_were_written():
    said = translated(f"{ACTOR}.fsdp_config.param_offload=True", "hydra.run.dir=out").notices()
    assert [line.partition(":")[0] for line in said] == [f"{ACTOR}.fsdp_config.param_offload", "hydra.run.dir"]


def test_a_loss_of_ones_own_gets_the_bounds_that_were_written():
    chosen = f"{ACTOR}.policy_loss.loss_mode=mine.py:loss"
    assert translated(chosen).native["algorithm"]["loss"] == {"name": "mine.py:loss"}
    written = translated(chosen, f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_c=4.0").native["algorithm"]["loss"]
    assert written == {"name": "mine.py:loss", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 4.0}


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as refused:
        translated("+nonsense.one=1", "+nonsense.two=2", "+nonsense.three=3")
    assert len(str(refused.value).splitlines()) == 3


def test_every_row_names_a_converter_and_native_keys_that_exist():
    known = {row.key for row in schema_table(RunConfig)}
    for row in table().rows:
        assert row.convert is None or row.convert in CONVERTERS, row
        assert set(row.to) <= known, row
        assert sum([bool(row.to), bool(row.rejected), bool(row.means), bool(row.ignored), row.native]) == 1, row
        if row.means is not None:
            assert table().find(row.means) is not None, row
    assert {row.convert for row in table().rows} - {None} == set(CONVERTERS)


def test_what_belongs_to_gae_moves_with_it_and_else_stays_away():
    written = ["critic.optim.lr=2e-5", "critic.cliprange_value=0.3", "trainer.critic_warmup=4", "algorithm.lam=0.95"]
    made = translated("algorithm.adv_estimator=gae", *(f"++{w}" for w in written)).native["algorithm"]
    assert made["critic"] == {"optim": {"lr": 2e-5, "max_grad_norm": 1.0}, "clip": 0.3, "warmup": 4}
    assert made["advantage"] == {"name": "gae", "gamma": 1.0, "lam": 0.95, "outcome": "end"}
    other = translated("algorithm.adv_estimator=grpo", *(f"++{w}" for w in written)).native["algorithm"]
    assert "critic" not in other and "lam" not in other["advantage"]


def test_a_kl_penalty_of_the_reward_may_follow_a_target():
    made = translated(
        "++algorithm.use_kl_in_reward=True",
        "++algorithm.kl_penalty=low_var_kl",
        "++algorithm.kl_ctrl.type=adaptive",
        "++algorithm.kl_ctrl.target_kl=0.2",
        "++algorithm.kl_ctrl.horizon=500",
    )
    assert made.native["algorithm"]["kl"] == {
        "place": "reward",
        "estimator": "k3",
        "coef": 0.001,
        "target": 0.2,
        "horizon": 500,
    }


def test_a_kl_in_the_loss_and_one_in_the_rewards_are_both_kept():
    made = translated(f"{ACTOR}.use_kl_loss=True", "++algorithm.use_kl_in_reward=True")
    assert made.native["algorithm"]["kl"] == [
        {"coef": 0.001, "estimator": "k3"},
        {"place": "reward", "estimator": "k1", "coef": 0.001},
    ]


def of_megatron(*overrides: str) -> Translation:
    return translate(compose_name("ppo_megatron_trainer", folder=None, overrides=[*REQUIRED, *overrides]))


@pytest.mark.parametrize("tree", ["ppo_trainer", "ppo_megatron_trainer"])
def test_sizes_of_megatron_are_those_of_its_backend(tree: str):
    sizes = [f"+{ACTOR}.megatron.{what}_model_parallel_size=2" for what in ("tensor", "pipeline", "expert")]
    sizes.append(f"+{ACTOR}.megatron.context_parallel_size=2")
    ignored = [f"+{ACTOR}.megatron.{key}" for key in ("param_offload=True", "virtual_pipeline_model_parallel_size=2")]
    ignored.append("+actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4")
    asked = [*REQUIRED, f"{ACTOR}.strategy=megatron", *sizes, *ignored]
    made = translate(compose_name(tree, folder=None, overrides=asked))
    assert made.native["train"]["backend"] == "megatron" and len(made.notices()) == len(ignored)
    split = {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2, "context_parallel": 2}
    assert made.native["train"]["distributed"] == {**split, "ranks": 8}  # ranks of one stage share its experts
    more = translate(compose_name(tree, folder=None, overrides=[*asked, "+polyturn.train.distributed.ranks=16"]))
    assert more.native["train"]["distributed"] == {**split, "ranks": 16}
    assert "backend" not in translated().native["train"] and "distributed" not in of_megatron().native["train"]


def test_ranks_split_the_tokens_of_a_sequence_as_ulysses_asks():
    made = translated(f"+{ACTOR}.ulysses_sequence_parallel_size=2")
    assert made.native["train"]["distributed"] == {"context_parallel": 2, "ranks": 2} and not made.notices()
    assert "distributed" not in translated(f"+{ACTOR}.ulysses_sequence_parallel_size=1").native["train"]
    made = of_megatron(f"{ACTOR}.strategy=megatron", f"+{ACTOR}.ulysses_sequence_parallel_size=2")
    assert "distributed" not in made.native["train"] and "megatron.context_parallel_size" in str(made.notices())
    with pytest.raises(ConfigError, match=r"context_parallel_size.*where actor_rollout_ref.actor.strategy is megatron"):
        translated(f"+{ACTOR}.megatron.context_parallel_size=2")


@pytest.mark.parametrize(
    ("asked", "schedule"),
    [
        ([], None),
        (["min_lr=1e-7"], None),
        (["lr_decay_style=cosine", "min_lr=1e-7"], {"name": "cosine", "min_lr_ratio": pytest.approx(0.1)}),
        (["lr_decay_style=linear", "lr_decay_steps=50"], {"name": "linear", "total_steps": 50}),
    ],
)
def test_the_learning_rate_of_megatrons_trees_falls_as_they_say(asked: list[str], schedule: dict[str, Any] | None):
    made = of_megatron(*(f"{ACTOR}.optim.{one}" for one in asked))
    assert made.native["train"]["optim"].get("schedule") == schedule
    assert len(made.notices()) == (asked == ["min_lr=1e-7"])  # a constant rate never comes to its least


def test_an_adapter_of_megatrons_fused_layers_is_one_of_those_that_they_are_made_of():
    of = "+actor_rollout_ref.model.lora"
    made = of_megatron(f"{of}.rank=8", f"{of}.type=canonical_lora", f"{of}.target_modules=[linear_qkv,linear_fc1_up]")
    modules = ["q_proj", "k_proj", "v_proj", "up_proj"]
    assert made.native["model"]["lora"] == {"rank": 8, "alpha": 32, "dropout": 0.0, "target_modules": modules}
    assert any("lora.rank" in line and "as canonical_lora has" in line for line in made.notices())
    every = of_megatron(f"{of}.rank=8", f"{of}.alpha=16", f"{of}.dropout=0.1").native["model"]["lora"]
    assert len(every.pop("target_modules")) == 7 and every == {"rank": 8, "alpha": 16, "dropout": 0.1}
    assert "lora" not in of_megatron(f"{of}.rank=0").native["model"]


def test_gae_has_its_critic_where_megatron_trains():
    made = of_megatron("algorithm.adv_estimator=gae", "critic.optim.lr=3e-6").native
    assert made["algorithm"]["advantage"]["name"] == "gae" and made["algorithm"]["critic"]["optim"]["lr"] == 3e-6


def test_no_steps_of_warm_up_are_megatrons_share_and_fsdps_none():
    asked = [f"{ACTOR}.optim.lr_warmup_steps=0", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"]
    assert of_megatron(*asked).native["train"]["optim"]["warmup_steps"] == 0.1
    assert translated(*asked).native["train"]["optim"]["warmup_steps"] == 0


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (f"{ACTOR}.optim.lr_decay_style=WSD", "lr_decay_style is 'WSD'"),
        (f"+{ACTOR}.optim.weight_decay_incr_style=linear", "weight_decay stays"),
        ("+reward_model.enable=True", "no reward models"),
        (f"+{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=3", "option of Megatron's"),
        (f"+{ACTOR}.megatron.router_replay.mode=R2", "which is R3"),
        ("+actor_rollout_ref.model.lora={rank: 8, target_modules: [linear_qvk]}", "no layer 'linear_qvk'.*'linear_qkv'"),
        ("+actor_rollout_ref.model.lora={rank: 8, type: dora}", "lora.type"),
    ],
)
def test_what_only_megatron_has_is_refused_by_name(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        of_megatron(override)


def test_what_the_first_trees_leave_to_the_code_is_what_the_code_takes():
    """0.4.1's tree has no betas and no length of a tool's text; its code takes (0.9, 0.999) and the whole text."""
    made = translated(f"~{ACTOR}.optim.betas", f"~{TURNS}.max_tool_response_length").native
    assert made["train"]["optim"]["betas"] == [0.9, 0.999] and made["rollout"]["tools"]["max_result_chars"] == 1_000_000


def test_a_value_that_a_whole_section_refuses_is_told_with_the_key_it_was_written_in():
    made = translated(f"{ROLLOUT}.top_p=2")
    with pytest.raises(ConfigError, match=rf"top_p is 2.0; .* \(from {ROLLOUT}.top_p \(from the override"):
        load_values(RunConfig, made.native, origin=made.origin)


def test_no_key_has_two_rows():
    keys = [row.key for row in table().rows]
    assert len(keys) == len(set(keys))


def test_every_key_of_the_base_is_in_the_table():
    made = translated()
    assert all(f.where == "" for f in made.fates if f.key != "actor_rollout_ref.model.path")
    assert made.notices() == []


def test_the_page_of_keys_is_the_table():
    """`python -m polyturn.compat.verl_config.document > docs/migrate/verl-keys.md` after a change."""
    assert (Path(__file__).parents[3] / "docs/migrate/verl-keys.md").read_text() == key_table()


def test_the_base_makes_a_native_configuration():
    made = translated("data.train_files=train.parquet")
    config = load_values(RunConfig, made.native, origin=made.origin).config
    assert config.rollout.limits.max_turns == 1, "nobody but the model speaks"
    assert config.algorithm.loss.clip_high == 0.2 and config.train.optim.betas == (0.9, 0.999)
    assert config.reward.weights == {"outcome": 1.0} and not config.algorithm.drop_zero_variance


def test_a_native_value_that_cannot_be_names_the_verl_key():
    made = translated(f"{ROLLOUT}.n=2.5")
    with pytest.raises(ConfigError, match=r"rollout\.n .*override.* is 2\.5, as train\.group_size; it must be a valid int"):
        load_values(RunConfig, made.native, origin=made.origin)
    with pytest.raises(ConfigError, match=r"data.train_batch_size is 'many' .*it must be a number"):
        translated("data.train_batch_size=many")


# What belongs together


def test_turns_without_caps_are_a_third_of_the_context_as_in_the_first_releases():
    limits = translated(f"{TURNS}.enable=True", "data.max_prompt_length=100", "data.max_response_length=200").native[
        "rollout"
    ]
    assert limits["limits"]["max_turns"] == limits["limits"]["max_user_turns"] == 100


def test_nothing_is_cut_or_capped_unless_it_is_written():
    rollout = translated(f"{TURNS}.enable=True").native["rollout"]
    assert rollout["tools"]["max_result_chars"] >= 1_000_000 and "max_parallel_calls" not in rollout["tools"]
    assert rollout["tools"]["truncate_side"] == "middle"


def test_files_without_enable_are_multi_turn_and_an_explicit_false_is_a_contradiction():
    assert translated(f"{TURNS}.tool_config_path=t.yaml").native["rollout"]["limits"]["max_turns"] > 1
    with pytest.raises(ConfigError, match=r"enable is False .*tool_config_path is set"):
        translated(f"{TURNS}.tool_config_path=t.yaml", f"{TURNS}.enable=False")


def test_a_bare_multi_turn_true_is_enable_and_keeps_the_keys_beside_it():
    made = translated(f"{TURNS}.max_assistant_turns=3", f"{ROLLOUT}.multi_turn=True")
    assert made.native["rollout"]["limits"]["max_turns"] == 3


@pytest.mark.parametrize(
    "key", ["polyturn.rollout.stuff", "actor_rollout_ref.ref.strategy", "actor_rollout_ref.rollout.trace.backend"]
)
def test_a_reference_that_leads_nowhere_is_told_wherever_somebody_wrote_it(key: str):
    """Also inside a section of native keys, and where the value would have no effect."""
    with pytest.raises(ConfigError, match=rf"{key} is '\$\{{no.where\}}' .*cannot be resolved"):
        translated(f"+{key}=${{no.where}}")


def test_two_spellings_of_one_key_must_agree():
    with pytest.raises(
        ConfigError, match=r"tools_config_file is 'a.yaml'.*tool_config_path, which means the same, is 'b.yaml'"
    ):
        translated(f"+{ROLLOUT}.tool_kwargs.tools_config_file=a.yaml", f"{TURNS}.tool_config_path=b.yaml")


def test_a_whole_tree_as_later_releases_print_it_is_accepted(tmp_path: Path):
    """Sections with `_target_`, both places of the reward's keys, and keys that are there and null."""
    (tmp_path / "printed.yaml").write_text(
        """
actor_rollout_ref:
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    optim: {_target_: x.Y, lr: 1.0e-06, clip_grad: 1.0, num_cycles: 0.5, lr_scheduler_type: constant, warmup_style: null}
    grad_clip: 0.5
    qat: {enable: false, mode: w4a16}
    policy_loss: {_target_: x.Y, loss_mode: vanilla, clip_cov_ratio: 0.0002}
    router_replay: {_target_: x.Y, mode: disabled, record_file: null}
    checkpoint: {save_contents: [model], load_contents: "${.save_contents}"}
  ref: {strategy: "${actor_rollout_ref.actor.strategy}", router_replay: {mode: disabled}}
  rollout:
    _target_: verl.workers.config.RolloutConfig
    name: sglang
    agent: {_target_: x.Y, num_workers: 8, custom_async_server: {_target_: x.Y, path: null, name: null}}
    mtp: "${oc.select:actor_rollout_ref.model.mtp, null}"
    qat: "${oc.select:actor_rollout_ref.actor.qat,null}"
    prometheus: {served_model_name: "${oc.select:actor_rollout_ref.model.path,null}"}
  model: {mtp: {enable: false}, fused_kernel_options: {impl_backend: torch}}
data: {custom_cls: {path: null, name: null}, datagen: {path: null, name: null}}
custom_reward_function: {path: null, name: null}
reward_model: {reward_manager: null, enable: null, rollout: {name: null}}
sandbox_fusion: {url: null}
reward:
  custom_reward_function: {path: null, name: compute_score}
  reward_manager: {_target_: x.Y, source: register, name: naive, module: {path: null, name: custom_reward_manager}}
  reward_model: {enable: false, rollout: {name: "???"}}
  sandbox_fusion: {url: null, max_concurrent: 64}
algorithm: {adv_estimator: grpo, rollout_correction: {rollout_is: null, bypass_mode: false, loss_type: ppo_clip}}
"""
    )
    changed = ["custom_reward_function.path=r.py", "custom_reward_function.name=mine", *REQUIRED]
    made = translate(compose_name("printed", folder=tmp_path, overrides=changed))
    assert made.native["reward"]["function"]["name"] == "r.py:mine", "what the command line says is above a file"
    assert made.native["train"]["optim"]["max_grad_norm"] == 0.5
    load_values(RunConfig, made.native, origin=made.origin)


@pytest.mark.parametrize("name", ["sglang", "sglang_async", "vllm", "hf"])
def test_the_named_engine_is_the_embedded_one_where_it_is_not_installed(name: str):
    kind = {"sglang_async": "sglang", "hf": "embedded"}.get(name, name)
    expected = kind if kind != "embedded" and importlib.util.find_spec(kind) else "embedded"
    assert translated(f"{ROLLOUT}.name={name}").native["engine"]["kind"] == expected


def test_the_engine_that_stands_in_for_another_is_said():
    assert any("embedded engine" in line for line in translated(f"{ROLLOUT}.name=vllm").notices())


@pytest.mark.parametrize(("named", "parser"), [("chatml", "auto"), ("gpt-oss", "gpt-oss"), ("glm", "glm")])
def test_the_parser_is_found_from_the_model_unless_it_is_named(named: str, parser: str):
    assert translated(f"{TURNS}.format={named}").native["rollout"]["parser"] == parser


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [
        ([], 0),
        (["temperature=0.6"], 0.6),
        (["do_sample=True", "temperature=0.6"], 0.6),
        (["do_sample=False", "temperature=1"], 0),
    ],
)
def test_validation_samples_where_it_is_asked_to(asked: list[str], temperature: float):
    """verl's agent loops take the temperature whatever `do_sample` is, and its first loop was greedy without it."""
    sets = translated(*(f"{ROLLOUT}.val_kwargs.{one}" for one in asked)).native["evaluation"]["sets"]
    assert sets["validation"]["sampling"]["temperature"] == temperature


def test_micro_batches_are_bounded_by_tokens_and_hold_at_least_one_trajectory():
    assert translated(f"{ACTOR}.use_dynamic_bsz=True").native["train"]["max_tokens_per_batch"] == 16384
    long = translated("data.max_response_length=9000").native["train"]
    assert long["max_tokens_per_batch"] == 9512


def test_a_custom_reward_gets_its_arguments_and_reads_what_the_model_wrote():
    reward = translated(
        "custom_reward_function.path=r.py", "custom_reward_function.name=mine", "+custom_reward_function.reward_kwargs={a:1}"
    ).native["reward"]
    assert reward["function"] == {"name": "r.py:mine", "a": 1} and reward["text"] == "turns"
    assert reward["num_processes"] == 4, "signals work where it is called, as in verl"
    assert translated().native["reward"]["text"] == "turns", "the shipped functions read the same"


def test_samples_are_limited_and_ordered_as_asked():
    made = translated(
        *("data.train_files=a.parquet", "data.train_max_samples=5", "data.val_files=b.parquet", "data.val_max_samples=6"),
        *("data.sampler.class_path=stages.py", "data.sampler.class_name=Stages"),
    ).native
    assert made["data"]["train"] == {"files": ["a.parquet"], "limit": 5}
    assert made["data"]["sampler"]["name"] == "polyturn.compat.verl.sampler:SamplerOrder"
    assert made["data"]["sampler"]["sampler"] == "stages.py:Stages"
    assert made["evaluation"]["data"] == {"files": ["b.parquet"], "limit": 6}


def test_the_managers_that_do_more_than_call_a_function():
    dapo = translated(
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs={max_resp_len: 200, overlong_buffer_cfg: {enable: True, len: 50, penalty_factor: 0.5}}",
    )
    assert dapo.native["reward"]["overlong"] == {"buffer": 50, "penalty": 0.5, "max_tokens": 200}
    batch = translated("reward_model.reward_manager=batch").native["reward"]["batch"]
    assert batch["size"] is None and batch["wait_s"] is None, "it waits for every episode that runs"
    limited = translated("reward_model.reward_manager=rate_limited", "+reward_model.max_rpm=60", "+reward_model.timeout=5")
    assert limited.native["reward"]["rate"]["calls_per_minute"] == 60 and limited.native["reward"]["timeout_s"] == 5


def test_loggers_that_somebody_wrote_are_trackers_where_they_are_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    made = translated("trainer.logger=[console,wandb,mlflow,swanlab]", "trainer.project_name=shop")
    assert made.native["tracking"] == [{"name": "wandb", "project": "shop"}]
    assert any("mlflow and swanlab are not here" in line for line in made.notices())
    assert "tracking" not in translated().native, "verl's default is not started unasked"
    with pytest.raises(ConfigError, match=r"no logger 'wandbb'.*Did you mean 'wandb'"):
        translated("trainer.logger=wandbb")


def test_a_critic_that_starts_from_another_model_is_refused():
    with pytest.raises(ConfigError, match="starts from the policy's model"):
        translated("algorithm.adv_estimator=gae", "critic.model.path=elsewhere")
    translated("algorithm.adv_estimator=gae", "critic.model.path=tiny")
    translated("critic.model.path=elsewhere")


def test_a_template_in_the_config_is_the_template():
    assert translated("actor_rollout_ref.model.custom_chat_template='{{ messages }}'").native["model"]["chat_template"]


def test_an_agent_loop_of_ones_own_becomes_the_scheduler(tmp_path: Path):
    (tmp_path / "loops.yaml").write_text(
        "- {name: react, _target_: project.loops.React}\n- {name: b, _target_: x.B, k: 1}\n"
    )
    file, chosen = f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}", f"{ROLLOUT}.agent.default_agent_loop"
    for default, more in (("react", [f"{chosen}=react"]), ("single_turn_agent", [])):
        rollout = translated(file, *more, f"{ROLLOUT}.n=3").native["rollout"]
        assert rollout["scheduler"] == "polyturn.compat.verl.agent_scheduler:AgentLoopScheduler"
        kwargs = rollout["scheduler_kwargs"]
        assert kwargs["loops"] == {"react": {"_target_": "project.loops.React"}, "b": {"_target_": "x.B", "k": 1}}
        assert kwargs["default"] == default
        assert kwargs["config"]["actor_rollout_ref"]["rollout"]["n"] == 3
    with pytest.raises(ConfigError, match=r"agent_loop_config_path does not name it. Did you mean 'react'"):
        translated(file, f"{chosen}=raect")


def test_a_dataset_of_ones_own_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rows.py").touch()
    (tmp_path / "train.parquet").touch()
    monkeypatch.chdir(tmp_path)
    custom = ("data.custom_cls.path=rows.py", "data.custom_cls.name=Rows", "data.train_max_samples=7")
    made = translated(*custom, "data.train_files=[train.parquet,org/set]", "data.val_files=org/set", "data.seed=3").native
    assert made["data"]["train"]["generator"] == "polyturn.compat.verl.rl_dataset:custom_tasks"
    train, held_out = made["data"]["train"]["kwargs"], made["evaluation"]["data"]["kwargs"]
    assert train["cls"] == f"{tmp_path / 'rows.py'}:Rows" and (train["max_samples"], held_out["max_samples"]) == (7, -1)
    assert train["files"] == [str(tmp_path / "train.parquet"), "org/set"] and held_out["files"] == ["org/set"]
    assert train["config"]["seed"] == 3 and train["config"]["return_raw_chat"] is True
    assert (train["split"], held_out["split"]) == ("train", "validation")


def test_nothing_that_was_written_is_dropped_without_a_word():
    with pytest.raises(ConfigError, match=r"removes the key if that is its value, and it is 1\.0"):
        translated("~algorithm.gamma=0.5")
    translated("~algorithm.gamma=1.0")
    with pytest.raises(ConfigError, match="the loss vanilla has no such option"):
        translated(f"+{ACTOR}.policy_loss.tau=3")
    warm = translated("trainer.critic_warmup=3", "algorithm.adv_estimator=grpo").notices()
    assert any("there is no critic to warm up without gae" in notice for notice in warm)
    quiet = translated("trainer.critic_warmup=0", "algorithm.adv_estimator=grpo").notices()
    assert not any("critic" in notice for notice in quiet)


def test_native_keys_stand_above_everything_that_was_translated():
    made = translated("+polyturn.engine.num_slots=4", f"{ROLLOUT}.max_num_seqs=9")
    assert made.native["engine"]["num_slots"] == 4
    wrong = translated("+polyturn.engine.num_slot=4")
    with pytest.raises(ConfigError, match=r"unknown key 'engine\.num_slot'"):
        load_values(RunConfig, wrong.native, origin=wrong.origin)


def test_rejections_bring_their_own_bounds():
    made = translated(
        "algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k3'",
        "algorithm.rollout_correction.rollout_rs_threshold='0.5_3.0,0.1'",
        "+algorithm.rollout_correction.rollout_token_veto_threshold=1e-4",
    )
    assert native(made.native, "algorithm.loss.correction") == {
        "weight": "none",
        "reject": {"token_k1": [0.5, 3.0], "seq_max_k3": 0.1},
        "veto": 1e-4,
    }
    load_values(RunConfig, made.native, origin=made.origin)


def test_a_correction_in_bypass_mode_is_refused():
    with pytest.raises(ConfigError, match="nothing left to correct"):
        translated("algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "data.train_batch_size=-3",
            r"data\.train_batch_size \(from the override .*\) is -3, as train\.groups_per_step; it must",
        ),
        (
            "actor_rollout_ref.actor.optim.lr=-1",
            r"actor_rollout_ref\.actor\.optim\.lr \(.*\) is -1, as train\.optim\.lr; it must",
        ),
    ],
)
def test_a_value_that_cannot_be_is_told_by_the_key_that_was_written(override: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text("actor_rollout_ref: {model: {path: m}}\ndata: {train_files: t.parquet}\n")
    made = translate(compose_file(path, [override]))
    with pytest.raises(ConfigError, match=says):
        load_values(RunConfig, made.native, origin=made.origin)
