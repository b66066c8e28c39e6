"""Speculative decoding by lookup: what is sampled is what would be sampled without drafts, in fewer forward passes."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from polyturn.core.generation import FinishReason, GenerateRequest, SamplingParams
from polyturn.engines import batch_step, speculation
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.speculation import CONTEXTS, MAX_WIDTH, Drafts, Follower

VOCAB = 96


@pytest.fixture(scope="module")
def model():
    """In float64, so that no rounding of a wider step decides which token is drawn."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().eval()


def requests(label: str, **sampling) -> list[GenerateRequest]:
    """Six requests of three prompts, seeded by their number."""
    return [
        GenerateRequest(
            request_id=f"{label}{i}",
            session_id=f"{label}{i}",
            prompt_ids=list(range(3 + i % 3, 20 + i % 3)),
            sampling=SamplingParams(**{"max_tokens": 40, "seed": i, **sampling}),
        )
        for i in range(6)
    ]


async def complete(engine: EmbeddedEngine, asked: list[GenerateRequest]):
    return await asyncio.gather(*(engine.generate(request) for request in asked))


@pytest.fixture
def widest(monkeypatch):
    """Let engines draft as much as they can: without measured times a wide step costs no more than a narrow one."""
    monkeypatch.setattr(Drafts, "took", lambda self, num_tokens, seconds: None)


def drafting(model, **options) -> EmbeddedEngine:
    return EmbeddedEngine(model, num_slots=6, **options)


@pytest.mark.usefixtures("widest")
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
        {"temperature": 1.3, "stop_token_ids": (7, 11, 13)},
        {"temperature": 1.0, "banned_token_ids": (1, 2, 3, 40)},
        {"temperature": 1.0, "max_tokens": 3},
    ],
)
def test_drafts_change_only_the_number_of_forward_passes(model, sampling):
    async def main():
        engine = drafting(model)
        first = await complete(engine, requests("first", **sampling))
        alone = engine.stats.decode_steps
        assert engine.stats.drafted_tokens == 0  # nothing has ended before
        second = await complete(engine, requests("second", **sampling))
        for before, after in zip(first, second, strict=True):
            np.testing.assert_array_equal(before.token_ids, after.token_ids)
            np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-5)
            assert before.finish_reason is after.finish_reason
            assert before.policy_versions == after.policy_versions
        assert engine.stats.accepted_tokens > 0
        assert engine.stats.decode_steps - alone < alone
        assert engine.stats.decoded_tokens == sum(len(c.token_ids) for c in first + second)

    asyncio.run(main())


@pytest.mark.usefixtures("widest")
@pytest.mark.parametrize(("most", "drafts"), [(6 * VOCAB, False), (12 * VOCAB, True)])
def test_drafts_keep_to_the_limit_of_logits(model, monkeypatch, most, drafts):
    monkeypatch.setattr(batch_step, "MAX_LOGITS", most)

    async def main():
        engine = drafting(model)
        await complete(engine, requests("a"))
        sizes = []
        engine.module.lm_head.register_forward_hook(lambda module, args, logits: sizes.append(logits.numel()))
        await complete(engine, requests("b"))
        assert max(sizes) <= most
        assert bool(engine.stats.drafted_tokens) is drafts

    asyncio.run(main())


@pytest.mark.usefixtures("widest")
def test_wrong_drafts_do_not_change_seeded_tokens(model):
    async def main():
        plain = EmbeddedEngine(model, num_slots=6, deterministic=True)
        expected = await complete(plain, requests("a"))
        assert plain.stats.drafted_tokens == 0
        engine = drafting(model)
        await complete(engine, requests("other", seed=99, temperature=0.3))
        found = await complete(engine, requests("a"))
        assert engine.stats.drafted_tokens > engine.stats.accepted_tokens  # some were wrong
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)

    asyncio.run(main())


