"""`polyturn train --ray ADDRESS` on a local cluster of two nodes: ranks on one, engine and rollout worker on the other.

A rank that dies ends the run with its log, or starts it again from its latest checkpoint; so does the last worker or engine
replica. If one of several dies, its conversations continue elsewhere.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import uuid
from functools import partial

import pytest
from cluster_run import ADAPTER, assert_adapter_trained, assert_each_call_ran_once, metrics_of, write_run

from polyturn.cli.main import main
from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.pool import EnginePool
from polyturn.engines.scripted import ScriptedEngine
from polyturn.training import hf
from support.ray_processes import MARK, processes_of, wait_until
from support.runs import SEVERAL_TURNS, call_command

pytest.importorskip("ray", reason="Ray is not installed: pip install 'polyturn[ray]'")

from polyturn.cluster.members import ResourceRequest
from polyturn.cluster.placement import Cluster
from support.refusals import refuses_later

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PLACES = [
    "train.distributed.ranks=2",
    "cluster.rank_resources={trainer: 1}",
    "cluster.engines.resources={rollout: 1}",
    "cluster.workers.resources={rollout: 1}",
]

COUNT_BUILDS = """

from polyturn.training import hf

make = hf.build_model


def counted(*args, **kwargs):
    model = make(*args, **kwargs)
    if not model.device.type == "meta":
        with (HERE / "builds.log").open("a") as log:
            log.write(f"{os.getpid()}\\n")
    return model


