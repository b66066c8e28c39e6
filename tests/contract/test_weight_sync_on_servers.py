"""The canary on the real servers: true syncs pass, and each group that is kept back is found."""

import asyncio
import copy
import dataclasses
import signal

import pytest
import torch
from engine_servers import CLIENTS, READY_S, launch_spec, needs_server, on_servers
from transformers import Qwen2Config, Qwen2ForCausalLM

from polyturn.core.errors import EngineError
from polyturn.engines.pool import EnginePool
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weights.folder import WeightFolder
from polyturn.engines.weights.stream import streamed
from polyturn.infra.process import signal_session
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


def adapted_model():
    model = small_model()
    lora.add_lora(model, lora.LoraSettings(rank=4))
    return model


def draw_adapter(model, seed):
    for tensor in lora.adapter_tensors(model).values():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))


def adapter_pool(kind, model, model_folder, root):
    """Return a pool of a server of its own that is sent only the adapter of `model`."""
    needs_server(kind)
    settings = lora.adapter_settings(model)
    flags, env = CLIENTS[kind].adapter_launch(settings, device="cpu")
    spec = launch_spec(kind, model_folder, way="adapter")
    spec = dataclasses.replace(spec, command=(*spec.command, *flags), env={**spec.env, **env})
    served = ServedModel(vocab_size=VOCAB, adapter=settings)
    engine = CLIENTS[kind]("", served, supervisor=ServerSupervisor(spec, max_restarts=1))
    return EnginePool([engine], files=adapter_files(model, model_folder, root))


def adapter_files(model, model_folder, root):
    return WeightFolder(model_folder, root=root, adapter=lora.adapter_settings(model))


def bytes_of_latest(root):
    """Return the size of the latest adapter in `root`."""
    return max(root.glob("*/*/adapter_model.safetensors")).stat().st_size


@pytest.mark.parametrize("kind", on_servers())
async def test_adapters_change_under_running_requests(kind, model_folder, tmp_path):
    model = adapted_model()
    pool = adapter_pool(kind, model, model_folder, tmp_path)
    models, running = [], []
    length = 1900 if kind == "vllm" else 600  # SGLang's adapters are slow on a CPU
    try:
        for version in range(5):
            draw_adapter(model, version)
            models.append(copy.deepcopy(model))
            await pool.update_weights(version, weights=lora.as_peft(lora.adapter_tensors(model)))
            running.append(asyncio.create_task(pool.generate(ask(f"r{version}", max_tokens=length))))
            await asyncio.sleep(0.3)
        completions = [await task for task in running]
    finally:
        await pool.close()
    for number, completion in enumerate(completions):
        assert len(completion.token_ids) == length
        assert completion.policy_versions[0] == (0, number)
        ends = [start for start, _ in completion.policy_versions[1:]] + [length]
        for (start, version), end in zip(completion.policy_versions, ends, strict=True):
            assert logprob_gaps(models[version], completion)[start:end].max() < 1e-4
    assert completions[0].policy_versions[-1][1] > 0, "it ran while the adapter changed"


@pytest.mark.timeout(3 * READY_S, func_only=True)  # it starts a server twice
@pytest.mark.parametrize("kind", on_servers(slow="vllm"))
async def test_adapter_is_proved_and_returns_after_a_kill(kind, model_folder, tmp_path, monkeypatch):
    model = adapted_model()
    pool = adapter_pool(kind, model, model_folder, tmp_path)
    (replica,) = pool.replicas
    trainer = local_policy(model, optim=OptimSettings(lr=1e-3))
    probe = WeightProbe(vocab_size=VOCAB)
    try:
        sync = WeightSync(pool, trainer, probe, to_checkpoint=lora.as_peft, adapter_only=True)
        report = await sync.start(0)
        assert report.canary < report.smallest_effect / 4
        assert report.num_groups == 14, "A and B of seven layers"
        draw_adapter(model, 1)
        assert await sync.publish(1) < 3 * report.noise
        sent, merged = bytes_of_latest(tmp_path), sum(kind.nbytes for kind in streamed(trainer.weights()).kinds.values())
        assert sent < merged / 6, f"{sent} bytes of the adapter, {merged} of the merged model"

        signal_session(replica.engine.process.pid, signal.SIGKILL)
        completion = await pool.generate(ask("after", max_tokens=80))
        assert replica.engine.num_restarts == 1
        assert completion.policy_versions == ((0, 1),)
        assert logprob_gaps(model, completion).max() < 1e-4

        if kind == "sglang":  # as to a server that does not see the folder
            monkeypatch.setattr("polyturn.engines.sglang.is_here", lambda url: False)
            client = CLIENTS[kind](replica.engine.url, ServedModel(vocab_size=VOCAB, adapter=lora.adapter_settings(model)))
            other = EnginePool([client], files=adapter_files(model, model_folder, tmp_path))
            draw_adapter(model, 2)
            await other.update_weights(2, weights=lora.as_peft(lora.adapter_tensors(model)))
            completion = await other.generate(ask("tensors", max_tokens=80))
            await other.close()
            assert completion.policy_versions == ((0, 2),)
            assert logprob_gaps(model, completion).max() < 1e-4
    finally:
        await pool.close()


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
