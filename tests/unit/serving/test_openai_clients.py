"""The openai and anthropic clients against the endpoint: answers, streams, errors, and agents as programs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.openai.chat_request import BadRequest
from polyturn.serving.openai.http import read_reward
from polyturn.serving.openai.scheduler import BlackBox
from polyturn.testing.episodes import scripted_context, task, turn_ids
from support.refusals import refuses_later

CALL = 'Let me look.\n<tool_call>\n{"name": "lookup", "arguments": {"key": "apples"}}\n</tool_call>'
THINKS = "<think>\nhm\n</think>\n\nfour"
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"key": {"type": "string"}}}
LOOKUP: Any = {"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "lookup", "parameters": PARAMETERS}
CUSTOM: Any = {"name": "lookup", "description": "Look up.", "input_schema": PARAMETERS}
Agent = Callable[[Any, Any], Awaitable[Any]]


async def play(agent: Agent, says: Any, *, max_context: int = 4000, **options: Any) -> Trajectory:
    async def call(base_url: str, anthropic_base_url: str, api_key: str) -> float:
        async with (
            openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as ours,
            anthropic.AsyncAnthropic(base_url=anthropic_base_url, api_key=api_key) as theirs,
        ):
            await agent(ours, theirs)
        return 1.0

    scheduler = BlackBox(agent=call, **options)
    context = scripted_context(says, scheduler=scheduler, limits=Limits(max_context=max_context))
    t = await run_episode(context, task(data_source=None), id="e")
    assert t.error is None, t.error
    return t


async def test_chat_completions_answer_the_client():
    async def agent(client: Any, _: Any) -> None:
        history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}]
        answer = await client.chat.completions.create(
            model="gpt-x", messages=history, tools=[LOOKUP], temperature=0.5, max_completion_tokens=50, user="me"
        )
        message = answer.choices[0].message
        assert message.content == "Let me look." and answer.choices[0].finish_reason == "tool_calls"
        assert answer.model == "gpt-x" and answer.usage.completion_tokens == len(turn_ids(CALL))
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"key": "apples"}
        history += [message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        answer = await client.chat.completions.create(model="gpt-x", messages=history, tools=[LOOKUP], logprobs=True)
        assert answer.choices[0].message.reasoning_content == "hm" and answer.choices[0].message.content == "four"
        logprobs = answer.choices[0].logprobs.content
        assert [p.logprob for p in logprobs] == [-1.0] * len(turn_ids(THINKS))
        assert "".join(p.token for p in logprobs).startswith("<think>")
        assert [m.id for m in (await client.models.list()).data] == ["polyturn"]

    t = await play(agent, [CALL, THINKS])
    assert len(t.segments) == 1 and len(t.turns) == 2


@pytest.mark.parametrize("n", [1, 2])
async def test_stream_has_the_same_words(n: int):
    async def agent(client: Any, _: Any) -> None:
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "How many?"}],
            tools=[LOOKUP],
            n=n,
            stream=True,
            stream_options={"include_usage": True},
        )
        words, arguments, finish, usage = [""] * n, [""] * n, [""] * n, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                words[choice.index] += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    arguments[choice.index] += call.function.arguments or ""
                finish[choice.index] = choice.finish_reason or finish[choice.index]
        assert words == ["Let me look."] * n and finish == ["tool_calls"] * n and usage is not None
        assert [json.loads(a) for a in arguments] == [{"key": "apples"}] * n

    assert len((await play(agent, [CALL])).turns) == n


@pytest.mark.parametrize("by_id", [True, False])
async def test_responses_continue_a_conversation(by_id: bool):
    async def agent(client: Any, _: Any) -> None:
        first = await client.responses.create(
            model="m", instructions="Be brief.", input="How many?", tools=[FLAT], include=["message.output_text.logprobs"]
        )
        assert first.output_text == "Let me look." and first.status == "completed"
        call = next(item for item in first.output if item.type == "function_call")
        assert json.loads(call.arguments) == {"key": "apples"}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        asked: Any = {"role": "user", "content": [{"type": "input_text", "text": "How many?"}]}
        go_on: Any = (
            {"previous_response_id": first.id, "input": [result]} if by_id else {"input": [asked, *first.output, result]}
        )
        second = await client.responses.create(model="m", instructions="Be brief.", tools=[FLAT], **go_on)
        assert second.output_text == "four" and second.output[0].type == "reasoning"

    t = await play(agent, [CALL, THINKS])
    assert len(t.segments) == 1 and len(t.turns) == 2, "what the agent sent back goes on where the first turn ended"


async def test_responses_stream_their_events():
    async def agent(client: Any, _: Any) -> None:
        async with client.responses.stream(model="m", input="How many?", tools=[FLAT]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "Let me look." and final.output[-1].name == "lookup"
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert "response.function_call_arguments.delta" in kinds

    await play(agent, [CALL])


async def test_messages_answer_the_client():
    async def agent(_: Any, client: Any) -> None:
        history: list[Any] = [{"role": "user", "content": "How many?"}]
        told: Any = {"model": "claude", "max_tokens": 60, "system": "Be brief.", "tools": [CUSTOM]}
        count = await client.messages.count_tokens(model="claude", messages=history, system="Be brief.", tools=[CUSTOM])
        answer = await client.messages.create(messages=history, **told)
        assert answer.stop_reason == "tool_use" and answer.usage.input_tokens == count.input_tokens
        text, use = answer.content
        assert text.text == "Let me look." and use.input == {"key": "apples"}
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "4"}]}
        history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=history, **told) as stream:
            final = await stream.get_final_message()
        assert [b.type for b in final.content] == ["thinking", "text"] and final.content[1].text == "four"
        assert final.stop_reason == "end_turn"

    t = await play(agent, [CALL, THINKS])
    assert len(t.segments) == 1 and len(t.turns) == 2


async def test_messages_continue_an_assistant_message():
    async def agent(_: Any, client: Any) -> None:
        history: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
        answer = await client.messages.create(model="m", max_tokens=9, messages=history, stop_sequences=["ur"])
        assert answer.content[0].text == " fo" and answer.stop_reason == "stop_sequence" and answer.stop_sequence == "ur"

    await play(agent, [" four"])


async def test_errors_are_the_exceptions_of_the_clients():
    async def agent(ours: Any, theirs: Any) -> None:
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        long: Any = [{"role": "user", "content": "word " * 400}]
        create = ours.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="200") as full:
            await create(model="m", messages=long)
        assert full.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await theirs.messages.create(model="m", max_tokens=5, messages=long)
        await refuses_later(lambda: create(**{**asked, "model": "gpt"}), openai.NotFoundError, "'gpt'")
        await refuses_later(
            lambda: theirs.messages.create(**{**asked, "model": "gpt"}, max_tokens=5), anthropic.NotFoundError, "'gpt'"
        )
        with pytest.raises(openai.AuthenticationError):
            await ours.with_options(api_key="wrong").chat.completions.create(**asked)
        with pytest.raises(anthropic.AuthenticationError):
            await theirs.with_options(api_key="wrong").messages.create(**asked, max_tokens=5)
        with pytest.raises(openai.NotFoundError, match="no response"):
            await ours.responses.create(model="tiny", input="a", previous_response_id="resp_1")
        for wrong, message in (
            ({"tools": [LOOKUP], "tool_choice": "required"}, "forced"),
            ({"extra_body": {"temprature": 1}}, "Did you mean 'temperature'"),
            ({"frequency_penalty": 0.5}, "frequency_penalty"),
            ({"messages": [{"role": "robot", "content": "a"}]}, r"messages\[0\].role is 'robot'"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await create(**{**asked, **wrong})
        await create(**asked)

    await play(agent, ["x"], max_context=200, models=["tiny", "m"])
    for reward in ("much", None, float("nan"), 10**400, [1], {"reward": {}}):
        with pytest.raises(BadRequest, match="finite number"):
            read_reward(reward)


async def test_picture_by_address_or_path_is_refused(tmp_path: Path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"not for you")

    async def agent(ours: Any, theirs: Any) -> None:
        data = "data:image/png;base64," + base64.b64encode(b"x").decode()
        for url, why in ((str(secret), "data URIs"), (f"file://{secret}", "data URIs"), ("http://a/b.png", "data URIs")):
            part = {"type": "image_url", "image_url": {"url": url}}
            with pytest.raises(openai.BadRequestError, match=why):
                await ours.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
        part = {"type": "image_url", "image_url": {"url": data}}
        with pytest.raises(openai.BadRequestError, match="reads text only"):
            await ours.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
        await ours.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])

    await play(agent, ["x"])


async def test_posted_reward_is_refused_without_reward_posted():
    async def agent(ours: Any, theirs: Any) -> None:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {ours.api_key}"}) as http,
            http.post(f"{ours.base_url}reward", json={"reward": 1_000_000}) as reply,
        ):
            assert reply.status == 403
        await ours.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])

    await play(agent, ["x"])


async def test_late_request_hears_that_its_episode_has_ended():
    ended = asyncio.Event()
    told: list[str] = []

    async def agent(base_url: str, api_key: str, task: Any) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task.id}])
        if task.id == "second":
            await ended.wait()
            with pytest.raises(openai.APIStatusError, match="has ended: its agent has finished") as late:
                await kept[0].chat.completions.create(model="m", messages=[{"role": "user", "content": "late"}])
            told.append(str(late.value.status_code))
            await client.close()
            await kept[0].close()
        else:
            kept.append(client)
        return 1.0

    kept: list[Any] = []
    context = scripted_context(["x"], scheduler=BlackBox(agent=agent))
    second = asyncio.create_task(run_episode(context, task(data_source=None, id="second"), id="e2"))
    first = await run_episode(context, task(data_source=None, id="first"), id="e1")
    assert first.reward is not None
    ended.set()
    t = await second
    assert t.error is None and told == ["410"]


async def test_plain_function_runs_in_a_thread_with_the_blocking_client():
    def agent(base_url: str, api_key: str) -> dict[str, Any]:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        return {"reward": 0.25, "said": answer.choices[0].message.content}

    context = scripted_context(["x"], scheduler=BlackBox(agent=agent))
    found = await asyncio.gather(*(run_episode(context, task(data_source=None), id=f"e{i}") for i in range(4)))
    assert [t.reward is not None and t.reward.total for t in found] == [0.25] * 4
    assert found[0].reward is not None
    assert found[0].reward.info == {"said": "x"}


COMMAND = """
import json, os, subprocess, sys, urllib.request

