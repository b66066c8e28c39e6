"""The canary on the real servers: true syncs pass, and each group that is kept back is found."""

import asyncio
import copy
import dataclasses

import pytest
import torch
from engine_servers import CLIENTS, launch_spec, needs_server, on_servers
from transformers import Qwen2Config, Qwen2ForCausalLM

from polyturn.core.errors import EngineError
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weight_files import WeightFolder
from polyturn.training import lora
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_shifts import groups_of
from polyturn.training.weight_sync import WeightSync
from support.served_model import VOCAB, ask, logprob_gaps, small_model


@pytest.fixture(params=on_servers())
def address(request, server_of):
    return CLIENTS[request.param], server_of(request.param)


@pytest.fixture
async def engine(address, model_folder):
    kind, url = address
    made = kind(url, ServedModel(vocab_size=VOCAB, max_context=2048, folder=model_folder))
    yield made
    await made.close()


def policy() -> ModelPolicy:
    return local_policy(small_model(), optim=OptimSettings(lr=1e-3))


async def test_true_weights_pass_the_canary(engine):
    report = await WeightSync(engine, policy(), WeightProbe(vocab_size=VOCAB)).start(0)
    assert report.canary < report.smallest_effect / 4
    assert report.smallest_effect > 20 * report.noise


async def test_adapter_arrives_merged(engine):
    model = small_model()
    lora.add_lora(model, lora.LoraSettings(rank=4))
    sync = WeightSync(engine, local_policy(model, optim=OptimSettings(lr=1e-3)), WeightProbe(vocab_size=VOCAB))
    report = await sync.start(0)
    assert report.canary < report.smallest_effect / 4
    for tensor in lora.adapter_tensors(model).values():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    assert await sync.publish(1) < 3 * report.noise


@pytest.mark.engines
async def test_adapters_change_under_running_requests(model_folder, tmp_path):
    needs_server("vllm")
    model = small_model()
    lora.add_lora(model, lora.LoraSettings(rank=4))
    flags, env = VllmEngine.adapter_launch(4)
    spec = launch_spec("vllm", model_folder)
    spec = dataclasses.replace(spec, command=(*spec.command, *flags), env={**spec.env, **env})
    engine = VllmEngine("", ServedModel(vocab_size=VOCAB), supervisor=ServerSupervisor(spec))
    pool = EnginePool([engine], files=WeightFolder(model_folder, root=tmp_path, adapter=lora.adapter_settings(model)))
    models, running = [], []
    try:
        for version in range(5):
            for tensor in lora.adapter_tensors(model).values():
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(version)))
            models.append(copy.deepcopy(model))
            await pool.update_weights(version, weights=lora.as_peft(lora.adapter_tensors(model)))
            running.append(asyncio.create_task(pool.generate(ask(f"r{version}", max_tokens=1900))))
            await asyncio.sleep(0.3)
        completions = [await task for task in running]
    finally:
        await pool.close()
    for number, completion in enumerate(completions):
        assert len(completion.token_ids) == 1900
        assert completion.policy_versions[0] == (0, number)
        ends = [start for start, _ in completion.policy_versions[1:]] + [1900]
        for (start, version), end in zip(completion.policy_versions, ends, strict=True):
            assert logprob_gaps(models[version], completion)[start:end].max() < 1e-4
    assert completions[0].policy_versions[-1][1] > 0, "it ran while the adapter changed"


async def test_sleeping_server_wakes_with_new_weights(engine):
    """On a CPU no memory is freed; the order of the calls, and what the servers make of it, is the same."""
    trainer = policy()
    sync = WeightSync(engine, trainer, WeightProbe(vocab_size=VOCAB))
    report = await sync.start(0)
    asked = asyncio.create_task(engine.generate(ask("long", max_tokens=1900)))
    await asyncio.sleep(0.2)
    await engine.sleep()
    await asyncio.sleep(0.3)
    assert not asked.done()
    for parameter in trainer.weights().values():
        parameter.mul_(1.1)
    assert await sync.publish(1) < 3 * report.noise
    completion = await asked
    assert len(completion.token_ids) == 1900
    assert completion.policy_versions[-1][1] == 1
    await engine.sleep()
    assert await sync.publish(2) < 3 * report.noise


async def test_withheld_weights_are_named(engine):
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
@pytest.mark.parametrize("kind", on_servers())
async def test_biases_and_an_untied_head_arrive_or_are_named(kind, tmp_path, caplog):
    needs_server(kind)
    caplog.set_level("INFO", logger="polyturn.training")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "tie_word_embeddings": False}
    no_tokens = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, **sizes, **heads, **no_tokens)).float().eval()
    model.save_pretrained(tmp_path)
    trainer = local_policy(model, optim=OptimSettings(lr=1e-3))
    served = ServedModel(vocab_size=VOCAB, folder=tmp_path)
    engine = CLIENTS[kind]("", served, supervisor=ServerSupervisor(launch_spec(kind, tmp_path)))
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


@pytest.mark.engines
@pytest.mark.slow
async def test_vllm_without_our_plug_in_fails_the_canary(model_folder):
    """It answers 200 and keeps the head's packed copy of the old embedding."""
    needs_server("vllm")
    spec = launch_spec("vllm", model_folder, way="folder")
    bare = dataclasses.replace(spec, env={**spec.env, "PYTHONPATH": ""})
    engine = VllmEngine("", ServedModel(vocab_size=VOCAB, folder=model_folder), supervisor=ServerSupervisor(bare))
    try:
        with pytest.raises(EngineError, match=r"did not arrive|still has the old"):
            await WeightSync(engine, policy(), WeightProbe(vocab_size=VOCAB)).start(0)
    finally:
        await engine.close()
