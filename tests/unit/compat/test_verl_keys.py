"""Every key of a verl config moves to a native key, is ignored with a reason, or is refused.

tests/data/verl/keys.tsv has one case a line: what becomes of an override, the native key (or the word that the message of
the refusal must name beside key and value), and the native value as JSON. Cases "together" have several overrides, joined
by &, and all native values that these decide, null where there is none.
"""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from polyturn.compat.verl_config.command import advice_in_verls_keys
from polyturn.compat.verl_config.compose import compose_file, compose_name
from polyturn.compat.verl_config.convert import CONVERTERS
from polyturn.compat.verl_config.table import table
from polyturn.compat.verl_config.translate import translate
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.config.schema import schema_table
from polyturn.config.translate.translation import Translation
from polyturn.core.errors import ConfigError
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # the first test imports Hydra

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
ACTOR = "actor_rollout_ref.actor"
REQUIRED = ["actor_rollout_ref.model.path=tiny"]
KEYS = Path(__file__).parents[2] / "data" / "verl" / "keys.tsv"


def translated(*overrides: str, tree: str = "ppo_trainer") -> Translation:
    return translate(compose_name(tree, folder=None, overrides=[*REQUIRED, *overrides]))


def of_megatron(*overrides: str) -> Translation:
    return translated(*overrides, tree="ppo_megatron_trainer")


