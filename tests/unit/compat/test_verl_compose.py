"""Trees of verl's keys are composed as Hydra composes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.verl_config.compose import BASE, compose_file, compose_name, parse_value
from polyturn.core.errors import ConfigError

PLAIN = "defaults: [ppo_trainer, _self_]\n"


def write(folder: Path, **files: str) -> Path:
    """Write YAML files, `a__b` for a/b.yaml; return the one called main."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "main.yaml"


def composed(path: Path, *overrides: str) -> dict[str, Any]:
    return compose_file(path, overrides).values


def test_the_shipped_base_is_below_everything_also_where_nobody_names_it(tmp_path: Path):
    for text in (PLAIN, "", "defaults: [ppo_trainer]\n"):
        values = composed(write(tmp_path, main=f"{text}data: {{train_batch_size: 7}}\n"))
        assert values["data"]["train_batch_size"] == 7 and values["data"]["shuffle"] is True


def test_defaults_are_merged_in_their_order_and_self_where_it_stands(tmp_path: Path):
    path = write(
        tmp_path,
        main="defaults: [ppo_trainer, first, _self_, last]\ndata: {seed: 2, train_batch_size: 2}\n",
        first="data: {seed: 1, train_batch_size: 1, shuffle: false}\n",
        last="data: {seed: 3}\n",
    )
    data = composed(path)["data"]
    assert (data["shuffle"], data["train_batch_size"], data["seed"]) == (False, 2, 3)


def test_without_self_a_file_is_above_its_defaults(tmp_path: Path):
    path = write(tmp_path, main="defaults: [other]\ndata: {seed: 2}\n", other="data: {seed: 1}\n")
    assert composed(path)["data"]["seed"] == 2


def test_groups_go_to_their_package(tmp_path: Path):
    path = write(
        tmp_path,
        main="defaults: ['actor@actor_rollout_ref.actor: mine', 'algorithm: plain']\n".replace("'", ""),
        actor__mine="grad_clip: 0.5\n",
        algorithm__plain="norm_adv_by_std_in_grpo: false\n",
    )
    path.write_text("defaults:\n  - actor@actor_rollout_ref.actor: mine\n  - algorithm: plain\n  - optional data: none\n")
    values = composed(path)
    assert values["actor_rollout_ref"]["actor"]["grad_clip"] == 0.5
    assert values["actor_rollout_ref"]["actor"]["clip_ratio"] == 0.2
    assert values["algorithm"]["norm_adv_by_std_in_grpo"] is False


def test_the_parts_of_verls_own_tree_are_in_the_base(tmp_path: Path):
    path = write(tmp_path, main="defaults:\n  - actor@actor_rollout_ref.actor: dp_actor\n  - data@data: legacy_data\n")
    assert composed(path)["actor_rollout_ref"]["actor"]["clip_ratio"] == 0.2


def test_the_search_path_is_searched(tmp_path: Path):
    (tmp_path / "more").mkdir()
    write(tmp_path / "more", shared="data: {seed: 5}\n")
    search = f"hydra: {{searchpath: ['file://{tmp_path / 'more'}', 'file://verl/trainer/config', 'pkg://verl.x']}}\n"
    assert composed(write(tmp_path, main=f"{search}defaults: [ppo_trainer, shared, _self_]\n"))["data"]["seed"] == 5
    bare = write(tmp_path, main="defaults: [shared]\n")
    assert composed(bare, f"hydra.searchpath=[file://{tmp_path / 'more'}]")["data"]["seed"] == 5


def test_a_missing_default_says_where_it_was_searched(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"names 'ppo_trainr', and there is no ppo_trainr.yaml .*Did you mean 'ppo_trainer'"
    ):
        composed(write(tmp_path, main="defaults: [ppo_trainr]\n"))


def test_a_circle_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="leads back to"):
        composed(write(tmp_path, main="defaults: [other]\n", other="defaults: [main]\n"))


@pytest.mark.parametrize("default", ["ppo_megatron_trainer", "{actor@actor_rollout_ref.actor: megatron_actor}"])
def test_megatron_is_refused_by_name(tmp_path: Path, default: str):
    with pytest.raises(ConfigError, match="Megatron's backend"):
        composed(write(tmp_path, main=f"defaults: [{default}]\n"))


def test_references_are_resolved_after_everything_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WHERE", "there")
    path = write(
        tmp_path,
        main="data: {max_prompt_length: 99, train_files: '${oc.env:WHERE}/a.parquet'}\n"
        "trainer: {experiment_name: 'r${data.train_batch_size}'}\n",
    )
    values = composed(path, "data.train_batch_size=3")
    assert values["actor_rollout_ref"]["rollout"]["prompt_length"] == 99
    assert values["data"]["train_files"] == "there/a.parquet"
    assert values["trainer"]["default_local_dir"] == "checkpoints/verl_examples/r3"


