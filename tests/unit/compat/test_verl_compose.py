"""Trees of verl's keys are composed as Hydra composes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.verl_config.compose import BASE, OF_VERL, base_folder, compose_file, compose_name
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
        main="""
defaults:
  - ppo_trainer
  - algorithm: plain
  - override actor@actor_rollout_ref.actor: mine
""",
        actor__mine="defaults: [dp_actor, _self_]\ngrad_clip: 0.5\n",
        algorithm__plain="norm_adv_by_std_in_grpo: false\n",
    )
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


def test_a_module_of_the_search_path_is_searched_and_its_keys_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write(tmp_path / "own_tree" / "parts", other="data: {seed: 5}\n")
    monkeypatch.syspath_prepend(tmp_path)
    search = "hydra: {searchpath: ['pkg://own_tree.parts', 'pkg://own_tree.nothing']}\n"
    found = compose_file(write(tmp_path, main=f"{search}defaults: [ppo_trainer, other, _self_]\n"))
    assert found.values["data"]["seed"] == 5
    assert found.origin == {"data.seed": f"in {tmp_path / 'own_tree' / 'parts' / 'other.yaml'}"}
    assert "hydra.searchpath names pkg://own_tree.nothing, which does not exist" in caplog.text


def test_a_missing_default_says_where_it_was_searched(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"Could not load 'ppo_trainr' in .*Did you mean 'ppo_trainer'"):
        composed(write(tmp_path, main="defaults: [ppo_trainr]\n"))


def test_a_circle_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="lead back to"):
        composed(write(tmp_path, main="defaults: [other]\n", other="defaults: [main]\n"))


@pytest.mark.parametrize(
    "defaults",
    ["ppo_megatron_trainer", "ppo_trainer, {override actor@actor_rollout_ref.actor: megatron_actor}"],
)
def test_trees_and_parts_of_megatron_are_found(tmp_path: Path, defaults: str):
    actor = composed(write(tmp_path, main=f"defaults: [{defaults}, _self_]\n"))["actor_rollout_ref"]["actor"]
    assert actor["strategy"] == "megatron" and actor["optim"]["lr_decay_style"] == "constant"
    assert actor["megatron"]["tensor_model_parallel_size"] == 1 and actor["clip_ratio"] == 0.2


def test_a_choice_of_parts_is_made_on_the_command_line_too(tmp_path: Path):
    path = write(tmp_path, main=PLAIN)
    assert composed(path, "actor@actor_rollout_ref.actor=megatron_actor")["actor_rollout_ref"]["actor"]["megatron"]
    named = compose_name("ppo_trainer", folder=None, overrides=["model_engine=megatron"]).values
    assert named["model_engine"] == "megatron" and named["actor_rollout_ref"]["actor"]["strategy"] == "megatron"
    assert compose_name("ppo_megatron_trainer", folder=tmp_path).values == named


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


def test_an_override_that_a_script_repeats_counts_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A user's `"$@"` behind the keys of a script that sets them."""
    path = write(tmp_path, main="a: 1")
    assert composed(path, "+b=1", "c=2", "++b=3", "c=2", "+d={x: 1}", "+d={y: 2}")["b"] == 3
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == ["overridden more than once: b"]


def test_a_tilde_removes_a_key_or_a_section(tmp_path: Path):
    path = write(tmp_path, main="data: {seed: 4}\ncritic: {optim: {lr: 1}}\n")
    values = composed(path, "~data.seed", "~trainer.resume_mode", "~reward_model.model")
    assert "seed" not in values["data"] and "resume_mode" not in values["trainer"]
    assert not compose_file(path, ["~data.seed"]).is_written("data.seed")
    with pytest.raises(ConfigError, match=r"'~data.sed': there is nothing to remove.*Did you mean 'data.seed'"):
        composed(path, "~data.sed")


def test_choices_of_hydra_itself_are_none_of_our_business(tmp_path: Path):
    path = write(tmp_path, main=PLAIN)
    chosen = composed(path, "hydra/job_logging=disabled", "actor@actor_rollout_ref.actor=dp_actor")
    assert chosen["hydra"] == {"job_logging": "disabled"}
    assert chosen["actor_rollout_ref"] == composed(path)["actor_rollout_ref"]


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
        ("{a:${x.y},b:2}", {"a": "${x.y}", "b": 2}),
        ("'quoted'", "quoted"),
        ("", ""),
        ("'a=b'", "a=b"),
    ],
)
def test_values_are_read_as_hydra_reads_them(raw: str, value: Any):
    assert compose_name("ppo_trainer", folder=None, overrides=[f"trainer.k={raw}"]).values["trainer"]["k"] == value


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
    own = (BASE / "ppo_trainer.yaml").read_text().replace("total_epochs: 30", "total_epochs: 3")
    write(tmp_path, main=PLAIN, ppo_trainer=own)
    assert composed(tmp_path / "main.yaml")["trainer"]["total_epochs"] == 3


