"""New weights reach the real servers over HTTP, as handles of memory and over a process group too, every group of parameters
of a tied model; and a single bit that changes on the way is found by the checksums."""

import asyncio
import os
from pathlib import Path

import pytest
import torch

from conftest import VOCAB, small_model
from polyturn.core.errors import EngineError, EngineLostError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.remote import FOREIGN_VERSION
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weight_files import WeightFolder, WrittenWeights
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from polyturn.training.weight_sync import WeightSync

SERVERS = {"vllm": VllmEngine, "sglang": SglangEngine}


@pytest.fixture(params=list(SERVERS))
def place(request, server_of):
    return request.param, server_of(request.param)


def client(place, model_folder, way):
    kind, url = place
    return SERVERS[kind](url, ServedModel(vocab_size=VOCAB, max_context=2048, folder=model_folder), way=way)


@pytest.mark.parametrize("way", [pytest.param("http", marks=pytest.mark.slow), "ipc", "gloo"])
async def test_weights_that_are_sent_pass_the_canary_and_each_later_sync(place, way, model_folder, monkeypatch):
    monkeypatch.setattr(f"polyturn.engines.{place[0]}.buckets", lambda weights: small_buckets(weights))
    engine = client(place, model_folder, way)
    try:
        model = small_model()
        sync = WeightSync(engine, local_policy(model, optim=OptimSettings(lr=1e-3)), vocab_size=VOCAB)
        report = await sync.start(0)
        assert report.canary < report.smallest_effect / 4
        assert not left_in_memory()
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


async def test_weights_that_break_off_in_the_middle_can_be_sent_again(place, model_folder, monkeypatch):
    monkeypatch.setattr(f"polyturn.engines.{place[0]}.buckets", lambda weights: small_buckets(weights))
    engine = client(place, model_folder, "http")
    post, sent = engine._post, 0

    async def breaks_off(path, body=None, **options):
        nonlocal sent
        if path == "/update_weights_from_tensor" or (body or {}).get("method") == "polyturn_hold":
            sent += 1
            if sent == 2:
                raise EngineLostError("the connection broke off")
        return await post(path, body, **options)

    try:
        await engine.update_weights(0, weights=small_model().state_dict())
        engine._post = breaks_off
        with pytest.raises(EngineLostError, match="broke off"):
            await engine.update_weights(1, weights=small_model().state_dict())
        engine._post = post
        between = await engine.generate(ask("between", max_tokens=2))
        assert between.policy_versions == ((0, FOREIGN_VERSION),)  # half of them are new: nobody's weights
        await engine.update_weights(2, weights=small_model().state_dict())
        assert (await engine.generate(ask("again", max_tokens=2))).policy_versions == ((0, 2),)
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


async def test_a_bit_that_changes_on_the_way_stops_the_run_and_is_named_though_no_logprob_shows_it(place, model_folder):
    engine = client(place, model_folder, "shared_memory")
    try:
        policy = local_policy(small_model(), optim=OptimSettings(lr=1e-3))
        sync = WeightSync(engine, policy, vocab_size=VOCAB)
        await sync.start(0)
        load, tensor = engine.update_weights, "model.layers.1.self_attn.k_proj.weight"

        async def damaged(version, *, weights):
            bits = weights[tensor].clone().view(torch.int32)
            bits[0, 0] ^= 1
            await load(version, weights={**weights, tensor: bits.view(torch.float32)})

        engine.update_weights = damaged
        with pytest.raises(EngineError, match=r"checksums differ in .*qkv_proj.* \(from .*layers\.1\.self_attn\.k_proj"):
            await sync.publish(1)
        engine.update_weights = load
        await sync.publish(2)
    finally:
        await engine.close()


async def test_checksums_cover_every_tensor_of_the_model(place, model_folder, caplog):
    caplog.set_level("INFO", logger="polyturn")
    engine = client(place, model_folder, "shared_memory")
    try:
        model = small_model()
        await WeightSync(engine, local_policy(model, optim=OptimSettings(lr=1e-3)), vocab_size=VOCAB).start(0)
        total = len(dict(model.named_parameters()))
        assert f"checksums of {total} of {total} tensors are compared" in caplog.text
    finally:
        await engine.close()


def left_in_memory() -> list[str]:
    """Return the files of shared memory that this process has handed over and nobody has let go."""
    return [path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]


def small_buckets(weights):
    from polyturn.engines.weight_transport import buckets

    return buckets(weights, limit=20_000)


def ask(name: str, **sampling) -> GenerateRequest:
    return GenerateRequest(request_id=name, session_id=name, prompt_ids=range(1, 30), sampling=SamplingParams(**sampling))
