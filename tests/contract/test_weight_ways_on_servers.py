"""New weights reach the real servers through a folder and by their own transfer, every group of parameters of a tied model;
and a single bit that changes on the way is found by the checksums."""

import itertools
from pathlib import Path

import pytest
import torch
from engine_servers import CLIENTS, on_servers
from transfer_checks import CHECKS, in_small_buckets

from polyturn.core.errors import EngineError
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.weights.folder import WeightFolder, WrittenWeights
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_sync import WeightSync
from support.served_model import VOCAB, ask, small_model


@pytest.fixture(params=on_servers())
def address(request, server_of):
    return request.param, server_of(request.param)


def client(address, model_folder):
    kind, url = address
    return CLIENTS[kind](url, ServedModel(vocab_size=VOCAB, max_context=2048, folder=model_folder))


@pytest.mark.parametrize("check", CHECKS)
async def test_transfer_of_tensors(address, check, model_folder, monkeypatch):
    kind, url = address
    monkeypatch.setattr("polyturn.engines.weights.group.streamed", in_small_buckets)
    await CHECKS[check](kind, url, model_folder)


async def test_folder_unseen_by_the_server_is_refused(address, model_folder):
    engine = client(address, model_folder)
    try:
        with pytest.raises(EngineError, match=r"engine\.weights"):
            await engine.update_weights(1, weights=WrittenWeights(Path("/nowhere/on/this/machine")))
        assert len((await engine.generate(ask("still", max_tokens=2))).token_ids) == 2
    finally:
        await engine.close()


async def test_weights_go_through_another_folder(address, model_folder, tmp_path):
    engine = client(address, model_folder)
    with WeightFolder(model_folder, root=tmp_path) as files:
        await engine.update_weights(2, weights=files.write(small_model().state_dict()))
    assert (await engine.generate(ask("disk", max_tokens=2))).policy_versions == ((0, 2),)
    await engine.close()


async def test_flipped_bit_is_found_and_named(address, model_folder):
    engine = client(address, model_folder)
    try:
        policy = local_policy(small_model(), optim=OptimSettings(lr=1e-3))
        load, tensor, pushes = engine.update_weights, "model.layers.1.self_attn.k_proj.weight", itertools.count(1)

        async def damaged(version, *, weights):
            if next(pushes) < 3:  # the true weights, and the canary's
                await load(version, weights=weights)
                return
            bits = weights[tensor].clone().view(torch.int32)
            bits[0, 0] ^= 1
            await load(version, weights={**weights, tensor: bits.view(torch.float32)})

        engine.update_weights = damaged
        with pytest.raises(EngineError, match=r"checksums differ in .*qkv_proj.* \(from .*layers\.1\.self_attn\.k_proj"):
            await WeightSync(engine, policy, WeightProbe(vocab_size=VOCAB)).start(0)
        engine.update_weights = load
        await WeightSync(engine, policy, WeightProbe(vocab_size=VOCAB)).start(0)
    finally:
        await engine.close()


async def test_checksums_cover_every_tensor(address, model_folder, caplog):
    caplog.set_level("INFO", logger="polyturn")
    engine = client(address, model_folder)
    try:
        model = small_model()
        await WeightSync(engine, local_policy(model, optim=OptimSettings(lr=1e-3)), WeightProbe(vocab_size=VOCAB)).start(0)
        total = len(dict(model.named_parameters()))
        assert f"checksums of {total} of {total} tensors are compared" in caplog.text
    finally:
        await engine.close()
