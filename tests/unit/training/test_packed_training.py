"""Packed rows and shared prefixes: the same numbers and the same gradient as every sample alone, in float64 to 1e-9 (I7)."""

import copy
import dataclasses
import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyturn.algorithms.options import AlgorithmOptions, DistillSettings, KlOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.batching.packing import common_prefix, pack, sorted_rows
from polyturn.core.errors import CheckpointError
from polyturn.core.sample import SampleId, TrainSample
from polyturn.training.hf import build_model, checkpoint_activations
from polyturn.training.loss_terms import LossSettings
from polyturn.training.model import TargetForward
from polyturn.training.optim import OptimSettings
from polyturn.training.packed_attention import BLOCK, PackedView, attend_flex, attend_rows, why_not_packed
from polyturn.training.policy import ModelPolicy, local_policy
from support.models import in_float64, tiny_model
from support.refusals import refuses
from support.samples import sample_of
from support.states import hand_over

VOCAB = 50


KINDS = ("qwen3", "qwen2", "llama")
MODELS = {kind: in_float64(tiny_model(VOCAB, kind, heads=4, kv_heads=2, layers=2)) for kind in KINDS}
ROWS, PACKED = LayoutSettings(), LayoutSettings(packed=True)
SHARED = LayoutSettings(shared_prefix=True, min_saving=0.0, min_shared=1)


def sample(ids: list[int], prompt: int, index: int, rng: np.random.Generator) -> TrainSample:
    weights = np.zeros(len(ids), np.float32)
    weights[prompt:] = rng.choice([0.0, 1.0], len(ids) - prompt, p=[0.3, 0.7])
    weights[-1] = 1
    return sample_of(
        ("g", str(index), 0),
        ids,
        weights,
        old_logprobs=rng.normal(-3.9, 0.2, len(ids)),
        ref_logprobs=rng.normal(-3.9, 0.2, len(ids)),
        advantages=rng.normal(size=len(ids)),
        temperature=float(rng.choice([0.7, 1.0])),
    )


