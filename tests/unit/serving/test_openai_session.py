"""Requests of an agent become turns of an episode: which history they continue, and what is left of it in the record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest

from polyturn.core.errors import ConfigError
from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids

CODEC = tiny_codec()
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "apples"}}\n</tool_call>'


class Client:
    """What an agent has: its address and its key; and the key for rewards, of whoever judges it."""

    def __init__(self, base_url: str, api_key: str, reward_key: str = "") -> None:
        self.base_url = base_url
        self.reward_key = reward_key
        self.http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"})

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.http.post(self.base_url + path, json=body, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None)

    async def reward(self, body: Any) -> tuple[int, Any]:
        return await self.post("/reward", body, Authorization=f"Bearer {self.reward_key}")

    async def chat(self, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
        status, answer = await self.post("/chat/completions", {"model": "m", "messages": list(messages), **options})
        assert status == 200, answer
        return answer


async def play(
    agent: Callable[[Client], Awaitable[Any]],
    says: Any,
    *,
    limits: Limits | None = None,
    rewards: Any = None,
    **options: Any,
) -> Trajectory:
    async def call(base_url: str, api_key: str, reward_key: str) -> Any:
        client = Client(base_url, api_key, reward_key)
        try:
            return await agent(client)
        finally:
            await client.http.close()

    scheduler = BlackBox(agent=call, **{"reward": "posted", **options})
    context = scripted_context(says, scheduler=scheduler, limits=limits or Limits(max_context=4000), rewards=rewards)
    context.rewarder._may_be_given = True
    return await run_episode(context, task(data_source=None), id="e")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ids_of(t: Trajectory, segment: int = 0) -> list[int]:
    return t.segments[segment].token_ids.tolist()


def message_of(answer: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    return dict(answer["choices"][choice]["message"])


async def test_a_history_that_grows_is_one_segment_of_what_was_sampled():
    async def agent(client: Client) -> float:
        history = [{"role": "system", "content": "Be brief."}, user("2+2?")]
        for question in ("3+3?", "4+4?", None):
            answer = await client.chat(history, return_token_ids=True)
            assert answer["choices"][0]["token_ids"] == turn_ids(message_of(answer)["content"]).tolist()
            history += [message_of(answer), *([] if question is None else [user(question)])]
        return 0.5

    t = await play(agent, ["four", "six", "eight"])
    assert t.stop_reason is StopReason.STOP and t.reward is not None and t.reward.total == 0.5
    assert len(t.segments) == 1 and [turn.message.text for turn in t.turns] == ["four", "six", "eight"]
    assert t.segments[0].loss_weights.sum() == sum(len(turn_ids(s)) for s in ("four", "six", "eight"))
    assert [m.text for m in t.task.prompt] == ["Be brief.", "2+2?"]


async def test_it_is_the_record_that_a_native_scheduler_leaves():
    class Asks(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> Any:
            return "And 3+3?" if turn.index == 0 else None

    async def agent(client: Client) -> float:
        history = [user("What is 2+2?")]
        history.append(message_of(await client.chat(history)))
        await client.chat([*history, user("And 3+3?")])
        return 0.0

    ours = await play(agent, ["<think>\nhm\n</think>\n\nfour", "six"])
    native = await run_episode(scripted_context(["<think>\nhm\n</think>\n\nfour", "six"], scheduler=Asks()), task(), id="e")
    (a,), (b,) = ours.segments, native.segments
    for name in ("token_ids", "loss_weights", "logprobs", "turn_ids", "versions"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert [t.message for t in ours.turns] == [t.message for t in native.turns]


async def test_tool_calls_have_ids_and_their_answers_go_on_in_the_segment():
    async def agent(client: Client) -> None:
        history: list[dict[str, Any]] = [user("How many apples?")]
        answer = await client.chat(history, tools=[LOOKUP])
        message = message_of(answer)
        (call,) = message["tool_calls"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"]) == {"key": "apples"}
        # Clients write arguments and empty contents in their own way.
        call["function"]["arguments"] = '{ "key":"apples" }'
        history += [{**message, "content": ""}, {"role": "tool", "tool_call_id": call["id"], "content": "4"}]
        await client.chat(history, tools=[LOOKUP])
        await client.reward({"reward": 1, "note": "right"})

    t = await play(agent, [CALL, "4 apples"])
    assert len(t.segments) == 1 and t.reward is not None and t.reward.total == 1.0 and t.reward.info == {"note": "right"}
    assert '"name": "lookup"' in CODEC.decode(t.segments[0].token_ids[:200]), "the agent's tools are in the prompt"
    assert t.turns[0].observation[0].name == "lookup"


async def test_without_tools_what_reads_as_a_call_is_text():
    async def agent(client: Client) -> float:
        answer = await client.chat([user("a")])
        assert "<tool_call>" in message_of(answer)["content"] and answer["choices"][0]["finish_reason"] == "stop"
        await client.chat([user("a"), message_of(answer), user("b")])
        return 0

    assert len((await play(agent, [CALL, "b"])).segments) == 1


async def test_an_edit_a_branch_and_another_agent_are_segments_of_their_own():
    async def agent(client: Client) -> float:
        first = message_of(await client.chat([user("a")]))
        await client.chat([user("a"), first, user("b")])
        await client.chat([user("a"), first, user("another b")])  # a branch behind the first turn
        await client.chat([user("a"), {**first, "content": "I said something else"}, user("b")])  # an edit
        await client.chat([{"role": "system", "content": "You are a critic."}, user("judge")])  # another agent
        return 1.0

    t = await play(agent, lambda request: f"answer {len(request.prompt_ids)}")
    assert len(t.segments) == 4 and len(t.turns) == 5
    sampled = [i for s in t.segments for i in s.token_ids[s.loss_weights > 0].tolist()]
    assert len(sampled) == sum(len(turn_ids(turn.message.text)) for turn in t.turns), "each sampled token is trained once"
    branch = t.segments[1]
    assert branch.parent is not None and branch.parent.segment == 0
    assert np.array_equal(branch.token_ids[: branch.parent.length], t.segments[0].token_ids[: branch.parent.length])


async def test_several_choices_are_branches_and_each_can_be_continued():
    async def agent(client: Client) -> float:
        answer = await client.chat([user("a")], n=3)
        assert len({message_of(answer, i)["content"] for i in range(3)}) == 3
        for index in range(3):
            await client.chat([user("a"), message_of(answer, index), user("more")])
        return 1.0

    said = iter(["one", "two", "three", "four", "five", "six"])
    t = await play(agent, lambda request: next(said))
    assert len(t.segments) == 3 and len(t.turns) == 6
    assert [s.loss_weights.sum() > len(turn_ids("one")) for s in t.segments] == [True] * 3, "both turns are in one segment"


async def test_requests_at_the_same_time_are_legal():
    async def agent(client: Client) -> float:
        asked = [client.chat([user(f"question {i % 3}")]) for i in range(6)]
        answers = await asyncio.gather(*asked)
        more = [client.chat([user(f"question {i % 3}"), message_of(a), user("so?")]) for i, a in enumerate(answers)]
        await asyncio.gather(*more)
        return 1.0

    t = await play(agent, lambda request: f"answer to {len(request.prompt_ids)}", limits=Limits(max_context=4000))
    assert len(t.turns) == 12 and not t.is_failed
    assert sum(float(s.loss_weights.sum()) for s in t.segments) == t.metrics["sampled_tokens"]


async def test_a_limit_is_told_to_the_agent_and_ends_the_episode_as_a_truncation():
    async def agent(client: Client) -> float:
        history = [user("a")]
        while True:
            status, answer = await client.post("/chat/completions", {"model": "m", "messages": history})
            if status != 200:
                assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
                raise RuntimeError("as a client's library raises")
            history += [message_of(answer), user("again, please, with all the words that you know")]

    t = await play(agent, lambda request: "so", limits=Limits(max_context=150, max_turns=None), rewards=None)
    assert t.stop_reason is StopReason.CONTEXT_FULL and len(t.segments) == 1
    assert t.reward is not None and t.reward.total == 0.0, "nothing was earned before the end"


async def test_a_long_request_is_refused_whichever_field_is_long():
    long = "a " * 100_000
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
    ways: list[list[dict[str, Any]]] = [
        [user(long)],
        [{**user("Hi"), "name": long}],
        [user("Hi"), {"role": "assistant", "content": "", "reasoning_content": long}, user("Go on")],
        [user("Hi"), {"role": "assistant", "content": "", "tool_calls": [{**call, "id": long}]}, user("Go on")],
        [user("Hi"), {"role": "tool", "content": "4", "tool_call_id": long}],
        [user("Hi")] * 101,
    ]

    async def agent(client: Client) -> None:
        for messages in ways:
            status, answer = await client.post("/chat/completions", {"model": "m", "messages": messages})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
        await client.chat([user("Hi")])
        await client.reward({"reward": 1.0})

    t = await play(agent, ["4"], limits=Limits(max_context=100))
    assert t.error is None and len(t.turns) == 1


async def test_the_run_samples_unless_the_request_may():
    seen: list[GenerateRequest] = []

    def says(request: GenerateRequest) -> str:
        seen.append(request)
        return "x"

    async def agent(client: Client) -> float:
        await client.chat([user("a")], temperature=0.3, max_tokens=7, seed=5)
        return 0

    await play(agent, says)
    await play(agent, says, sampling="request")
    assert [r.sampling.temperature for r in seen] == [1.0, 0.3]
    assert {r.sampling.max_tokens for r in seen} == {7} and {r.sampling.seed for r in seen} == {5}


async def test_a_stop_string_cuts_the_text_and_never_the_ids():
    async def agent(client: Client) -> float:
        answer = await client.chat([user("a")], stop=["apples"])
        assert message_of(answer)["content"] == "two " and answer["choices"][0]["finish_reason"] == "stop"
        await client.chat([user("a"), message_of(answer), user("b")])
        return 0

    t = await play(agent, ["two apples and pears", "b"])
    assert len(t.segments) == 1 and "apples" in CODEC.decode(t.segments[0].token_ids)


async def test_a_last_assistant_message_goes_on_where_that_is_asked_for():
    async def agent(client: Client) -> float:
        history = [user("a"), {"role": "assistant", "content": "The answer is"}]
        answer = await client.chat(history, continue_final_message=True)
        assert message_of(answer)["content"] == " four"
        await client.chat([user("a"), {"role": "assistant", "content": "The answer is four"}, user("b")])
        return 0

    t = await play(agent, [" four", "b"])
    assert len(t.segments) == 1 and "The answer is four" in CODEC.decode(t.segments[0].token_ids)
    assert t.segments[0].loss_weights.sum() == len(turn_ids(" four")) + len(turn_ids("b"))


async def test_what_nobody_waits_for_any_more_is_not_trained():
    async def agent(base_url: str, api_key: str) -> float:
        client, engine = Client(base_url, api_key), context.engine
        async with client.http:
            asking = asyncio.create_task(client.chat([user("slow")]))
            while not engine.num_requests:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait({asking})
            engine._latency_s = 0.0  # type: ignore[attr-defined]
            await client.chat([user("quick")])
            return 1.0

    context = scripted_context(["x"], scheduler=BlackBox(agent=agent), latency_s=3600)
    t = await run_episode(context, task(data_source=None), id="e")
    assert sum(float(s.loss_weights.sum()) for s in t.segments) == len(turn_ids("x"))


async def test_an_agent_that_raises_fails_its_trajectory_and_one_that_never_asks_does_too():
    async def raises(client: Client) -> None:
        await client.chat([user("a")])
        raise ValueError("no such page")

    async def silent(client: Client) -> float:
        return 1.0

    t = await play(raises, ["x"])
    assert t.stop_reason is StopReason.ERROR and "no such page" in str(t.error)
    t = await play(silent, ["x"])
    assert t.stop_reason is StopReason.ERROR and "without a single request" in str(t.error)


async def test_an_agent_without_a_reward_is_an_error_and_never_zero():
    async def agent(client: Client) -> None:
        await client.chat([user("a")])

    t = await play(agent, ["x"])
    assert t.reward is None and "nothing says what the episode" in str(t.error)


async def test_an_engine_that_is_lost_fails_the_trajectory():
    async def agent(client: Client) -> float:
        status, answer = await client.post("/chat/completions", {"model": "m", "messages": [user("a")]})
        assert status == 410 and "lost" in answer["error"]["message"]
        await asyncio.sleep(5)
        return 1.0

    t = await play(agent, [OSError("lost")])
    assert t.stop_reason is StopReason.ERROR and "lost" in str(t.error)


async def test_the_deadline_of_the_run_ends_an_agent_that_hangs():
    episodes: list[Any] = []

    class Holds(BlackBox):
        async def on_turn_end(self, episode: Any, turn: Any) -> None:
            episodes.append(episode)

    async def hangs(base_url: str, api_key: str) -> float:
        client = Client(base_url, api_key)
        async with client.http:
            await client.chat([user("a")])
            episodes[0].resources.spent(elapsed_s=5000, duration_s=5000)
            await asyncio.sleep(3600)
            return 1.0

    context = scripted_context(["x"], scheduler=Holds(agent=hangs), limits=Limits(max_context=4000, timeout_s=5000))
    t = await run_episode(context, task(data_source=None), id="e")
    assert t.stop_reason is StopReason.TIMEOUT and len(t.turns) == 1


async def test_an_address_that_cannot_be_listened_on_ends_the_run_with_a_sentence():
    async def agent(client: Client) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="the endpoint cannot listen on"):
        await play(agent, ["x"], host="203.0.113.7")


async def test_agents_elsewhere_are_told_the_name_under_which_they_reach_the_endpoint():
    async def agent(client: Client) -> float:
        assert client.base_url.startswith("http://localhost:")
        await client.chat([user("a")])
        return 1.0

    assert not (await play(agent, ["x"], host="0.0.0.0", reach_as="localhost")).is_failed


def test_an_agent_that_cannot_be_called_is_refused_at_once():
    def odd(base_url: str, browser: Any) -> None: ...

    with pytest.raises(ConfigError, match="has a parameter 'browser', which nothing fills"):
        BlackBox(agent=odd)
    with pytest.raises(ConfigError, match="needs an agent"):
        BlackBox()
    with pytest.raises(ConfigError, match="say in reach_as under which name"):
        BlackBox(command=["x"], host="0.0.0.0")
    with pytest.raises(ConfigError, match="has an agent and a command"):
        BlackBox(agent=odd, command=["x"])
    with pytest.raises(ConfigError, match="sampling is 'both'"):
        BlackBox(agent=odd, kwargs={"browser": 1}, sampling="both")