hf.build_model = counted
"""
"""Writes down the process of every model that is built with weights."""


@pytest.fixture(scope="module")
def mark():
    """A word in the environment of every process of this cluster."""
    return f"polyturn-test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def address(mark):
    from ray.cluster_utils import Cluster

    os.environ[MARK] = mark
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"trainer": 2}, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2, resources={"rollout": 2})
    yield cluster.address
    cluster.shutdown()
    del os.environ[MARK]


@pytest.mark.slow
def test_ranks_train_with_engine_and_tools_elsewhere(address, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "build_model", hf.build_model)  # so that the plug-in's change of this process is undone
    config = write_run(tmp_path)
    (tmp_path / "plugins.py").write_text((tmp_path / "plugins.py").read_text() + COUNT_BUILDS)
    done = call_command(main, "train", config, "--ray", address, "train.steps=2", *PLACES)
    assert done.code == 0, done.err
    assert_two_ranks_trained(tmp_path)


def assert_two_ranks_trained(folder):
    steps = metrics_of(folder / "runs" / "tiny")
    assert len(steps) == 2 and all(step["loss/grad_norm"] > 0 for step in steps)
    assert all(0 < step["time/generate_s"] < step["time/step_s"] for step in steps), "what the engines spent for the workers"
    assert_each_call_ran_once(folder, "tiny")
    built = (folder / "builds.log").read_text().split()
    assert len(built) == len(set(built)) == 2 + 1 + 1, "ranks, the engine's own, and the leader's copy; workers have none"


@pytest.mark.slow
async def test_request_of_a_dead_replica_moves_to_another(address, mark):
    cluster = Cluster(address)
    try:
        script = [[5, 6], [5, 6], EngineError("the prompt is too long")]
        build = partial(ScriptedEngine, script)
        engine = cluster.engines(ResourceRequest(count=2, resources={"rollout": 0.5}), build)(EnginePool)
        assert list((await engine.generate(request("a/0", session="a"))).token_ids) == [5, 6]
        first, second = processes_of(mark, "EngineActor")
        os.kill(first, signal.SIGKILL)
        said = [await told(engine, request(f"a/{turn}", session="a")) for turn in range(1, 4)]
        assert said[0] == [5, 6] and "the prompt is too long" in said, "of the other's script"
        os.kill(second, signal.SIGKILL)
        with pytest.raises(EngineLostError, match=r"(?s)engine replica \d \(process .* died"):
            await engine.update_weights(1, weights={})
        await refuses_later(
            lambda: engine.generate(request("b/0", session="b")), EngineLostError, "all servers are lost for good"
        )
        assert engine.read_metrics()["engine/replicas_live"] == 0
        await engine.abort("b/0")
        await engine.end_session("b")
    finally:
        cluster.close()


@pytest.mark.slow
async def test_calls_do_not_wait_for_each_other(address, tmp_path):
    asked = tmp_path / "asked"
    asked.touch()

    def build():
        class Silent(ScriptedEngine):
            """Records each request, and takes a minute."""

            async def generate(self, request):
                with asked.open("a") as file:
                    file.write("x")
                return await super().generate(request)

        return Silent([[5]] * 1100, latency_s=60.0)

    cluster = Cluster(address)
    try:
        engine = cluster.engines(ResourceRequest(count=1, resources={"rollout": 0.5}), build)(EnginePool)
        running = [asyncio.create_task(engine.generate(request(f"{i}/0", session=f"{i}"))) for i in range(1100)]
        await asyncio.to_thread(wait_until, lambda: asked.stat().st_size == 1100)
        await asyncio.wait_for(engine.update_weights(1, weights={}), timeout=55.0)
        assert not any(task.done() for task in running)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    finally:
        cluster.close()


async def told(engine, asked):
    try:
        return list((await engine.generate(asked)).token_ids)
    except EngineError as problem:
        return str(problem)


def request(name, *, session):
    return GenerateRequest(request_id=name, session_id=session, prompt_ids=[1], sampling=SamplingParams(max_tokens=4))


def kill_after_a_step(folder, mark, *kinds):
    """Kill an actor of each of `kinds` in the cluster with `mark`, once there is a checkpoint of the first step.

    The killed worker is running a tool, in the middle of conversations.
    """

    def watch():
        checkpoints = folder / "runs" / "tiny" / "checkpoints"
        wait_until(lambda: any(p.name >= "step-000001" for p in checkpoints.glob("step-*")))
        for kind in kinds:
            os.kill(called_last(folder) if kind == "RolloutActor" else max(processes_of(mark, kind)), signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def called_last(folder):
    """Slow the tool down; return its process once conversations have a few turns."""
    (folder / "slow").touch()
    log, before = folder / "calls.log", len(calls_of(folder))
    wait_until(lambda: len(calls_of(folder)) >= before + 12)
    (folder / "slow").unlink()
    return int(log.read_text().split()[-1])


def calls_of(folder):
    return (folder / "calls.log").read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [("RankActor", "trainer rank"), ("RolloutActor", "rollout worker"), ("EngineActor", "engine replica")]
)
def test_dead_actor_ends_the_run_with_its_log(address, mark, tmp_path, kind, name):
    config = write_run(tmp_path)
    thread = kill_after_a_step(tmp_path, mark, kind)
    many = ["train.steps=100000", "train.checkpoint_every=1", "rollout.max_failed_share=1"]
    done = call_command(main, "train", config, "--ray", address, *many, *PLACES)
    thread.join()
    assert done.code == 2
    assert f"{name} " in done.err and "died. The last lines of its log" in done.err


@pytest.mark.slow
def test_conversations_survive_a_dead_worker_and_engine(address, mark, tmp_path):
    config = write_run(tmp_path)
    thread = kill_after_a_step(tmp_path, mark, "RolloutActor", "EngineActor")
    places = [f"cluster.{kind}={{count: 2, resources: {{rollout: 0.5}}}}" for kind in ("engines", "workers")]
    many = ["train.steps=12", "train.checkpoint_every=1", "warm_start.steps=0", *SEVERAL_TURNS]
    done = call_command(main, "train", config, "--ray", address, *many, *PLACES[:2], *places)
    thread.join()
    assert done.code == 0, done.err
    steps = metrics_of(tmp_path / "runs" / "tiny")
    assert [step["step"] for step in steps][-1] == 12
    assert steps[0]["engine/replicas_live"] == 2 and steps[-1]["engine/replicas_live"] == 1
    assert sum(step["rollout/resumed_episodes"] for step in steps) >= 1
    assert not any(step.get("rollout/failed", 0) for step in steps)


@pytest.mark.slow
def test_killed_run_resumes_conversations_of_workers(address, tmp_path):
    config = write_run(tmp_path)
    (tmp_path / "calls.log").touch()
    arguments = ["train", config, "--ray", address, "warm_start.steps=0", *SEVERAL_TURNS, *PLACES]
    (tmp_path / "said").touch()
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, "-m", "polyturn", *map(str, arguments), "train.steps=100000"]
        run = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
    try:
        called_last(tmp_path)
    finally:
        run.kill()
        run.wait()
    assert len(calls_of(tmp_path)) >= 12, (tmp_path / "said").read_text()
    last = max(int(p.name.removeprefix("step-")) for p in (tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*"))
    done = call_command(main, *arguments, "--resume", f"train.steps={last + 1}")
    assert done.code == 0, done.err
    assert sum(step["rollout/resumed_episodes"] for step in metrics_of(tmp_path / "runs" / "tiny")) >= 1, done.err


@pytest.mark.slow
@pytest.mark.parametrize("update", ["in_flight", "abort_resume", "wait"])
def test_groups_cut_off_on_a_worker_are_counted(update, address, tmp_path):
    config = write_run(tmp_path)
    many = ["train.steps=4", "train.oversample=1.0", "warm_start.steps=0", f"engine.update={update}", *SEVERAL_TURNS]
    done = call_command(main, "train", config, "--ray", address, *many, *PLACES)
    assert done.code == 0, done.err
    steps = metrics_of(tmp_path / "runs" / "tiny")
    assert sum(step.get("tokens/dropped_left_over", 0) for step in steps) > 0, sorted(steps[-1])


@pytest.mark.slow
def test_adapter_trains_on_a_cluster(address, tmp_path):
    config = write_run(tmp_path)
    done = call_command(main, "train", config, "--ray", address, "train.steps=3", *ADAPTER, *PLACES)
    assert done.code == 0, done.err
    assert_adapter_trained(tmp_path)


@pytest.mark.slow
def test_run_restarts_from_its_latest_checkpoint(address, mark, tmp_path):
    config = write_run(tmp_path)
    thread = kill_after_a_step(tmp_path, mark, "RankActor")
    many = ["train.steps=30", "train.checkpoint_every=1", "warm_start.steps=0", "cluster.restarts=1"]
    done = call_command(main, "train", config, "--ray", address, *many, *PLACES)
    thread.join()
    assert done.code == 0, done.err
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["tiny"]
    assert [step["step"] for step in metrics_of(tmp_path / "runs" / "tiny")][-1] == 30


PROGRAM = """
import os
import sys

