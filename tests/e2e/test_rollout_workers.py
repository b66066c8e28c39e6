"""`cluster.workers.count` without a cluster: episodes run in processes of this machine, over the trainer's own engine."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from cluster_run import metrics_of, write_run

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from support.ray_processes import wait_until
from support.runs import SEVERAL_TURNS, call_command

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def calls_of(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "calls.log").read_text().split()]


def train(folder: Path, *settings: str, count: int = 2):
    arguments = ["warm_start.steps=0", *SEVERAL_TURNS, *settings, f"cluster.workers.count={count}"]
    return call_command(main, "train", write_run(folder), *arguments)


def killing_workers(folder: Path, *, all_of_them: bool = False) -> threading.Thread:
    """Kill the worker that called a tool last, once there were a few calls; or all, once there is a checkpoint."""
    log, checkpoint = folder / "calls.log", folder / "runs" / "tiny" / "checkpoints" / "step-000001"

    def watch() -> None:
        wait_until(checkpoint.exists if all_of_them else log.exists)
        before = len(calls_of(folder)) if all_of_them else 0
        wait_until(lambda: len(calls_of(folder)) >= before + 8)
        for pid in set(calls_of(folder)) if all_of_them else calls_of(folder)[-1:]:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_two_workers_sample_what_one_process_samples(tmp_path):
    runs = {}
    for count in (1, 2):
        (folder := tmp_path / str(count)).mkdir()
        done = train(folder, "train.steps=1", "evaluation={before: true, data: {files: tasks.jsonl, limit: 2}}", count=count)
        assert done.code == 0, done.err
        trajectories = list(open_store(folder / "runs" / "tiny").trajectories())
        assert len(calls_of(folder)) == sum(len(turn.tool_results) for t in trajectories for turn in t.turns) > 0
        sampled = sorted((t.id, [s.token_ids.tolist() for s in t.segments]) for t in trajectories)
        runs[count] = (set(calls_of(folder)), sampled)
    (own, one), (workers, two) = runs[1], runs[2]
    assert own == {os.getpid()} and len(workers) == 2 and os.getpid() not in workers
    assert len(one) == 6 + 2 * 2 and one == two, "those of a step, and of the evaluations before and after it"
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers), "they ended with the run"


def test_workers_run_a_rollout(tmp_path):
    done = call_command(main, "rollout", write_run(tmp_path), *SEVERAL_TURNS, "cluster.workers.count=2")
    assert done.code == 0, done.err
    workers = set(calls_of(tmp_path))
    assert len(workers) == 2 and os.getpid() not in workers and not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_episodes_of_a_killed_worker_move_to_the_other(tmp_path):
    killing = killing_workers(tmp_path)
    done = train(tmp_path, "train.steps=4")
    killing.join()
    assert done.code == 0, done.err
    assert "ended with status -9" in done.err and "Rollout workers left, where its groups go on: 1" in done.err
    steps = metrics_of(tmp_path / "runs" / "tiny")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert not any(step.get("rollout/failed", 0) for step in steps)
    assert sum(step["rollout/resumed_episodes"] for step in steps) >= 1


def test_policies_beside_workers_are_refused(tmp_path):
    done = train(tmp_path, "policies={judge: {model: self}}", "--dry-run")
    assert done.code == 2
    assert "cluster.workers.count above 1), each of which would load them again" in " ".join((done.err + done.out).split())


def test_run_restarts_when_its_last_worker_is_killed(tmp_path):
    killing = killing_workers(tmp_path, all_of_them=True)
    done = train(tmp_path, "train.steps=4", "train.checkpoint_every=1", "cluster.restarts=1")
    killing.join()
    assert done.code == 0, done.err
    assert "no rollout worker is left" in done.err and "restarts left after this one: 0" in done.err
    steps = metrics_of(tmp_path / "runs" / "tiny")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert sum(step["rollout/resumed_episodes"] for step in steps) >= 1
    trajectories = [t.id for t in open_store(tmp_path / "runs" / "tiny").trajectories()]
    assert len(trajectories) == len(set(trajectories)) == 24
