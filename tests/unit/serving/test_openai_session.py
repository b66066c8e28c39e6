"""Requests of an agent become turns of an episode: which history they continue, and how they are recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from polyturn.core.errors import ConfigError
from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import CUT_BY_REQUEST, Trajectory
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.listen import bind
from polyturn.serving.openai import endpoint
from polyturn.serving.openai.chat import token_logprobs
from polyturn.serving.openai.chat_request import BadRequest, ChatRequest
from polyturn.serving.openai.endpoint import EndpointOptions, ModelEndpoint
from polyturn.serving.openai.scheduler import BlackBox, SessionScheduler
from polyturn.serving.openai.session import AgentSession, SessionRules
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids
from support.refusals import refuses_later

CODEC = tiny_codec()
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "apples"}}\n</tool_call>'


class Client:
    """An agent's address and key, and the key for rewards."""

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
    return await run_episode(context, task(data_source=None), id="e")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ids_of(t: Trajectory, segment: int = 0) -> list[int]:
    return t.segments[segment].token_ids.tolist()


def message_of(answer: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    return dict(answer["choices"][choice]["message"])


async def test_growing_history_is_one_segment():
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


async def test_session_is_not_idle_while_it_answers():
    sessions: list[AgentSession] = []
    idle: list[float] = []

    class Asking(SessionScheduler):
        async def run_agent(self, episode: Episode, session: AgentSession) -> None:
            sessions.append(session)
            await session.ask(ChatRequest(messages=[user("2+2?")]))
            idle.append(session.idle_s)

    def says(request: GenerateRequest) -> str:
        idle.append(sessions[0].idle_s)
        return "four"

    await run_episode(scripted_context(says, scheduler=Asking()), task(), id="e")
    assert idle[0] == 0.0 and idle[1] > 0.0


async def test_tool_answers_continue_the_segment():
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


async def test_logprobs_of_an_engine_without_any_are_empty():
    class Asking(SessionScheduler):
        async def run_agent(self, episode: Episode, session: AgentSession) -> None:
            (one,) = await session.ask(ChatRequest(messages=[user("a")], wants_texts=True))
            assert token_logprobs(dataclasses.replace(one, logprobs=None)) == []

    assert (await run_episode(scripted_context(["x"], scheduler=Asking()), task(), id="e")).error is None


async def test_call_without_tools_is_text():
    async def agent(client: Client) -> float:
        answer = await client.chat([user("a")])
        assert "<tool_call>" in message_of(answer)["content"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        await client.chat([user("a"), message_of(answer), user("b")])
        return 0

    assert len((await play(agent, [CALL, "b"])).segments) == 1


async def test_edit_branch_and_other_agent_are_own_segments():
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


async def test_full_context_ends_the_episode_as_a_truncation(caplog: pytest.LogCaptureFixture):
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
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "RuntimeError: as a client's library raises (test_openai_session.py, line " in warning
    assert t.reward is not None and t.reward.total == 0.0, "nothing was earned before the end"


async def test_long_request_is_refused_before_it_is_rendered():
    long = "a " * 100_000
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"word": long})}}
    ways: list[list[dict[str, Any]]] = [
        [user(long)],
        [user("Hi"), {"role": "assistant", "content": "", "reasoning_content": long}, user("Go on")],
        [user("Hi"), {"role": "assistant", "content": "", "tool_calls": [call]}, user("Go on")],
    ]

    async def agent(client: Client) -> None:
        for messages in ways:
            status, answer = await client.post("/chat/completions", {"model": "m", "messages": messages})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
        await client.chat([user("Hi")])
        await client.reward({"reward": 1.0})

    t = await play(agent, ["4"], limits=Limits(max_context=100))
    assert t.error is None and len(t.turns) == 1


async def test_run_samples_unless_the_request_may():
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


async def test_stop_string_cuts_the_text_and_never_the_ids():
    async def agent(client: Client) -> float:
        answer = await client.chat([user("a")], stop=["apples"])
        assert message_of(answer)["content"] == "two " and answer["choices"][0]["finish_reason"] == "stop"
        await client.chat([user("a"), message_of(answer), user("b")])
        return 0

    t = await play(agent, ["two apples and pears", "b"])
    assert len(t.segments) == 1 and "apples" in CODEC.decode(t.segments[0].token_ids)


