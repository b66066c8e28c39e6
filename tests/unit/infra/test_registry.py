"""Four ways from a name to a plug-in, and the errors where one leads nowhere. Entry points have their own file."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError, MissingAttributeError, MissingModuleError, UnknownNameError
from polyturn.infra.plugins import Registry, import_attr, load_plugins
from support.refusals import refuses

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


def test_registered_name_resolves_and_wins() -> None:
    rewards: Registry[object] = Registry("rewards")

    @rewards.register("gsm8k")
    class Score:
        pass

    assert rewards.resolve("gsm8k") is Score
    assert list(rewards) == ["gsm8k"]
    assert "gsm8k" in rewards
    assert "math" not in rewards
    rewards.register("json.dumps")(len)
    assert rewards.resolve("json.dumps") is len


def test_name_is_registered_once() -> None:
    rewards: Registry[object] = Registry("rewards")
    rewards.register("a")(len)
    assert rewards.register("a")(len) is len
    refuses(lambda: rewards.register("a")(max), ConfigError, "rewards", "'a'", "len")
    assert rewards.resolve("a") is len


@pytest.mark.parametrize("name", ["json:dumps", "json.dumps"])
def test_import_path_has_a_colon_or_a_dot(name: str) -> None:
    import json

    assert Registry("rewards").resolve(name) is json.dumps
    assert import_attr("pathlib:Path.cwd") == Path.cwd


def test_file_resolves_relative_to_its_config(plugin: Path) -> None:
    score = Registry("rewards").resolve("my_rewards.py:score", base=plugin.parent)
    assert score() == 0.5
    assert import_attr(f"{plugin}:score") is score  # loaded once, also by its absolute path
    assert import_attr(f"{plugin}:Thing.Inner").__name__ == "Inner"


def test_home_of_an_unknown_user_is_an_ordinary_name() -> None:
    refuses(lambda: import_attr("~nobodyhere/x.py:score"), MissingModuleError, "~nobodyhere/x.py")
    refuses(lambda: load_plugins(["~nobodyhere/x.py"]), MissingModuleError, "~nobodyhere/x.py")


def test_class_of_a_file_can_be_pickled(plugin: Path) -> None:
    thing = import_attr(f"{plugin}:Thing")(x=3)
    assert pickle.loads(pickle.dumps(thing)) == thing


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"VALUE = {value}")
    assert [import_attr("same.py:VALUE", base=tmp_path / f) for f in "ab"] == [1, 2]


def test_file_imports_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "rew.py").write_text(
        "from beside_of_test import f\n\ndef score():\n    import later_of_test\n    return f() + later_of_test.ONE\n"
    )
    (tmp_path / "beside_of_test.py").write_text("def f(): return 0.5\n")
    (tmp_path / "later_of_test.py").write_text("ONE = 1\n")
    score = import_attr("rew.py:score", base=tmp_path)
    assert score() == 1.5
    program = "import sys; from polyturn.infra.plugins import import_attr; print(import_attr(sys.argv[1])())"
    command = [sys.executable, "-c", program, str(tmp_path / "rew.py:score")]
    run = subprocess.run(command, cwd="/", stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout == "1.5\n"


def test_hidden_file_beside_a_plugin_is_an_error(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rew.py").write_text(f"import step_{folder}_of_test\n\ndef score(): return 1\n")
        (tmp_path / folder / f"step_{folder}_of_test.py").write_text("def f():\n    import hidden_of_test\n")
        (tmp_path / folder / "hidden_of_test.py").write_text("")
    assert import_attr("rew.py:score", base=tmp_path / "a")() == 1
    hidden = [str(tmp_path / folder / "hidden_of_test.py") for folder in "ab"]
    refuses(lambda: import_attr("rew.py:score", base=tmp_path / "b"), ConfigError, "'hidden_of_test'", *hidden)


def test_unknown_name_comes_with_the_nearest() -> None:
    rewards: Registry[object] = Registry("rewards")
    rewards.register("gsm8k")(len)
    refuses(lambda: rewards.resolve("gsm8"), UnknownNameError, "rewards", "'gsm8'", "'gsm8k'")


@pytest.mark.parametrize(
    ("path", "error", "key"),
    [
        ("no_such_module:x", MissingModuleError, "'no_such_module'"),
        ("other.py:x", MissingModuleError, r"other\.py'"),
        ("broken.py:x", MissingModuleError, "line 1: ZeroDivisionError"),
        ("my_rewards.py:scores", MissingAttributeError, "'scores'.*'score'"),
        *((path, ConfigError, "package.module:Name") for path in ("", ":", "name", "module:", ":Name", "rewards.py")),
    ],
)
def test_path_that_leads_nowhere_is_an_error_of_its_kind(plugin: Path, path: str, error: type[Exception], key: str) -> None:
    (plugin.parent / "broken.py").write_text("1 / 0")
    with pytest.raises(error, match=key):
        import_attr(path, base=plugin.parent)
    with pytest.raises(error, match=f"^reward.function: .*{key}"):
        import_attr(path, base=plugin.parent, key="reward.function")


def test_hint_about_a_file_names_what_the_file_defines(tmp_path: Path) -> None:
    (tmp_path / "shop_of_test.py").write_text(
        "from __future__ import annotations\nimport time\nfrom pathlib import Path\nimport polyturn\n"
        "@polyturn.tool\ndef price() -> str:\n    'Return the price.'\n    return '3'\n"
        "def score() -> float: return 0.5\nclass Judge: pass\nTASKS = ['lamp']\n"
    )
    with pytest.raises(MissingAttributeError) as raised:
        import_attr("shop_of_test.py:zzz", base=tmp_path)
    assert str(raised.value).endswith("Known: 'Judge', 'TASKS', 'price', 'score'.")


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import polyturn\n\n@polyturn.tool\ndef population(country):\n    'Return it.'\n", "'country' is missing a type"),
        ("from polyturn.core.errors import ConfigError\n\nraise ConfigError('no table')\n", "no table"),
    ],
)
def test_wrong_definition_is_an_error_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, word: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong_of_test.py").write_text(source)
    for load in (
        lambda: import_attr("wrong_of_test.py:x", base=tmp_path),
        lambda: import_attr("wrong_of_test:x"),
        lambda: load_plugins(["wrong_of_test.py"], base=tmp_path),
    ):
        with pytest.raises(ConfigError) as raised:
            load()
        assert type(raised.value) is ConfigError
        assert word in str(raised.value)
        assert str(raised.value).count("(wrong_of_test.py, line 3)") == 1
        assert "import" not in str(raised.value)


def test_missing_package_comes_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "agent_of_test.py").write_text("import no_such_client\n")
    (tmp_path / "plugin_of_test.py").write_text("import no_such_client\n")
    for load in (
        lambda: import_attr("agent_of_test.py:agent", base=tmp_path),
        lambda: import_attr("agent_of_test:agent"),
        lambda: load_plugins(["plugin_of_test.py"], base=tmp_path),
    ):
        refuses(load, MissingModuleError, "No module named 'no_such_client'", "pip install no_such_client")
    with pytest.raises(MissingModuleError) as raised:
        import_attr("no_such_module_of_test:x")
    assert "pip install" not in str(raised.value), "it may be misspelt, or not on the path"


def test_file_that_fails_on_import_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('no model')")
    refuses(lambda: import_attr(f"{path}:x"), MissingModuleError, "RuntimeError: no model")
    path.write_text("x = 1")
    assert import_attr(f"{path}:x") == 1


def test_file_is_imported_once_for_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\n\ntime.sleep(0.05)\nx = object()\n")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(import_attr, [f"{path}:x"] * 4))
    assert len(set(map(id, found))) == 1
