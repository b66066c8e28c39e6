"""`cluster.workers.count` without a cluster: episodes run in processes of this machine.

An embedded engine samples in the run's own process; workers send requests to servers directly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_run import metrics_of, write_run

from polyturn.cli.main import main
from polyturn.cluster.worker_pool import WorkerPool, travelling
from polyturn.cluster.worker_process import ProcessWorker
from polyturn.engines.following import FollowingPool
from polyturn.engines.launcher import LaunchSpec
from polyturn.engines.options import ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weights.folder import WeightFolder
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task
from support.echo_server import SERVE, EchoEngine
from support.ray_processes import wait_until
from support.runs import SEVERAL_TURNS, call_command
from support.scripted_server import scripted_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def calls_of(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "calls.log").read_text().split()]


def train(folder: Path, *settings: str, count: int = 2):
    arguments = ["warm_start.steps=0", *SEVERAL_TURNS, *settings, f"cluster.workers.count={count}"]
    return call_command(main, "train", write_run(folder), *arguments)


def killing_workers(folder: Path, *, all_of_them: bool = False) -> threading.Thread:
    """Kill a worker within a tool call; or all of them, once there is a checkpoint.

    The call belongs to an episode that has a complete turn, and does not return until its worker is dead.
    """
    checkpoint, hold, held = folder / "runs" / "tiny" / "checkpoints" / "step-000001", folder / "hold", folder / "held.log"
    if not all_of_them:
        hold.touch()

    def watch() -> None:
        if all_of_them:
            wait_until(checkpoint.exists)
            hold.touch()
        wait_until(lambda: held.exists() and "\n" in held.read_text())
        for pid in set(calls_of(folder)) if all_of_them else {int(held.read_text().split()[0])}:
            os.kill(pid, signal.SIGKILL)
        hold.unlink()

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


class StandIn:
    """Answers as a vLLM server does, always with the same text."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.num_answers = self.num_running = self.most_running = 0
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path.startswith("/server_info"):
            model = {"logprobs_mode": "processed_logprobs", "max_model_len": 2048}
            return {"vllm_config": {"model_config": model, "aux_output_config": {"enable_return_routed_experts": False}}}
        if path != "/inference/v1/generate":
            return {"world_size": 1, "version": VllmEngine.tested_version}
        if self.is_broken:
            return 500, {}
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        time.sleep(0.02)
        with self._lock:
            self.num_running -= 1
            self.num_answers += 1
        choice = {
            "token_ids": [5, body["sampling_params"]["stop_token_ids"][0]],
            "logprobs": {"content": [{"logprob": -1.0}] * 2},
            "weight_versions": [{"start": 0, "version": "default"}],
            "finish_reason": "stop",
        }
        return {"choices": [choice], "usage": None}


def roll_out(folder: Path, *settings: str):
    servers = ["engine.kind=vllm", "engine.num_slots=null", "cluster.workers.count=2"]
    return call_command(main, "rollout", write_run(folder), *SEVERAL_TURNS, *servers, *settings)


def roll_out_on(folder: Path, *servers: StandIn, settings: tuple[str, ...] = ()) -> str:
    """Roll out in two workers over these servers, and return the printed lines; every turn got one answer."""
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(scripted_server(server.answer)) for server in servers]
        done = roll_out(folder, f"engine.urls=[{', '.join(urls)}]", *settings)
    assert done.code == 0, done.err
    trajectories = list(open_store(folder / "runs" / "tiny-rollout").trajectories())
    assert len(trajectories) == 18 and not any(t.error for t in trajectories)
    assert sum(len(t.turns) for t in trajectories) == sum(server.num_answers for server in servers) > 18
    return done.err


def test_workers_send_requests_to_servers_directly(tmp_path, monkeypatch):
    async def generate(*_: Any) -> None:
        raise AssertionError("this process sent a request")

    monkeypatch.setattr(RemoteEngine, "generate", generate)
    roll_out_on(tmp_path, *(servers := [StandIn(), StandIn()]))
    assert all(server.num_answers for server in servers) and len(set(calls_of(tmp_path))) == 2


def test_workers_share_the_requests_of_a_server(tmp_path):
    roll_out_on(tmp_path, server := StandIn(), settings=("engine.max_in_flight=3",))
    assert server.most_running <= 3
    done = roll_out(tmp_path, "engine.urls=[http://127.0.0.1:1]", "engine.max_in_flight=1")
    assert done.code == 2 and "engine.max_in_flight is 1 and cluster.workers.count is 2" in " ".join(done.err.split())


def test_workers_leave_out_lost_servers(tmp_path):
    assert "replica 0 is left out" in roll_out_on(tmp_path, StandIn(is_broken=True), StandIn())


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("engine.launch.python=/bin/false", "the server '/bin/false' ended with status 1 before it was ready"),
        ("engine.urls=[http://127.0.0.1:1]", "the server at http://127.0.0.1:1 cannot be used for training"),
    ],
)
def test_server_that_cannot_be_used_ends_a_run_with_workers(tmp_path, setting, problem):
    done = roll_out(tmp_path, setting)
    assert done.code == 2
    assert problem in " ".join(done.err.split())


def echo_engine(**options: Any) -> EchoEngine:
    return EchoEngine("", ServedModel(vocab_size=1000), options=ServerOptions(kind="vllm", health_s=5), **options)


def context_over(engine: EnginePool) -> Any:
    context = scripted_context([])
    context.engine = engine
    return context


def build_worker(journal: object, engine: None) -> RolloutPool:
    return RolloutPool(context_over(FollowingPool([echo_engine()])))


async def test_restarted_server_serves_workers_with_its_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    spec = LaunchSpec(command=(sys.executable, "-c", SERVE, "{host}", "{port}"), stop_timeout_s=5)
    server = echo_engine(supervisor=ServerSupervisor(spec))
    engines = EnginePool([server], files=WeightFolder(tmp_path))
    worker = ProcessWorker("worker", travelling(build_worker), None)
    pool = WorkerPool([worker], context_over(engines), max_concurrent=8, max_failed_share=1.0, engines=engines)

    async def versions(name: str) -> set[int | None]:
        group = await pool.run_one(GroupSpec(id=name, task=task(), size=4))
        assert not any(t.error for t in group.trajectories)
        return {span.policy_version for t in group.trajectories for span in t.segments[0].spans if span.logprobs is not None}

    try:
        assert await versions("before") == {0}, "the first group starts the server"
        await engines.update_weights(1, weights={"a": torch.zeros(2)})
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        assert await versions("after") == {1}
        metrics = engines.read_metrics()
        assert metrics["engine/restarts"] == 1 and metrics["engine/lost"] >= 1, "the worker counts lost requests"
    finally:
        await pool.close()
