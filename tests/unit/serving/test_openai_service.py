"""`polyturn serve --openai`: requests without an episode, episodes on demand, and the command as a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from polyturn.cli.main import main
from polyturn.core.serde import from_json
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.auth import ServerRules
from polyturn.serving.listen import bind
from polyturn.serving.openai.endpoint import EndpointOptions
from polyturn.serving.openai.hosted_episodes import OpenAIService
from polyturn.serving.openai.http import MAX_VALUES
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, turn_ids
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from support.forked import served as process_serving
from support.models import tiny_model
from support.runs import call_command
from support.templates import CHATML

CALL = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
LOOKUP: Any = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


@asynccontextmanager
async def served(says: Any, **options: Any) -> AsyncIterator[tuple[str, list[TrajectoryGroup]]]:
    recorded: list[TrajectoryGroup] = []
    rules = ServerRules(token=options.pop("token", None), max_body_bytes=options.pop("max_body_bytes", 1 << 20))
    endpoint = EndpointOptions(models=("tiny",), any_model=False, rules=rules)
    context = says if isinstance(says, RolloutContext) else scripted_context(says)
    service = OpenAIService(context, endpoint, record=recorded.append, **options)
    bound, until = bind("127.0.0.1", 0), asyncio.Event()
    running = asyncio.create_task(service.serve(bound, until, grace_s=0.1))
    yield f"http://127.0.0.1:{bound.getsockname()[1]}", recorded
    until.set()
    await running


async def test_request_without_an_episode_is_answered():
    async with served([CALL]) as (origin, recorded), openai.AsyncOpenAI(base_url=f"{origin}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "a"}]
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="tiny", messages=messages, tools=[LOOKUP], n=2) for _ in range(3))
        )
        ids = {c.message.tool_calls[0].id for a in answers for c in a.choices}
        assert len(ids) == 6, "no two calls of a conversation have one id"
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            await client.chat.completions.create(model="other", messages=messages)
        assert not recorded


async def test_episode_is_created_used_ended_and_fetched():
    async with served(["four", "six"], token="sesame") as (origin, recorded), aiohttp.ClientSession() as http:
        async with http.post(f"{origin}/episodes", json={}) as refused:
            assert refused.status == 401 and "this server requires its token" in await refused.text()
        head = {"Authorization": "Bearer sesame"}
        async with http.post(f"{origin}/episodes", json={"metadata": {"task": "t7"}, "seed": 3}, headers=head) as reply:
            made = await reply.json()
        url = f"{origin}/episodes/{made['id']}"
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["api_key"]) as client:
            history: Any = [{"role": "user", "content": "2+2?"}]
            said = await client.chat.completions.create(model="tiny", messages=history)
            history += [said.choices[0].message, {"role": "user", "content": "3+3?"}]
            await client.chat.completions.create(model="tiny", messages=history)
        agents = {"Authorization": f"Bearer {made['api_key']}"}
        for ask in (http.get(url), http.get(f"{url}/trajectory"), http.post(f"{url}/end", json={"reward": 9.0})):
            async with ask as reply:
                assert reply.status == 401, "without any key"
        for path in ("/end", "/v1/reward", "/reward"):
            async with http.post(url + path, json={"reward": 1_000_000}, headers=agents) as reply:
                assert reply.status == 401 and "needs the episode's reward key" in await reply.text()
        key = {"Authorization": f"Bearer {made['reward_key']}"}
        async with http.post(f"{url}/v1/chat/completions", json={"model": "tiny"}, headers=key) as reply:
            assert reply.status == 401, "the reward key gives no access to the model"
        async with http.get(url, headers=key) as reply:
            assert await reply.json() == {"status": "live", "num_calls": 2}
        async with http.get(f"{url}/trajectory", headers=key) as reply:
            assert reply.status == 409
        async with http.post(f"{url}/end", json={"reward": 0.5}, headers=key) as reply:
            t = from_json(Trajectory, await reply.json())
        assert t.reward is not None and t.reward.total == 0.5 and t.task.id == "t7" and len(t.segments) == 1
        assert t.segments[0].loss_weights.sum() == len(turn_ids("four")) + len(turn_ids("six"))
        async with http.get(f"{url}/trajectory", headers={"x-api-key": "wrong"}) as reply:
            assert reply.status == 401 and "needs the episode's reward key" in await reply.text()
        async with http.get(f"{origin}/episodes/nobody") as reply:
            assert reply.status == 404
        assert [g.task.id for g in recorded] == ["t7"]


async def test_tools_that_the_template_leaves_out_are_refused():
    context = scripted_context(["four"])
    context.codec = Codec(tiny_tokenizer(), chat_template=CHATML)
    async with served(context) as (origin, _), openai.AsyncOpenAI(base_url=f"{origin}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "2+2?"}]
        with pytest.raises(openai.BadRequestError, match=r"1 tool.*model\.chat_template"):
            await client.chat.completions.create(model="tiny", messages=messages, tools=[LOOKUP])
        said = await client.chat.completions.create(model="tiny", messages=messages)
        assert said.choices[0].message.content == "four"


@pytest.mark.parametrize("has_episode", [False, True])
async def test_count_of_tools_that_the_template_leaves_out_is_refused(has_episode: bool):
    context = scripted_context(["four"])
    context.codec = Codec(tiny_tokenizer(), chat_template=CHATML)
    tools = [{"name": "lookup", "description": "Look it up.", "input_schema": {"type": "object", "properties": {}}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "2+2?"}], "tools": tools}
    async with served(context) as (origin, _), aiohttp.ClientSession() as http:
        head = {}
        if has_episode:
            async with http.post(f"{origin}/episodes", json={}) as reply:
                made = await reply.json()
            origin, head = f"{origin}/episodes/{made['id']}", {"x-api-key": made["api_key"]}
        async with http.post(f"{origin}/v1/messages/count_tokens", json=body, headers=head) as reply:
            message = (await reply.json())["error"]["message"]
            assert reply.status == 400 and "model.chat_template" in message and "messages cannot" not in message


async def test_episode_without_a_request_says_that_none_came():
    async with served(["four"]) as (origin, recorded), aiohttp.ClientSession() as http:
        async with http.post(f"{origin}/episodes", json={}) as reply:
            made = await reply.json()
        head = {"Authorization": f"Bearer {made['reward_key']}"}
        async with http.post(f"{origin}/episodes/{made['id']}/end", json={}, headers=head) as reply:
            assert reply.status == 200
    (group,) = recorded
    assert "before any request" in str(group.trajectories[0].error)


PARTS = [{"type": "text", "text": ""}] * (MAX_VALUES + 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": PARTS}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * (MAX_VALUES + 1)}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * (MAX_VALUES + 1)}),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "a", "tool_calls": PARTS}]}),
        ("responses", {"input": [{"role": "user", "content": PARTS}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": PARTS}]}]}),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "system": PARTS}),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": PARTS}]}),
    ],
)
async def test_request_of_too_many_parts_is_refused_unread(path: str, body: dict[str, Any], monkeypatch):
    for api in ("chat", "responses", "messages"):
        monkeypatch.setattr(f"polyturn.serving.openai.{api}.parse", lambda *args, **options: pytest.fail("it was looked at"))
    async with (
        served(["a"], max_body_bytes=1 << 24) as (origin, _),
        aiohttp.ClientSession() as http,
        http.post(f"{origin}/v1/{path}", json={"model": "tiny", **body}) as reply,
    ):
        assert reply.status == 400 and f"more than {MAX_VALUES} lists and objects" in await reply.text()


async def test_unknown_key_of_an_episode_is_refused():
    async with (
        served(["x"]) as (origin, _),
        aiohttp.ClientSession() as http,
        http.post(f"{origin}/episodes", json={"sed": 1}) as refused,
    ):
        assert refused.status == 400 and "Did you mean 'seed'" in await refused.text()


async def test_failed_episode_is_forgotten_like_any_other(monkeypatch: pytest.MonkeyPatch):
    async def run_and_fail(*args: Any, **options: Any) -> Trajectory:
        await run_episode(*args, **options)
        raise RuntimeError("on fire")

    monkeypatch.setattr("polyturn.serving.openai.hosted_episodes.run_episode", run_and_fail)
    monkeypatch.setattr("polyturn.serving.openai.hosted_episodes.MAX_KEPT", 1)
    async with served(["x"]) as (origin, _), aiohttp.ClientSession() as http:
        asks, statuses = [], []
        for _ in range(2):
            async with http.post(f"{origin}/episodes") as reply:
                made = await reply.json()
            head = {"Authorization": f"Bearer {made['reward_key']}"}
            asks.append(partial(http.get, f"{origin}/episodes/{made['id']}/trajectory", headers=head))
            async with http.post(f"{origin}/episodes/{made['id']}/end", headers=head) as reply:
                assert reply.status == 410
        for ask in asks:
            async with ask() as reply:
                statuses.append(reply.status)
    assert statuses == [404, 410]


async def test_unused_episode_is_ended():
    async with served(["x"], idle_s=0.3) as (origin, recorded), aiohttp.ClientSession() as http:
        async with http.post(f"{origin}/episodes") as reply:
            made = await reply.json()
        while not recorded:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["api_key"]) as client:
            with pytest.raises(openai.APIStatusError) as ended:
                await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        assert ended.value.status_code == 410


async def test_episodes_beyond_the_limit_are_refused():
    async with served(["x"], max_episodes=1) as (origin, _), aiohttp.ClientSession() as http:

        async def create() -> int:
            async with http.post(f"{origin}/episodes") as reply:
                return reply.status

        assert sorted(await asyncio.gather(*(create() for _ in range(8)))) == [200, *[503] * 7]


def test_open_address_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("POLYTURN_TOKEN", raising=False)
    called = call_command(main, "serve", "--openai", "--model", "x", "--host", "0.0.0.0")
    assert called.code == 2 and "without a token" in called.err


@pytest.mark.timeout(300)  # a process starts
def test_command_serves_a_checkpoint_and_records(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    arguments = ["serve", "--openai", "--model", tmp_path / "model", "--port", 0, "--record", tmp_path / "run"]
    with process_serving(*arguments, "num_threads=1", "rollout.limits.max_context=256") as (_, origin):
        asyncio.run(use(origin))
    (t,) = open_store(tmp_path / "run").trajectories(split="served")
    assert t.reward is not None and t.reward.total == 1.0 and len(t.turns) == 1
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()


async def use(origin: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{origin}/v1", api_key="none") as client:
        said = await client.chat.completions.create(
            model="model", messages=[{"role": "user", "content": "a"}], max_tokens=5, temperature=0, logprobs=True
        )
        assert said.usage is not None and 1 <= said.usage.completion_tokens <= 5
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{origin}/episodes") as reply:
            made = await reply.json()
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["api_key"]) as client:
            await client.chat.completions.create(model="polyturn", messages=[{"role": "user", "content": "a"}], max_tokens=5)
        head = {"Authorization": f"Bearer {made['reward_key']}"}
        async with http.post(f"{origin}/episodes/{made['id']}/end", json={"reward": 1}, headers=head) as reply:
            assert reply.status == 200