@pytest.mark.usefixtures("widest")
def test_logprobs_behind_drafts_are_those_of_the_model(model):
    async def main():
        engine = drafting(model)
        await complete(engine, requests("a"))
        for request, completion in zip(asked := requests("b"), await complete(engine, asked), strict=True):
            ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
            with torch.no_grad():
                logprobs = model(ids).logits[0].log_softmax(-1)
            start = len(request.prompt_ids)
            expected = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-4)

    asyncio.run(main())


@pytest.mark.usefixtures("widest")
def test_session_continues_behind_a_wrong_draft(model):
    """What was fed in vain lies behind the known tokens in the cache, and the next turn's tokens take its place."""

    async def main():
        engine = drafting(model)
        await complete(engine, requests("other", seed=99, temperature=0.3))
        [first] = await complete(engine, requests("a", max_tokens=9)[:1])
        longer = [*requests("a")[0].prompt_ids, *first.token_ids, 5, 6, 7]
        turn = GenerateRequest(
            request_id="turn", session_id="a0", prompt_ids=longer, sampling=SamplingParams(max_tokens=9, seed=3)
        )
        second = await engine.generate(turn)
        assert second.info["prefilled_tokens"] < len(longer)
        fresh = EmbeddedEngine(model, num_slots=1, deterministic=True)
        expected = await fresh.generate(turn)
        np.testing.assert_array_equal(second.token_ids, expected.token_ids)
        np.testing.assert_allclose(second.logprobs, expected.logprobs, atol=1e-5)

    asyncio.run(main())


@pytest.mark.usefixtures("widest")
def test_last_token_of_the_context_can_be_drafted(model):
    async def main():
        engine = drafting(model, max_context=32)
        for label in "ab":
            for completion in await complete(engine, requests(label, max_tokens=200)):
                assert completion.finish_reason is FinishReason.LENGTH
        assert engine.stats.accepted_tokens

    asyncio.run(main())


def test_follower_drafts_what_followed_before():
    drafts = Drafts()
    earlier = Follower(drafts, [1, 2, 3, 4, 5])
    assert earlier.drafted(4) == []
    earlier.extend([6, 7, 8, 9, 10, 11, 12, 13])
    earlier.end()
    follower = Follower(drafts, [1, 2, 3, 4, 5])
    assert follower.drafted(3) == [6, 7, 8]
    follower.extend([6, 7])
    assert follower.drafted(2) == [8, 9]
    follower.extend([50])
    assert follower.drafted(2) == []
    follower.extend([7, 8, 9, 10])  # the shorter context is one that the earlier request had, too
    assert follower.drafted(9) == [11, 12, 13]
    assert follower.drafted(0) == []


def test_number_of_contexts_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speculation, "MAX_ENTRIES", 4096)
    drafts = Drafts()
    for start in range(0, 5 * 4096, 300):
        drafts.learn(list(range(start, start + 300)), start=1)
    assert drafts.num_contexts <= 2 * (4096 + 2 * 300)
    newest = list(range(start, start + 100))
    assert drafts.after(newest) is not None
    assert drafts.after(list(range(max(CONTEXTS)))) is None


def test_step_is_as_wide_as_pays():
    def width(*, right: float, seconds: dict[int, float]) -> int:
        drafts = Drafts()
        for turn in range(5000):
            drafts.count(right=(turn * right) % 1 + right >= 1)
        for num_tokens, taken in seconds.items():
            for _ in range(20):
                drafts.took(num_tokens, taken)
        return drafts.width([MAX_WIDTH] * 8)

    free, in_proportion = {8: 1.0, 128: 1.0}, {8 * 2**i: 2.0**i for i in range(5)}
    assert width(right=0.98, seconds=free) == width(right=1, seconds=free) == MAX_WIDTH
    assert width(right=0, seconds=free) == 1
    assert width(right=0.98, seconds=in_proportion) == 1
    assert width(right=0.05, seconds={8: 1.0, 16: 1.5, 32: 2.0, 64: 3.0, 128: 5.0}) == 1
    assert 1 < width(right=0.8, seconds={8: 1.0, 16: 1.1, 32: 1.3, 64: 1.9, 128: 9.0}) < MAX_WIDTH
    assert Drafts().width([0, 0]) == 1