reward_key = os.read(int(os.environ["POLYTURN_REWARD_FD"]), 100).decode() if "POLYTURN_REWARD_FD" in os.environ else ""
task = json.loads(sys.stdin.readline())
def post(path, body, key=os.environ["OPENAI_API_KEY"]):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + key)
    return json.load(urllib.request.urlopen(request))
said = post("/chat/completions", {"model": "m", "messages": [{"role": "user", "content": task["ground_truth"]}]})
if os.environ["MODE"] == "break":
    sys.exit("the browser did not start")
if os.environ["MODE"] == "hang":
    import time
    time.sleep(60)
if os.environ["MODE"] == "run":
    # What a model might have written: it has all that its parent handed down, files that are open included.
    subprocess.run([sys.executable, "-c", os.environ["WRITTEN"]], close_fds=False, timeout=20)
if os.environ["MODE"] == "leave":
    # What goes on in the background holds what its parent held, its standard error too; one of them leaves the session.
    for is_apart in (False, True):
        left = subprocess.Popen(["sleep", "45"], start_new_session=is_apart)
    open("left", "w").write(str(left.pid))
if reward_key:
    post("/reward", {"reward": len(said["choices"][0]["message"]["content"])}, key=reward_key)
"""
WRITTEN = """
import os, urllib.request
keys = [value for value in os.environ.values() if value and value.isascii() and value.isprintable()]
for fd in range(3, 64):
    try:
        os.set_blocking(fd, False)
        keys.append(os.read(fd, 1000).decode())
    except (OSError, ValueError):
        pass
