"""New weights reach the real servers over HTTP and over a process group too, every group of parameters of a tied model."""

import asyncio
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, small_model

from polyturn.core.errors import EngineError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weight_files import WeightFolder, WrittenWeights
from polyturn.training.local import LocalPolicy
from polyturn.training.optim import OptimSettings
from polyturn.training.weight_sync import WeightSync

SERVERS = {"vllm": VllmEngine, "sglang": SglangEngine}


@pytest.fixture(params=list(SERVERS))
def place(request, server_of):
    return request.param, server_of(request.param)


def client(place, model_folder, way):
    kind, url = place
    return SERVERS[kind](url, vocab_size=VOCAB, max_context=2048, model=model_folder, way=way)


@pytest.mark.parametrize("way", ["http", "gloo"])
async def test_weights_that_are_sent_pass_the_canary_and_each_later_sync(place, way, model_folder, monkeypatch):
    monkeypatch.setattr(f"polyturn.engines.{place[0]}.buckets", lambda weights: small_buckets(weights))
    engine = client(place, model_folder, way)
    try:
        model = small_model()
        sync = WeightSync(engine, LocalPolicy(model, optim=OptimSettings(lr=1e-3)), vocab_size=VOCAB)
        report = await sync.start(0)
        assert report.canary < report.smallest_effect / 4
        running = asyncio.create_task(engine.generate(ask("across", max_tokens=300)))
        await asyncio.sleep(0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        assert await sync.publish(1) < 3 * report.noise
        completion = await running
        assert len(completion.token_ids) == 300
        assert {version for _, version in completion.policy_versions} <= {0, 1}
        assert (await engine.generate(ask("after", max_tokens=2))).policy_versions == ((0, 1),)
    finally:
        await engine.close()


async def test_a_second_client_sends_over_a_group_of_its_own(place, model_folder):
    for _ in range(2):
        engine = client(place, model_folder, "gloo")
        await engine.update_weights(3, weights=small_model().state_dict())
        assert (await engine.generate(ask("one", max_tokens=2))).policy_versions == ((0, 3),)
        await engine.close()


async def test_a_folder_that_the_server_does_not_see_is_one_sentence_and_it_goes_on(place, model_folder):
    engine = client(place, model_folder, "disk")
    try:
        with pytest.raises(EngineError, match=r"engine\.weights"):
            await engine.update_weights(1, weights=WrittenWeights(Path("/nowhere/on/this/machine")))
        assert len((await engine.generate(ask("still", max_tokens=2))).token_ids) == 2
    finally:
        await engine.close()


async def test_weights_go_through_a_folder_on_disk(place, model_folder, tmp_path):
    engine = client(place, model_folder, "disk")
    with WeightFolder(model_folder, root=tmp_path) as files:
        await engine.update_weights(2, weights=files.write(small_model().state_dict()))
    assert (await engine.generate(ask("disk", max_tokens=2))).policy_versions == ((0, 2),)
    await engine.close()


def small_buckets(weights):
    from polyturn.engines.weight_ways import buckets

    return buckets(weights, limit=20_000)


def ask(name: str, **sampling) -> GenerateRequest:
    return GenerateRequest(request_id=name, session_id=name, prompt_ids=range(1, 30), sampling=SamplingParams(**sampling))
