"""Every key of verl's releases is known, and none that is misspelt, foreign or misplaced is dropped."""

from __future__ import annotations

import copy
import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from polyturn.compat.verl_config.compose import BASE, OF_VERL, compose_name
from polyturn.compat.verl_config.overrides import BACKENDS
from polyturn.compat.verl_config.table import is_of_verl, release_keys, table, wrong_kind
from polyturn.compat.verl_config.translate import translate
from polyturn.config.load import load_values
from polyturn.config.models import RunConfig
from polyturn.config.translate.tree import Composed, leaves
from polyturn.core.errors import ConfigError

pytestmark = pytest.mark.timeout(300)  # a test translates a hundred configs

RELEASES = ["0.4.1", "0.5.0", "0.6.1", "0.7.0", "0.7.1", "0.9.1"]
LAST_AND_SLOW = [RELEASES[-1], *(pytest.param(release, marks=pytest.mark.slow) for release in RELEASES[:-1])]


def keys_of(release: str) -> list[str]:
    return sorted(key for key, releases in release_keys().items() if release in releases)


@pytest.mark.parametrize("release", RELEASES)
def test_every_key_of_a_release_is_covered(release: str):
    keys = keys_of(release)
    assert len(keys) > 250
    assert [key for key in keys if not table().covers(key)] == []


def misspelt(keys: list[str], count: int, seed: int) -> dict[str, str]:
    """Return wrong keys, each with the one it was made from."""
    chance = random.Random(seed)
    wrong: dict[str, str] = {}
    candidates = [k for k in keys if len(k.rpartition(".")[2]) > 4 and not any(b in k for b in BACKENDS)]
    while len(wrong) < count:
        key = chance.choice(candidates)
        above, _, name = key.rpartition(".")
        at = chance.randrange(1, len(name) - 1)
        changed = chance.choice([name[:at] + name[at + 1 :], name[:at] + name[at] * 2 + name[at + 1 :], f"{name}_x"])
        candidate = f"{above}.{changed}" if above else changed
        if not is_of_verl(candidate) and candidate not in table().exact and not is_free(candidate):
            wrong[candidate] = key
    return wrong


def is_free(key: str) -> bool:
    """Return whether a section takes keys of its user's own."""
    row = table().find(key)
    return row is not None and (row.native or row.convert is not None or row.rejected is not None)


def a_checkout(release: str, folder: Path) -> Path:
    """Return a copy of the tree of a release, of its package where POLYTURN_VERL_WHEELS names one, else of the shipped."""
    tree = folder / OF_VERL
    wheels = os.environ.get("POLYTURN_VERL_WHEELS")
    package = None if wheels is None else next(Path(wheels).glob(f"verl-{release}-*.whl"), None)
    if package is None:
        shutil.copytree(BASE, tree)
    else:
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(OF_VERL.as_posix())])
    return tree


def outcome(tree: Composed, key: str, value: Any) -> str:
    """Return refused, told or changed; silent if a written value has neither an effect nor a notice."""
    *above, last = key.split(".")
    values = copy.deepcopy(tree.values)
    at = values
    for part in above:
        at = at.setdefault(part, {})
    at[last] = value
    try:
        made = translate(Composed(values=values, origin={**tree.origin, key: f"from the override {key}"}))
        load_values(RunConfig, made.native, origin=made.origin)
    except ConfigError:
        return "refused"
    told = any(key in notice.partition(": ")[0].split(", ") for notice in made.notices())
    return "told" if told else "silent" if made.native == translate(tree).native else "changed"


