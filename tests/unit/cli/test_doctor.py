"""`polyturn doctor` lists installed and missing parts, and how to install them."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from polyturn.cli import doctor
from polyturn.cli.project import explain


def test_environment_extras_and_servers_are_named(capsys: pytest.CaptureFixture[str]):
    doctor.main.main(["--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["torch"].startswith(metadata.version("torch"))
    assert told["transformers"] == metadata.version("transformers")
    of_libraries = {"verl"}
    assert set(doctor.FEATURES) == set(told["extras"]) - of_libraries, (
        "an extra without a feature that it is for, or the reverse"
    )
    assert told["extras"]["train"]["missing"] == []
    assert set(told["servers"]) == {"vllm", "sglang"}


def test_torch_that_is_never_imported_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def hangs(command: list[str], *, timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    doctor.main.main(["--json"], standalone_mode=False)
    assert "not imported within 120 s" in json.loads(capsys.readouterr().out)["torch"]


def test_missing_package_comes_with_its_install_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    real = metadata.version

    def version(package: str) -> str:
        if package in ("duckdb", "torch"):
            raise metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("COLUMNS", "200")
    doctor.main.main([], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "missing duckdb: pip install 'polyturn[view]'" in shown
    assert "not installed: pip install 'polyturn[train]'" in shown
    for feature in ("launching vLLM servers", "launching SGLang servers", "evaluating models behind an endpoint"):
        assert feature in shown


@pytest.mark.parametrize("architectures", [[], "Qwen2ForCausalLM", None, 3, {}])
def test_model_without_a_list_of_architectures_is_described(architectures: Any, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"architectures": architectures, "num_hidden_layers": 2}))
    (tmp_path / "config.yaml").write_text("model: {path: model}\n")
    parts = {name: (text, is_right) for name, text, is_right in explain(tmp_path)}
    assert parts["model"] == (f"a model in {tmp_path}/model: 2 layers of None", True)


@pytest.mark.parametrize("content", [b'{"num_hidden', b"[]", b"3", b"\xff"])
def test_damaged_config_of_a_model_is_a_problem(content: bytes, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_bytes(content)
    (tmp_path / "config.yaml").write_text("model: {path: model}\n")
    parts = {name: (text, is_right) for name, text, is_right in explain(tmp_path)}
    text, is_right = parts["model"]
    assert not is_right and "config.json" in text and "training" in parts
