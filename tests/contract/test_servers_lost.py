"""Three nodes, two real vLLM servers, two ranks, two workers, and a server and a worker are killed while conversations are
under way. Nothing is skipped and nothing repeated, as docs/guides/scale.md says.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_servers import READY_S, interpreter, needs_server

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from polyturn.tracking.jsonl import read_metrics
from support.ray_processes import MARK, processes_of, wait_until
from support.runs import SEVERAL_TURNS, call_command, write_tiny_run

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'polyturn[ray]'")
pytestmark = [pytest.mark.engines, pytest.mark.cluster, pytest.mark.slow]
WIDER = ("model.init.hidden_size=64", "model.init.head_dim=32", "model.init.intermediate_size=64")
SLOW = '''

import asyncio
import os
from pathlib import Path

HERE = Path(__file__).parent


class Slow(Coach):
    """In the second turn of a conversation, while there is a file `hold`: writes down its process and takes its time."""

    async def generate_response(self, instance_id, messages, **kwargs):
        if (HERE / "hold").exists() and sum(m["role"] == "assistant" for m in messages) == 2:
            with (HERE / "held").open("a") as log:
                log.write(f"{os.getpid()}\\n")
            for _ in range(300):
                if not (HERE / "hold").exists():
                    break
                await asyncio.sleep(0.1)
        return await super().generate_response(instance_id, messages, **kwargs)
'''


class Nodes:
    """A cluster of three nodes: the driver's with both ranks, and two with a server and a worker each."""

    def __init__(self) -> None:
        self.mark = f"polyturn-test-{uuid.uuid4().hex}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARK, self.mark)
            head = {"num_cpus": 2, "resources": {"trainer": 2}, "include_dashboard": False}
            made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
            for _ in range(2):
                made.add_node(num_cpus=1, resources={"server": 1, "worker": 1})
        self.address: str = made.address
        self.close: Callable[[], object] = made.shutdown

    def kill(self, what: str) -> None:
        """Kill an actor of a class."""
        os.kill(processes_of(self.mark, f"ray::{what}")[-1], signal.SIGKILL)


@pytest.fixture
def nodes():
    needs_server("vllm")
    made = Nodes()
    yield made
    made.close()


def arguments(nodes: Nodes, folder: Path, *settings: str) -> list[Any]:
    config = write_tiny_run(folder)
    with (folder / "plugins.py").open("a") as plugins:
        plugins.write(SLOW)
    return [
        *("train", config, "--ray", nodes.address, *WIDER, *SEVERAL_TURNS, "warm_start.steps=0", "evaluation.data=null"),
        *("rollout.interactions=[{name: coach, class_name: 'plugins.py:Slow', config: {}}]", "train.checkpoint_every=1"),
        *("train.distributed.ranks=2", "cluster.rank_resources={trainer: 1}", "cluster.patience_s=60", *settings),
        *("engine.kind=vllm", "engine.num_slots=null", f"engine.launch.python={interpreter('vllm')}"),
        *(f"engine.launch.ready_timeout_s={READY_S}", "cluster.engines={count: 2, resources: {server: 1}}"),
        "cluster.workers={count: 2, resources: {worker: 1}}",
    ]


def while_conversations_run(folder: Path, act: Callable[[], object]) -> threading.Thread:
    """Act behind the first checkpoint, while conversations of both workers are in their second turn, which waits for it."""

    def in_second_turn() -> bool:
        held = Counter((folder / "held").read_text().split()) if (folder / "held").exists() else Counter()
        return len(held) == 2 and min(held.values()) >= 3

    def watch() -> None:
        wait_until((folder / "runs" / "tiny" / "checkpoints" / "step-000001").exists, seconds=2 * READY_S)
        (folder / "hold").touch()
        wait_until(in_second_turn)
        act()
        (folder / "hold").unlink()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def steps_of(folder: Path, count: int) -> Sequence[dict[str, Any]]:
    """Return the metrics of a run's steps: each is there once, with six trajectories, sampled by the right weights."""
    steps = [m for m in read_metrics(folder / "runs" / "tiny" / "metrics.jsonl") if "engine/lost" in m]
    assert [step["step"] for step in steps] == list(range(1, count + 1))
    assert not any(step.get("rollout/failed", 0) for step in steps)
    assert all(step["policy/rollout_difference"] < 1e-4 for step in steps)
    trajectories = Counter(t.id for t in open_store(folder / "runs" / "tiny").trajectories())
    assert set(trajectories.values()) == {1} and len(trajectories) == 6 * count
    return steps


@pytest.mark.timeout(900)
def test_run_continues_without_a_killed_server_and_worker(nodes, tmp_path):
    def kill() -> None:
        nodes.kill("ServerActor")
        nodes.kill("RolloutActor")

    thread = while_conversations_run(tmp_path, kill)
    done = call_command(main, *arguments(nodes, tmp_path, "train.steps=5"))
    thread.join()
    assert done.code == 0, done.err
    steps = steps_of(tmp_path, 5)
    assert steps[0]["engine/replicas_live"] == 2
    assert any(step["engine/replicas_live"] < 2 or step["engine/restarts"] for step in steps), "the run saw it"
    assert "Rollout workers left, where its groups go on: 1" in done.err
    assert sum(step["rollout/resumed_episodes"] for step in steps) >= 1
