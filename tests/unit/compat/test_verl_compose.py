"""Trees of verl's keys are composed as Hydra composes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.verl_config.compose import BASE, OF_VERL, base_folder, compose_file, compose_name
from polyturn.core.errors import ConfigError
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # the first test imports Hydra

PLAIN = "defaults: [ppo_trainer, _self_]\n"
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


def write(folder: Path, **files: str) -> Path:
    """Write YAML files, `a__b` for a/b.yaml; return the one called main."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "main.yaml"


def composed(path: Path, *overrides: str) -> dict[str, Any]:
    return compose_file(path, overrides).values


def at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize(
    ("files", "overrides", "values"),
    [
        # The shipped base is below every file, also where none names it.
        *[
            ({"main": f"{head}data: {{seed: 7}}\n"}, [], {"data.seed": 7, "data.shuffle": True})
            for head in (PLAIN, "", "defaults: [ppo_trainer]\n")
        ],
        # Defaults are merged in their order, and a file where `_self_` stands, else last.
        (
            {
                "main": "defaults: [ppo_trainer, first, _self_, last]\ndata: {seed: 2, train_batch_size: 2}\n",
                "first": "data: {seed: 1, train_batch_size: 1, shuffle: false}\n",
                "last": "data: {seed: 3}\n",
            },
            [],
            {"data.shuffle": False, "data.train_batch_size": 2, "data.seed": 3},
        ),
        ({"main": "defaults: [other]\ndata: {seed: 2}\n", "other": "data: {seed: 1}\n"}, [], {"data.seed": 2}),
        # Groups go to their package, which a header may name.
        (
            {
                "main": f"defaults: [ppo_trainer, {{algorithm: plain}}, {{override actor@{ACTOR}: mine}}]\n",
                "actor__mine": "defaults: [dp_actor, _self_]\ngrad_clip: 0.5\n",
                "algorithm__plain": "norm_adv_by_std_in_grpo: false\n",
            },
            [],
            {f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.clip_ratio": 0.2, "algorithm.norm_adv_by_std_in_grpo": False},
        ),
        (
            {"main": f"defaults: [{{actor@{ACTOR}: dp_actor}}, {{data@data: legacy_data}}]\n"},
            [],
            {f"{ACTOR}.clip_ratio": 0.2},
        ),
        ({"main": "defaults: [extra, _self_]", "extra": "# @package algorithm\ngamma: 0.5\n"}, [], {"algorithm.gamma": 0.5}),
        # Megatron's trees and parts are there.
        *[
            ({"main": f"defaults: [{names}, _self_]\n"}, more, {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.clip_ratio": 0.2})
            for names, more in (
                ("ppo_megatron_trainer", []),
                (f"ppo_trainer, {{override actor@{ACTOR}: megatron_actor}}", []),
                ("ppo_trainer", [f"actor@{ACTOR}=megatron_actor"]),
            )
        ],
        # Overrides set keys whatever their sign; a choice of Hydra's own changes no key of verl's.
        *[
            ({"main": PLAIN}, [f"{sign}data.seed=4", f"{sign}own.key=5"], {"data.seed": 4, "own.key": 5})
            for sign in ("", "+", "++")
        ],
        ({"main": PLAIN}, ["hydra/job_logging=disabled"], {"hydra": {"job_logging": "disabled"}}),
        # A section whose keys are all commented out changes nothing.
        ({"main": "actor_rollout_ref:\n  rollout:\n    multi_turn:\n"}, [], {f"{ROLLOUT}.multi_turn.enable": False}),
        # A copy of the base beside the file replaces the shipped one.
        (
            {"main": PLAIN, "ppo_trainer": (BASE / "ppo_trainer.yaml").read_text().replace("epochs: 30", "epochs: 3")},
            [],
            {"trainer.total_epochs": 3},
        ),
    ],
)
def test_files_and_overrides_are_merged(files: dict[str, str], overrides: list[str], values: dict[str, Any], tmp_path: Path):
    found = composed(write(tmp_path, **files), *overrides)
    assert {key: at(found, key) for key in values} == values


@pytest.mark.parametrize(
    ("files", "overrides", "names"),
    [
        ({"main": "defaults: [ppo_trainr]\n"}, [], "'ppo_trainr'.*'ppo_trainer'"),
        ({"main": "defaults: [other]\n", "other": "defaults: [main]\n"}, [], "form a circle"),
        ({"main": "a: 1\n  b: 2\n"}, [], "main.yaml line 2"),
        *[({"main": PLAIN}, [text], "key.path=value") for text in ("train_batch_size", "--multirun", "=3")],
        *[({"main": text}, [], "main") for text in ("data: [", "defaults: 3", "- 1", "defaults: [main]")],
        ({"main": PLAIN}, ["data.seed=[1"], r"data\.seed"),
        ({"main": PLAIN}, ["~nothing.here"], r"nothing\.here"),
        ({"main": PLAIN}, ["~data.sed"], r"~data\.sed.*'data\.seed'"),
        ({"main": PLAIN, "rollout__mine": "n: 7\n"}, [f"rollout@{ROLLOUT}=mein"], "rollout/mein.*'mine'"),
        (
            {"main": PLAIN, "rollout__mine": "n: 7\n"},
            ["rollout@actor_rollout_ref.rolout=mine"],
            "rollout@actor_rollout_ref.rolout",
        ),
        ({"main": PLAIN}, ["data/foo=bar"], "data/foo"),
        ({"main": PLAIN}, ["optim@optim=sgd"], "optim"),
        ({"main": PLAIN}, ["actor@actor_rollout_ref.actor=dp"], "actor"),
        ({"main": PLAIN, "rollout__mine": "n: 7\n"}, ["rollout=mine"], "rollout"),
        ({"main": PLAIN}, ["~rollout@nowhere"], "rollout@nowhere"),
        ({"main": PLAIN}, [f"actor@{ACTOR}=veomni_actor"], "VeOmni"),
        ({"main": PLAIN}, ["hydra/launcher=slurm"], "slurm"),
        ({"main": PLAIN}, ["data.seed=1,2"], "several values"),
    ],
)
def test_impossible_files_and_overrides_are_named(files: dict[str, str], overrides: list[str], names: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=names):
        composed(write(tmp_path, **files), *overrides)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("1e-6", 1e-6),
        ("null", None),
        ("True", True),
        ("['a.parquet', \"b\"]", ["a.parquet", "b"]),
        ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}),
        ("{url:http://host:8000/x}", {"url": "http://host:8000/x"}),
        ("{a:${x.y},b:2}", {"a": "${x.y}", "b": 2}),
        ("'quoted'", "quoted"),
        ("", ""),
        ("'a=b'", "a=b"),
    ],
)
def test_override_values_are_read_as_hydra_reads_them(raw: str, value: Any):
    assert compose_name("ppo_trainer", folder=None, overrides=[f"trainer.k={raw}"]).values["trainer"]["k"] == value


