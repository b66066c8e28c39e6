"""Inference servers on the nodes of a Ray cluster: placed, given weights once a node, and replaced when lost.

The servers are the cheapest (`support/echo_server.py`); `tests/contract/test_training_on_servers.py` has real ones.
"""

import asyncio
import os
import signal
import uuid
from pathlib import Path

import pytest
import torch

from polyturn.core.errors import EngineError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.base import ModelFolder
from polyturn.engines.following import FollowingPool, PoolView
from polyturn.engines.request_limits import ServedModel
from support.echo_server import EchoEngine, echo_pool, missing_server
from support.ray_processes import MARK, processes_of
from support.tools_parts import until

pytest.importorskip("ray", reason="Ray is not installed: pip install 'polyturn[ray]'")

from polyturn.cluster.members import ResourceRequest
from polyturn.cluster.placement import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3).bfloat16(), "b.bias": torch.tensor(3.0)}
TIED = {**WEIGHTS, "head.weight": WEIGHTS["a.weight"]}


@pytest.fixture(scope="module")
def mark():
    """A word in the environment of every process of this cluster: no test may kill the processes of another one."""
    return f"polyturn-test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def nodes(mark):
    """Return a cluster of three nodes: the driver's, and two with room for servers."""
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # where actors find `support`
        patch.setenv(MARK, mark)
        made = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.rooms = [made.add_node(num_cpus=1, num_gpus=2, resources={"room": 2}) for _ in range(2)]
        yield made
        made.shutdown()


@pytest.fixture
def cluster(nodes):
    made = Cluster(nodes.address, patience_s=200)
    yield made
    made.close()


@pytest.fixture
def model(tmp_path):
    """Return a model's folder that no other node has."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return ModelFolder(tmp_path / "model", is_temporary=True)


async def started(cluster, model, *, count=2):
    """Return the controller's pool of servers, all of which are up, and a worker's, which follows it."""
    engine = await echo_pool(cluster.places(ResourceRequest(count=count, resources={"room": 1}))(model))
    worker = FollowingPool([EchoEngine("", ServedModel(vocab_size=10)) for _ in range(count)], slots=8)
    engine.on_change = lambda: worker.follow(PoolView.of(engine))
    engine.on_change()
    return engine, worker


async def ask(engine, number):
    name = f"{uuid.uuid4().hex}/{number}"
    request = GenerateRequest(
        request_id=name, session_id=f"s{number}", prompt_ids=[1], sampling=SamplingParams(max_tokens=4)
    )
    return await engine.generate(request)


def gpus_of(pid):
    """Return the GPUs that are visible to a process."""
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(line for line in lines if line.startswith("CUDA_VISIBLE_DEVICES=")).partition("=")[2]


async def test_servers_on_two_nodes_answer_as_one_engine(cluster, model):
    engine, worker = await started(cluster, model)
    said = await asyncio.gather(*(ask(worker, i) for i in range(24)))
    assert len({c.info["pid"] for c in said}) == 2 and {c.policy_versions for c in said} == {((0, 0),)}
    await engine.update_weights(1, weights=TIED)
    said = await asyncio.gather(*(ask(worker, i) for i in range(24)))
    assert {c.policy_versions for c in said} == {((0, 1),)} and len({c.info["bytes"] for c in said}) == 1
    assert engine.read_metrics()["engine/replicas_live"] == 2
    pids = {int(c.info["pid"]) for c in said}
    await worker.close()
    await engine.close()
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert not model.path.exists(), "it was written for the run, and the nodes' copies went with the servers"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "actor", "node"])
async def test_lost_server_is_replaced_and_given_its_weights(cluster, nodes, mark, model, victim):
    engine, worker = await started(cluster, model)
    await engine.update_weights(1, weights=TIED)
    watching = [asyncio.create_task(engine.watch(replica)) for replica in engine.replicas]
    proved = []

    async def prove(one, version):
        answer = await one.generate(
            GenerateRequest(request_id=f"p{len(proved)}", session_id="p", prompt_ids=[1], sampling=SamplingParams())
        )
        proved.append((version, answer.policy_versions))
        if len(proved) == 1:
            raise EngineError("the leader says no once, so that it is sent its weights again")

    engine.verify = prove
    first = await asyncio.gather(*(ask(worker, i) for i in range(16)))
    before = {int(c.info["pid"]) for c in first}
    asked = [asyncio.create_task(ask(worker, i)) for i in range(200)]
    await asyncio.sleep(0.2)
    if victim == "node":
        nodes.remove_node(nodes.rooms[0], allow_graceful=False)
    elif victim == "actor":
        os.kill(min(processes_of(mark, "ray::ServerActor")), signal.SIGKILL)
    else:
        os.kill(min(before), signal.SIGKILL)
    said = await asyncio.gather(*asked)
    assert len(said) == 200 and {c.policy_versions for c in said} == {((0, 1),)}, "each was answered, by the right weights"
    await until(lambda: len(proved) >= 2)
    assert set(proved) == {(1, ((0, 1),))}

    def has_both():
        return engine.read_metrics()["engine/replicas_live"] == 2

    await until(has_both)
    after = {int(c.info["pid"]) for c in await asyncio.gather(*(ask(worker, i) for i in range(24)))}
    assert len(after) == 2 and len(after - before) == 1
    await engine.update_weights(2, weights=TIED)
    assert {c.policy_versions for c in await asyncio.gather(*(ask(worker, i) for i in range(24)))} == {((0, 2),)}
    for task in watching:
        task.cancel()
    await worker.close()
    await engine.close()
    if victim == "node":
        nodes.rooms[0] = nodes.add_node(num_cpus=1, num_gpus=2, resources={"room": 2})


async def test_servers_share_gpus_with_ranks_and_sleep(cluster, model):
    """Ray counts GPUs that these nodes do not have; it assigns them like real ones."""
    ranks, places = cluster.shared(
        ResourceRequest(count=4, resources={"GPU": 1}), ResourceRequest(count=2, resources={"GPU": 2, "room": 1})
    )
    assert len({rank.home.node for rank in ranks[:2]}) == len({rank.home.node for rank in ranks[2:]}) == 1
    made = places(model)
    engine = await echo_pool(made)
    of_ranks = [",".join(gpu for rank in pair for gpu in rank.home.gpus) for pair in (ranks[:2], ranks[2:])]
    assert list(made.devices) == of_ranks and {len(gpus.split(",")) for gpus in of_ranks} == {2}
    pids = {int(c.info["pid"]) for c in await asyncio.gather(*(ask(engine, i) for i in range(24)))}
    assert sorted(map(gpus_of, pids)) == sorted(of_ranks)
    await engine.sleep()
    asked = [asyncio.create_task(ask(engine, i)) for i in range(8)]
    await asyncio.sleep(0.5)
    assert not any(one.done() for one in asked)
    await engine.update_weights(1, weights=TIED)
    assert {c.policy_versions for c in await asyncio.gather(*asked)} == {((0, 1),)}
    await engine.close()


async def test_failed_start_names_its_node(cluster, model):
    places = cluster.places(ResourceRequest(count=1, resources={"room": 1}))(model)
    with pytest.raises(EngineError, match=r"server 0 on \S+: the server '/no/such/python' cannot be started"):
        await missing_server(places)
