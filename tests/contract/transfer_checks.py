"""What holds of a transfer of tensors to a real server, gloo between processors."""

import asyncio

import torch

from polyturn.core.errors import EngineError, EngineLostError
from polyturn.engines.remote import FOREIGN_VERSION, RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weights.stream import streamed
from polyturn.engines.weights.transfer import WeightTransfer
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_sync import WeightSync
from support.served_model import VOCAB, ask, changed_model, small_model

SERVERS: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
SENDS = {"vllm": "/update_weights", "sglang": "/update_weights_from_distributed"}


def client(kind, url, folder):
    served = ServedModel(vocab_size=VOCAB, max_context=2048, folder=folder)
    return SERVERS[kind](url, served, transfer=WeightTransfer("gloo", SERVERS[kind].open_link))


async def versions(engine, name):
    return (await engine.generate(ask(name, max_tokens=2))).policy_versions


async def arrives(kind, url, folder):
    """Every group of a tied model passes the canary, and each later sync goes in flight."""
    engine, trained = client(kind, url, folder), small_model()
    try:
        sync = WeightSync(engine, local_policy(trained, optim=OptimSettings(lr=1e-3)), WeightProbe(vocab_size=VOCAB))
        report = await sync.start(0)
        assert report.canary < report.smallest_effect / 4
        running = asyncio.create_task(engine.generate(ask("across", max_tokens=300)))
        await asyncio.sleep(0.1)
        with torch.no_grad():
            for parameter, changed in zip(trained.parameters(), changed_model().parameters(), strict=True):
                parameter.copy_(changed)
        assert await sync.publish(1) < 3 * report.noise
        completion = await running
        assert len(completion.token_ids) == 300
        assert {version for _, version in completion.policy_versions} <= {0, 1}
        assert await versions(engine, "after") == ((0, 1),)
    finally:
        await engine.close()


async def breaks_off(kind, url, folder):
    """A broken-off transfer can be repeated; until then the server's weights count as unknown."""
    engine = client(kind, url, folder)
    post = engine._post

    async def broken(path, body=None, **options):
        if path == SENDS[kind]:
            raise EngineLostError("the connection broke off")
        return await post(path, body, **options)

    try:
        await engine.update_weights(0, weights=small_model().state_dict())
        engine._post = broken
        problem = None
        try:
            await engine.update_weights(1, weights=small_model().state_dict())
        except EngineError as raised:
            problem = raised
        assert "broke off" in str(problem)
        engine._post = post
        assert await versions(engine, "between") == ((0, FOREIGN_VERSION),)
        await engine.update_weights(2, weights=small_model().state_dict())
        assert await versions(engine, "again") == ((0, 2),)
    finally:
        await engine.close()


async def second_client(kind, url, folder):
    """A client that comes later sends over a group of its own."""
    for _ in range(2):
        engine = client(kind, url, folder)
        await engine.update_weights(3, weights=small_model().state_dict())
        assert await versions(engine, "one") == ((0, 3),)
        await engine.close()


CHECKS = {check.__name__: check for check in (arrives, breaks_off, second_client)}


def in_small_buckets(weights):
    return streamed(dict(weights), limit=20_000)
