"""A run that cannot go on ends with one sentence; mistakes in input are in `cli/test_wrong_commands.py`."""

from __future__ import annotations

import functools
from pathlib import Path

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from polyturn.training.checkpoint import Checkpoints
from support.runs import call_command, write_tiny_run

call = functools.partial(call_command, main)


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
    config = write_tiny_run(tmp_path)
    own = (tmp_path / "plugins.py").read_text()
    fails = own.replace('return False, "Say it again.", 0.5, {}', 'raise RuntimeError("no such room")')
    assert fails != own
    (tmp_path / "plugins.py").write_text(
        fails + "\n\nfrom polyturn.rollout.scheduler import MultiTurnScheduler\n\n\nclass Asks(MultiTurnScheduler):\n"
        "    def check_finished(self, episode, turn):\n        return None\n"
        "\n    async def step(self, episode, turn):\n        return await episode.ask_partner(turn)\n"
    )
    called = call("train", config, "rollout.scheduler=plugins.py:Asks", "train.steps=9", "evaluation.data=null")
    assert called.code == 2
    sentence = called.err.splitlines()[-1]
    assert "all 6 trajectories failed" in sentence and "no such room" in sentence
