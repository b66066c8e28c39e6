"""One suite for every engine: what `core.protocols.Engine` promises to the loop.

Engines that sample from a model are also held to the one meaning of logprobs (I8) in tests/unit/engines.
"""

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from polyturn.core.errors import EngineError
from polyturn.core.generation import FinishReason, GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.scripted import ScriptedEngine

VOCAB = 96


def scripted() -> ScriptedEngine:
    return ScriptedEngine(lambda request: np.arange(3, 3 + 64) % VOCAB, latency_s=0.001)


def embedded(**options) -> EmbeddedEngine:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return EmbeddedEngine(Qwen3ForCausalLM(config), num_slots=8, **options)


def embedded_deterministic() -> EmbeddedEngine:
    return embedded(deterministic=True)


@pytest.fixture(params=[scripted, embedded, embedded_deterministic], ids=lambda make: make.__name__)
async def engine(request):
    made = request.param()
    yield made
    await made.close()


def ask(name: str = "r", *, prompt=(1, 2, 3), session: str | None = None, **sampling) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, session_id=session or name, prompt_ids=prompt, sampling=SamplingParams(**sampling)
    )


async def test_it_is_an_engine_and_says_what_it_can_do(engine):
    assert isinstance(engine, Engine)
    assert engine.capabilities.logprobs
    assert engine.capabilities.seeded


async def test_one_logprob_per_token_none_positive(engine):
    completion = await engine.generate(ask(max_tokens=7, seed=1))
    assert len(completion.token_ids) == len(completion.logprobs) == 7
    assert completion.token_ids.dtype == np.int32
    assert np.all(completion.logprobs <= 0)
    assert completion.finish_reason is FinishReason.LENGTH


async def test_the_stop_token_ends_the_completion_and_is_kept(engine):
    free = (await engine.generate(ask("free", max_tokens=20, seed=1))).token_ids.tolist()
    stop = free[5]
    completion = await engine.generate(ask("stopped", max_tokens=20, seed=1, stop_token_ids=(VOCAB + 1, stop)))
    assert completion.token_ids.tolist() == free[: free.index(stop) + 1]
    assert completion.finish_reason is FinishReason.STOP


async def test_the_same_seed_gives_the_same_tokens(engine):
    first = await engine.generate(ask("a", max_tokens=12, seed=5))
    second = await engine.generate(ask("b", max_tokens=12, seed=5))
    assert first.token_ids.tolist() == second.token_ids.tolist()


async def test_many_requests_at_once_each_get_their_own_answer(engine):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(ask(f"r{i}", max_tokens=1 + i, seed=i))) for i in range(20)]
    assert [len(t.result().token_ids) for t in tasks] == [1 + i for i in range(20)]


async def test_abort_ends_a_running_request_with_what_there_is(engine):
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=200, seed=1)))
    await asyncio.sleep(0)
    await engine.abort("long")
    completion = await running
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) < 200
    assert len(completion.logprobs) == len(completion.token_ids)


async def test_abort_and_end_session_of_unknown_ids_are_fine(engine):
    await engine.abort("nobody")
    await engine.end_session("nobody")
    assert len((await engine.generate(ask(max_tokens=1))).token_ids) == 1


async def test_cancelling_the_call_leaves_the_engine_usable(engine):
    for i in range(30):
        running = asyncio.create_task(engine.generate(ask(f"r{i}", max_tokens=200)))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len((await engine.generate(ask("after", max_tokens=3))).token_ids) == 3


async def test_a_completion_carries_the_version_that_sampled_it(engine):
    assert (await engine.generate(ask("old", max_tokens=2))).policy_versions == ((0, 0),)
    await engine.update_weights(7)
    assert (await engine.generate(ask("new", max_tokens=2))).policy_versions == ((0, 7),)


async def test_a_closed_engine_refuses_with_a_sentence(engine):
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask())