@pytest.mark.parametrize("release", LAST_AND_SLOW)
def test_no_wrong_value_is_silent(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Words, lists and mappings for keys whose values travel, and null for any key that has an effect and no null."""
    monkeypatch.chdir(tmp_path)
    tree = compose_name("ppo_trainer", folder=None, overrides=["actor_rollout_ref.model.path=m", "data.train_files=t"])
    rows = {key: table().find(key) for key in keys_of(release)}
    through = ("data.max_prompt_length", "data.max_response_length")  # the tree refers to them, and was resolved before
    travels = [k for k, row in rows.items() if row is not None and (row.to or row.means) and k not in through]
    chance = random.Random(RELEASES.index(release))
    wrong = [(key, chance.choice(["wrong", ["wrong"], {"wrong": 1}, -7.5])) for key in chance.sample(travels, 30)]
    read = {k: row for k, row in rows.items() if row is not None and not row.may_be_null}
    matters = [k for k, row in read.items() if row.to or row.means or row.rejected]
    nulls = [k for k in matters if wrong_kind(k, None)]
    wrong += [(k, None) for k in chance.sample(nulls, 12)]
    wrong += [("actor_rollout_ref.model.override_config", None), ("actor_rollout_ref.rollout.val_kwargs.do_sample", True)]
    wrong += [("actor_rollout_ref.actor.megatron.qat._target_", "wrong"), ("algorithm.rollout_is", True)]
    outcomes = {f"{key}={value}": outcome(tree, key, value) for key, value in wrong}
    assert [one for one, found in outcomes.items() if found == "silent"] == []
    assert sum(found == "refused" for found in outcomes.values()) > 12


FOREIGN = ["learning_rate", "trainer.max_steps", "loss.kind", "actor.lr", "per_device_train_batch_size", "rollout.n"]


@pytest.mark.parametrize("release", LAST_AND_SLOW)
def test_misspelt_and_foreign_keys_are_errors(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a_checkout(release, tmp_path)
    monkeypatch.chdir(tmp_path)
    wrong = misspelt(keys_of(release), 40, seed=RELEASES.index(release))
    with pytest.raises(ConfigError) as refused:
        translate(compose_name("ppo_trainer", folder=None, overrides=[f"+{key}=1" for key in (*wrong, *FOREIGN)]))
    lines = {line.partition("'")[2].partition("'")[0]: line for line in str(refused.value).splitlines()}
    assert [key for key in (*wrong, *FOREIGN) if key not in lines] == []
    assert [key for key in wrong if "Did you mean" not in lines[key] and "Known:" not in lines[key]] == []


NOWHERE = "no such key"
DIFFERING: dict[str, tuple[Any, ...]] = {
    "algorithm.old_logprobs": (NOWHERE, "trainer"),
    "engine.deterministic": (NOWHERE, False),
    "engine.num_slots": (256, 1024),
    "model.gradient_checkpointing": (NOWHERE, True, False),
    "model.template_kwargs": ({}, NOWHERE),
    "rollout.parser": ("auto", "hermes"),
    "rollout.tools.max_parallel_calls": (NOWHERE, 1),
    "rollout.tools.max_result_chars": (1_000_000, 256),
    "rollout.tools.truncate_side": ("middle", NOWHERE),
    "train.backend": (NOWHERE, "megatron"),
    "train.optim.schedule.min_lr_ratio": (0.0, NOWHERE),
    "train.optim.schedule.name": ("constant", "linear", NOWHERE),
}
"""What native keys may be where a release's default tree differs from the shipped one, whose value is the first."""


def native_defaults(name: str) -> dict[str, Any]:
    """Return the native keys that the tree of a name makes of its defaults, in the working directory."""
    said = ["actor_rollout_ref.model.path=m", "critic.model.path=m", "algorithm.adv_estimator=grpo", "data.val_files=null"]
    said += ["actor_rollout_ref.rollout.name=hf", "data.train_files=t.parquet"]
    native = translate(compose_name(name, folder=None, overrides=said)).native
    return {".".join(map(str, path)): value for path, value in leaves(native)}


@pytest.mark.parametrize("release", RELEASES if "POLYTURN_VERL_WHEELS" in os.environ else RELEASES[-1:])
def test_default_trees_of_a_release_equal_the_shipped_one(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over each release's own trees where there are packages, else over the shipped ones, Megatron's included."""
    monkeypatch.chdir(tmp_path)
    shipped = native_defaults("ppo_trainer")
    a_checkout(release, tmp_path)
    for name in ("ppo_trainer", "ppo_megatron_trainer"):
        found = native_defaults(name)
        pairs = {k: (shipped.get(k, NOWHERE), found.get(k, NOWHERE)) for k in sorted({*shipped, *found})}
        other = {k: values for k, values in pairs.items() if values[0] != values[1]}
        assert {k: v for k, v in other.items() if k not in DIFFERING or v[1] not in DIFFERING[k]} == {}
