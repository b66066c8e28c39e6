"""The trainer and the embedded engine on the machine's accelerator, against the same in float32 on the CPU.

They run on the CPU where there is no accelerator, so that `scripts/gpu/run.sh --tiny` finds their mistakes there.
"""

import copy

import numpy as np
import pytest
import torch

import polyturn
from polyturn.batching.microbatch import LayoutSettings
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.sample import TrainSample
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from support.models import tiny_model
from support.samples import sample_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 512
ROWS = LayoutSettings(max_tokens_per_batch=4096)
PACKED = LayoutSettings(max_tokens_per_batch=4096, packed=True)
SHARED = LayoutSettings(max_tokens_per_batch=4096, packed=True, shared_prefix=True)


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return tiny_model(VOCAB, hidden=128, layers=3, heads=4, kv_heads=2, spread=0.1).to(dtype)


def samples() -> list[TrainSample]:
    """Eight samples of 100 to 400 tokens, of which each half begins with the same 80."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, 80)
    made = []
    for number in range(8):
        ids = np.concatenate([common + number // 4, rng.integers(0, VOCAB, int(rng.integers(20, 320)))]) % VOCAB
        weights = (np.arange(len(ids)) >= 80).astype(np.float32)
        made.append(sample_of((f"g{number // 4}", f"t{number}", 0), ids, weights, advantages=weights * float(rng.normal())))
    return made


def policy(device: torch.device, layout: LayoutSettings, dtype: torch.dtype = torch.float32) -> ModelPolicy:
    return local_policy(model(dtype).to(device), optim=OptimSettings(lr=1e-3), layout=layout)


def gradient(trained: ModelPolicy) -> dict[str, torch.Tensor]:
    trained.forward_backward(samples())
    return {n: p.grad.float().cpu() for n, p in trained.backend.model.named_parameters() if p.grad is not None}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys() and a
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp_min(1e-12)) for n in a)


@pytest.mark.parametrize("layout", [ROWS, PACKED, SHARED], ids=["rows", "packed", "shared prefixes"])
def test_gradient_equals_that_of_the_cpu(layout):
    expected = gradient(policy(torch.device("cpu"), ROWS))
    assert largest_difference(gradient(policy(DEVICE, layout)), expected) < 2e-3  # TF32 rounds to 10 bits


@pytest.mark.parametrize("layout", [ROWS, SHARED], ids=["rows", "shared prefixes"])
def test_scores_equal_those_of_the_cpu(layout):
    expected = policy(torch.device("cpu"), ROWS).score(samples())
    for ours, theirs in zip(policy(DEVICE, layout).score(samples()), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-2)


def test_bfloat16_scores_stay_near_float32():
    expected = policy(torch.device("cpu"), ROWS).score(samples())
    ours = policy(DEVICE, PACKED, torch.bfloat16).score(samples())
    far = np.concatenate([abs(a - b) for a, b in zip(ours, expected, strict=True)])
    assert float(far.mean()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_raise_the_likelihood_of_rewarded_samples(dtype):
    trained = policy(DEVICE, PACKED, dtype)
    good = [sample.replace(advantages=np.abs(sample.advantages)) for sample in samples()]
    before = sum(float(scores.sum()) for scores in trained.score(good))
    for _ in range(5):
        trained.forward_backward(good)
        trained.optim_step()
    assert sum(float(scores.sum()) for scores in trained.score(good)) > before + 10


def test_offloaded_optimizer_takes_nearly_the_same_steps():
    weights = []
    for offload in (False, True):
        trained = local_policy(
            model(torch.bfloat16).to(DEVICE), optim=OptimSettings(lr=1e-3, offload=offload), layout=PACKED
        )
        for _ in range(3):
            trained.forward_backward(samples())
            trained.optim_step()
        weights.append({name: weight.float().cpu() for name, weight in trained.weights().items()})
    assert largest_difference(*weights) < 1e-2


async def test_engine_is_greedy_as_generate_is():
    lm = model().to(DEVICE)
    prompts = [np.random.default_rng(n).integers(0, VOCAB, 20 + n).tolist() for n in range(4)]
    engine = EmbeddedEngine(copy.deepcopy(lm), num_slots=4)
    for number, ids in enumerate(prompts):
        request = GenerateRequest(
            request_id=f"r{number}",
            session_id=f"s{number}",
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=16, temperature=0.0),
        )
        completion = await engine.generate(request)
        ids_t = torch.tensor([ids], device=DEVICE)
        expected = lm.generate(ids_t, attention_mask=torch.ones_like(ids_t), max_new_tokens=16, do_sample=False)
        assert list(completion.token_ids) == expected[0, len(ids) :].tolist()


async def test_engine_logprobs_equal_the_trainers():
    lm = model().to(DEVICE)
    ids = np.random.default_rng(0).integers(0, VOCAB, 30).tolist()
    request = GenerateRequest(request_id="r", session_id="s", prompt_ids=ids, sampling=SamplingParams(max_tokens=64, seed=1))
    completion = await EmbeddedEngine(copy.deepcopy(lm), num_slots=2).generate(request)
    weights = np.array([0.0] * 30 + [1.0] * len(completion.token_ids), np.float32)
    sample = sample_of(("g", "t", 0), np.array([*ids, *completion.token_ids]), weights, advantages=weights)
    scores = local_policy(lm, optim=OptimSettings(), layout=PACKED).score([sample])[0]
    np.testing.assert_allclose(scores[30:], completion.logprobs, rtol=0, atol=2e-2)


def test_run_trains_and_evaluates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {a} + 1?", "ground_truth": str(a + 1), "data_source": "openai/gsm8k"} for a in range(4)]
    run = polyturn.train(
        model=polyturn.tiny("Qwen/Qwen3-0.6B"),
        tasks=rows,
        eval_tasks=rows,
        steps=2,
        groups_per_step=2,
        group_size=2,
        max_tokens_per_turn=8,
        name="device",
    )
    assert (run.folder / "metrics.jsonl").is_file()