def native(values: Any, key: str) -> Any:
    """Return the value of a native key, None where it is absent."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def cases(fate: str) -> list[Any]:
    """Return the (override, name, value) of each line of keys.tsv with a fate."""
    with KEYS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    found = [(row["override"], row["names"] or "", row["value"] or "null") for row in rows if row["fate"] == fate]
    return [pytest.param(override, name, json.loads(value), id=override) for override, name, value in found]


@pytest.mark.parametrize(("override", "key", "value"), cases("mapped"))
def test_mapped_key_sets_its_native_key(override: str, key: str, value: Any):
    needs = {".max_": f"{TURNS}.enable=True", ".kl_loss_type": f"{ACTOR}.use_kl_loss=True"}
    made = translated(override, *(other for part, other in needs.items() if part in override))
    assert native(made.native, key) == value
    fate = next(f for f in made.fates if f.key == override.partition("=")[0])
    assert (fate.kind, fate.where) == ("mapped", f"from the override {override!r}")
    assert any(key == to or key.startswith(f"{to}.") or to.startswith(f"{key}.") for to in fate.to) or len(fate.to) > 1, fate


@pytest.mark.parametrize(
    ("overrides", "values", "tree"),
    [
        pytest.param(case.values[0], case.values[2], tree, id=case.id)
        for fate, tree in (("together", "ppo_trainer"), ("together in megatron", "ppo_megatron_trainer"))
        for case in cases(fate)
    ],
)
def test_keys_together_set_native_values(overrides: str, values: dict[str, Any], tree: str):
    made = translated(*filter(None, overrides.split(" & ")), tree=tree)
    for key, value in values.items():
        assert native(made.native, key) == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize(("override", "_", "__"), cases("ignored"))
def test_ignored_key_gives_its_reason_once(override: str, _: str, __: None):
    made = translated(f"+{override}")
    key = override.partition("=")[0]
    fate = next(f for f in made.fates if key == f.key or key.startswith(f"{f.key}."))
    assert fate.kind == "ignored"
    assert sum(fate.says in line for line in made.notices()) == 1


@pytest.mark.parametrize(("override", "_", "__"), cases("accepted"))
def test_value_that_asks_for_nothing_is_silent(override: str, _: str, __: None):
    assert translated(f"++{override}").notices() == []


@pytest.mark.parametrize(("override", "_", "__"), cases("unread"))
def test_key_without_a_reader_is_reported(override: str, _: str, __: None):
    line = f"{override.partition('=')[0]}: ignored: this config uses no part that reads it"
    assert line in translated(f"++{override}").notices()


@pytest.mark.parametrize(
    ("override", "name", "tree"),
    [
        pytest.param(*case.values[:2], tree, id=case.id)
        for fate, tree in (("refused", "ppo_trainer"), ("refused by megatron", "ppo_megatron_trainer"))
        for case in cases(fate)
    ],
)
def test_refused_key_names_key_value_and_remedy(override: str, name: str, tree: str):
    with pytest.raises(ConfigError) as refused:
        translated(override, tree=tree)
    text = str(refused.value)
    key, _, value = override.lstrip("+").partition("=")
    assert key in text
    assert value in text
    assert name in text.rpartition(f"={value}")[2]
    assert "\n" not in text


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as refused:
        translated("+nonsense.one=1", "+nonsense.two=2", "+nonsense.three=3")
    assert len(str(refused.value).splitlines()) == 3


def test_notices_name_the_written_keys():
    notices = translated(f"{ACTOR}.fsdp_config.param_offload=True", "hydra.run.dir=out").notices()
    assert [line.partition(":")[0] for line in notices] == [f"{ACTOR}.fsdp_config.param_offload", "hydra.run.dir"]


# The table


def test_every_row_names_converters_and_native_keys_that_exist():
    known = {row.key for row in schema_table(RunConfig)}
    rows = table().rows
    for row in rows:
        assert row.convert is None or row.convert in CONVERTERS, row
        assert set(row.to) <= known, row
        assert sum([bool(row.to), bool(row.rejected), bool(row.means), bool(row.ignored), row.native]) == 1, row
        assert row.means is None or table().find(row.means) is not None, row
    assert {row.convert for row in rows} - {None} == set(CONVERTERS)
    assert len({row.key for row in rows}) == len(rows)


def test_shipped_base_is_covered_and_makes_a_native_config():
    made = translated("data.train_files=train.parquet")
    assert {f.key for f in made.fates if f.where} == {"actor_rollout_ref.model.path", "data.train_files"}
    assert made.notices() == []
    config = load_values(RunConfig, made.native, origin=made.origin).config
    assert config.rollout.limits.max_turns == 1, "only the model speaks"
    assert config.algorithm.loss.clip_high == 0.2
    assert config.train.optim.betas == (0.9, 0.999)
    assert config.reward.weights == {"outcome": 1.0}
    assert not config.algorithm.drop_zero_variance


# Errors of native values


@pytest.mark.parametrize(
    ("override", "key", "native_key", "value"),
    [
        (f"{ROLLOUT}.n=2.5", f"{ROLLOUT}.n", "train.group_size", "2.5"),
        ("data.train_batch_size=-3", "data.train_batch_size", "train.groups_per_step", "-3"),
        (f"{ACTOR}.optim.lr=-1", f"{ACTOR}.optim.lr", "train.optim.lr", "-1"),
        (f"{ROLLOUT}.top_p=2", f"{ROLLOUT}.top_p", "top_p", "2.0"),  # its whole section refuses it
    ],
)
def test_impossible_native_value_names_the_verl_key(override: str, key: str, native_key: str, value: str, tmp_path: Path):
    path = tmp_path / "verl.yaml"
    path.write_text("actor_rollout_ref: {model: {path: m}}\ndata: {train_files: t.parquet}\n")
    made = translate(compose_file(path, [override]))
    with pytest.raises(ConfigError) as refused:
        load_values(RunConfig, made.native, origin=made.origin)
    for part in (key, native_key, value, "override"):
        assert part in str(refused.value)


@pytest.mark.parametrize("key", ["polyturn.rollout.stuff", "actor_rollout_ref.ref.strategy", f"{ROLLOUT}.trace.backend"])
def test_reference_that_leads_nowhere_is_an_error(key: str):
    """Also inside a section of native keys, and where the value would have no effect."""
    with pytest.raises(ConfigError, match=rf"{key} is '\$\{{no.where\}}'"):
        translated(f"+{key}=${{no.where}}")


def test_unknown_native_key_is_an_error():
    wrong = translated("+polyturn.engine.num_slot=4")
    refuses(lambda: load_values(RunConfig, wrong.native, origin=wrong.origin), ConfigError, "'engine.num_slot'")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([f"{TURNS}.tool_config_path=t.yaml", f"{TURNS}.enable=False"], ["enable", "tool_config_path"]),
        (
            [f"+{ROLLOUT}.tool_kwargs.tools_config_file=a", f"{TURNS}.tool_config_path=b"],
            ["tools_config_file", "'a'", "'b'"],
        ),
        ([f"{ACTOR}.optim.lr=1e-5", f"{ACTOR}.optim.override_optimizer_config.lr=2e-5"], ["override", "2e-05", "1e-05"]),
        (["algorithm.adv_estimator=gae", "critic.model.path=elsewhere"], ["critic.model.path", "elsewhere"]),
        (["~algorithm.gamma=0.5"], ["algorithm.gamma", "1.0"]),
        ([f"+{ACTOR}.policy_loss.tau=3"], ["tau", "vanilla"]),
        (["data.train_batch_size=many"], ["data.train_batch_size", "many"]),
        (["data.train_batch_size=inf"], ["data.train_batch_size", "inf"]),
        (["data.train_batch_size=nan"], ["data.train_batch_size", "nan"]),
        ([f"+{ACTOR}.megatron.context_parallel_size=2"], ["context_parallel_size", f"{ACTOR}.strategy"]),
        (["trainer.logger=wandbb"], ["wandbb", "'wandb'"]),
        (
            ["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token"],
            ["bypass_mode"],
        ),
    ],
)
def test_contradicting_keys_are_refused(overrides: list[str], names: list[str]):
    with pytest.raises(ConfigError) as refused:
        translated(*overrides)
    assert [name for name in names if name not in str(refused.value)] == []


# Engines, loops and data


@pytest.mark.parametrize("name", ["sglang", "sglang_async", "vllm", "hf"])
def test_engine_is_embedded_where_the_named_one_is_missing(name: str):
    kind = {"sglang_async": "sglang", "hf": "embedded"}.get(name, name)
    expected = kind if kind != "embedded" and importlib.util.find_spec(kind) else "embedded"
    made = translated(f"{ROLLOUT}.name={name}")
    assert made.native["engine"]["kind"] == expected
    assert any("embedded engine" in line for line in made.notices()) == (expected != kind)


def test_agent_loops_of_a_file_become_the_scheduler(tmp_path: Path):
    (tmp_path / "loops.yaml").write_text("- {name: react, _target_: own.React}\n- {name: b, _target_: x.B, k: 1}\n")
    file, chosen = f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}", f"{ROLLOUT}.agent.default_agent_loop"
    for default, more in (("react", [f"{chosen}=react"]), ("single_turn_agent", [])):
        rollout = translated(file, *more, f"{ROLLOUT}.n=3").native["rollout"]
        assert rollout["scheduler"] == "polyturn.compat.verl.agent_scheduler:AgentLoopScheduler"
        kwargs = rollout["scheduler_kwargs"]
        assert kwargs["loops"] == {"react": {"_target_": "own.React"}, "b": {"_target_": "x.B", "k": 1}}
        assert kwargs["default"] == default
        assert kwargs["config"]["actor_rollout_ref"]["rollout"]["n"] == 3
    refuses(lambda: translated(file, f"{chosen}=raect"), ConfigError, "'raect'", "'react'")


def test_single_turn_agent_beside_a_tool_file_is_reported():
    loop, file = f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent", f"{TURNS}.tool_config_path=tools.yaml"
    (notice,) = translated(loop, file).notices()
    assert "default_agent_loop" in notice and "tool_config_path" in notice and "agent_name" in notice
    assert translated(loop).notices() == translated(file).notices() == []


def test_custom_dataset_class_reads_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rows.py").touch()
    (tmp_path / "train.parquet").touch()
    monkeypatch.chdir(tmp_path)
    custom = ("data.custom_cls.path=rows.py", "data.custom_cls.name=Rows", "data.train_max_samples=7")
    made = translated(*custom, "data.train_files=[train.parquet,org/set]", "data.val_files=org/set", "data.seed=3").native
    assert made["data"]["train"]["generator"] == "polyturn.compat.verl.rl_dataset:custom_tasks"
    train, held_out = made["data"]["train"]["kwargs"], made["evaluation"]["data"]["kwargs"]
    assert train["cls"] == f"{tmp_path / 'rows.py'}:Rows"
    assert (train["max_samples"], held_out["max_samples"]) == (7, -1)
    assert (train["files"], held_out["files"]) == ([str(tmp_path / "train.parquet"), "org/set"], ["org/set"])
    assert (train["config"]["seed"], train["config"]["return_raw_chat"]) == (3, True)
    assert (train["split"], held_out["split"]) == ("train", "validation")


@pytest.mark.parametrize(
    ("key", "native_key"),
    [
        ("actor_rollout_ref.model.path", "model.path"),
        ("data.train_files", "data.train.files"),
        (f"{TURNS}.tool_config_path", "rollout.tools.file"),
        ("trainer.default_local_dir", "out"),
        ("custom_reward_function.path", "reward.function.name"),
    ],
)
def test_home_of_an_unknown_user_stays_in_the_path(key: str, native_key: str):
    value = native(translated(f"{key}='~no-such-user/mine/x.py'").native, native_key)
    assert "~no-such-user/mine" in str(value)


# Losses and estimators


@pytest.mark.parametrize("make", [translated, of_megatron])
def test_critic_keys_move_with_gae_alone(make: Any):
    written = ["critic.optim.lr=2e-5", "critic.cliprange_value=0.3", "trainer.critic_warmup=4", "algorithm.lam=0.95"]
    made = make("algorithm.adv_estimator=gae", "critic.model.path=tiny", *(f"++{w}" for w in written)).native["algorithm"]
    assert made["critic"] == {"optim": {"lr": 2e-5, "max_grad_norm": 1.0}, "clip": 0.3, "warmup": 4}
    assert made["advantage"] == {"name": "gae", "gamma": 1.0, "lam": 0.95, "outcome": "end"}
    other = make("algorithm.adv_estimator=grpo", "critic.model.path=elsewhere", *(f"++{w}" for w in written))
    assert "critic" not in other.native["algorithm"]
    assert "lam" not in other.native["algorithm"]["advantage"]
    assert any(notice.startswith("trainer.critic_warmup") for notice in other.notices())


def test_own_estimator_gets_the_discounts_of_the_run(tmp_path: Path) -> None:
    own = [f"algorithm.adv_estimator={tmp_path / 'mine.py'}:mine", "algorithm.gamma=0.9"]
    made = translated(*own, "algorithm.lam=0.8").native["algorithm"]["advantage"]
    assert (made["gamma"], made["lam"]) == (0.9, 0.8)
    assert translated(*own).native["algorithm"]["advantage"].keys() & {"gamma", "lam"} == {"gamma"}
    for name in ("rloo", "grpo_vectorized"):
        assert "gamma" not in translated(f"algorithm.adv_estimator={name}", own[1]).native["algorithm"]["advantage"]


# Training


@pytest.mark.parametrize("tree", ["ppo_trainer", "ppo_megatron_trainer"])
def test_megatron_sizes_are_those_of_its_backend(tree: str):
    sizes = [f"+{ACTOR}.megatron.{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline", "expert")]
    sizes.append(f"+{ACTOR}.megatron.context_parallel_size=2")
    ignored = [f"+{ACTOR}.megatron.{key}" for key in ("param_offload=True", "virtual_pipeline_model_parallel_size=2")]
    ignored.append("+actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4")
    overrides = [f"{ACTOR}.strategy=megatron", *sizes, *ignored]
    made = translated(*overrides, tree=tree)
    assert made.native["train"]["backend"] == "megatron"
    assert len(made.notices()) == len(ignored)
    split = {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2, "context_parallel": 2}
    assert made.native["train"]["distributed"] == {**split, "ranks": 8}  # ranks of one stage share its experts
    more = translated(*overrides, "+polyturn.train.distributed.ranks=16", tree=tree)
    assert more.native["train"]["distributed"] == {**split, "ranks": 16}


def test_megatron_keys_without_effect_are_reported():
    (line,) = of_megatron(f"{ACTOR}.optim.min_lr=1e-7").notices()  # a constant rate never reaches it
    assert line.startswith(f"{ACTOR}.optim.min_lr")
    transformer = "megatron.override_transformer_config"
    fusion = of_megatron(f"+{ACTOR}.{transformer}.apply_rope_fusion=True", f"+{ACTOR}.{transformer}.moe_router_dtype=fp32")
    assert any("apply_rope_fusion" in line and "moe_router_dtype" in line for line in fusion.notices())
    lora = of_megatron("+actor_rollout_ref.model.lora={rank: 8, type: canonical_lora}")
    assert any("lora.rank" in line for line in lora.notices())
    assert len(lora.native["model"]["lora"]["target_modules"]) == 7
    ulysses = of_megatron(f"{ACTOR}.strategy=megatron", f"+{ACTOR}.ulysses_sequence_parallel_size=2")
    assert "distributed" not in ulysses.native["train"]
    assert "megatron.context_parallel_size" in str(ulysses.notices())


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("dppo_tv", {"name": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "cap": 3.0}),
        ("dro", {"name": "dro", "dro_beta": 0.5}),
    ],
)
def test_loss_keeps_its_own_bounds(mode: str, options: dict[str, Any]):
    """verl's dppo reads clip_ratio as a divergence and clip_ratio_c as the cap of its weight."""
    loss = translated(f"{ACTOR}.policy_loss.loss_mode={mode}", f"+{ACTOR}.policy_loss.dro_beta=0.5").native
    assert native(loss, "algorithm.loss") == options
    TypeAdapter(RunConfig).validate_python(loss)


