"""The folder of a run stands for its configuration: its relative paths still start where those of the original file do."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.cli.main import main
from support.runs import call_command, write_tiny_run


def test_run_resumes_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    called = call_command(main, "train", write_tiny_run(tmp_path / "project"), "train.steps=1")
    assert called.code == 0, called.err
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    monkeypatch.chdir(tmp_path)  # none of the paths of the config is found from here, or from the run's folder
    for steps, named in ((2, run), (3, run / "config.yaml")):
        again = call_command(main, "train", named, "--resume", f"train.steps={steps}")
        assert again.code == 0, again.err
        assert (run / f"checkpoints/step-{steps:06d}").is_dir()


def test_refused_resume_changes_nothing_of_the_run(tmp_path: Path) -> None:
    called = call_command(main, "train", write_tiny_run(tmp_path), "train.steps=1")
    assert called.code == 0, called.err
    (run,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    stored = (run / "config.yaml").read_text()
    marked = run / "tokenizer" / "tokenizer_config.json"
    marked.write_text("as it was")
    refused = call_command(main, "train", run, "--resume", "train.steps=2", "model.lora.rank=2")
    assert refused.code == 2 and "is of another model" in refused.err
    assert (run / "config.yaml").read_text() == stored and marked.read_text() == "as it was"


def test_folder_without_a_run_is_not_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: of a person\n")
    called = call_command(main, "train", tmp_path)
    assert called.code != 0 and "is a folder, not a config file" in called.err
    assert str(tmp_path / "config.yaml") in called.err