async def test_last_assistant_message_is_continued_on_request():
    async def agent(client: Client) -> float:
        history = [user("a"), {"role": "assistant", "content": "The answer is"}]
        answer = await client.chat(history, continue_final_message=True)
        assert message_of(answer)["content"] == " four"
        await client.chat([user("a"), {"role": "assistant", "content": "The answer is four"}, user("b")])
        return 0

    t = await play(agent, [" four", "b"])
    assert len(t.segments) == 1 and "The answer is four" in CODEC.decode(t.segments[0].token_ids)
    assert t.segments[0].loss_weights.sum() == len(turn_ids(" four")) + len(turn_ids("b"))


async def test_answer_to_a_cancelled_request_is_not_trained():
    async def agent(base_url: str, api_key: str) -> float:
        client, engine = Client(base_url, api_key), context.engine
        async with client.http:
            asking = asyncio.create_task(client.chat([user("slow")]))
            while not engine.num_requests:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait({asking})
            engine.latency_s = 0.0  # type: ignore[attr-defined]
            await client.chat([user("quick")])
            return 1.0

    context = scripted_context(["x"], scheduler=BlackBox(agent=agent), latency_s=3600)
    t = await run_episode(context, task(data_source=None), id="e")
    assert sum(float(s.loss_weights.sum()) for s in t.segments) == len(turn_ids("x"))


async def test_cancelled_first_request_for_two_answers_is_not_trained():
    class Asking(SessionScheduler):
        async def run_agent(self, episode: Episode, session: AgentSession) -> None:
            asking = asyncio.create_task(session.ask(ChatRequest(messages=[user("a")], n=2)))
            await asyncio.sleep(0)  # the first answer begins, and the second waits for the episode to be ready
            asking.cancel()
            await asyncio.wait({asking})
            await session.ask(ChatRequest(messages=[user("b")]))

    t = await run_episode(scripted_context(["x"], scheduler=Asking(), latency_s=0.01), task(), id="e")
    assert sum(float(s.loss_weights.sum()) for s in t.segments) == len(turn_ids("x"))


async def test_refused_request_is_not_a_completion():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    counts: list[int] = []

    class Asking(SessionScheduler):
        rules = SessionRules(max_calls=1)

        async def run_agent(self, episode: Episode, session: AgentSession) -> None:
            with pytest.raises(BadRequest):
                await session.ask(ChatRequest(messages=[{"role": "user", "content": [image]}]))
            counts.append(session.num_calls)
            await session.ask(ChatRequest(messages=[user("a")]))
            counts.append(session.num_calls)

    t = await run_episode(scripted_context(["x"], scheduler=Asking()), task(), id="e")
    assert (t.error, counts) == (None, [0, 1])


async def test_agent_whose_requests_are_refused_did_send_some():
    async def agent(client: Client) -> float:
        status, _ = await client.post("/chat/completions", {"model": "m", "messages": [user("long " * 100_000)]})
        assert status == 400
        return 0.0

    assert (await play(agent, ["x"])).error is None


async def raises(client: Client) -> None:
    await client.chat([user("a")])
    raise ValueError("no such page")


async def silent(client: Client) -> float:
    return 1.0


async def without_a_reward(client: Client) -> None:
    await client.chat([user("a")])


async def asks_a_lost_engine(client: Client) -> float:
    status, answer = await client.post("/chat/completions", {"model": "m", "messages": [user("a")]})
    assert status == 410
    assert "lost" in answer["error"]["message"]
    await asyncio.sleep(5)  # the episode ends meanwhile
    return 1.0


@pytest.mark.parametrize(
    ("agent", "says", "message"),
    [
        (raises, ["x"], "no such page"),
        (silent, ["x"], "without a single request"),
        (without_a_reward, ["x"], "has no reward: its agent returned None"),
        (asks_a_lost_engine, [OSError("lost")], "lost"),
    ],
)
async def test_failing_agent_fails_its_trajectory(agent: Any, says: Any, message: str):
    t = await play(agent, says)
    assert (t.reward, t.is_failed) == (None, True)
    assert message in str(t.error)