def test_a_file_that_is_no_yaml_says_the_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"main.yaml line 2: this is not YAML"):
        composed(write(tmp_path, main="a: 1\n  b: 2\n"))


# Groups, as Hydra has them


def checkout(folder: Path) -> Path:
    """Write a small tree where a checkout of verl has its own; its rollout group has a relative part."""
    tree = folder / "verl" / "trainer" / "config"
    write(
        tree,
        ppo_trainer="defaults:\n  - rollout@actor_rollout_ref.rollout: rollout\n  - _self_\ndata: {seed: 1}\n",
        rollout__rollout="defaults: [{../optim@extra: plain}, _self_]\nn: 1\ntemperature: 0.5\n",
        rollout__other="n: 5\n",
        optim__plain="lr: 3\n",
    )
    return tree


def test_a_group_override_chooses_another_file(tmp_path: Path):
    path = write(tmp_path, main=PLAIN, rollout__mine="defaults: [rollout, _self_]\nn: 7\n")
    tree = compose_file(path, ["rollout@actor_rollout_ref.rollout=mine"])
    assert tree.values["actor_rollout_ref"]["rollout"]["n"] == 7
    assert tree.values["actor_rollout_ref"]["rollout"]["temperature"] == 1.0
    assert tree.where("actor_rollout_ref.rollout.n") == f" (in {tmp_path / 'rollout' / 'mine.yaml'})"
    added = composed(path, "+rollout@elsewhere=mine")
    assert added["elsewhere"]["n"] == 7 and added["actor_rollout_ref"]["rollout"]["n"] == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout@actor_rollout_ref.rollout=mein", r"rollout/mein.*Did you mean 'mine'"),
        ("rollout@actor_rollout_ref.rolout=mine", r"rollout@actor_rollout_ref.rolout"),
        ("data/foo=bar", r"data/foo"),
        ("rollout=mine", r"rollout"),
        ("~rollout@nowhere", r"rollout@nowhere"),
        ("actor@actor_rollout_ref.actor=veomni_actor", "VeOmni's backend"),
        ("model_engine=veomni", "VeOmni's backend"),
        ("hydra/launcher=slurm", "slurm"),
        ("data.seed=1,2", "several values"),
    ],
)
def test_a_choice_that_leads_nowhere_is_an_error(tmp_path: Path, override: str, says: str):
    path = write(tmp_path, main=PLAIN, rollout__mine="n: 7\n")
    with pytest.raises(ConfigError, match=says):
        composed(path, override)


def test_in_a_checkout_of_verl_its_own_tree_is_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = compose_name("ppo_trainer", folder=None)
    rollout = found.values["actor_rollout_ref"]["rollout"]
    assert rollout == {"n": 1, "temperature": 0.5, "extra": {"lr": 3}} and found.origin == {}
    chosen = compose_name("ppo_trainer", folder=None, overrides=["rollout@actor_rollout_ref.rollout=other"])
    assert chosen.values["actor_rollout_ref"]["rollout"] == {"n": 5}
    run = "hydra: {searchpath: ['file://verl/trainer/config']}\ndefaults: [ppo_trainer, _self_]\ndata: {seed: 9}\n"
    path = write(tmp_path / "recipe", main=run)
    assert compose_file(path).values["data"] == {"seed": 9}
    assert compose_file(path).origin == {"data.seed": f"in {path}"}
    assert tree.is_dir()


def test_the_tree_of_a_checkout_is_the_base_in_its_folders_and_where_it_is_on_pythons_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkout(tmp_path / "verl")
    inside, outside = tmp_path / "verl" / "recipe" / "mine", tmp_path / "project"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert compose_name("ppo_trainer", folder=None).values["actor_rollout_ref"]["rollout"]["temperature"] == 0.5
    monkeypatch.chdir(outside)
    assert base_folder() == BASE
    monkeypatch.syspath_prepend(tmp_path / "verl")
    assert base_folder() == tmp_path / "verl" / OF_VERL


def test_a_package_header_is_read(tmp_path: Path):
    path = write(tmp_path, main="defaults: [ppo_trainer, extra, _self_]\n", extra="# @package algorithm\ngamma: 0.5\n")
    assert composed(path)["algorithm"]["gamma"] == 0.5


def test_without_hydra_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'polyturn\[verl\]'"):
        compose_name("ppo_trainer", folder=None)