import polyturn

ADDRESS, CONFIG, CALLS = sys.argv[1:]
SEEN = "what a function of the program itself reads"


@polyturn.tool
def shout(text: str) -> str:
    '''Say something loudly.

    Args:
        text: What to say.
    '''
    with open(CALLS, "a") as log:
        log.write(f"{os.getpid()}\\n")
    return SEEN


def reward(trajectory):
    assert SEEN
    return float(trajectory.id.rpartition("/")[2])  # of its number in its group, so that each group teaches something


run = polyturn.train(
    config=CONFIG,
    tasks=[{"prompt": f"How loud is mouse {n}?", "interaction_kwargs": {"name": "coach"}} for n in range(4)],
    tools=[shout],
    reward=reward,
    steps=2,
    ray=ADDRESS,
    **{
        "train.distributed.ranks": 2,
        "cluster.rank_resources": {"trainer": 1},
        "cluster.engines.resources": {"rollout": 1},
        "cluster.workers.resources": {"rollout": 1},
    },
)
assert run.metrics["step"][-2:] == [1, 2], run.metrics
assert len(run.trajectories) == 12
assert next(run.model().parameters()).isfinite().all()
"""


@pytest.mark.timeout(900)
def test_program_trains_with_its_own_functions_elsewhere(address, tmp_path):
    config = write_run(tmp_path)
    (tmp_path / "plugins.py").write_text((tmp_path / "plugins.py").read_text() + COUNT_BUILDS)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", address, config, tmp_path / "calls.log"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_two_ranks_trained(tmp_path)


def test_cluster_without_room_is_refused(address, tmp_path):
    config = write_run(tmp_path)
    done = call_command(main, "train", config, "--ray", address, *PLACES, "cluster.engines.count=50", "cluster.patience_s=1")
    assert done.code == 2
    assert "waiting for room for 50 actors as engine replica" in done.err
    assert "no room for 50 actors as engine replica" in done.err and "Lower cluster.*" in done.err
    done = call_command(
        main, "train", config, "--ray", address, "cluster.engines.resources={GPU: 16}", "cluster.patience_s=1"
    )
    assert done.code == 2 and "Each engine replica is on one node" in done.err
