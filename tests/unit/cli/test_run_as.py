"""`polyturn run-as verl`: the environment it makes, and the command line that Hydra programs have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyturn.cli.main import main
from polyturn.cli.run_as import find_stand_in, run, runtime_env, variables
from polyturn.compat.verl_config.command import parse_arguments
from polyturn.core.errors import ConfigError
from support.cases import each
from support.runs import call_command

pytestmark = pytest.mark.timeout(300)  # each case starts interpreters, some of which import torch
SHIMS = find_stand_in("verl").shims


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def test_shim_goes_before_the_path():
    made = {"PYTHONPATH": f"{SHIMS}{os.pathsep}/mine", "POLYTURN_RUN_AS": "verl"}
    assert variables("verl", {"PYTHONPATH": "/mine"}) == made
    assert variables("verl", {}) == {"PYTHONPATH": str(SHIMS), "POLYTURN_RUN_AS": "verl"}
    assert variables("verl", {"POLYTURN_RUN_AS": "swift"})["POLYTURN_RUN_AS"] == "verl,swift"


def run_as_verl(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder with polyturn in verl's place, as the process that `run-as` becomes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        became: list[Any] = []
        patch.setattr("os.execve", lambda *process: became.extend(process))
        run("verl", command)
    program, arguments, environment = became
    return run_process(program, *arguments[1:], folder=folder, environment=environment)


def programs_of_run_as(patch: pytest.MonkeyPatch) -> Path:
    """Return the first folder of the PATH that a command gets."""
    environments: list[Mapping[str, str]] = []
    patch.setattr("os.execve", lambda program, arguments, environment: environments.append(environment))
    run("verl", ["python"])
    return Path(environments[0]["PATH"].partition(os.pathsep)[0])


def test_commands_share_one_folder_of_programs(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = (programs_of_run_as(monkeypatch) for _ in range(2))
    assert first == second and first.is_relative_to(cache) and not list(tmp_path.iterdir())
    assert {file.name for file in first.iterdir()} >= {"python", "python3"}
    assert all(os.access(file, os.X_OK) and not file.name.startswith(".") for file in first.iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert programs_of_run_as(monkeypatch).parent == tmp_path, "without a cache that can be written"


def run_process(
    *command: str, folder: Path, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def make_checkout(folder: Path) -> Path:
    """Write a checkout of verl, whose modules must not be imported."""
    for name in ("", "tools/", "utils/"):
        (folder / "verl" / name).mkdir(parents=True, exist_ok=True)
        (folder / "verl" / name / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    for name in ("tools/base_tool.py", "utils/megatron_utils.py"):
        (folder / "verl" / name).write_text("raise RuntimeError('not this one')\n")
    return folder


@pytest.mark.parametrize("first", each(3, ["", ".", "{checkout}"]))
def test_checkout_first_on_the_path_gives_way(tmp_path: Path, first: str):
    """Programs put it there themselves: a script in its root, pytest for a folder of tests, `sys.path.insert`."""
    checkout = make_checkout(tmp_path)
    (checkout / "main.py").write_text(
        f"import sys; sys.path.insert(0, {first.format(checkout=checkout)!r})\n"
        "from verl.tools.base_tool import BaseTool\nprint(BaseTool.__module__)\n"
    )
    ended = run_as_verl(checkout, "python", str(checkout / "main.py"))
    assert ended.stdout.strip() == "polyturn.compat.verl.base_tool", ended.stderr


@pytest.mark.parametrize("line", ["PYTHONPATH=. python3", "env -u PYTHONPATH python"])
def test_own_pythonpath_of_a_script_keeps_ours(tmp_path: Path, line: str):
    asks = "from verl.tools.base_tool import BaseTool; print(BaseTool.__module__)"
    ended = run_as_verl(make_checkout(tmp_path / "my verl"), "bash", "-c", f'{line} -c "$0" a', asks)
    assert ended.stdout.strip() == "polyturn.compat.verl.base_tool", ended.stderr


def test_missing_module_is_never_taken_from_a_checkout(tmp_path: Path):
    ended = run_as_verl(make_checkout(tmp_path), "python", "-c", "import verl.utils.megatron_utils")
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: No module named 'verl.utils.megatron_utils': polyturn, which stands in for verl"
    )
    assert "verl.utils has " in last and "hdfs_io" in last


def test_own_sitecustomize_still_runs(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = __file__\n")
    ended = run_as_verl(tmp_path, "python", "-c", "import os; print(os.environ['THEIRS'])", PYTHONPATH=str(tmp_path))
    assert ended.stdout.strip() == str(tmp_path / "sitecustomize.py"), ended.stderr


def test_runtime_environment_of_ray_is_the_same():
    assert runtime_env("verl", {}) == {"env_vars": variables("verl", {})}
    called = call_command(main, "run-as", "verl", "--runtime-env")
    assert called.code == 0 and str(SHIMS) in json.loads(called.out)["env_vars"]["PYTHONPATH"]


def test_unknown_command_is_one_sentence():
    unknown = call_command(main, "run-as", "verll", "--", "python")
    assert unknown.code == 2 and "Did you mean 'verl'" in unknown.err
    assert "there is no command" in call_command(main, "run-as", "verl").err
    missing = call_command(main, "run-as", "verl", "--", "no-such-program")
    assert missing.code == 2 and "'no-such-program' is not found" in missing.err


def test_script_without_a_program_is_one_sentence(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text("echo hi\n")
    script.chmod(0o700)
    called = call_command(main, "run-as", "verl", "--", script)
    assert called.code == 2 and f"run-as verl -- bash {script}" in called.err


@pytest.mark.parametrize("is_checkout", [False, True])
def test_children_find_verl_and_keep_their_exit_code(tmp_path: Path, is_checkout: bool):
    (tmp_path / "own.py").write_text(
        "from verl.interactions.base import BaseInteraction\nprint(BaseInteraction.__module__)\n"
    )
    if is_checkout:
        (tmp_path / "verl").mkdir()
        (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    code = "import subprocess, sys; sys.exit(7 * (subprocess.run([sys.executable, '-m', 'own']).returncode == 0))"
    if is_checkout:
        ended = run_as_verl(tmp_path, "python", "-c", code)
    else:
        polyturn = [sys.executable, "-c", "from polyturn.cli.main import main; main()"]
        ended = run_process(*polyturn, "run-as", "verl", "--", "python", "-c", code, folder=tmp_path)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.strip() == "polyturn.interactions.base"


def test_own_classes_are_found_in_the_working_directory(tmp_path: Path):
    """As with `python -m`; here for the first task of a project that only has a class."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "talk.py").write_text("from verl.interactions.base import BaseInteraction as Talk\n")
    code = "from polyturn.cli.run_as import find_like; find_like('verl'); import project.talk as t; print(t.Talk.__module__)"
    ended = run_process(sys.executable, "-P", "-c", code, folder=tmp_path)
    assert ended.stdout.strip() == "polyturn.interactions.base", ended.stderr


