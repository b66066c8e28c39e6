"""LoRA: trained parameters, sampling, the reference, and pushed, saved and resumed weights."""

import asyncio
import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from polyturn.algorithms.options import AlgorithmOptions, KlOptions, RoutingOptions
from polyturn.core.errors import CheckpointError, ConfigError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.sample import TrainSample
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.training import hf, lora
from polyturn.training.loss_terms import LossSettings
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from support.models import tiny_model
from support.refusals import refuses
from support.samples import sample_of
from support.states import hand_over, stored, tensors_in

VOCAB = 48


def samples(seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    weights = np.array([0.0] * 3 + [1.0] * 9, np.float32)
    return [
        sample_of(("g", str(i), 0), rng.integers(0, VOCAB, 12), weights, advantages=weights * (1.0 if i % 2 else -1.0))
        for i in range(4)
    ]


def adapted(seed: int = 0, **settings: object) -> PreTrainedModel:
    model = tiny_model(VOCAB, hidden=16, seed=seed)
    lora.add_lora(model, lora.LoraSettings(rank=4, alpha=8, **settings), seed=seed)
    return model


@pytest.mark.parametrize("excluded", [None, ["o_proj"], r".*\.o_proj"])
def test_all_linear_excludes_experts_and_routers(excluded: str | list[str] | None) -> None:
    model = tiny_model(VOCAB, kind="qwen3_moe", hidden=16)
    lora.add_lora(model, lora.LoraSettings(rank=4, alpha=8, exclude_modules=excluded))
    found = {name.rpartition(".")[2] for name in lora.adapted_layers(model)}
    assert found == {"q_proj", "k_proj", "v_proj"} | ({"o_proj"} if excluded is None else set())
    named = tiny_model(VOCAB, kind="qwen3_moe", hidden=16)
    lora.add_lora(named, lora.LoraSettings(rank=4, alpha=8, target_modules=["gate"]))  # unless they are named
    assert {name.rpartition(".")[2] for name in lora.adapted_layers(named)} == {"gate"}


def test_all_linear_leaves_shared_experts_and_dense_layers_alone() -> None:
    model = tiny_model(VOCAB, kind="deepseek_v3", hidden=16, layers=2)
    lora.add_lora(model, lora.LoraSettings(rank=4, alpha=8))
    assert {name.split(".")[-2] for name in lora.adapted_layers(model)} == {"self_attn"}
    assert (
        lora.merged_weights(model).keys() == tiny_model(VOCAB, kind="deepseek_v3", hidden=16, layers=2).state_dict().keys()
    )


def test_adapter_of_experts_names_its_modules_and_resumes(tmp_path: Path) -> None:
    """An earlier all-linear adapted the stacks of experts of such a model."""

    def made(targets: str | list[str]) -> ModelPolicy:
        model = tiny_model(VOCAB, kind="deepseek_v3", hidden=16, layers=2)
        lora.add_lora(model, lora.LoraSettings(rank=4, alpha=8, target_modules=targets))
        loss = LossSettings(algorithm=AlgorithmOptions(routing=RoutingOptions(replay="off")))
        return local_policy(model, optim=OptimSettings(lr=0.05), loss=loss)

    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    former = train(made([*attention, "gate_proj", "up_proj", "down_proj"]), 1)
    state, alone = stored(former, tmp_path / "state"), hf.save_model(former.backend.model, tmp_path / "a", adapter_only=True)
    targets = "[down_proj, gate_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, q_a_proj, q_b_proj, up_proj]"
    narrow = made("all-linear")
    for load in (lambda: narrow.load(state), lambda: lora.load_adapter(narrow.backend.model, alone)):
        refuses(load, CheckpointError, f"target_modules: {targets}", "all-linear leaves out experts")
    for load in (lambda one: one.load(state), lambda one: lora.load_adapter(one.backend.model, alone)):
        load(again := made(yaml.safe_load(targets)))
        assert torch.equal(logits(again.backend.model), logits(former.backend.model))


def policy(model: PreTrainedModel, *, kl: float = 0.0) -> ModelPolicy:
    loss = LossSettings(algorithm=AlgorithmOptions(kl=KlOptions(coef=kl)))
    return local_policy(model, optim=OptimSettings(lr=0.05), loss=loss, reference=kl > 0)


def train(made: ModelPolicy, steps: int = 3, first: int = 0) -> ModelPolicy:
    for step in range(first, first + steps):
        made.forward_backward(samples(step))
        made.optim_step()
    return made


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None]).logits


