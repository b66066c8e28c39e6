"""Weights on their way to servers: the transport, a folder or a process group, concurrent servers, and excluded ones."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from typing import get_args

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyturn.config.schema import keys_of
from polyturn.core.errors import ConfigError, EngineError, EngineLostError, RankLostError
from polyturn.engines.options import ServerOptions
from polyturn.engines.weights import group as weight_group
from polyturn.engines.weights.folder import WeightFolder
from polyturn.engines.weights.group import GroupEnd, WeightGroup, WeightGroupSpec
from polyturn.engines.weights.stream import Transport, address_towards, choose_transport, is_here, streamed
from polyturn.engines.weights.transfer import SETTLE_S, WeightTransfer
from polyturn.engines.weights.vllm import VllmLink
from support.forked import run_program
from support.parts import virtual
from support.refusals import refuses, refuses_later


class Server:
    """A server that is held after a while, or is lost before."""

    num_workers = 1

    def __init__(self, name, *, held_after=0.0, is_lost=False):
        self.url = self.name = name
        self.held_after = held_after
        self.is_lost = is_lost
        self.is_known = True
        self.weights = None

    async def tell(self, path, body=None):
        raise NotImplementedError

    async def is_as_left(self):
        return None if self.is_lost else self.is_known

    async def take(self, sent):
        with sent.given_to(self):
            await asyncio.sleep(self.held_after)
            if self.held_after < 0:
                raise EngineLostError(f"{self.name} cannot be held")
            await sent.load(self)


class Link:
    """Records the weights that it sends to each server."""

    def __init__(self, way, servers, log):
        self.servers, self.log = servers, log
        log.append(("open", way, [server.name for server in servers]))

    async def send(self, weights):
        self.log.append(("send", [server.name for server in self.servers]))
        if lost := [server.name for server in self.servers if server.is_lost]:
            raise EngineLostError(f"{lost[0]} broke off")
        for server in self.servers:
            server.weights = dict(weights)

    async def close(self):
        self.log.append(("close", [server.name for server in self.servers]))


@pytest.fixture
def log():
    return []


@pytest.fixture
def transfer(log):
    async def open_link(way, servers, weights):
        return Link(way, servers, log)

    return WeightTransfer("gloo", open_link)


async def push(transfer, weights, servers):
    sent = transfer.write(weights)
    results = await asyncio.gather(*(server.take(sent) for server in servers), return_exceptions=True)
    await sent.settle()
    return sent, results


async def test_all_servers_are_held_before_one_transfer(transfer, log):
    servers = [Server("a"), Server("b", held_after=0.05)]
    for version in (1, 2):
        _, results = await push(transfer, {"w": version}, servers)
        assert results == [None, None]
        assert [server.weights for server in servers] == [{"w": version}] * 2
    names = sorted(log[0][2])
    assert names == ["a", "b"]
    assert [entry[0] for entry in log] == ["open", "send", "send"]


async def test_server_that_cannot_be_held_is_left_out(transfer):
    servers = [Server("a"), Server("b", held_after=-1)]
    _, results = await push(transfer, {"w": 1}, servers)
    assert results[0] is None and "cannot be held" in str(results[1])
    assert servers[0].weights == {"w": 1} and servers[1].weights is None


async def test_lost_server_leaves_the_others_a_new_link(transfer, log):
    servers = [Server("a"), Server("b", is_lost=True), Server("c")]
    _, results = await push(transfer, {"w": 1}, servers)
    assert [str(result) if result else None for result in results] == [None, "b broke off", None]
    assert [server.weights for server in servers] == [{"w": 1}, None, {"w": 1}]
    assert [entry[0] for entry in log] == ["open", "send", "close", "open", "send"]
    assert sorted(log[-1][1]) == ["a", "c"]


@pytest.mark.parametrize("problem", [RankLostError("rank 1 ended"), MemoryError("no memory is left")])
async def test_error_of_the_trainer_reaches_every_server(problem):
    async def open_link(way, servers, weights):
        raise problem

    servers = [Server("a"), Server("b")]
    async with asyncio.timeout(30):
        _, results = await push(WeightTransfer("gloo", open_link), {"w": 1}, servers)
    assert results == [problem, problem]


class Gated(Link):
    """Sends, and closes, once its gate is open."""

    def __init__(self, servers, log, begun, gate):
        super().__init__("gloo", servers, log)
        self.begun, self.gate = begun, gate

    async def send(self, weights):
        self.begun.set()
        await self.gate.wait()
        self.log.append("ends")

    async def close(self):
        await self.gate.wait()


async def given_up(gate, log):
    """Return weights that are being sent although no server waits for them any more, and their sender."""

    begun = asyncio.Event()

    async def open_link(way, servers, weights):
        return Gated(servers, log, begun, gate)

    transfer = WeightTransfer("gloo", open_link)
    sent = transfer.write({"w": 1})
    taking = asyncio.create_task(Server("a").take(sent))
    await begun.wait()
    taking.cancel()
    await asyncio.wait({taking})
    return sent, transfer


async def test_weights_are_held_until_a_given_up_transfer_ends(log):
    sent, _ = await given_up(gate := asyncio.Event(), log)
    settling = asyncio.create_task(sent.settle())
    await asyncio.wait({settling}, timeout=0.05)
    assert not settling.done()
    gate.set()
    await settling
    assert log[-1] == "ends"


@virtual
async def test_given_up_transfer_that_hangs_is_broken_off():
    sent, transfer = await given_up(asyncio.Event(), log := [])
    async with asyncio.timeout(3 * SETTLE_S):
        await sent.settle()
        await transfer.unlink()
    assert "ends" not in log


async def test_server_given_up_before_others_are_held_is_not_sent_to(transfer, log):
    sent, first, second = transfer.write({"w": 1}), Server("a"), Server("b")
    with sent.given_to(second):
        taking = asyncio.create_task(first.take(sent))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait({taking})
        await sent.load(second)
    assert log[-1] == ("send", ["b"]) and first.weights is None


async def test_replaced_weights_are_not_sent(transfer):
    server = Server("a")
    sent, _ = await push(transfer, {"w": 1}, [server])
    await refuses_later(lambda: server.take(sent), EngineError, "no longer available; the server gets the next ones")


async def test_late_server_gets_a_transfer_of_its_own(transfer, log):
    sent = transfer.write({"w": 1})
    first, second = Server("a"), Server("b")
    await first.take(sent)
    await second.take(sent)
    assert [entry for entry in log if entry[0] == "send"] == [("send", ["a"]), ("send", ["b"])]


pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


def test_newer_weights_replace_older_ones_and_tied_are_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    own = torch.ones(3)
    with WeightFolder(tmp_path, root=tmp_path) as files:
        first = files.write({"w": own, "tied": own})
        assert load_file(first.folder / "model.safetensors").keys() == {"w"}
        second = files.write({"w": own})
        assert not first.folder.exists() and second.folder.exists()
    assert not second.folder.exists()


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), SafetensorError("No space left (os error 28)")])
@pytest.mark.parametrize("adapter", [None, {"r": 1}])
def test_full_disk_is_named_and_leaves_no_partial_weights(tmp_path, monkeypatch, problem, adapter):
    def save_file(*args, **kwargs):
        raise problem

    (tmp_path / "config.json").write_text("{}")
    with WeightFolder(tmp_path, root=tmp_path, adapter=adapter) as files:
        with monkeypatch.context() as patch:
            patch.setattr("safetensors.torch.save_file", save_file)
            words = ("No space left", str(tmp_path), "MB are free", "engine.weights_folder")
            refuses(lambda: files.write({"w": torch.ones(3)}), EngineError, *words)
        assert not list(tmp_path.glob("*/*/*"))
        assert files.write({"w": torch.ones(3)}).folder.is_dir(), "the run may go on"


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o700, 0o1777])
def test_named_folder_decides_who_reads_the_weights(tmp_path, mode):
    tmp_path.chmod(mode)
    with WeightFolder(tmp_path, root=tmp_path):
        (root,) = tmp_path.iterdir()
        assert root.stat().st_mode & 0o7777 == mode & 0o755
    with WeightFolder(tmp_path, adapter={"r": 1}) as files:
        root = files.write({"w": torch.ones(3)}).folder.parent
        assert root.stat().st_mode & 0o7777 == 0o700, "shared memory is open to all users"


OWNER = """
import os, pathlib, signal, sys
from polyturn.engines.weights.folder import WeightFolder
WeightFolder(pathlib.Path(sys.argv[1]), root=pathlib.Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_weights_of_a_killed_process_alone_are_removed(tmp_path):
    (tmp_path / "polyturn-weights-of-an-older-version").mkdir()
    with WeightFolder(tmp_path, root=tmp_path):
        living = set(tmp_path.iterdir())
        assert run_program(OWNER, tmp_path).returncode == -signal.SIGKILL
        (killed,) = set(tmp_path.iterdir()) - living
        with WeightFolder(tmp_path, root=tmp_path):
            (own,) = set(tmp_path.iterdir()) - living
        assert own != killed
    assert [p.name for p in tmp_path.iterdir()] == ["polyturn-weights-of-an-older-version"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        (socket.gethostname(), True),
        ("192.0.2.7", False),
        ("near.test", True),
        ("far.test", False),
        ("both.test", False),
        ("unknown.test", False),
    ],
)
def test_url_of_this_machine_is_recognised(host, expected, monkeypatch):
    """Names are looked up in a table, because some resolvers answer everything."""
    table = {"near.test": ["127.0.0.1"], "far.test": ["192.0.2.7"], "both.test": ["127.0.0.1", "192.0.2.7"]}

    def getaddrinfo(name, port):
        addresses = table.get(name, [name] if name[0].isdigit() else [])
        if not addresses:
            raise socket.gaierror(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert is_here(f"http://{host}:8000") is expected


def test_auto_is_the_folder_where_all_servers_see_it():
    near, far = "http://127.0.0.1:8000", "http://192.0.2.7:8000"
    assert choose_transport("auto", []) == "folder"
    assert choose_transport("auto", [near], has_gpu=True) == "folder"
    assert choose_transport("auto", [near, far]) == "gloo"
    assert choose_transport("auto", [near, far], has_gpu=True) == "nccl"
    assert choose_transport("auto", [near, far], is_shared=True) == "folder"


def test_server_on_this_machine_uses_loopback():
    assert address_towards(["http://127.0.0.1:8000"]) == "127.0.0.1"


def test_tensor_larger_than_a_bucket_goes_alone():
    weights = {name: torch.zeros(size) for name, size in [("a", 10), ("b", 10), ("big", 100), ("c", 10)]}
    assert [list(bucket) for bucket in streamed(weights, limit=80).buckets()] == [["a", "b"], ["big"], ["c"]]
    assert list(streamed({}, limit=80).buckets()) == []


def test_config_offers_every_transport():
    assert set(get_args(keys_of(ServerOptions)["weights"].annotation)) == {"auto", *get_args(Transport)}


@pytest.mark.parametrize(
    ("transport", "urls", "words"),
    [
        ("nccl", [], "engine.weights is nccl"),
        ("ipc", [], "engine.weights is ipc"),
        ("folder", ["http://127.0.0.1:8000", "http://192.0.2.7:8000"], r"192\.0\.2\.7:8000 .*engine\.weights_folder"),
        ("ipc", ["http://127.0.0.1:8000", "http://192.0.2.7:8000"], r"192\.0\.2\.7:8000"),
    ],
)
def test_transport_that_cannot_work_is_refused(transport, urls, words):
    with pytest.raises(ConfigError, match=words):
        choose_transport(transport, urls)


URLS = ["http://127.0.0.1:8000"]
WORKER = """
import json, sys
from datetime import timedelta
import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world
host, port, size, name, backend = sys.argv[1:]
device = "cuda:1" if backend == "nccl" else "cpu"
if backend == "nccl":
    torch.cuda.set_device(1)
store = PrefixStore(name, TCPStore(host, int(port), int(size), is_master=False))
timeout = timedelta(seconds=60)
group, _ = _new_process_group_helper(int(size), 1, [], Backend(backend), store, group_name=name, timeout=timeout)
_world.pg_group_ranks[group] = {rank: rank for rank in range(int(size))}
print("joined", flush=True)
came = {"matrix": torch.empty(3, 2, device=device), "one": torch.empty(1, device=device)}
for tensor in came.values():
    group.broadcast([tensor], BroadcastOptions()).wait()
print(json.dumps({name: tensor.tolist() for name, tensor in came.items()}))
"""


def spec(name, *, backend="gloo"):
    return WeightGroupSpec(WeightGroup, URLS, name, backend, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the group is made")
def test_nccl_without_a_gpu_is_refused():
    with pytest.raises(EngineError, match=r"over nccl needs a GPU .* set engine\.weights to gloo"):
        GroupEnd().open(spec("g", backend="nccl"))


@pytest.mark.parametrize("problem", [socket.gaierror(-2, "Name or service not known"), RuntimeError("address in use")])
def test_servers_that_the_trainer_cannot_reach_are_named(problem, monkeypatch):
    """A rank may resolve other names than the controller, and any other error would end the rank."""

    def fail(urls):
        raise problem

    monkeypatch.setattr(weight_group, "address_towards", fail)
    words = ("http://127.0.0.1:8000", str(problem.args[-1]), "engine.urls", "engine.weights: folder")
    refuses(lambda: GroupEnd().open(spec("g")), EngineError, *words)


def finish(end):
    while not end.is_done():
        continue


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"))],
)
def test_worker_joins_and_receives_weights(backend):
    end = GroupEnd()
    host, port = end.open(spec("polyturn-one", backend=backend))
    command = [sys.executable, "-c", WORKER, host, str(port), "2", "polyturn-one", backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        finish(end)
        assert worker.stdout.readline() == b"joined\n"
        matrix = torch.arange(6.0).view(2, 3).t()  # not contiguous
        if not end.broadcast(["matrix", "one"], {"one": torch.tensor([7.0]), "matrix": matrix}):
            finish(end)
        came = json.loads(worker.stdout.read())
    assert came == {"matrix": matrix.tolist(), "one": [7.0]}
    assert not torch.distributed.is_initialized()
    end.close()


def test_call_of_a_closed_group_is_refused():
    end = GroupEnd()
    end.open(spec("polyturn-two"))
    end.close()
    refuses(end.is_done, EngineLostError, "is closed")


async def test_server_that_does_not_join_ends_the_wait_with_advice():
    class Refusing(Server):
        async def tell(self, path, body=None):
            raise EngineLostError("it has died")

    words = ("it has died", "127.0.0.1", "engine.weights: folder")
    server = Refusing(URLS[0])
    await refuses_later(lambda: VllmLink.open("gloo", [server], {"w": torch.ones(1)}), EngineLostError, *words)
