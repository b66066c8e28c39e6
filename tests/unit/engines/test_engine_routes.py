"""The embedded engine returns the experts of each token, as one pass over the whole sequence chooses them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.errors import ConfigError
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.routing import has_route
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.engines.routers import Routers, RoutingPass
from support.models import tiny_model
from support.refusals import refuses

VOCAB = 96
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3")
_names = itertools.count()


def make(kind: str = "qwen3_moe") -> Any:
    return tiny_model(VOCAB, kind, layers=3 if kind == "deepseek_v3" else 2, spread=0.2, max_positions=512)


def ask(ids: Any, *, session: str | None = None, routed_from: int = 0, max_tokens: int = 6) -> GenerateRequest:
    name = f"r{next(_names)}"
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(
        request_id=name, session_id=session or name, prompt_ids=ids, sampling=sampling, routed_from=routed_from
    )


def live_routes(model: Any, ids: Any) -> Any:
    """Return the routes [T, L, K] of one pass over `ids`."""
    routers = Routers.of(model)
    assert routers is not None
    with torch.no_grad(), RoutingPass(routers) as routing:
        model(torch.tensor([np.asarray(ids).tolist()]))
        return routing.read_choices().numpy()


async def until(condition: Callable[[], bool]) -> None:
    """Let the engine run until a condition holds; it computes on this loop."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to be")


def same_sets(a: Any, b: Any) -> bool:
    """Whether tokens go to the same experts, in any order."""
    return np.array_equal(np.sort(a, axis=-1), np.sort(b, axis=-1))


def whole(request: GenerateRequest, answer: Completion) -> Any:
    return np.concatenate([request.prompt_ids, answer.token_ids])


@pytest.mark.parametrize("kind", KINDS)
async def test_routes_are_those_of_one_pass_over_the_sequence(kind: str) -> None:
    model = make(kind)
    engine = EmbeddedEngine(model, num_slots=4, prefill_chunk=16, routes=True)
    assert engine.capabilities.routes
    requests = [ask(np.arange(n) % VOCAB, max_tokens=5 + n) for n in (1, 3, 17, 40, 41)]
    answers = await asyncio.gather(*map(engine.generate, requests))
    for request, answer in zip(requests, answers, strict=True):
        ids = whole(request, answer)
        assert answer.routed_experts is not None
        assert len(answer.routed_experts) == len(ids) - 1
        assert same_sets(answer.routed_experts, live_routes(model, ids)[:-1])
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([ids.tolist()])).logits[0], -1).numpy()
        begin = len(request.prompt_ids)
        own = scores[np.arange(begin - 1, len(ids) - 1), ids[begin:]]
        np.testing.assert_allclose(answer.logprobs, own, atol=1e-4)


@pytest.mark.parametrize("num_slots", [1, 3])
async def test_routes_stay_aligned_with_any_cache(num_slots: int) -> None:
    """One builder and its forks: whatever the cache held, a segment ends up with the routes of its own sequence."""
    model = make()
    engine = EmbeddedEngine(model, num_slots=num_slots, prefill_chunk=8, routes=True)
    builders = []
    for number in range(3):
        builder = TrajectoryBuilder()
        builder.open(np.arange(20) if number < 2 else np.arange(30, 45))  # two share their prompt
        builders.append(builder)
    for turn in range(4):
        asked = [ask(b.context, session=f"s{i}", routed_from=b.num_routed) for i, b in enumerate(builders)]
        for builder, answer in zip(builders, await asyncio.gather(*map(engine.generate, asked)), strict=True):
            assert answer.routed_experts is not None
            builder.sample(answer, turn=turn)
            builder.observe([turn, 7, 9], turn=turn)
        if turn == 1:
            builders.append(builders[0].fork())
    for builder in builders:
        for segment in builder.build():
            known = has_route(segment.routed_experts)
            assert known[:-4].all(), "all but the last token sampled and what was observed behind it"
            assert same_sets(segment.routed_experts[known], live_routes(model, segment.token_ids)[known])
    assert engine.stats.reused_tokens or num_slots == 1


async def test_sampled_token_keeps_its_experts_after_an_update() -> None:
    model = make()
    engine = EmbeddedEngine(model, num_slots=2, routes=True)
    request = ask(np.arange(10), max_tokens=12)
    running = asyncio.create_task(engine.generate(request))
    await until(lambda: engine.stats.decode_steps >= 5)
    old = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.3)
    await engine.update_weights(1)
    count = engine.stats.decode_steps
    answer = await running
    ids = whole(request, answer)
    assert answer.policy_versions == ((0, 0), (count, 1))
    assert same_sets(answer.routed_experts[: 10 + count - 1], live_routes(old, ids)[: 10 + count - 1])
    assert same_sets(answer.routed_experts[10 + count - 1 :], live_routes(model, ids)[10 + count - 1 : -1])


async def test_request_aborted_in_its_prompt_has_no_routes() -> None:
    engine = EmbeddedEngine(make(), num_slots=1, prefill_chunk=8, routes=True)
    request = ask(np.arange(40))
    running = asyncio.create_task(engine.generate(request))
    await until(lambda: engine.stats.prefill_steps > 0)
    await engine.abort(request.request_id)
    assert (await running).routed_experts is None


async def test_engine_gives_no_routes_unasked_or_without_experts() -> None:
    engine = EmbeddedEngine(make(), num_slots=1)
    assert not engine.capabilities.routes
    assert (await engine.generate(ask([1, 2]))).routed_experts is None
    refuses(lambda: EmbeddedEngine(tiny_model(VOCAB), routes=True), ConfigError, "Qwen3ForCausalLM has no experts")