def branching(seed: int, *, members: int = 6) -> list[TrainSample]:
    """Return members of one prompt, the segments of each of which share some turns, and one sample that shares nothing."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, int(rng.integers(2, 20))).tolist()
    samples = []
    for _ in range(members):
        ids = [*prompt, *rng.integers(0, VOCAB, int(rng.integers(1, 12))).tolist()]
        samples.append(sample(ids, len(prompt), len(samples), rng))
        for _ in range(int(rng.integers(0, 3))):  # segments that branch off later
            keep = int(rng.integers(len(prompt), len(ids) + 1))
            ids = [*ids[:keep], *rng.integers(0, VOCAB, int(rng.integers(1, 12))).tolist()]
            samples.append(sample(ids, max(keep, 1), len(samples), rng))
    samples.append(sample(rng.integers(0, VOCAB, 9).tolist(), 3, len(samples), rng))
    samples.append(samples[0].replace(id=SampleId("g", "again", 0)))  # what another row holds entirely
    return samples


def policy_of(kind: str, layout: LayoutSettings, *, checkpointing: bool = False) -> ModelPolicy:
    model = copy.deepcopy(MODELS[kind])
    if checkpointing:
        checkpoint_activations(model)
    loss = LossSettings(algorithm=AlgorithmOptions(kl=KlOptions(coef=0.1), entropy_coef=0.01))
    return local_policy(model, optim=OptimSettings(), loss=loss, layout=layout, reference=True)


def gradient(policy: ModelPolicy, samples: list[TrainSample]) -> dict[str, Tensor]:
    policy.forward_backward(samples)
    return {n: p.grad for n, p in policy.backend.model.named_parameters()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < tolerance


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), tokens=st.sampled_from([20, 70, 10**6]))
def test_packed_rows_have_the_gradient_of_padded_rows(kind, seed, tokens):
    samples = branching(seed)
    rows = policy_of(kind, ROWS)
    expected, scores = gradient(rows, samples), rows.score(samples)
    for layout in (PACKED, SHARED):
        policy = policy_of(kind, dataclasses.replace(layout, max_tokens_per_batch=tokens))
        assert_same(gradient(policy, samples), expected)
        for a, b in zip(policy.score(samples), scores, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)  # scores are float32


def test_recomputed_layers_attend_by_rows():
    samples = branching(4)
    expected = gradient(policy_of("qwen3", ROWS), samples)
    for layout in (ROWS, PACKED, SHARED):
        assert_same(gradient(policy_of("qwen3", layout, checkpointing=True), samples), expected)


def test_shared_prefix_is_counted():
    samples = branching(5)
    metrics = policy_of("qwen3", SHARED).forward_backward(samples).metrics
    plain = policy_of("qwen3", ROWS).forward_backward(samples).metrics
    assert plain["tokens/shared_prefix"].value == 0
    shared = metrics["tokens/shared_prefix"].value
    assert shared > 0 and metrics["tokens/processed"].value + shared == plain["tokens/processed"].value
    assert metrics["tokens/trained"].value == plain["tokens/trained"].value


def test_model_keeps_its_attention_implementation():
    policy = policy_of("qwen3", SHARED)
    policy.forward_backward(branching(6))
    assert policy.backend.model.config._attn_implementation == "sdpa"


def test_long_rows_behind_a_prefix_go_in_blocks():
    rng = np.random.default_rng(0)
    common = rng.integers(0, 9, 40)
    rows = [np.concatenate([common, rng.integers(0, 9, n)]) for n in (2 * BLOCK + 30, BLOCK + 7, 3)]
    rows = [rows[i] for i in sorted_rows(rows)]
    packing = pack(rows, shared=[0, *(common_prefix(a, b) for a, b in itertools.pairwise(rows))])
    view = PackedView(packing, torch.device("cpu"))
    n = packing.num_tokens
    q, k, v = (torch.randn(1, heads, n, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out = attend_rows(q, k, v, view, scale=0.3)
    for place in packing.row_indices:
        alone = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, place], k[:, :, place], v[:, :, place], is_causal=True, scale=0.3, enable_gqa=True
        )
        assert float((out[:, :, place] - alone).abs().max()) < 1e-12


def test_gpu_kernel_masks_as_rows_do():
    samples = branching(7)
    rows = [s.token_ids for s in samples]
    rows = [rows[i] for i in sorted_rows(rows)]
    shared = [0, *(common_prefix(a, b) for a, b in itertools.pairwise(rows))]
    view = PackedView(pack(rows, shared=shared), torch.device("cpu"))
    n = view.packing.num_tokens
    q, k, v = (torch.randn(1, heads, n, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        flex = attend_flex(q, k, v, view, scale=0.25)
    torch.testing.assert_close(flex, attend_rows(q, k, v, view, scale=0.25), atol=1e-5, rtol=0)


SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
OTHER = {
    "sliding window": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4},
    "a sliding window in every layer": {"model_type": "mistral", "sliding_window": 4},
    "capped scores": {"model_type": "gemma2", "head_dim": 16},
}


@pytest.mark.parametrize("name", OTHER)
def test_model_that_cannot_be_packed_is_trained_in_rows(name, caplog):
    model = build_model({"num_key_value_heads": 1, **SMALL, **OTHER[name]}, seed=0)
    assert why_not_packed(model)
    with caplog.at_level(logging.WARNING, logger="polyturn.training.policy"):
        policy = local_policy(model, optim=OptimSettings(), layout=SHARED)
        metrics = policy.forward_backward(branching(8)).metrics
        policy.forward_backward(branching(8))
    assert metrics["tokens/packing_refused"].value == 1 and metrics["tokens/shared_prefix"].value == 0
    assert metrics["tokens/padding_share"].value > 0
    assert len([r for r in caplog.records if "cannot be packed: " in r.message]) == 1


def test_teacher_that_can_be_packed_does_not_let_the_policy_be_packed():
    fields = {"num_key_value_heads": 1, **SMALL}
    model = build_model({**fields, **OTHER["sliding window"]}, seed=0)
    teacher = build_model({**fields, "model_type": "qwen2"}, seed=1)
    loss = LossSettings(distill=DistillSettings(teacher="teacher"))
    policy = local_policy(model, optim=OptimSettings(), layout=SHARED, loss=loss, teacher=teacher)
    assert policy.forward_backward(branching(8)).metrics["tokens/packing_refused"].value == 1


def test_model_with_a_recurrent_state_is_not_packed():
    recurrent = {"model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    model = build_model({"num_key_value_heads": 1, **SMALL, **recurrent}, seed=0)
    assert why_not_packed(model) == "it has layers of linear_attention"


def test_model_with_experts_is_packed():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = build_model({"model_type": "qwen3_moe", "num_key_value_heads": 1, "head_dim": 16, **experts, **SMALL}, seed=0)
    assert why_not_packed(model) is None


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-7)])
def test_rounding_of_experts_is_not_a_leak(dtype: torch.dtype, rounding: float):
    """Other tokens change the sizes of the experts' matrices, and with them the last bits; here every other pass differs."""
    model, passes = tiny_model(VOCAB, spread=0.2).to(dtype), itertools.count()
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, out: out * (1 + rounding * (next(passes) % 2)))
    assert why_not_packed(model) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_that_reads_other_rows_is_not_packed(dtype: torch.dtype):
    model = tiny_model(VOCAB).to(dtype)
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, out: out + 0.5 * args[0].mean(dim=1, keepdim=True))
    assert why_not_packed(model) == "a row of its packed rows reads another one"