for key in keys:
    for path in ("/reward", "/../reward"):
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, b'{"reward": 1000000}')
        request.add_header("Authorization", "Bearer " + key)
        try:
            urllib.request.urlopen(request)
        except (OSError, ValueError):
            pass
open(os.environ["FOUND"], "w").write("\\n".join(os.environ))
"""


async def test_command_finds_its_model_in_the_environment(tmp_path: Path):
    (tmp_path / "agent.py").write_text(COMMAND)

    async def run(mode: str, timeout_s: float = 50.0) -> Trajectory:
        made = BlackBox(command=[sys.executable, "-I", "agent.py"], kwargs={"MODE": mode}, base=tmp_path, reward="posted")
        context = scripted_context(["four"], scheduler=made, limits=Limits(timeout_s=timeout_s))
        return await run_episode(context, task(data_source=None), id="e")

    fine, broken, hangs = await asyncio.gather(run("fine"), run("break"), run("hang", 3.0))
    assert fine.reward is not None and fine.reward.total == 4.0
    assert broken.stop_reason is StopReason.ERROR and "the browser did not start" in str(broken.error)
    assert hangs.stop_reason is StopReason.TIMEOUT
    assert np.array_equal(fine.segments[0].token_ids[-len(turn_ids("four")) :], turn_ids("four"))


async def test_program_left_running_delays_no_episode(tmp_path: Path):
    (tmp_path / "agent.py").write_text(COMMAND)
    made = BlackBox(command=[sys.executable, "-I", "agent.py"], kwargs={"MODE": "leave"}, base=tmp_path, reward="posted")
    context = scripted_context(["four"], scheduler=made, limits=Limits(timeout_s=50.0))
    t = await run_episode(context, task(data_source=None), id="e")
    left = int((tmp_path / "left").read_text())
    try:
        os.kill(left, 0)  # it outlived the episode
    finally:
        os.kill(left, signal.SIGKILL)
    assert t.error is None and t.stop_reason is StopReason.STOP, (t.error, t.stop_reason)


@pytest.mark.parametrize(("api", "is_streamed"), [("responses", True), ("chat", True), ("chat", False)])
async def test_agents_framework_hands_over(api: str, is_streamed: bool):
    """Its runner calls the tool, hands over to another agent, and each of the two has a history of its own."""
    import agents  # which takes a second

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def lookup(key: str) -> str:
        """Look something up."""
        return f"{key}: 4"

    async def agent(client: Any, _: Any) -> None:
        kind: Any = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
        model = kind(model="gpt-x", openai_client=client)
        second = agents.Agent(name="second", instructions="Finish.", model=model)
        first = agents.Agent(name="first", instructions="Begin.", model=model, tools=[lookup], handoffs=[second])
        if is_streamed:
            running = agents.Runner.run_streamed(first, "How many?")
            kinds = {event.type async for event in running.stream_events()}
            assert "raw_response_event" in kinds
            assert running.final_output == "four"
        else:
            assert (await agents.Runner.run(first, "How many?")).final_output == "four"

    hand_over = '<tool_call>\n{"name": "transfer_to_second", "arguments": {}}\n</tool_call>'
    said = iter([CALL, hand_over, "four"])
    t = await play(agent, lambda request: next(said))
    assert len(t.turns) == 3 and len(t.segments) == 2, "the second agent has other instructions and other tools"


@pytest.mark.parametrize(("reward", "worth"), [("posted", 4.0), ("final", 0.5)])
async def test_code_of_an_agent_finds_no_reward_key_or_secret(
    reward: str, worth: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "agent.py").write_text(COMMAND)
    monkeypatch.setenv("WANDB_API_KEY", "of the trainer")
    own = {"MODE": "run", "WRITTEN": WRITTEN, "FOUND": str(tmp_path / "found")}
    made = BlackBox(command=[sys.executable, "-I", "agent.py"], kwargs=own, base=tmp_path, reward=reward)
    assert made.gives_reward is (reward == "posted")
    context = scripted_context(["four"], scheduler=made, rewards={"quiz": lambda trajectory: 0.5})
    t = await run_episode(context, task(data_source="quiz"), id="e")
    assert t.error is None and t.reward is not None and t.reward.total == worth
    found = (tmp_path / "found").read_text().split()
    assert "OPENAI_API_KEY" in found and "PATH" in found
    assert {"WANDB_API_KEY", "PYTEST_CURRENT_TEST"}.isdisjoint(found), found


async def test_agent_with_any_keywords_gets_no_reward_key():
    def anything(**given: Any) -> float:
        assert "reward_key" not in given
        with openai.OpenAI(base_url=given["base_url"], api_key=given["api_key"]) as client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        return 1.0

    assert not BlackBox(command=["x"]).gives_reward, "a command's environment is read by the code that the agent runs"
    t = await run_episode(scripted_context(["x"], scheduler=BlackBox(agent=anything)), task(data_source=None), id="e")
    assert t.error is None, t.error
    context = scripted_context(["x"], scheduler=BlackBox(agent=anything, reward="final"))
    t = await run_episode(context, task(data_source=None), id="e")
    assert "reward: final" in str(t.error)
