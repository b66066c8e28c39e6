"""SimulatedUser: the prompt of its model, the end of a conversation, its budget, and its cache."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import DataError, EngineError, InteractionError
from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.snapshots import SnapshotHooks
from polyturn.core.task import InteractionRef
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.interactions.base import SpeakOptions, ViewInteraction
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.interactions.roles import OPENING, SILENCE, flipped
from polyturn.interactions.simulated_user import SimulatedUser
from polyturn.partners.partner import without_thoughts
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.testing.suites.interaction import check_interaction
from support.parts import seen_script
from support.policies import Speaker
from support.refusals import refuses, refuses_later
from support.services import serve

GOAL = "Book a table for two."
TALK = [{"role": "user", "content": "A table, please."}, {"role": "assistant", "content": "For how many?"}]


def says(*texts: str) -> Callable[[dict[str, Any], int], Any]:
    """Return a server that answers one text after another, and the last one for ever."""

    def answer(asked: dict[str, Any], number: int) -> dict[str, Any]:
        text = texts[min(number, len(texts)) - 1]
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 30, "completion_tokens": len(text.split())}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}

    return answer


def user(url: str, **config: Any) -> SimulatedUser:
    return SimulatedUser({"name": "user", "base_url": url, "model": "m", "backoff_s": 0.01, **config})


async def reply(partner: SimulatedUser, messages: list[dict[str, Any]] = TALK, **row: Any) -> tuple[Any, ...]:
    row = {"goal": GOAL, **row}
    instance_id = await partner.start_interaction(**row)
    try:
        return await partner.respond(None, instance_id, messages, **row)
    finally:
        await partner.finalize_interaction(instance_id)


def about_goal(prompt: str = "A table, please.", **row: Any) -> Any:
    ref = InteractionRef(name="user", kwargs={"name": "user", "goal": GOAL, **row})
    return dataclasses.replace(task(prompt, data_source=None), interaction=ref)


def test_model_of_the_user_sees_exchanged_roles() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    shown = flipped(
        [
            {"role": "system", "content": "Rules of the assistant."},
            {"role": "user", "content": "A table, please."},
            {"role": "assistant", "content": "<think>Look it up.</think>", "tool_calls": [call]},
            {"role": "tool", "content": "Luigi's, Mario's", "tool_call_id": "c"},
            {"role": "assistant", "content": "<think>Two.</think>Luigi's?"},
            {"role": "assistant", "content": "Or Mario's?"},
        ],
        instructions="You are a guest.",
    )
    assert shown == [
        {"role": "system", "content": "You are a guest."},
        {"role": "user", "content": OPENING},
        {"role": "assistant", "content": "A table, please."},
        {"role": "user", "content": "Luigi's?\n\nOr Mario's?"},
    ]


def test_roles_alternate_whatever_the_conversation() -> None:
    shown = flipped(
        [
            {"role": "user", "content": [{"type": "text", "text": "This one"}, {"type": "image_url", "image_url": {}}]},
            {"role": "user", "content": ["and that."]},
            {"role": "assistant", "content": ""},
        ],
        instructions="…",
    )
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "user"]
    assert shown[2]["content"] == "This one\n[image]\n\nand that."
    assert shown[3]["content"] == SILENCE
    thoughts = ("<think>a</think>Hello", "a</think>Hello", "Hello<think>cut", "<thinking>a</thinking> Hello ", "Hello")
    assert {without_thoughts(text) for text in thoughts} == {"Hello"}


async def test_reply_has_no_thoughts_and_the_key_is_kept_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    async with serve(says("<think>Two, I think.</think>For two.")) as server:
        partner = user(server.url, api_key_env="MY_KEY", temperature=0.2, max_tokens=50, extra={"top_k": 5})
        done, content, score, info = await reply(partner, persona="Writes little.")
    assert (done, content, score) == (False, "For two.", 0.0)
    assert info == {"user_turn": 0, "user_tokens": 4, "user_prompt_tokens": 30, "user_cached": False}
    (asked,) = server.asked
    assert asked["model"] == "m"
    assert asked["temperature"] == 0.2
    assert asked["max_tokens"] == 50
    assert asked["top_k"] == 5
    assert GOAL in asked["messages"][0]["content"] and "Writes little." in asked["messages"][0]["content"]
    assert "sk-very-secret" not in json.dumps(asked) + caplog.text + repr(vars(partner)) + repr(partner.config)


async def test_marker_ends_the_conversation_and_is_not_shown() -> None:
    async with serve(says("Thanks, bye! [[DONE]]")) as server:
        done, content, score, info = await reply(user(server.url))
    assert (done, content, score, info["user_stop"]) == (True, "Thanks, bye!", 1.0, "marker")


async def test_predicate_ends_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text("def over(messages):\n    return 'thanks' in messages[-1]['content'].lower()\n")
    async with serve(says("Thanks.")) as server:
        config = {"base_url": server.url, "model": "m", "stop_when": "rule.py:over", "done_score": 0.5}
        entry = {"name": "user", "class_name": "polyturn.interactions.simulated_user.SimulatedUser", "config": config}
        partner: Any = initialize_interactions_from_config({"interaction": [entry]}, base=tmp_path)["user"]
        assert (await reply(partner))[0::2] == (True, 0.5)


@pytest.mark.parametrize(
    ("body", "limit_s", "message"),
    [("return messages[0]['mood']", 60.0, "stop_when raised KeyError: 'mood'"), ("wait()", 0.2, "stop_when took")],
)
async def test_predicate_that_fails_is_named(
    tmp_path: Path, body: str, limit_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyturn.interactions.simulated_user.STOP_TIMEOUT_S", limit_s)
    (tmp_path / "rule.py").write_text(f"import threading\nwait = threading.Event().wait\ndef over(messages):\n    {body}\n")
    async with serve(says("Thanks.")) as server:
        rule = f"{tmp_path / 'rule.py'}:over"
        await refuses_later(lambda: reply(user(server.url, stop_when=rule)), InteractionError, message, "rule.py")


async def test_user_turns_are_bounded() -> None:
    async with serve(says("More.")) as server:
        context = scripted_context(["a", "b", "c", "d"], interactions={"user": user(server.url, max_user_turns=2)})
        found = await run_episode(context, about_goal(), id="e")
    assert found.stop_reason is StopReason.ENV_DONE and len(found.turns) == 3
    assert [t.info.get("user_stop") for t in found.turns] == [None, None, "max_user_turns"]
    assert len(server.asked) == 2


async def test_calls_of_the_model_are_bounded() -> None:
    async with serve(says("", "More.", "More.")) as server:
        context = scripted_context(["a", "b", "c", "d"], interactions={"user": user(server.url, max_calls=3)})
        found = await run_episode(context, about_goal(), id="e")
    assert len(server.asked) == 3, "an empty answer is asked for again, and counts"
    assert found.turns[-1].info["user_stop"] == "max_calls"


async def test_requests_after_empty_answers_are_bounded_too() -> None:
    async with serve(says("")) as server:
        context = scripted_context(["a", "b"], interactions={"user": user(server.url, max_calls=2)})
        found = await run_episode(context, about_goal(), id="e")
    assert len(server.asked) == 2 and found.turns[0].info["user_stop"] == "max_calls"


async def test_busy_server_is_asked_again() -> None:
    def answer(asked: dict[str, Any], number: int) -> Any:
        return {1: (429, {"error": {"message": "slow down"}}), 2: (500, "oops")}.get(number) or says("Two.")(asked, number)

    async with serve(answer) as server:
        assert (await reply(user(server.url)))[1] == "Two."
        assert len(server.asked) == 3
    async with serve(lambda asked, number: (401, {"error": {"message": "no such key"}})) as server:
        context = scripted_context(["a"], interactions={"user": user(server.url)})
        found = await run_episode(context, about_goal(), id="e")
    assert found.is_failed
    assert "401" in str(found.error)


async def test_silent_server_misses_the_deadline() -> None:
    async def answer(asked: dict[str, Any], number: int) -> Any:
        await asyncio.sleep(3600)

    async with serve(answer) as server:
        await refuses_later(lambda: reply(user(server.url, deadline_s=0.2)), EngineError, "deadline_s")


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (
            "raise ValueError('no mood')",
            "the simulated user 'guest': stop_when raised ValueError: no mood (rule.py, line 2)",
        ),
        (None, "EngineError: the simulated user 'guest': "),
    ],
)
async def test_failed_trajectory_names_the_simulated_user(tmp_path: Path, rule: str | None, error: str) -> None:
    config: dict[str, Any] = {"name": "guest", "max_tries": 1}
    if rule is not None:
        (tmp_path / "rule.py").write_text(f"def over(messages):\n    {rule}\n")
        config["stop_when"] = f"{tmp_path / 'rule.py'}:over"
    broken = (500, "oops") if rule is None else None
    async with serve(lambda asked, number: broken or says("Two.")(asked, number)) as server:
        context = scripted_context(["a"], interactions={"user": user(server.url, **config)})
        trajectory = await run_episode(context, about_goal(), id="e")
    assert str(trajectory.error).startswith(f"InteractionError: interaction 'user': {error}")
    assert "respond" not in str(trajectory.error)


async def test_model_that_says_nothing_is_an_error() -> None:
    async with serve(says("<think>hm</think>")) as server:
        await refuses_later(lambda: reply(user(server.url)), InteractionError, "3 empty answers")


async def test_concurrent_requests_at_one_host_are_bounded() -> None:
    async def answer(asked: dict[str, Any], number: int) -> Any:
        await asyncio.sleep(0.02)
        return says("Two.")(asked, number)

    async with serve(answer) as server:
        users = [user(server.url, max_concurrent=2) for _ in range(2)]
        await asyncio.gather(*(reply(users[i % 2]) for i in range(8)))
    assert server.most_at_once == 2


async def test_second_run_is_answered_from_the_cache(tmp_path: Path) -> None:
    numbers = iter(range(1000))

    def answer(asked: dict[str, Any], number: int) -> Any:
        return says(f"Word {next(numbers)}.")(asked, number)

    async def run(url: str) -> list[Trajectory]:
        partner = user(url, cache=str(tmp_path / "answers.sqlite"), max_user_turns=2)
        context = scripted_context(["a", "b", "c"], interactions={"user": partner})
        return list(await asyncio.gather(*(run_episode(context, about_goal(), id=f"g/{i}", seed=i) for i in range(4))))

    async with serve(answer) as server:
        first = await run(server.url)
        num_asked = len(server.asked)
        second = await run(server.url)
        assert num_asked == 8 == len(server.asked), "members of a group are asked for by themselves"
    assert [t.messages for t in first] == [t.messages for t in second]
    assert all(t.turns[0].info["user_cached"] for t in second)


async def test_writers_of_one_cache_agree(tmp_path: Path) -> None:
    numbers = iter(range(1000))
    async with serve(lambda asked, number: says(f"Word {next(numbers)}.")(asked, number)) as server:
        users = [user(server.url, cache=str(tmp_path / "answers.sqlite")) for _ in range(6)]
        ids = [await u.start_interaction("same", goal=GOAL) for u in users]
        found = await asyncio.gather(*(u.respond(None, i, TALK, goal=GOAL) for u, i in zip(users, ids, strict=True)))
        for u, i in zip(users, ids, strict=True):
            await u.finalize_interaction(i)
    assert len({content for _, content, _, _ in found}) == 1, "the first answer that is stored stands"


def voices(request: Any) -> str:
    """Speak for the model, or for the user if the session is the user's."""
    text = str(request.session_id)
    return "Two. [[DONE]]" if "#" in text and request.request_id.endswith("/1") else ("Two." if "#" in text else "How many?")