def test_own_modules_in_a_checkout_are_found(tmp_path: Path):
    tools = make_checkout(tmp_path) / "verl" / "tools"
    (tools / "mine.py").write_text("from verl.tools.base_tool import BaseTool\n\n\nclass Mine(BaseTool):\n    pass\n")
    code = "from verl.tools.mine import Mine; print(Mine.__module__, Mine.__base__.__module__)"
    ended = run_as_verl(tmp_path, "python", "-c", code)
    assert ended.stdout.split() == ["verl.tools.mine", "polyturn.compat.verl.base_tool"], ended.stderr


def test_mistake_in_the_config_is_one_sentence(tmp_path: Path):
    ended = run_as_verl(tmp_path, "python", "-m", "verl.trainer.main_ppo", "data.train_batch_sise=3")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "Did you mean 'data.train_batch_size'" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "folder", "name"),
    [
        (["--config-path=/c", "--config-name=run"], Path("/c"), "run"),
        (["--config-path", "/c", "--config-name", "run"], Path("/c"), "run"),
        (["-cp", "/c", "-cn", "run"], Path("/c"), "run"),
        (["--config-dir=/", "--config-name=run.yaml"], None, "run.yaml"),
        ([], None, "ppo_trainer"),
    ],
)
def test_options_of_hydra_are_read(arguments: list[str], folder: Path | None, name: str):
    asked = parse_arguments([*arguments, "a.b=c=d", "~e"])
    assert (asked.folder, asked.name, asked.overrides) == (folder, name, ["a.b=c=d", "~e"])


@pytest.mark.parametrize("arguments", [["--multirun"], ["--cfg", "job"], ["--config-name"]])
def test_other_options_are_refused(arguments: list[str]):
    with pytest.raises(ConfigError, match=r"not available here|needs a value"):
        parse_arguments(arguments)
