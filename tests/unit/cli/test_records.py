"""The files of `polyturn train` with dumps, repeated evaluation and verl's metric names."""

from __future__ import annotations

import json
from pathlib import Path

from polyturn.cli.main import main
from polyturn.tracking.jsonl import read_metrics
from support.runs import call_command, write_tiny_run


def test_dumps_and_repeated_evaluation(tmp_path: Path) -> None:
    called = call_command(
        main,
        "train",
        write_tiny_run(tmp_path),
        "train.steps=1",
        f"dump={{train: {tmp_path / 'rollouts'}, evaluation: {tmp_path / 'validation'}}}",
        "evaluation.sets={sampled: {sampling: {temperature: 1}, samples: 2}}",
        "compat.validation_metrics=true",
    )
    assert called.code == 0, called.err
    before, after = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    for line in (before, after):
        assert line["val-core/tiny/reward/mean@2"] == line["eval/sampled/tiny/reward/mean@2"]
        assert 2 <= line["val-aux/num_turns/mean"] <= 5
    (train,) = (tmp_path / "rollouts").iterdir()
    lines = [json.loads(text) for text in train.read_text().splitlines()]
    assert train.name == "1.jsonl" and len(lines) == 6
    assert {m["role"] for m in lines[0]["messages"]} == {"user", "assistant"}
    assert sorted(p.name for p in (tmp_path / "validation").iterdir()) == ["0.jsonl", "1.jsonl"]