async def test_own_model_as_the_user_is_not_trained() -> None:
    partner = SimulatedUser({"name": "user", "model": "policy", "agent": "guest", "max_tokens": 20})
    context = scripted_context(voices, interactions={"user": partner}, limits=Limits(max_turns=4))
    found = await run_episode(context, about_goal(), id="e", seed=3)
    assert found.error is None and found.stop_reason is StopReason.ENV_DONE
    assert [m.text for m in found.messages] == ["A table, please.", "How many?", "Two.", "How many?", "Two."]
    assert len(found.turns) == 2, "its words are not turns of the model"
    agents = {segment.agent for segment in found.segments}
    assert agents == {"assistant", "guest"}
    for segment in found.segments:
        sampled = [s for s in segment.spans if s.source is SpanSource.SAMPLED]
        assert sampled and all(s.loss_weights.any() == (segment.agent == "assistant") for s in sampled)
    assert found.metrics["num_asides"] == 2 and found.metrics["aside_tokens"] > 0


async def test_own_model_as_the_user_is_trained_if_configured() -> None:
    partner = SimulatedUser({"name": "user", "model": "policy", "train": True})
    context = scripted_context(voices, interactions={"user": partner}, limits=Limits(max_turns=4))
    found = await run_episode(context, about_goal(), id="e")
    assert all(segment.loss_weights.any() for segment in found.segments if segment.agent == "user")