def test_the_time_of_hydra_is_there(tmp_path: Path):
    name = composed(write(tmp_path, main="trainer: {experiment_name: 'a-${now:%Y}'}\n"))["trainer"]["experiment_name"]
    assert name.startswith("a-20") and len(name) == 6


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_overrides_set_keys_whatever_their_sign(tmp_path: Path, sign: str):
    values = composed(write(tmp_path, main=PLAIN), f"{sign}data.seed=4", f"{sign}trainer.brand_new.key=5")
    assert values["data"]["seed"] == 4 and values["trainer"]["brand_new"] == {"key": 5}


def test_a_tilde_removes_a_key_or_a_section(tmp_path: Path):
    path = write(tmp_path, main="data: {seed: 4}\ncritic: {optim: {lr: 1}}\n")
    values = composed(path, "~data.seed", "~critic", "~reward_model.model")
    assert "seed" not in values["data"] and "critic" not in values
    assert not compose_file(path, ["~data.seed"]).is_written("data.seed")
    with pytest.raises(ConfigError, match=r"'~data.sed': there is nothing to remove.*Did you mean 'data.seed'"):
        composed(path, "~data.sed")


def test_choices_of_hydra_itself_are_none_of_our_business(tmp_path: Path):
    path = write(tmp_path, main=PLAIN)
    chosen = composed(path, "hydra/job_logging=disabled", "actor@actor_rollout_ref.actor=dp_actor")
    assert "hydra" not in chosen and chosen["actor_rollout_ref"] == composed(path)["actor_rollout_ref"]


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("1e-6", 1e-6),
        ("null", None),
        ("True", True),
        ('["console","wandb"]', ["console", "wandb"]),
        ("['a.parquet', 'b.parquet']", ["a.parquet", "b.parquet"]),
        ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}),
        ("{url:http://host:8000/x}", {"url": "http://host:8000/x"}),
        ("{'a b':'c:d'}", {"a b": "c:d"}),
        ("{a:${x.y},b:2}", {"a": "${x.y}", "b": 2}),
        ("'quoted'", "quoted"),
        ("", None),
        ("a=b", "a=b"),
    ],
)
def test_values_are_read_as_hydra_reads_them(raw: str, value: Any):
    assert parse_value(raw, text=f"k={raw}") == value


@pytest.mark.parametrize("text", ["train_batch_size", "--multirun", "=3"])
def test_what_is_no_override_is_refused(tmp_path: Path, text: str):
    with pytest.raises(ConfigError, match=r"cannot be read; write key.path=value"):
        composed(write(tmp_path, main=PLAIN), text)


def test_it_is_known_who_wrote_a_key(tmp_path: Path):
    path = write(tmp_path, main="data: {seed: 4}\n")
    tree = compose_file(path, ["data.shuffle=False"])
    assert (
        tree.where("data.seed") == f" (in {path})"
        and tree.where("data.shuffle") == " (from the override 'data.shuffle=False')"
    )
    assert tree.where("data.truncation") == "" and tree.is_written("data") and not tree.is_written("data.truncation")


def test_a_section_whose_keys_are_all_commented_out_changes_nothing(tmp_path: Path):
    rollout = composed(write(tmp_path, main="actor_rollout_ref:\n  rollout:\n    multi_turn:\n"))["actor_rollout_ref"][
        "rollout"
    ]
    assert rollout["multi_turn"]["enable"] is False


def test_a_config_is_found_by_name_and_the_shipped_one_without_a_folder(tmp_path: Path):
    write(tmp_path, main="data: {seed: 4}\n")
    assert compose_name("main", folder=tmp_path).values["data"]["seed"] == 4
    assert compose_name("main.yaml", folder=tmp_path).values["data"]["seed"] == 4
    assert compose_name("ppo_trainer", folder=None).origin == {} == compose_name("ppo_trainer", folder=tmp_path).origin
    with pytest.raises(ConfigError, match=r"mein.yaml' does not exist. Did you mean 'main.yaml'"):
        compose_name("mein", folder=tmp_path)
    with pytest.raises(ConfigError, match="--config-path"):
        compose_name("main", folder=None)


def test_ones_own_copy_of_the_base_is_above_the_shipped_one(tmp_path: Path):
    write(tmp_path, main=PLAIN, ppo_trainer=BASE.read_text().replace("train_batch_size: 1024", "train_batch_size: 3"))
    assert composed(tmp_path / "main.yaml")["data"]["train_batch_size"] == 3


def test_a_file_that_is_no_yaml_says_the_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"main.yaml line 2: this is not YAML"):
        composed(write(tmp_path, main="a: 1\n  b: 2\n"))
