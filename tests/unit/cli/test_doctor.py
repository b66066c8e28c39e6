"""`polyturn doctor` names what is here, what is missing, and what to install for it."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from polyturn.cli import doctor


def test_the_environment_and_every_extra_are_named(capsys: pytest.CaptureFixture[str]):
    doctor.run(as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["torch"].startswith(metadata.version("torch"))
    assert told["transformers"] == metadata.version("transformers")
    of_libraries = {"verl"}
    assert set(doctor.FEATURES) == set(told["extras"]) - of_libraries, (
        "an extra without a feature that it is for, or the reverse"
    )
    assert told["extras"]["train"]["missing"] == []


def test_what_is_missing_comes_with_the_command_that_brings_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    real = metadata.version

    def version(package: str) -> str:
        if package in ("duckdb", "torch"):
            raise metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("COLUMNS", "200")
    doctor.run(as_json=False)
    shown = capsys.readouterr().out
    assert "missing duckdb: pip install 'polyturn[view]'" in shown
    assert "not installed: pip install 'polyturn[train]'" in shown


def test_servers_that_live_in_another_environment_are_named_with_what_to_set(capsys: pytest.CaptureFixture[str]):
    doctor.run(as_json=False)
    shown = capsys.readouterr().out
    assert "launching vLLM servers" in shown and "launching SGLang servers" in shown
    assert "evaluating models behind an endpoint" in shown
    doctor.run(as_json=True)
    assert set(json.loads(capsys.readouterr().out)["servers"]) == {"vllm", "sglang"}