def test_search_path_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    write(tmp_path / "more", shared="data: {seed: 5}\n")
    search = f"hydra: {{searchpath: ['file://{tmp_path / 'more'}', 'file://verl/trainer/config', 'pkg://verl.x']}}\n"
    assert composed(write(tmp_path, main=f"{search}defaults: [ppo_trainer, shared, _self_]\n"))["data"]["seed"] == 5
    bare = write(tmp_path, main="defaults: [shared]\n")
    assert composed(bare, f"hydra.searchpath=[file://{tmp_path / 'more'}]")["data"]["seed"] == 5
    write(tmp_path / "own_tree" / "parts", other="data: {seed: 6}\n")
    monkeypatch.syspath_prepend(tmp_path)
    search = "hydra: {searchpath: ['pkg://own_tree.parts', 'pkg://own_tree.nothing']}\n"
    found = compose_file(write(tmp_path, main=f"{search}defaults: [ppo_trainer, other, _self_]\n"))
    assert found.values["data"]["seed"] == 6
    assert found.origin == {"data.seed": f"in {tmp_path / 'own_tree' / 'parts' / 'other.yaml'}"}
    assert "pkg://own_tree.nothing" in caplog.text


def test_references_are_resolved_after_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WHERE", "there")
    data = "data: {max_prompt_length: 99, train_files: '${oc.env:WHERE}/a.parquet'}\n"
    trainer = "trainer: {experiment_name: 'r${data.train_batch_size}-${now:%Y}'}\n"
    values = composed(write(tmp_path, main=data + trainer), "data.train_batch_size=3")
    assert values["actor_rollout_ref"]["rollout"]["prompt_length"] == 99
    assert values["data"]["train_files"] == "there/a.parquet"
    assert values["trainer"]["default_local_dir"].startswith("checkpoints/verl_examples/r3-20")


