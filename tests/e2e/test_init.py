"""`polyturn init` writes a project whose tests pass, whose model trains, and which `polyturn doctor` can explain."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from polyturn.cli.init import KINDS, files
from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from support.cases import each
from support.forked import Forked
from support.runs import call_command


def begun(folder: Path, kind: str) -> Path:
    called = call_command(main, "init", folder, "--kind", kind)
    assert called.code == 0, called.err
    assert f"\nNow: cd {shlex.quote(str(folder))} && " in called.out
    return folder


@pytest.mark.slow
def test_printed_commands_work_in_a_folder_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    printed = call_command(main, "init", "my first", "--kind", "tool").out.rpartition("Now: ")[2].strip()
    assert printed.endswith("polyturn train config.yaml")
    quick = printed.replace("pytest", "pytest --version") + " --help"
    done = subprocess.run(["sh", "-c", quick], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "train" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_project_passes_its_own_tests(kind: str, tmp_path: Path):
    folder = begun(tmp_path / f"my_{kind}", kind)
    done = Forked("-q", "-p", "no:cacheprovider", "--rootdir", folder, folder, cwd=folder, call="pytest:console_main")
    assert done.wait(600) == 0, done.out[-3000:] + done.err[-2000:]


@pytest.mark.parametrize("kind", each(len(KINDS), KINDS))
def test_doctor_explains_a_project(kind: str, tmp_path: Path):
    folder = begun(tmp_path / "mine", kind)
    called = call_command(main, "doctor", folder)
    assert called.code == 0 and "PROBLEM" not in called.out, called.out
    told = " ".join(called.out.split())
    for part in ("Qwen3ForCausalLM", "30 steps of 4 tasks x 8 episodes", "run them with pytest"):
        assert part in told
    planned = call_command(main, "train", folder / "config.yaml", "--dry-run")
    assert planned.code == 0 and "to train on" in planned.out, planned.err


@pytest.mark.parametrize(
    ("kind", "model", "line"),
    [
        ("env", "smollm2", "model: {path: smollm2}"),
        ("tool", "smollm2", "model: {path: smollm2, chat_template: hermes}"),
        ("interaction", "Qwen/Qwen3-0.6B", "model: {path: Qwen/Qwen3-0.6B}"),
    ],
)
def test_trained_model_in_place_of_random_weights(kind: str, model: str, line: str, tmp_path: Path):
    called = call_command(main, "init", tmp_path / "mine", "--kind", kind, "--model", model)
    assert called.code == 0 and not (tmp_path / "mine" / "model").exists(), called.err
    config = (tmp_path / "mine" / "config.yaml").read_text()
    assert line in config.splitlines() and "lr: 1.0e-5" in config
    shows_calls = (tmp_path / "mine" / "demonstrations.jsonl").exists()
    assert shows_calls == ("conversations: demonstrations.jsonl" in config) == (kind == "tool")


def test_folder_of_a_model_is_found_from_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    begun(tmp_path / "first", "env")
    called = call_command(main, "init", "second", "--kind", "env", "--model", "first/model")
    assert called.code == 0, called.err
    called = call_command(main, "doctor", tmp_path / "second")
    assert called.code == 0 and "Qwen3ForCausalLM" in called.out, called.out


@pytest.mark.parametrize("name", ["plain-1", "my first", "2024", "1e5", "no", "2024-01-01", "a: b", "#1", "it's 😀"])
def test_any_folder_name_is_the_name_of_the_run(name: str, tmp_path: Path):
    for file, text in files(name, kind="env", model=f"/models/{name}"):
        (tmp_path / file).write_text(text, encoding="utf-8")
    config = load_config(RunConfig, tmp_path / "config.yaml", ()).config
    assert (config.name, config.model.path) == (name, f"/models/{name}")
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert ["polyturn", "view", f"runs/{name}"] in map(shlex.split, readme.partition("```")[2].splitlines()[:6])


def test_doctor_names_every_problem(tmp_path: Path):
    folder = begun(tmp_path / "mine", "tool")
    (folder / "shop.py").write_text("PRICES = {}\n")
    (folder / "tasks.jsonl").unlink()
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("path: model", "path: ./modle"))
    called = call_command(main, "doctor", folder)
    assert called.code == 1
    told = " ".join(called.out.split())
    for problem in ("modle", "price", "tasks.jsonl"):
        assert problem in told
    assert told.count("PROBLEM") == 3


def test_init_overwrites_nothing_and_suggests_a_kind(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    called = call_command(main, "init", tmp_path)
    assert called.code == 2 and "already exists" in called.err
    called = call_command(main, "init", tmp_path / "new", "--kind", "tools")
    assert called.code == 2 and "Did you mean 'tool'" in called.err and not (tmp_path / "new").exists()
