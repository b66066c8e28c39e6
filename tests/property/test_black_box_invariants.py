"""Whatever an agent asks through the endpoint, in any order and at once: I1, I3 and I4 hold, and a native run is the same.

Random agents append, edit earlier turns, branch behind them, open other conversations, ask for several choices, stream, and
make requests at the same time. What the engine was shown and sampled is compared with the record.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import aiohttp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.messages import Message
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.testing.episodes import scripted_context, task
from support.invariants import check_invariants

MOVES = ("append", "append", "append", "edit", "branch", "retry", "other", "choices", "together", "stream")
SAYINGS = ("<think>\nso\n</think>\n\nfour", "plain words", "#### 4", "é and more", "a longer answer " * 3, " ")
ASKED = ("And then?", "Again, please.", "So? <|im_end|>", "2+2", "Use <tool_call> now", "x" * 40)


def saying(request: GenerateRequest) -> str:
    """Depends on the request alone, so that a native run says the same; the number tells completions apart."""
    pick = random.Random(f"{request.sampling.seed}/{len(request.prompt_ids)}")
    return pick.choice(SAYINGS) + f" {pick.randrange(10**6)}"


class RandomAgent:
    """Makes moves over the histories that it has."""

    def __init__(self, moves: list[tuple[str, int]]) -> None:
        self.moves = moves
        self.histories: list[list[Any]] = []

    async def __call__(self, base_url: str, api_key: str) -> float:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
            self.http, self.url = http, base_url + "/chat/completions"
            await self.ask([{"role": "user", "content": "What is 2+2?"}])
            for move, pick in self.moves:
                await self.make(move, random.Random(pick))
        return 1.0

    async def make(self, move: str, rng: random.Random) -> None:
        history, question = copy.deepcopy(rng.choice(self.histories)), {"role": "user", "content": rng.choice(ASKED)}
        turns = [i for i, m in enumerate(history) if m["role"] == "assistant"]
        if move == "edit":
            history[rng.choice(turns)]["content"] = "Something else was said."
        elif move == "branch":
            history = history[: rng.choice(turns) + 1]
        elif move == "retry":
            await self.ask(history[: rng.choice(turns)])
            return
        elif move == "other":
            history = [{"role": "system", "content": f"You are critic {rng.randrange(3)}."}]
        elif move == "together":
            await asyncio.gather(*(self.ask([*history, {"role": "user", "content": c}]) for c in rng.sample(ASKED, 3)))
            return
        await self.ask([*history, question], n=3 if move == "choices" else 1, stream=move == "stream")

    async def ask(self, history: list[Any], *, n: int = 1, stream: bool = False) -> None:
        body = {"model": "m", "messages": history, "n": n, "stream": stream}
        async with self.http.post(self.url, json=body) as reply:
            assert reply.status == 200, await reply.text()
            text = await reply.text()
        if not stream:
            self.histories += [[*history, choice["message"]] for choice in json.loads(text)["choices"]]
            return
        said = ""
        for line in text.splitlines():
            if line.startswith("data: {"):
                said += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        self.histories.append([*history, {"role": "assistant", "content": said}])


def run(moves: list[tuple[str, int]]) -> tuple[Trajectory, list[tuple[np.ndarray, Completion]]]:
    agent, seen = RandomAgent(moves), []

    async def call(base_url: str, api_key: str) -> float:
        return await agent(base_url, api_key)

    context = scripted_context(saying, scheduler=BlackBox(agent=call), limits=Limits(max_turns=None), sanity_every=0)
    engine: Any = context.engine
    generate = engine.generate

    async def listen(request: GenerateRequest) -> Completion:
        await asyncio.sleep(0)
        prompt = request.prompt_ids.copy()
        completion = await generate(request)
        seen.append((prompt, completion))
        return completion

    engine.generate = listen
    return asyncio.run(run_episode(context, task(data_source=None), id="e", seed=3)), seen


@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 99)), max_size=7))
def test_random_agents_leave_exact_samples(moves: list[tuple[str, int]]) -> None:
    t, seen = run(moves)
    assert t.error is None, t.error
    assert len(seen) == len(t.turns)
    check_invariants(t, seen)
    assert t.num_sampled_tokens == sum(len(completion.token_ids) for _, completion in seen)


@settings(max_examples=10)
@given(questions=st.lists(st.sampled_from(ASKED), max_size=5))
def test_agent_conversation_equals_a_native_run(questions: list[str]) -> None:
    class Asks(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> Any:
            return questions[turn.index] if turn.index < len(questions) else None

    async def agent(base_url: str, api_key: str) -> float:
        asker = RandomAgent([])
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
            asker.http, asker.url = http, base_url + "/chat/completions"
            await asker.ask([{"role": "user", "content": "What is 2+2?"}])
            for question in questions:
                await asker.ask([*asker.histories[-1], {"role": "user", "content": question}])
        return 0.0

    limits = Limits(max_turns=None)
    ours_context = scripted_context(saying, scheduler=BlackBox(agent=agent), limits=limits)
    ours = asyncio.run(run_episode(ours_context, task(data_source=None), id="e", seed=5))
    native = asyncio.run(run_episode(scripted_context(saying, scheduler=Asks(), limits=limits), task(), id="e", seed=5))
    assert ours.error is None and len(ours.segments) == len(native.segments) == 1
    for name in ("token_ids", "loss_weights", "logprobs", "turn_ids", "versions"):
        assert np.array_equal(getattr(ours.segments[0], name), getattr(native.segments[0], name)), name
    assert [(t.message, t.observation, t.spans) for t in ours.turns] == [
        (t.message, t.observation, t.spans) for t in native.turns
    ]
    assert ours.task.prompt == (Message(role="user", content="What is 2+2?"),)
