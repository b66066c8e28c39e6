"""`keep_support`: engine and trainer normalise log-probabilities over the tokens that top-p and top-k kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.cli.main import main
from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.continuation import joined
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.serde import from_json, to_json
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.tracking.jsonl import read_metrics
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import local_policy
from support.models import tiny_model
from support.runs import call_command, write_tiny_run

VOCAB = 48
CUT = {"temperature": 0.9, "top_p": 0.8, "top_k": 12}
PROMPT = [1, 2, 3, 4]


def completion(ids: list[int], support: Any) -> Completion:
    return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), support=support, finish_reason=FinishReason.STOP)


async def sampled(engine: EmbeddedEngine, **sampling: Any) -> Completion:
    params = SamplingParams(max_tokens=24, seed=5, **sampling)
    return await engine.generate(GenerateRequest(request_id="r", session_id="r", prompt_ids=PROMPT, sampling=params))


def sample_of(completion: Completion, **arrays: Any) -> TrainSample:
    ids = np.concatenate([PROMPT, completion.token_ids])
    weights = np.array([0.0] * len(PROMPT) + [1.0] * len(completion.token_ids), np.float32)
    return TrainSample(
        id=SampleId("g", "t", 0), token_ids=ids, loss_weights=weights, turn_ids=np.zeros(len(ids), np.int32), **arrays
    )


async def test_trainer_scores_a_sampled_token_as_the_engine_does():
    policy = local_policy(tiny_model(VOCAB, hidden=16, seed=0, spread=0.3), optim=OptimSettings())
    engine = EmbeddedEngine(policy.backend.model, num_slots=2, max_context=64)
    own = await sampled(engine, **CUT, keep_support=True)
    assert own.support is not None and own.logprobs is not None
    assert all(token in row for token, row in zip(own.token_ids, own.support, strict=True))
    before = np.full((len(PROMPT), own.support.shape[1]), -1, np.int32)
    (scores,) = policy.score([sample_of(own, support=np.concatenate([before, own.support]), temperature=0.9)])
    np.testing.assert_allclose(scores[len(PROMPT) :], own.logprobs, atol=1e-5)

    plain = await sampled(engine, **CUT)
    assert plain.support is None and plain.token_ids.tolist() == own.token_ids.tolist()
    assert (own.logprobs > plain.logprobs + 0.01).any(), "the cut removes something here"
    await engine.close()


async def test_greedy_completion_has_no_support():
    engine = EmbeddedEngine(tiny_model(VOCAB, hidden=16, seed=0), num_slots=1, max_context=64)
    assert (await sampled(engine, **CUT, keep_support=True)).support is not None
    assert (await sampled(engine, temperature=0.0, keep_support=True)).support is None
    await engine.close()


def test_support_reaches_the_segment_through_journal_and_builder():
    parts = [completion([5, 6], [[5, 7], [6, -1]]), completion([8], [[8]]), completion([], [])]
    whole = from_json(Completion, to_json(joined(parts)))
    assert whole.support is not None and whole.support.tolist() == [[5, 7], [6, -1], [8, -1]]
    builder = TrajectoryBuilder()
    builder.open([1, 2])
    builder.cut(builder.sample(whole, turn=0), keep=2)
    builder.observe([3], turn=0)
    support = builder.build()[0].support
    assert support is not None and support.tolist() == [[-1, -1], [-1, -1], [5, 7], [6, -1], [-1, -1]]


def test_run_trains_on_the_distribution_that_it_samples(tmp_path: Path):
    sampling = "rollout.sampling={temperature: 0.9, top_p: 0.7, keep_support: true}"
    called = call_command(main, "train", write_tiny_run(tmp_path), sampling, "train.steps=2")
    assert called.code == 0, called.err
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss/total" in m]
    assert len(steps) == 2
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["rollout.sampling={keep_support: true}"], "top_p"),
        (["rollout.sampling={top_k: 65, keep_support: true}"], "65"),
        (["rollout.sampling={temperature: 0, top_p: 0.9, keep_support: true}"], "temperature"),
        (["rollout.sampling={top_p: 0.9, keep_support: true}", "train.backend=megatron"], "megatron"),
        (
            ["rollout.sampling={top_p: 0.9, keep_support: true}", "engine.kind=scripted.py:build", "engine.num_slots=null"],
            "scripted",
        ),
    ],
)
def test_run_that_cannot_use_the_support_is_refused(settings: list[str], named: str, tmp_path: Path):
    (tmp_path / "scripted.py").write_text(
        "from polyturn.testing.episodes import ScriptedEngine\n\n\ndef build(setup):\n    return ScriptedEngine([])\n"
    )
    called = call_command(main, "train", write_tiny_run(tmp_path), *settings)
    assert called.code == 2
    assert "keep_support" in called.err and named in called.err