def test_only_the_adapter_is_trained_from_zero():
    plain, model = tiny_model(VOCAB, hidden=16), adapted()
    assert torch.equal(logits(plain), logits(model))
    made = train(policy(model))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    for name, tensor in lora.base_weights(model).items():
        assert torch.equal(tensor, plain.state_dict()[name])
    assert not torch.allclose(logits(plain), logits(model), atol=1e-3)
    assert made.step_count == 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_embedded_engine_samples_from_the_adapted_model(temperature):
    """I8: engine logprobs = trainer logprobs, before and after training, without a copy of any weight."""

    async def check() -> None:
        engine = EmbeddedEngine(model, num_slots=4, max_context=64)
        worst = 0.0
        for version in range(3):
            await engine.update_weights(version)
            found = await engine.generate(
                GenerateRequest(
                    request_id=f"r{version}",
                    session_id=f"s{version}",
                    prompt_ids=np.arange(5, dtype=np.int32),
                    sampling=SamplingParams(max_tokens=20, temperature=temperature, seed=version),
                )
            )
            n = len(found.token_ids)
            sample = sample_of(
                ("g", "t", 0),
                np.concatenate([np.arange(5), found.token_ids]),
                np.array([0.0] * 5 + [1.0] * n),
                temperature=temperature,
            )
            (own,) = made.score([sample])
            worst = max(worst, float(np.abs(own[5:] - found.logprobs).max()))
            train(made, 2, first=2 * version)
        await engine.close()
        assert worst < 1e-4

    model = adapted()
    made = policy(model)
    asyncio.run(check())


def test_reference_is_the_model_without_its_adapter():
    """No second copy of the weights, and scoring it in the middle of a step disturbs neither gradient nor adapter."""
    plain = tiny_model(VOCAB, hidden=16)
    made = train(policy(adapted(), kl=0.1))
    expected = policy(plain).score(samples())
    found = made.score(samples(), reference=True)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))
    assert not all(np.allclose(a, b, atol=1e-3) for a, b in zip(made.score(samples()), found, strict=True))
    assert sum(p.numel() for p in made.backend.model.parameters()) < 1.5 * sum(p.numel() for p in plain.parameters())


def test_reference_after_a_warm_start_is_its_adapter():
    model = train(policy(adapted())).backend.model
    expected = policy(copy.deepcopy(model)).score(samples())
    made = train(policy(model, kl=0.1), first=5)
    resumed = policy(adapted(), kl=0.1)
    hand_over(made, resumed)
    for one in (made, resumed):
        found = one.score(samples(), reference=True)
        assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))
        assert not all(np.allclose(a, b, atol=1e-3) for a, b in zip(one.score(samples()), found, strict=True))