def test_written_loggers_become_trackers_where_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    made = translated("trainer.logger=[console,wandb,mlflow,swanlab]", "trainer.project_name=shop")
    assert made.native["tracking"] == [{"name": "wandb", "project": "shop"}]
    assert any("mlflow and swanlab" in line for line in made.notices())


def test_printed_tree_of_a_later_release_is_accepted(tmp_path: Path):
    """It has sections with `_target_`, both sections of the reward's keys, and keys that are null."""
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
    assert made.native["reward"]["function"]["name"] == "r.py:mine", "an override counts above a file"
    assert made.native["train"]["optim"]["max_grad_norm"] == 0.5
    load_values(RunConfig, made.native, origin=made.origin)


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("set train.on_checkpoint_error", "train.on_checkpoint_error is +polyturn.train.on_checkpoint_error"),
        (
            "rollout.limits.max_prompt_tokens allows 20, and data.train_files has longer prompts",
            "rollout.limits.max_prompt_tokens is data.max_prompt_length or +polyturn.rollout.limits.max_prompt_tokens",
        ),
        ("data.train_files is missing", ""),
    ],
)
def test_advice_names_the_keys_of_the_config(message: str, more: str) -> None:
    with pytest.raises(ConfigError) as caught, advice_in_verls_keys():
        raise ConfigError(message)
    assert str(caught.value) == message + (f" (in this config: {more})" if more else "")
