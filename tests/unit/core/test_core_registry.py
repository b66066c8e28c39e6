"""Four ways from a name to a plug-in, and what each says when it leads nowhere."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError, MissingAttributeError, MissingModuleError, UnknownNameError
from polyturn.core.registry import Registry, import_attr

PLUGIN = """
from dataclasses import dataclass

@dataclass
class Thing:
    x: int = 1

    class Inner:
        pass

def score(): return 0.5
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(PLUGIN)
    return path


def test_a_registered_name_resolves_and_is_listed() -> None:
    rewards: Registry[object] = Registry("rewards")

    @rewards.register("gsm8k")
    class Score:
        pass

    assert rewards.resolve("gsm8k") is Score
    assert list(rewards) == ["gsm8k"]
    assert "gsm8k" in rewards
    assert "math" not in rewards


def test_a_name_is_registered_once_but_the_same_thing_may_come_again() -> None:
    rewards: Registry[object] = Registry("rewards")
    rewards.register("a")(len)
    assert rewards.register("a")(len) is len
    with pytest.raises(ConfigError, match=r"rewards: the name 'a' is registered already, as <built-in function len>"):
        rewards.register("a")(max)
    assert rewards.resolve("a") is len


def test_a_registered_name_wins_over_an_import_path() -> None:
    rewards: Registry[object] = Registry("rewards")
    rewards.register("json.dumps")(len)
    assert rewards.resolve("json.dumps") is len


@pytest.mark.parametrize("name", ["json:dumps", "json.dumps"])
def test_an_importable_module_resolves_with_a_colon_or_a_dot(name: str) -> None:
    import json

    assert Registry("rewards").resolve(name) is json.dumps


def test_an_attribute_of_a_class_resolves() -> None:
    assert import_attr("pathlib:Path.cwd") == Path.cwd


def test_a_file_resolves_relative_to_the_folder_of_its_config(plugin: Path) -> None:
    score = Registry("rewards").resolve("my_rewards.py:score", base=plugin.parent)
    assert score() == 0.5
    assert import_attr(f"{plugin}:score") is score  # loaded once, also by its absolute path
    assert import_attr(f"{plugin}:Thing.Inner").__name__ == "Inner"


def test_what_a_file_defines_can_be_pickled(plugin: Path) -> None:
    thing = import_attr(f"{plugin}:Thing")(x=3)
    assert pickle.loads(pickle.dumps(thing)) == thing


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"VALUE = {value}")
    assert [import_attr("same.py:VALUE", base=tmp_path / f) for f in "ab"] == [1, 2]


def test_an_entry_point_of_the_kind_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "some_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polyturn.rewards]\nlength = some_package_rewards:length\n")
    (tmp_path / "some_package_rewards.py").write_text("def length(): return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert Registry("rewards").resolve("length")() == 7
    with pytest.raises(UnknownNameError, match="Did you mean 'length'"):
        Registry("rewards").resolve("lenght")
    with pytest.raises(UnknownNameError, match="tools: there is no 'length'"):
        Registry("tools").resolve("length")


def test_an_unknown_name_comes_with_the_nearest_known() -> None:
    rewards: Registry[object] = Registry("rewards")
    rewards.register("gsm8k")(len)
    with pytest.raises(UnknownNameError, match=r"^rewards: there is no 'gsm8'\. Did you mean 'gsm8k'\?$"):
        rewards.resolve("gsm8")
    with pytest.raises(LookupError):
        rewards.resolve("gsm8")


def test_a_missing_module_a_missing_file_and_a_missing_attribute_are_told_apart(plugin: Path) -> None:
    with pytest.raises(MissingModuleError, match=r"the module 'no_such_module' cannot be imported .* PYTHONPATH"):
        import_attr("no_such_module:x")
    with pytest.raises(MissingModuleError, match=r"there is no file '.*other\.py'"):
        import_attr("other.py:x", base=plugin.parent)
    with pytest.raises(MissingAttributeError, match=r"has no attribute 'scores'\. Did you mean 'score'\?"):
        import_attr("my_rewards.py:scores", base=plugin.parent)


@pytest.mark.parametrize("path", ["", ":", "name", "module:", ":Name", "rewards.py"])
def test_what_is_no_import_path_is_refused_with_the_form_it_needs(path: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as 'package.module:Name' or 'file.py:Name'"):
        import_attr(path)


def test_a_file_that_fails_when_imported_says_why_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('no model')")
    with pytest.raises(MissingModuleError, match=r"broken\.py' fails when imported, at line 1: RuntimeError: no model"):
        import_attr(f"{path}:x")
    path.write_text("x = 1")
    assert import_attr(f"{path}:x") == 1


def test_a_module_that_fails_when_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "polyturn_test_broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingModuleError, match="ZeroDivisionError: division by zero"):
        import_attr("polyturn_test_broken_module:x")


def test_a_file_that_threads_ask_for_at_once_is_imported_once(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\n\ntime.sleep(0.05)\nx = object()\n")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(import_attr, [f"{path}:x"] * 4))
    assert len(set(map(id, found))) == 1