def test_servers_get_merged_weights():
    made = train(policy(adapted()))
    plain = tiny_model(VOCAB, hidden=16, seed=3)
    assert made.weights().keys() == plain.state_dict().keys()
    plain.load_state_dict(made.weights())
    made.backend.model.eval()
    assert torch.allclose(logits(plain.eval()), logits(made.backend.model), atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_resumed_adapter_trains_bit_for_bit(dropout: float):
    straight, first, second = (policy(adapted(dropout=dropout), kl=0.1) for _ in range(3))
    train(straight, 6)
    train(first, 3)
    hand_over(first, second)
    train(second, 3, first=3)
    pairs = zip(straight.backend.model.parameters(), second.backend.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_checkpoint_holds_the_adapter_alone(tmp_path: Path):
    made = train(policy(adapted()))
    state = stored(made, tmp_path / "state")
    size = sum(p.numel() for p in made.backend.model.parameters())
    assert sum(t.numel() for t in tensors_in(state, "model/").values()) < 0.5 * size
    other = tiny_model(VOCAB, hidden=16)
    lora.add_lora(other, lora.LoraSettings(rank=2))
    refuses(lambda: policy(other).load(state), CheckpointError, "set model.lora as in the run that wrote it")
    refuses(lambda: policy(tiny_model(VOCAB, hidden=16)).load(state), CheckpointError, "is of another model")
    narrower = adapted(target_modules=["q_proj"])
    refuses(lambda: policy(narrower).load(state), CheckpointError, "set model.lora as in the run that wrote it")


def test_adapter_is_saved_merged_or_alone(tmp_path: Path):
    model = train(policy(adapted())).backend.model.eval()
    merged = AutoModelForCausalLM.from_pretrained(hf.save_model(model, tmp_path / "merged"))
    assert not lora.has_lora(merged)
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    alone = hf.save_model(model, tmp_path / "alone", adapter_only=True)
    assert not (alone / "model.safetensors").exists()
    assert {file.stat().st_mode & 0o777 for file in alone.iterdir()} == {alone.stat().st_mode & 0o666}, "as readable"
    other = adapted(seed=0)
    lora.load_adapter(other, alone)
    assert torch.equal(logits(other), logits(model))
    refuses(lambda: lora.load_adapter(other, tmp_path / "merged"), CheckpointError, "no adapter in")
    louder = tiny_model(VOCAB, hidden=16)
    lora.add_lora(louder, lora.LoraSettings(rank=4, alpha=32))
    refuses(lambda: lora.load_adapter(louder, alone), CheckpointError, "has lora_alpha 8", "and model.lora has 32")
    (alone / lora.WEIGHTS_FILE).write_bytes(b"short")
    refuses(lambda: lora.load_adapter(other, alone), CheckpointError, lora.WEIGHTS_FILE, "is damaged")


def test_adapter_of_experts_is_merged(tmp_path: Path):
    model = tiny_model(VOCAB, kind="deepseek_v3", hidden=16, layers=2)
    lora.add_lora(model, lora.LoraSettings(rank=2, alpha=4, target_modules=["o_proj", "gate_proj", "up_proj", "down_proj"]))
    with torch.no_grad():
        for tensor in lora.adapter_tensors(model).values():
            tensor.normal_(std=0.2)
    merged = hf.load_model(hf.save_model(model, tmp_path / "merged"))
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)


def test_adapter_of_an_embedding_is_kept(tmp_path: Path):
    config = {**tiny_model(VOCAB, hidden=16).config.to_dict(), "tie_word_embeddings": False}

    def untied() -> ModelPolicy:
        model = hf.build_model(config, seed=0)
        lora.add_lora(model, lora.LoraSettings(rank=2, target_modules=["embed_tokens"]))
        return policy(model)

    model = (first := train(untied())).backend.model.eval()
    assert not torch.allclose(logits(model), logits(untied().backend.model), atol=1e-3)
    merged = hf.load_model(hf.save_model(model, tmp_path / "merged"))
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    state, alone = stored(first, tmp_path / "state"), hf.save_model(model, tmp_path / "alone", adapter_only=True)
    for load in (lambda one: one.load(state), lambda one: lora.load_adapter(one.backend.model, alone)):
        load(again := untied())
        assert torch.equal(logits(again.backend.model), logits(model))


@pytest.mark.parametrize("is_tied", [True, False])
def test_copy_of_a_policy_holds_an_adapted_embedding_unless_it_is_tied(is_tied: bool):
    model = hf.build_model({**tiny_model(VOCAB, hidden=16).config.to_dict(), "tie_word_embeddings": is_tied}, seed=0)
    lora.add_lora(model, lora.LoraSettings(rank=2, target_modules=["embed_tokens"]))
    trained = train(policy(model)).backend.model.eval()
    if is_tied:
        with pytest.raises(ConfigError, match=r"model\.lora adapts model\.embed_tokens, .*tie_word_embeddings"):
            hf.frozen_copy(trained)
    else:
        assert torch.allclose(logits(hf.frozen_copy(trained)), logits(trained), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_of_a_model_without_weights_begins_like_one_with_weights(dtype: torch.dtype):
    """So many ranks, which read the weights later, begin with the adapter of one process."""
    real = hf.build_model(tiny_model(VOCAB, hidden=16).config.to_dict(), seed=0).to(dtype)
    outline = copy.deepcopy(real).to("meta")
    for model in (real, outline):
        lora.add_lora(model, lora.LoraSettings(rank=4, alpha=8), seed=5)
    expected = lora.adapter_tensors(real)
    assert any(tensor.any() for tensor in expected.values())
    for name, tensor in lora.adapter_tensors(outline).items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_unknown_target_modules_are_refused():
    with pytest.raises(ConfigError, match=r"does not fit this model.*its linear modules are down_proj, gate_proj"):
        adapted(target_modules=["query"])
    for key in ("target_modules", "exclude_modules"):
        refuses(lambda key=key: adapted(**{key: "*.q_proj"}), ConfigError, "nothing to repeat", "q_proj")