async def test_each_reply_of_the_own_model_has_its_options() -> None:
    class Guest(ViewInteraction):
        stateless = True

        async def respond(self, view: Any, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            number = view.num_user_turns + 1
            said = await view.speak(messages, SpeakOptions(max_tokens=2 * number, temperature=0.5 * number))
            return number == 2, said.text, 0.0, {}

    seen: list[GenerateRequest] = []
    script = seen_script(["one two three four five six"], seen)
    found = await run_episode(scripted_context(script, interactions={"user": Guest()}), about_goal(), id="e")
    assert found.error is None
    asides = [request.sampling for request in seen if "#" in str(request.session_id)]
    assert [(s.max_tokens, s.temperature) for s in asides] == [(2, 0.5), (4, 1.0)]


async def test_own_model_cannot_speak_without_a_run() -> None:
    await refuses_later(lambda: reply(SimulatedUser({"model": "policy"})), InteractionError, "run")


async def test_simulated_user_keeps_the_contract() -> None:
    async with serve(says("Hm.")) as server:
        await check_interaction(user(server.url), goal=GOAL, says=["a", "b"])


async def test_episode_with_its_own_model_as_the_user_is_freed_at_once() -> None:
    """Thousands of live episodes must not wait for the garbage collector to find cycles."""
    seen: list[weakref.ref[Any]] = []
    partner = SimulatedUser({"name": "user", "model": "policy"})
    context = scripted_context(voices, interactions={"user": partner}, limits=Limits(max_turns=4))
    gc.collect()
    gc.disable()
    try:
        await run_episode(context, about_goal(), id="e", on_start=lambda episode: seen.append(weakref.ref(episode)))
        assert seen[0]() is None
    finally:
        gc.enable()


def further(*says: str) -> tuple[SimulatedUser, Any]:
    """Return a user that a further policy of the run plays, and its engine."""
    policy = Speaker(*says, name="guest", version=8, max_tokens=64)
    config = {"name": "user", "policy": "guest", "max_user_turns": 2}
    return SimulatedUser(config, policies={"guest": policy}), policy.engine


async def test_further_policy_plays_the_user() -> None:
    partner, engine = further("<think>Two.</think>For two.", "Yes. [[DONE]]")
    context = scripted_context(["For how many?", "Is eight fine?"], interactions={"user": partner})
    found = await run_episode(context, about_goal(), id="e")
    assert found.stop_reason is StopReason.ENV_DONE and found.error is None
    assert [t.info.get("user_stop") for t in found.turns] == [None, "marker"]
    assert {t.info["user_policy"] for t in found.turns} == {"guest"} and found.turns[0].info["user_policy_version"] == 8
    assert found.turns[0].info["user_tokens"] > 0 and not found.turns[0].info["user_cached"]
    assert {s.agent for s in found.segments} == {"assistant"}, "its words are observations, its tokens no segment"
    observed = [s.ids for segment in found.segments for s in segment.spans if s.source is SpanSource.OBSERVATION]
    assert "For two." in str(tiny_codec().decode([i for ids in observed for i in ids.tolist()]))
    assert engine.ended_sessions == ["user/e"], "one conversation, which ends with the episode"


async def test_user_of_a_further_policy_can_be_snapshotted() -> None:
    partner, _ = further("For two.")
    assert SnapshotHooks.of(partner, label="user").snapshot is not None
    await reply(partner)


@pytest.mark.parametrize("field", ["{persona.name}", "{goal[name]}"])
def test_instructions_that_do_not_fit_the_row_are_refused(field: str) -> None:
    partner = SimulatedUser({"model": "policy", "instructions": field})
    refuses(lambda: partner.check_row({"goal": GOAL}), DataError, "cannot be filled in")