async def test_deadline_of_the_run_ends_a_hanging_agent():
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


async def test_address_that_cannot_be_listened_on_is_refused():
    async def agent(client: Client) -> float:
        return 1.0

    await refuses_later(lambda: play(agent, ["x"], host="203.0.113.7"), ConfigError, "the endpoint cannot listen on")


async def test_endpoint_starts_again_after_a_cancelled_start(monkeypatch: pytest.MonkeyPatch):
    model, is_starting, serving = ModelEndpoint(), asyncio.Event(), endpoint.serving

    @asynccontextmanager
    async def gated(*args: Any, **options: Any) -> AsyncIterator[None]:
        if not is_starting.is_set():
            is_starting.set()
            await asyncio.Event().wait()
        async with serving(*args, **options):
            yield

    async def origin() -> str:
        async with model.serving() as address:
            return address

    monkeypatch.setattr(endpoint, "serving", gated)
    first = asyncio.create_task(origin())
    await is_starting.wait()
    second = asyncio.create_task(origin())
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).startswith("http://127.0.0.1:")


async def test_endpoint_is_up_for_an_episode_that_begins_while_it_stops():
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    model = ModelEndpoint(EndpointOptions(port=port))

    async def visit() -> None:
        async with model.serving() as origin, aiohttp.ClientSession() as http, http.get(f"{origin}/health") as reply:
            assert reply.status == 200

    async with model.serving():
        later = asyncio.create_task(asyncio.sleep(0))
        later.add_done_callback(lambda _: visits.append(asyncio.create_task(visit())))
        visits: list[asyncio.Task[None]] = []
    await asyncio.gather(*visits)
    assert visits


async def test_reach_as_names_the_endpoint_to_agents():
    async def agent(client: Client) -> float:
        assert client.base_url.startswith("http://localhost:")
        await client.chat([user("a")])
        return 1.0

    assert not (await play(agent, ["x"], host="0.0.0.0", reach_as="localhost")).is_failed


def odd(base_url: str, browser: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent": odd}, "'browser'"),
        ({}, "needs an agent"),
        ({"command": ["x"], "host": "0.0.0.0"}, "reach_as"),
        ({"command": ["x"], "port": "80"}, "port is '80'"),
        ({"command": ["x"], "port": 65536}, "port is 65536"),
        ({"command": ["x"], "max_calls": "9"}, "max_calls is '9'"),
        ({"agent": odd, "command": ["x"]}, "has an agent and a command"),
        ({"agent": odd, "kwargs": {"browser": 1}, "sampling": "both"}, "sampling is 'both'"),
        ({"agent": lambda base_url, api_key, reward_key: 1.0}, "'reward_key', but reward is 'returned'"),
        ({"agent": lambda base_url, api_key: 1.0, "reward": "agent"}, "reward is 'agent'"),
        ({"command": ["x"], "reward": "returned"}, "reward is 'returned'"),
    ],
)
def test_agent_that_cannot_be_called_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        BlackBox(**options)


@pytest.mark.parametrize(("own", "ends"), [(2, StopReason.ERROR), (None, StopReason.LENGTH)])
async def test_agent_that_fails_behind_a_cut_fails_unless_the_run_cut(own: int | None, ends: StopReason) -> None:
    async def agent(client: Client) -> None:
        await client.chat([user("a")], **({} if own is None else {"max_tokens": own}))
        raise KeyError("bug")

    t = await play(agent, ["a long answer"], limits=Limits(max_context=4000, max_tokens_per_turn=3))
    assert t.stop_reason is ends
    assert "bug" in str(t.error) if own else t.error is None


@pytest.mark.parametrize(("own", "noted"), [(2, 2), (3, None), (None, None)])
async def test_turn_notes_a_cut_that_its_request_asked_for(own: int | None, noted: int | None) -> None:
    async def agent(client: Client) -> None:
        await client.chat([user("a")], **({} if own is None else {"max_tokens": own}))

    t = await play(agent, ["a long answer"], limits=Limits(max_context=4000, max_tokens_per_turn=3))
    assert t.stop_reason is StopReason.LENGTH and t.turns[-1].info.get(CUT_BY_REQUEST) == noted
