"""Bad input is one line on stderr with the offending key and value, before anything is trained.

One case for each place that is checked; the keys of the configuration have tests of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from polyturn.training.checkpoint import Checkpoints
from support.runs import call_command, write_tiny_run

call = functools.partial(call_command, main)


def row(folder: Path, **changes: Any) -> None:
    """Change the second row of the tasks; None takes a key out."""
    path = folder / "tasks.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] = {key: value for key, value in {**rows[1], **changes}.items() if value is not None}
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def text(folder: Path, old: str, new: str, file: str = "config.yaml") -> None:
    path = folder / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def file(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that is wrong."""

    name: str
    says: Sequence[str]
    """Words of the sentence: the thing, its value, what to do."""
    change: Callable[[Path], None] = lambda folder: None
    arguments: Sequence[str] = ()


CASES = [
    Case(
        "an unknown key in the file",
        ["'train.group_sise'", "4", "config.yaml", "'train.group_size'"],
        lambda f: text(f, "  group_size: 3", "  group_sise: 4"),
    ),
    Case("a missing data file", ["task.jsonl", "'tasks.jsonl'"], arguments=["data.train.files=task.jsonl"]),
    Case(
        "an unknown tool in a row",
        ["'mouse-1'", "'shoot'", "'shout'"],
        lambda f: row(f, extra_info={"need_tools_kwargs": True, "tools_kwargs": {"shoot": {"create_kwargs": {}}}}),
    ),
    Case(
        "a class that is not in its file",
        ["plugins.py", "'Couch'", "'Coach'"],
        lambda f: text(f, "plugins.py:Coach", "plugins.py:Couch"),
    ),
    Case(
        "a prompt longer than the context",
        ["'mouse-1'", "447"],
        lambda f: row(f, prompt=[{"role": "user", "content": "How loud is it? " * 80}]),
    ),
    Case(
        "a bad task of the evaluation",
        ["'tinny'", "'tiny'"],
        lambda f: file(f, "held_out.jsonl", json.dumps({"prompt": "How loud?", "data_source": "tinny"}) + "\n"),
        ["evaluation.data={files: held_out.jsonl}"],
    ),
]


def check_one_sentence(err: str, says: Sequence[str]) -> None:
    shown = [line for line in err.splitlines() if line.strip() and not line.startswith("tiny: checking the configuration")]
    assert len(shown) == 1, err
    assert shown[0].startswith("polyturn: ") and "Traceback" not in err
    missing = [words for words in says if words not in shown[0]]
    assert not missing, f"{missing} not in {shown[0]!r}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_named_before_any_training(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def too_late(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("training time was spent before the problem was found")

    monkeypatch.setattr("polyturn.api.warm_starting.run_sft", too_late)
    monkeypatch.setattr("polyturn.training.loop.Trainer.run", too_late)
    config = write_tiny_run(tmp_path)
    case.change(tmp_path)
    called = call("train", config, *case.arguments)
    assert called.code == 2, called
    check_one_sentence(called.err, case.says)
    assert not (tmp_path / "runs").exists()


def test_loss_that_is_not_finite_leaves_a_checkpoint(tmp_path: Path):
    config = write_tiny_run(tmp_path)
    with (tmp_path / "plugins.py").open("a") as plugins:
        plugins.write(
            "\n\nCALLS = []\n\n\ndef broken(logprobs_T, old_logprobs_T, advantages_T):\n"
            "    from polyturn.algorithms.losses import TokenLoss\n\n    CALLS.append(1)\n"
            "    return TokenLoss(logprobs_T * (float('nan') if len(CALLS) > 3 else -1.0), {})\n"
        )
    skips = "train.optim.max_skipped=1"
    called = call("train", config, "train.steps=6", skips, "algorithm.loss=plugins.py:broken")
    assert called.code == 2
    sentence = called.err.splitlines()[-1]
    assert sentence.startswith("polyturn: ") and "nan" in sentence and "Traceback" not in called.err
    run = tmp_path / "runs" / "tiny"
    latest = Checkpoints(run / "checkpoints").latest()
    assert latest is not None and latest.name == "step-000003", "one step was skipped, the next one ended the run"
    assert len(list(open_store(run).trajectories(split="train"))) == 24, "also of the failed step"
    again = call("train", config, "train.steps=4", "--resume")
    assert again.code == 0, again.err


def test_failing_interaction_ends_the_run_with_its_reason(tmp_path: Path):
    """An interaction that always raises ends the run with its reasons."""
    config = write_tiny_run(tmp_path)
    text(tmp_path, 'return False, "Say it again.", 0.5, {}', 'raise RuntimeError("no such room")', "plugins.py")
    with (tmp_path / "plugins.py").open("a") as plugins:
        plugins.write(
            "\n\nfrom polyturn.rollout.scheduler import MultiTurnScheduler\n\n\nclass Asks(MultiTurnScheduler):\n"
            "    def check_finished(self, episode, turn):\n        return None\n"
            "\n    async def step(self, episode, turn):\n        return await episode.ask_partner(turn)\n"
        )
    called = call("train", config, "rollout.scheduler=plugins.py:Asks", "train.steps=9", "evaluation.data=null")
    assert called.code == 2
    sentence = called.err.splitlines()[-1]
    assert "all 6 trajectories failed" in sentence and "no such room" in sentence
