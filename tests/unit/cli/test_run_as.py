"""`polyturn run-as verl`: the environment it makes, and the command line that Hydra programs have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.cli.run_as import SHIMS, runtime_env, variables
from polyturn.cli.verl import parse_arguments
from polyturn.core.errors import ConfigError
from polyturn.testing.runs import call_command


def test_the_shim_goes_before_whatever_is_on_the_path_and_the_working_directory_to_its_end():
    here = str(Path.cwd())
    assert variables("verl", {"PYTHONPATH": "/mine"})["PYTHONPATH"].split(os.pathsep) == [str(SHIMS), "/mine", here]
    assert variables("verl", {}) == {"PYTHONPATH": f"{SHIMS}{os.pathsep}{here}", "PYTHONSAFEPATH": "1"}


def test_the_same_as_a_runtime_environment_of_ray():
    assert runtime_env("verl", {}) == {"env_vars": variables("verl", {})}
    called = call_command(main, "run-as", "verl", "--runtime-env")
    assert called.code == 0 and str(SHIMS) in json.loads(called.out)["env_vars"]["PYTHONPATH"]


def test_what_cannot_be_run_is_one_sentence():
    unknown = call_command(main, "run-as", "verll", "--", "python")
    assert unknown.code == 2 and "Did you mean 'verl'" in unknown.err
    assert "there is no command" in call_command(main, "run-as", "verl").err
    missing = call_command(main, "run-as", "verl", "--", "no-such-program")
    assert missing.code == 2 and "'no-such-program' is not found" in missing.err


def test_a_command_and_its_children_find_verl_and_keep_their_exit_code(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from verl.interactions.base import BaseInteraction\nprint(BaseInteraction.__module__)\n"
    )
    code = "import subprocess, sys; sys.exit(7 * (subprocess.run([sys.executable, 'own.py']).returncode == 0))"
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('a checkout in the working directory')\n")
    polyturn = ["-c", "from polyturn.cli.main import main; main()"]
    command = [sys.executable, *polyturn, "run-as", "verl", "--", "python", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.strip() == "polyturn.interactions.base"


def test_a_mistake_in_the_config_is_one_sentence_of_the_program(tmp_path: Path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "data.train_batch_sise=3"]
    environment = {**os.environ, **variables("verl", {})}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60, check=False)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "Did you mean 'data.train_batch_size'" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "folder", "name"),
    [
        (["--config-path=/c", "--config-name=run"], Path("/c"), "run"),
        (["--config-path", "/c", "--config-name", "run"], Path("/c"), "run"),
        (["-cp", "/c", "-cn", "run"], Path("/c"), "run"),
        (["--config-dir=/c", "--config-name=run.yaml"], Path("/c"), "run.yaml"),
        ([], None, "ppo_trainer"),
    ],
)
def test_hydras_options_are_read(arguments: list[str], folder: Path | None, name: str):
    assert parse_arguments([*arguments, "a.b=c=d", "~e"]) == (folder, name, ["a.b=c=d", "~e"])


@pytest.mark.parametrize("arguments", [["--multirun"], ["--cfg", "job"], ["--config-name"]])
def test_other_options_are_refused(arguments: list[str]):
    with pytest.raises(ConfigError, match=r"not available here|needs a value"):
        parse_arguments(arguments)
