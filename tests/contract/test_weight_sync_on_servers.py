"""The canary on the real servers: true syncs pass, and each group that is kept back is found."""

import asyncio
import dataclasses

import pytest
import torch
from engine_servers import launch_spec, why_not
from transformers import Qwen2Config, Qwen2ForCausalLM

from conftest import VOCAB, small_model
from polyturn.core.errors import EngineError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.vllm import VllmEngine
from polyturn.training import lora
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_shifts import groups_of
from polyturn.training.weight_sync import WeightSync

SERVERS = {"vllm": VllmEngine, "sglang": SglangEngine}


@pytest.fixture(params=list(SERVERS))
def address(request, server_of):
    return SERVERS[request.param], server_of(request.param)


@pytest.fixture
async def engine(address, model_folder):
    kind, url = address
    made = kind(url, ServedModel(vocab_size=VOCAB, max_context=2048, folder=model_folder))
    yield made
    await made.close()


def policy() -> ModelPolicy:
    return local_policy(small_model(), optim=OptimSettings(lr=1e-3))


async def test_true_weights_pass_a_tied_head_included(engine):
    report = await WeightSync(engine, policy(), WeightProbe(vocab_size=VOCAB)).start(0)
    assert report.canary < report.smallest_effect / 4
    assert report.smallest_effect > 20 * report.noise


async def test_an_adapter_arrives_merged_into_its_weights(engine):
    model = small_model()
    lora.add_lora(model, lora.LoraSettings(rank=4))
    sync = WeightSync(engine, local_policy(model, optim=OptimSettings(lr=1e-3)), WeightProbe(vocab_size=VOCAB))
    report = await sync.start(0)
    assert report.canary < report.smallest_effect / 4
    for tensor in lora.adapter_tensors(model).values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    assert await sync.publish(1) < 3 * report.noise


async def test_a_server_that_sleeps_takes_weights_as_it_wakes_and_goes_on_with_what_it_was_sampling(engine):
    """On a CPU no memory is freed; the order of the calls, and what the servers make of it, is the same."""
    trainer = policy()
    sync = WeightSync(engine, trainer, WeightProbe(vocab_size=VOCAB))
    report = await sync.start(0)
    sampling = SamplingParams(max_tokens=1500, temperature=1.0)
    asked = asyncio.create_task(
        engine.generate(GenerateRequest(request_id="long", session_id="long", prompt_ids=[1, 2, 3], sampling=sampling))
    )
    await asyncio.sleep(0.3)
    await engine.sleep()
    await asyncio.sleep(0.3)
    assert not asked.done()
    for parameter in trainer.weights().values():
        parameter.mul_(1.1)
    assert await sync.publish(1) < 3 * report.noise
    said = await asked
    assert len(said.token_ids) == 1500 and [version for _, version in said.policy_versions] == [0, 1]
    await engine.sleep()
    assert await sync.publish(2) < 3 * report.noise


async def test_each_group_that_is_kept_back_is_named(engine):
    trainer = policy()
    true = {name: value.clone() for name, value in trainer.weights().items()}
    for name in trainer.backend.weight_groups():
        pointers = {trainer.weights()[kept].data_ptr() for kept in groups_of(trainer.weights())[name]}
        load = engine.update_weights

        async def leaky(version, *, weights, pointers=pointers, load=load):
            await load(
                version,
                weights={key: true[key] if value.data_ptr() in pointers else value for key, value in weights.items()},
            )

        engine.update_weights = leaky
        with pytest.raises(EngineError, match=name.replace(".", r"\.").replace("*", r"\*")):
            await WeightSync(engine, trainer, WeightProbe(vocab_size=VOCAB, num_prompts=2, num_tokens=16)).start(0)
        engine.update_weights = load


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(SERVERS))
async def test_biases_and_a_head_of_its_own_arrive_and_one_that_is_kept_back_is_named(kind, tmp_path, caplog):
    if (reason := why_not(kind)) is not None:
        pytest.skip(reason)
    caplog.set_level("INFO", logger="polyturn.training")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "tie_word_embeddings": False}
    no_tokens = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, **sizes, **heads, **no_tokens)).float().eval()
    model.save_pretrained(tmp_path)
    trainer = local_policy(model, optim=OptimSettings(lr=1e-3))
    engine = SERVERS[kind](
        "", ServedModel(vocab_size=VOCAB, folder=tmp_path), supervisor=ServerSupervisor(launch_spec(kind, tmp_path))
    )
    try:
        report = await WeightSync(engine, trainer, WeightProbe(vocab_size=VOCAB)).start(0)
        assert report.canary < report.smallest_effect / 4
        count = len(dict(model.named_parameters()))
        assert f"checksums of {count} of {count} tensors" in caplog.text
        load, true = engine.update_weights, {name: value.clone() for name, value in trainer.weights().items()}
        for part in ("lm_head.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"):

            async def leaky(version, *, weights, part=part):
                await load(version, weights={k: true[k] if k.endswith(part) else v for k, v in weights.items()})

            engine.update_weights = leaky
            with pytest.raises(EngineError, match=part.replace(".", r"\.")):
                await WeightSync(engine, trainer, WeightProbe(vocab_size=VOCAB, num_prompts=2, num_tokens=16)).start(0)
    finally:
        await engine.close()


@pytest.mark.slow
async def test_a_vllm_server_without_our_plug_in_that_keeps_a_tied_head_old_is_caught(model_folder):
    """It answers 200 and keeps the head's packed copy of the old embedding."""
    if (reason := why_not("vllm")) is not None:
        pytest.skip(reason)
    spec = launch_spec("vllm", model_folder, way="folder")
    bare = dataclasses.replace(spec, env={**spec.env, "PYTHONPATH": ""})
    engine = VllmEngine("", ServedModel(vocab_size=VOCAB, folder=model_folder), supervisor=ServerSupervisor(bare))
    try:
        with pytest.raises(EngineError, match=r"did not arrive|is still the old one"):
            await WeightSync(engine, policy(), WeightProbe(vocab_size=VOCAB)).start(0)
    finally:
        await engine.close()
