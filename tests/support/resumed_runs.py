"""Runs that are interrupted at a step of their own choice and resumed, compared with a run that was never stopped.

    config = write_interrupted_run(tmp_path, signal.SIGTERM, after=3)      the run sends itself the signal behind step 3
    call_command(main, "train", config, *SETTINGS)                         143; a checkpoint of step 3 or later is there
    check_equal_runs(run, whole)                                           once it was resumed: equal to the bit

The signal comes from the reward of the run itself, so that no test has to be quicker than the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from polyturn.store.stored_run import open_store
from polyturn.training.checkpoint import Checkpoints
from support.runs import write_tiny_run
from support.states import tensors_in

STEPS = 8
SETTINGS = (
    *(f"train.steps={STEPS}", "train.checkpoint_every=2", "train.keep_checkpoints=3", "engine.deterministic=true"),
    *("evaluation.every=3", "rollout.sanity_every=1", "warm_start.steps=2"),
)
SIGNALLING = '''

import os
import time
from pathlib import Path

HERE = Path(__file__).parent
unsignalled_score = score


def score(trajectory):
    """Score; once `AFTER` steps are trained, wait while there is a file `hold` and send this process its signal, once."""
    metrics = HERE / "runs" / "tiny" / "metrics.jsonl"
    if metrics.is_file() and metrics.read_text().count('"rollout/turns"') >= AFTER:
        (HERE / "reached").touch()
        while (HERE / "hold").exists():
            time.sleep(0.02)
        try:
            os.rename(HERE / "signal", HERE / "signalled")  # rewards are scored in threads: one of them sends it
        except FileNotFoundError:
            pass
        else:
            os.kill(os.getpid(), int((HERE / "signalled").read_text()))
    return unsignalled_score(trajectory)
'''
VARYING = ("time/", "system/", "rollout/state_", "engine/queue", "engine/kv_use", "tokens/prefilled")
"""Metrics that depend on the clock, or on what the KV cache still held."""
RESUMED = ("rollout/resumed_episodes", "rollout/restarted_episodes")


def write_interrupted_run(folder: Path, number: int | None, *, after: int = 3) -> Path:
    """Write the tiny run; behind step `after` it sends itself signal `number`. Return its config."""
    config = write_tiny_run(folder)
    with (folder / "plugins.py").open("a") as plugins:
        plugins.write(SIGNALLING.replace("AFTER", str(after)))
    if number is not None:
        (folder / "signal").write_text(str(int(number)))
    return config


def training_lines(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps of a run, without a last line that was cut."""
    lines = []
    for text in (run / "metrics.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the process was killed while it wrote it
            continue
    return [line for line in lines if "rollout/turns" in line]


def reproducible(line: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that are equal in two runs of the same seed."""
    return {k: v for k, v in line.items() if not k.startswith((*VARYING, *RESUMED)) and not k.endswith("time_s")}


def latest_checkpoint(run: Path) -> Path:
    latest = Checkpoints(run / "checkpoints").latest()
    assert latest is not None
    return latest


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the latest checkpoint."""
    return dict(tensors_in(latest_checkpoint(run) / "policy", "model/"))


def check_equal_weights(run: Path, whole: Path) -> None:
    weights, expected = weights_of(run), weights_of(whole)
    different = [name for name in expected if not torch.equal(weights[name], expected[name])]
    assert not different, "the weights are equal to the bit"


def check_equal_runs(run: Path, whole: Path) -> None:
    """Check that a resumed run has the same steps, metrics, trajectories and weights as one that was never stopped."""
    steps, expected = training_lines(run), training_lines(whole)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1)), "each step once"
    for line, other in zip(map(reproducible, steps), map(reproducible, expected), strict=True):
        assert line == other, f"step {line['step']}"
    recorded, others = ({(r["split"], r["step"], r["id"]) for r in open_store(f).table().to_pylist()} for f in (run, whole))
    assert recorded == others, "every trajectory is recorded"
    check_equal_weights(run, whole)