def test_repeated_override_counts_and_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A user's `"$@"` stands behind the keys of a script that sets them."""
    path = write(tmp_path, main="a: 1")
    assert composed(path, "+b=1", "c=2", "++b=3", "c=2", "+d={x: 1}", "+d={y: 2}")["b"] == 3
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == ["overridden more than once: b"]


def test_tilde_removes_a_key_or_a_section(tmp_path: Path):
    path = write(tmp_path, main="data: {seed: 4}\ncritic: {optim: {lr: 1}}\n")
    values = composed(path, "~data.seed", "~trainer.resume_mode", "~reward_model.model")
    assert "seed" not in values["data"]
    assert "resume_mode" not in values["trainer"]
    assert not compose_file(path, ["~data.seed"]).is_written("data.seed")


def test_origin_of_a_key_is_known(tmp_path: Path):
    path = write(tmp_path, main=f"{PLAIN}data: {{seed: 4}}\n", rollout__mine="defaults: [rollout, _self_]\nn: 7\n")
    tree = compose_file(path, ["data.shuffle=False", f"rollout@{ROLLOUT}=mine", "+rollout@elsewhere=mine"])
    assert tree.where("data.seed") == f" (in {path})"
    assert tree.where("data.shuffle") == " (from the override 'data.shuffle=False')"
    assert tree.where(f"{ROLLOUT}.n") == f" (in {tmp_path / 'rollout' / 'mine.yaml'})"
    assert (at(tree.values, f"{ROLLOUT}.n"), at(tree.values, f"{ROLLOUT}.temperature")) == (7, 1.0)
    assert tree.values["elsewhere"]["n"] == 7
    assert tree.where("data.truncation") == ""
    assert tree.is_written("data")
    assert not tree.is_written("data.truncation")


def test_config_is_found_by_name(tmp_path: Path):
    write(tmp_path, main="data: {seed: 4}\n")
    for name in ("main", "main.yaml"):
        assert compose_name(name, folder=tmp_path).values["data"]["seed"] == 4
    assert compose_name("ppo_trainer", folder=None).origin == {} == compose_name("ppo_trainer", folder=tmp_path).origin
    megatron = compose_name("ppo_trainer", folder=None, overrides=["model_engine=megatron"]).values
    assert compose_name("ppo_megatron_trainer", folder=tmp_path).values == megatron
    for name, folder, names in (("mein", tmp_path, "mein.yaml'.*'main.yaml'"), ("main", None, "--config-path")):
        with pytest.raises(ConfigError, match=names):
            compose_name(name, folder=folder)
    refuses(lambda: compose_name("ppo_trainer", folder=None, overrides=["model_engine=veomni"]), ConfigError, "VeOmni")


# A checkout of verl


def checkout(folder: Path) -> None:
    """Write a small tree where a checkout of verl has its own; its rollout group has a relative part."""
    write(
        folder / "verl" / "trainer" / "config",
        ppo_trainer=f"defaults:\n  - rollout@{ROLLOUT}: rollout\n  - _self_\ndata: {{seed: 1}}\n",
        rollout__rollout="defaults: [{../optim@extra: plain}, _self_]\nn: 1\ntemperature: 0.5\n",
        rollout__other="n: 5\n",
        optim__plain="lr: 3\n",
    )


def test_checkouts_own_tree_is_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = compose_name("ppo_trainer", folder=None)
    assert found.values["actor_rollout_ref"]["rollout"] == {"n": 1, "temperature": 0.5, "extra": {"lr": 3}}
    assert found.origin == {}
    chosen = compose_name("ppo_trainer", folder=None, overrides=[f"rollout@{ROLLOUT}=other"])
    assert chosen.values["actor_rollout_ref"]["rollout"] == {"n": 5}
    run = f"hydra: {{searchpath: ['file://verl/trainer/config']}}\n{PLAIN}data: {{seed: 9}}\n"
    path = write(tmp_path / "recipe", main=run)
    assert compose_file(path).values["data"] == {"seed": 9}
    assert compose_file(path).origin == {"data.seed": f"in {path}"}


def test_checkout_is_found_from_inside_and_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_missing_hydra_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(lambda: compose_name("ppo_trainer", folder=None), ConfigError, "pip install 'polyturn[verl]'")
