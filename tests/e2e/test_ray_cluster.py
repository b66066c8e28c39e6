"""`polyturn train --ray ADDRESS` on a local cluster of two nodes: ranks on one, engine and rollout worker on the other.

A rank that dies ends the run with its log, or starts it again from its latest checkpoint.
"""

import os
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
from cluster_run import assert_each_call_ran_once, metrics_of, write_run

from polyturn.cli.main import main
from polyturn.testing.runs import call_command

pytest.importorskip("ray", reason="Ray is not installed: pip install 'polyturn[ray]'")
pytestmark = pytest.mark.timeout(300)

PLACES = [
    "train.distributed.ranks=2",
    "cluster.rank_resources={trainer: 1}",
    "cluster.engines.resources={rollout: 1}",
    "cluster.workers.resources={rollout: 1}",
]


@pytest.fixture(scope="module")
def mark():
    """A word in the environment of every process of this cluster."""
    return f"polyturn-test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def address(mark):
    from ray.cluster_utils import Cluster

    os.environ["POLYTURN_TEST_CLUSTER"] = mark
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"trainer": 2}, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2, resources={"rollout": 2})
    yield cluster.address
    cluster.shutdown()
    del os.environ["POLYTURN_TEST_CLUSTER"]


def test_two_ranks_train_with_engine_and_tools_on_another_node(address, tmp_path):
    config = write_run(tmp_path)
    done = call_command(main, "train", config, "--ray", address, "train.steps=2", *PLACES)
    assert done.code == 0, done.err
    steps = metrics_of(tmp_path / "runs" / "tiny")
    assert len(steps) == 2 and all(step["loss/grad_norm"] > 0 for step in steps)
    assert_each_call_ran_once(tmp_path, "tiny")


def kill_a_rank_after_a_step(checkpoints, mark):
    """Kill one trainer rank of the cluster that bears `mark`, once there is a checkpoint of the first step."""

    def watch():
        deadline = time.monotonic() + 120
        while not any(p.name >= "step-000001" for p in checkpoints.glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(max(ranks_of(mark)), signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def ranks_of(mark):
    found = []
    for process in Path("/proc").iterdir():
        try:
            is_rank = process.name.isdigit() and b"RankActor" in (process / "cmdline").read_bytes()
            if is_rank and mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.mark.slow
def test_a_dead_rank_ends_the_run_with_its_log(address, mark, tmp_path):
    config = write_run(tmp_path)
    thread = kill_a_rank_after_a_step(tmp_path / "runs" / "tiny" / "checkpoints", mark)
    many = ["train.steps=100000", "train.checkpoint_every=1", "warm_start.steps=0"]
    done = call_command(main, "train", config, "--ray", address, *many, *PLACES)
    thread.join()
    assert done.code == 2
    assert "trainer rank" in done.err and "died. The last lines of its log" in done.err


@pytest.mark.slow
def test_a_run_that_may_restart_goes_on_from_its_latest_checkpoint(address, mark, tmp_path):
    config = write_run(tmp_path)
    thread = kill_a_rank_after_a_step(tmp_path / "runs" / "tiny" / "checkpoints", mark)
    many = ["train.steps=30", "train.checkpoint_every=1", "warm_start.steps=0", "cluster.restarts=1"]
    done = call_command(main, "train", config, "--ray", address, *many, *PLACES)
    thread.join()
    assert done.code == 0, done.err
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["tiny"]
    assert [step["step"] for step in metrics_of(tmp_path / "runs" / "tiny")][-1] == 30


def test_a_cluster_without_room_is_a_sentence(address, tmp_path):
    config = write_run(tmp_path)
    done = call_command(main, "train", config, "--ray", address, *PLACES, "cluster.engines.count=50", "cluster.patience_s=1")
    assert done.code == 2
    assert "no room for 50 actors as engine replica" in done.err and "Lower cluster.*" in done.err
