"""Code from a model's repository is never run: every loader of transformers gets `trust_remote_code=False`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polyturn

SRC = Path(polyturn.__file__).parent
LOADERS = ("from_pretrained", "from_config")


def loading_calls() -> list[tuple[str, ast.Call]]:
    """Return every call of a loader in the library, with its position."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not any(name in source for name in LOADERS):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
                found.append((f"{path.relative_to(SRC)}:{node.lineno}", node))
    return found


def test_every_loader_runs_no_remote_code() -> None:
    calls = loading_calls()
    assert len(calls) >= 5
    without = [
        where
        for where, call in calls
        if not any(k.arg == "trust_remote_code" and ast.unparse(k.value) == "False" for k in call.keywords)
    ]
    assert not without


def test_repository_with_code_is_refused_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyturn.core.errors import ConfigError
    from polyturn.training.hf import load_model

    (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "code.C"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    with pytest.raises(ConfigError):
        load_model(tmp_path)