@pytest.mark.parametrize("entropy_grad", [None, False, True])
def test_chunked_logits_give_the_same_gradient(entropy_grad):
    samples = branching(9)
    found = []
    for max_logits in (None, 7 * VOCAB):
        policy = policy_of("qwen3", PACKED)
        forward = TargetForward(policy.backend.model, max_logits=max_logits)
        (batch,) = policy.backend.lay_out(samples, [s.loss_weights for s in samples])
        scores = forward(batch, entropy_grad=entropy_grad)
        total = (scores.logprobs_S * batch.advantages_S).sum()
        if entropy_grad:
            total = total + scores.entropy_S.square().sum()
        total.backward()
        gradients = {n: p.grad for n, p in policy.backend.model.named_parameters()}
        found.append((scores, gradients))
    (whole, a), (chunked, b) = found
    torch.testing.assert_close(chunked.logprobs_S, whole.logprobs_S, atol=1e-12, rtol=0)
    assert (whole.entropy_S is None) == (entropy_grad is None)
    if entropy_grad is not None:
        torch.testing.assert_close(chunked.entropy_S, whole.entropy_S, atol=1e-12, rtol=0)
    assert_same(a, b)


def test_backward_pass_keeps_no_logits():
    samples = branching(10)
    policy = policy_of("qwen3", PACKED)
    forward = TargetForward(policy.backend.model, max_logits=5 * VOCAB)
    (batch,) = policy.backend.lay_out(samples, [s.loss_weights for s in samples])
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        scores = forward(batch)
    assert batch.num_targets * VOCAB not in kept and 5 * VOCAB not in kept
    scores.logprobs_S.sum().backward()


def masters_of(policy: ModelPolicy) -> dict[str, Tensor]:
    """Return the float32 copies of the parameters."""
    return dict(policy.backend.optimizer.sections()["masters/"])


def bf16_policy(**optim: Any) -> ModelPolicy:
    model = copy.deepcopy(MODELS["qwen3"]).to(torch.bfloat16)
    return local_policy(model, optim=OptimSettings(**optim), layout=SHARED)


def test_bfloat16_parameters_learn_small_steps():
    """A step of 1e-4 of a weight is lost in bfloat16; in the masters many of them add up."""
    policy = bf16_policy(lr=2e-5, weight_decay=0.0, max_grad_norm=None)
    start = {n: p.detach().clone() for n, p in policy.backend.model.named_parameters()}
    samples = branching(11)
    for _ in range(30):
        policy.forward_backward(samples)
        policy.optim_step()
    name, parameter = next((n, p) for n, p in policy.backend.model.named_parameters() if "q_proj" in n)
    assert parameter.dtype == torch.bfloat16
    moved = (masters_of(policy)[name] - start[name].float()).abs()
    assert float(moved.detach().median()) > 1e-4
    assert torch.equal(parameter, masters_of(policy)[name].to(torch.bfloat16))


def test_micro_batch_gradients_are_summed_in_float32():
    samples = branching(12)
    policy = bf16_policy()
    policy.forward_backward(samples)
    assert all(p.grad is None for p in policy.backend.model.parameters())
    assert all(m.grad.dtype == torch.float32 for m in policy.backend.optimizer.masters.values())


def test_masters_survive_a_checkpoint():
    samples = branching(13)
    one, other = bf16_policy(lr=1e-5), bf16_policy(lr=1e-5)
    for _ in range(2):
        one.forward_backward(samples)
        one.optim_step()
    hand_over(one, other)
    for policy in (one, other):
        policy.forward_backward(samples)
        policy.optim_step()
    for name, master in masters_of(one).items():
        assert torch.equal(master, masters_of(other)[name])
    plain = local_policy(copy.deepcopy(MODELS["qwen3"]).float(), optim=OptimSettings())
    refuses(lambda: hand_over(one, plain), CheckpointError, "float32 copies of", "another model.dtype")
