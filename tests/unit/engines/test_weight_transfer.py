"""Weights are sent to all servers at once: order, lost servers, late servers."""

import asyncio

import pytest

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.engines.weight_transfer import WeightTransfer
from support.refusals import refuses_later


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
    """Writes down where it sends what."""

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
    async def open_link(way, servers):
        return Link(way, servers, log)

    return WeightTransfer("gloo", open_link)


async def push(transfer, weights, servers):
    sent = transfer.write(weights)
    results = await asyncio.gather(*(server.take(sent) for server in servers), return_exceptions=True)
    sent.settle()
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


async def test_replaced_weights_are_not_sent(transfer):
    server = Server("a")
    sent, _ = await push(transfer, {"w": 1}, [server])
    await refuses_later(lambda: server.take(sent), EngineError, "not kept; it gets the next ones")


async def test_late_server_gets_a_transfer_of_its_own(transfer, log):
    sent = transfer.write({"w": 1})
    first, second = Server("a"), Server("b")
    await first.take(sent)
    await second.take(sent)
    assert [entry for entry in log if entry[0] == "send"] == [("send", ["a"]), ("send", ["b"])]
