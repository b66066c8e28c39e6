"""Schedulers in ms-swift's interface over native episodes: their inputs, what is trained, how episodes end, mistakes."""

from __future__ import annotations

import asyncio
import functools
import math
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyturn.compat.swift.adapter import SwiftScheduler, to_request
from polyturn.compat.swift.base import MultiTurnScheduler
from polyturn.compat.swift.gym_env import ContextManager, Env, context_managers, envs
from polyturn.compat.swift.orm import ORM, AsyncORM, orms
from polyturn.compat.swift.reward_adapter import score
from polyturn.compat.swift.schedulers import GYMScheduler
from polyturn.compat.swift.template import ThinkingTemplate
from polyturn.compat.swift.turn_weights import OUTPUTS
from polyturn.core.errors import ConfigError, DataError, RewardError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler as NativeScheduler
from polyturn.serving.outputs import reward_rows
from polyturn.serving.rollout_protocol import RolloutInferRequest, RolloutOutput
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.testing.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from polyturn.tokens.codec import Codec
from support.compat_parts import again, play_swift, running, stepping
from support.refusals import refuses


def spans(trajectory: Trajectory, segment: int = 0) -> list[tuple[str, bool]]:
    """Return the text of each sampled span, and whether it is trained."""
    codec = tiny_codec()
    ends = codec.decode(np.array(codec.stop_token_ids[:1], np.int32))
    return [
        (codec.decode(s.ids).removesuffix(ends), bool(s.loss_weights.any()))
        for s in trajectory.segments[segment].spans
        if s.source is SpanSource.SAMPLED
    ]


# --- the inputs of a scheduler -------------------------------------------------------------------------------------------


async def test_step_gets_turns_from_one_and_all_columns() -> None:
    seen: list[Any] = []

    def step(request: Any, choice: Any, turn: int) -> Any:
        seen.append((turn, [m["content"] for m in request.messages], dict(request.data_dict)))
        return again(request, choice, turn)

    row = task("Hi", ground_truth="4", extra={"level": 3})
    trajectory = await play_swift(stepping(step), ["a", "b"], row=row, max_turns=None, limits=Limits(max_turns=2))
    assert seen[0] == (1, ["Hi", "a"], {"level": 3, "solution": "4", "data_source": "openai/gsm8k"})
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert [m.text for m in trajectory.messages] == ["Hi", "a", "Again 1.", "b"]


async def test_all_forms_of_the_constructor_are_understood() -> None:
    base = stepping()

    class Early(base):  # type: ignore[misc, valid-type]
        def __init__(self, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(max_turns, *args, **kwargs)

    class Late(base):  # type: ignore[misc, valid-type]
        def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(infer_engine, max_turns, *args, **kwargs)

    class Bare(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()

    class WithTokenizer(base):  # type: ignore[misc, valid-type]
        def __init__(self, max_turns: int, tokenizer: Any, **kwargs: Any) -> None:
            super().__init__(max_turns=max_turns, **kwargs)
            assert tokenizer.encode("a")

    for cls in (Early, Late, Bare, WithTokenizer):
        trajectory = await play_swift(cls, ["a", "b", "c"], max_turns=2)
        assert (trajectory.error, len(trajectory.turns)) == (None, 2)
    assert (Early(3).max_turns, Late(None, 4).max_turns, base(5).max_turns) == (3, 4, 5)


@pytest.mark.parametrize("thinks", [False, True])
async def test_engine_and_template_are_reached_from_the_scheduler(thinks: bool) -> None:
    found: dict[str, Any] = {}

    class Looks(MultiTurnScheduler):
        def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
            found["ids"] = self.tokenizer.encode("a", add_special_tokens=False)
            found["unknown"] = hasattr(self, "max_concurrent_envs")
            template = self.infer_engine.default_template
            found["thinks"] = (template.template_meta.is_thinking, isinstance(template, ThinkingTemplate))
            return True

    context = scripted_context(["a"], scheduler=SwiftScheduler(Looks), rewards={"openai/gsm8k": lambda trajectory: 1.0})
    context.codec = Codec(tiny_tokenizer(), chat_template=CHAT_TEMPLATE if thinks else CHAT_TEMPLATE.replace("think", "x"))
    assert (await run_episode(context, task(), id="g0/0")).error is None
    assert found["ids"]
    assert (found["unknown"], found["thinks"]) == (False, (thinks, thinks))
    with pytest.raises(AttributeError, match="nothing"):
        _ = Looks().nothing


async def test_choice_has_the_sampled_ids_and_the_messages() -> None:
    seen: list[Any] = []

    class Looks(stepping()):  # type: ignore[misc]
        def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> None:
            seen.append(response_choice)

    trajectory = await play_swift(Looks, ["a", "b"], max_turns=2)
    ids = trajectory.segments[0].spans[1].ids.tolist()
    first, last = seen
    assert (first.token_ids, len(first.logprobs["content"])) == (ids, len(ids))
    assert (first.finish_reason, first.message.content, first.index) == ("stop", "a", 0)
    assert [m["content"] for m in last.messages] == ["What is 2+2?", "a", "Again 1.", "b"]


def test_media_of_a_prompt_become_side_lists_with_tags() -> None:
    request = to_request(task(extra={"data_dict": {"x": 1}, "y": 2}), uuid="u")
    assert (request.data_dict["x"], request.data_dict["y"], request.uuid) == (1, 2, "u")
    shown = ({"type": "image", "image": "a.png"}, {"type": "text", "text": "Color?"})
    request = to_request(Task(id="t", prompt=(Message(role="user", content=shown),)), uuid="u")
    assert request.messages == [{"role": "user", "content": "<image>Color?"}]
    assert request.images == ["a.png"]


async def test_tool_message_of_a_step_stays_one() -> None:
    def step(request: Any, choice: Any, turn: int) -> Any:
        request.messages.append({"role": "tool", "content": "5"})
        return {"infer_request": request}

    trajectory = await play_swift(stepping(step), ["a", "b"], max_turns=2)
    assert (trajectory.error, len(trajectory.segments)) == (None, 1)
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]


# --- trained tokens -----------------------------------------------------------------------------------------------------


async def test_math_tips_drops_what_it_cuts_and_masks_the_hint() -> None:
    trajectory = await play_swift("math_tip_trick", ["ab</think>41<answer>41</answer>", "  42"], ground_truth="42")
    assert [m.text for m in trajectory.messages] == ["What is 2+2?", "abBut wait... It seems I made a mistake,  42"]
    assert spans(trajectory) == [("ab", True), ("  42", True)]
    assert trajectory.metrics["dropped_cut"] == 19
    assert len((await play_swift("math_tip_trick", ["42"], ground_truth="42")).turns) == 1
    wrong = await play_swift("math_tip_trick", ["abc", "x"], ground_truth="42")
    assert len(wrong.turns) == 2, "a hint is given once"


async def test_thinking_tips_makes_a_segment_per_turn_and_one_reward() -> None:
    says = ["<think>x</think>41", "<think>y</think>42"]
    trajectory = await play_swift("thinking_tips_scheduler", says, ground_truth="42")
    assert [len(s.spans) for s in trajectory.segments] == [2, 2]
    rows = reward_rows(trajectory)
    assert [len(row["messages"]) for row in rows] == [2, 4]
    assert rows[1]["messages"][1]["content"] == "41", "the history has no reasoning"
    assert [row["rollout_infos"]["num_turns"] for row in rows] == [1, 2]
    assert (await score(trajectory, ["thinking_tips"]))["score"] == 1.0
    cut = await play_swift("thinking_tips_scheduler", ["x" * 30], limits=Limits(max_tokens_per_turn=4))
    assert len(cut.turns) == 1


async def test_changed_text_opens_a_segment_and_keeps_the_sampled_one() -> None:
    def step(request: Any, choice: Any, turn: int) -> Any:
        request.messages[-1]["content"] = "Something else."
        return again(request, choice, turn)

    trajectory = await play_swift(stepping(step), ["abc", "d"], max_turns=2)
    assert [spans(trajectory, i) for i in range(len(trajectory.segments))] == [[("abc", True)], [("d", True)]]
    assert "Something else." in tiny_codec().decode(trajectory.segments[1].spans[0].ids)


async def test_ids_that_were_not_sampled_are_never_trained() -> None:
    def step(request: Any, choice: Any, turn: int) -> Any:
        ids = [choice.token_ids[0], 7, 7, *choice.token_ids[1:]]
        return {**again(request, choice, turn), "response_token_ids": ids, "response_loss_mask": [1] * len(ids)}

    trajectory = await play_swift(stepping(step), ["abcd", "e"], max_turns=2)
    first = next(s for s in trajectory.segments[0].spans if s.source is SpanSource.SAMPLED)
    assert first.loss_weights.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0][: len(first.ids)]


async def test_own_run_trains_only_what_it_returns() -> None:
    async def best_of_three(engine: Any, request: Any, config: Any) -> RolloutOutput:
        tries = [await engine.infer_async(RolloutInferRequest(list(request.messages)), config) for _ in range(3)]
        best = tries[1].choices[0]
        messages = [*request.messages, {"role": "assistant", "content": best.message.content}]
        return RolloutOutput(response=tries[1], messages=messages, response_token_ids=best.token_ids)

    trajectory = await play_swift(running(best_of_three), ["a", "b", "c"])
    assert [bool(s.loss_weights.any()) for s in trajectory.segments] == [False, True, False]
    assert trajectory.turns[1].info[OUTPUTS][0]["messages"][-1]["content"] == "b"


# --- how a trajectory ends ----------------------------------------------------------------------------------------------


class Endless(Env):
    """Never done, and counts how often it was closed."""

    closed: list[Any] = []  # noqa: RUF012
    is_reset = asyncio.Event()

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self.is_reset.set()
        return "Go.", {}, ""

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        if action[-1]["content"] == "boom":
            raise RuntimeError("the environment broke")
        return "Go on.", 0.5, action[-1]["content"] == "done", {}

    async def close(self) -> None:
        self.closed.append(self)


@pytest.fixture
def endless() -> list[Any]:
    envs["endless"] = Endless
    Endless.closed = []
    return Endless.closed


ROW: dict[str, Any] = {"extra": {"env_config": {"name": "endless"}}}


@pytest.mark.parametrize(
    ("says", "limits", "reason"),
    [
        (["a"], Limits(max_turns=9), StopReason.MAX_TURNS),
        (["a" * 40], Limits(max_turns=9, max_tokens_per_turn=4), StopReason.LENGTH),
        (["a"], Limits(max_turns=9, max_tokens=20), StopReason.MAX_TOKENS),
        (["boom"], Limits(max_turns=9), StopReason.ERROR),
        ([OSError("lost")], Limits(max_turns=9), StopReason.ERROR),
    ],
)
async def test_environment_is_closed_once_on_every_exit(
    endless: list[Any], says: list[Any], limits: Limits, reason: StopReason
) -> None:
    trajectory = await play_swift("gym_scheduler", says, limits=limits, **ROW)
    assert trajectory.stop_reason is reason, trajectory.error
    assert len(endless) == 1


@pytest.mark.parametrize(("text", "reason"), [("done", StopReason.ENV_DONE), ("a", StopReason.MAX_TURNS)])
async def test_failing_close_keeps_the_trajectory(
    endless: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, reason: StopReason
) -> None:
    async def close(self: Any) -> None:
        self.closed.append(self)
        raise OSError("the socket is gone")

    monkeypatch.setattr(Endless, "close", close)
    trajectory = await play_swift("gym_scheduler", [text], max_turns=2, **ROW)
    assert (trajectory.error, trajectory.stop_reason) == (None, reason)
    assert trajectory.reward is not None
    assert len(endless) == 1
    assert "Endless.close raised in trajectory g0/0: OSError: the socket is gone" in caplog.text


async def test_environment_of_a_cancelled_episode_is_closed(endless: list[Any]) -> None:
    Endless.is_reset = asyncio.Event()
    context = scripted_context(["a"], scheduler=SwiftScheduler("gym_scheduler"), latency_s=3600.0)
    running_episode = asyncio.create_task(run_episode(context, task(**ROW), id="e"))
    await Endless.is_reset.wait()
    running_episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running_episode
    assert len(endless) == 1


async def test_check_finished_overrules_a_cut_turn(endless: list[Any]) -> None:
    class GoesOn(GYMScheduler):
        def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
            return False

    short = Limits(max_turns=2, max_tokens_per_turn=2)
    assert len((await play_swift("gym_scheduler", ["aaaa"], limits=short, **ROW)).turns) == 1
    assert len((await play_swift(GoesOn, ["aaaa"], limits=short, **ROW)).turns) == 2


async def test_context_manager_shortens_the_history(endless: list[Any]) -> None:
    class KeepsLast(ContextManager):
        def manage_context(self, history: Any, trajectory_id: str) -> Any:
            return history[-1:]

    context_managers["keeps_last"] = KeepsLast
    row = {"extra": {**ROW["extra"], "ctx_config": {"name": "keeps_last"}}}
    trajectory = await play_swift("gym_scheduler", ["a", "b"], max_turns=2, **row)
    assert len(trajectory.segments) == 2
    assert "Go.\n" not in tiny_codec().decode(trajectory.segments[1].spans[0].ids)


async def test_limit_ends_a_run_that_swallows_every_error() -> None:
    async def stubborn(engine: Any, request: Any, config: Any) -> Any:
        while True:
            try:
                response = await engine.infer_async(request, config)
                request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
                request.messages.append({"role": "user", "content": "Again."})
            except Exception:
                continue

    async def in_tasks(engine: Any, request: Any, config: Any) -> Any:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(engine.infer_async(request, config))

    for run in (stubborn, in_tasks):
        trajectory = await play_swift(running(run), ["a"], limits=Limits(max_turns=3))
        assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 3)


async def test_failing_trajectory_leaves_the_others_alone() -> None:
    def step(request: Any, choice: Any, turn: int) -> Any:
        if request.uuid == "e0":
            raise ValueError("no")
        return again(request, choice, turn)

    context = scripted_context(["a"], scheduler=SwiftScheduler(stepping(step), max_turns=2))
    found = await asyncio.gather(*(run_episode(context, task(), id=f"e{i}") for i in range(4)))
    assert [t.is_failed for t in found] == [True, False, False, False]


@pytest.mark.parametrize("shared", [False, True])
async def test_slow_step_blocks_others_only_if_shared(shared: bool) -> None:
    """Four steps meet at a barrier; those of a shared object never meet."""
    meeting, inside = threading.Barrier(4), threading.Lock()

    def step(request: Any, choice: Any, turn: int) -> Any:
        if shared:
            assert inside.acquire(blocking=False), "two episodes are in the step of one object"
            time.sleep(0.01)  # long enough that another step would come in
            inside.release()
        else:
            meeting.wait(timeout=120)
        return again(request, choice, turn)

    scheduler = stepping(step)
    if shared:
        scheduler.shared = True  # type: ignore[attr-defined]
    context = scripted_context(["a"], scheduler=SwiftScheduler(scheduler, max_turns=2))
    found = await asyncio.gather(*(run_episode(context, task(), id=f"e{i}") for i in range(4)))
    assert [t.error for t in found] == [None] * 4


@pytest.mark.parametrize("is_shared", [False, True])
async def test_shared_scheduler_has_the_effects_of_a_copied_one(is_shared: bool) -> None:
    ended: list[str | None] = []

    class Masks(MultiTurnScheduler):
        shared = is_shared

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            assert self.template is self.infer_engine.template
            ids = response_choice.token_ids
            masked = {"response_token_ids": ids, "response_loss_mask": [0] * len(ids)}
            return {**again(infer_request, response_choice, current_turn), **masked}

        def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            return {"score": 0.5, "done": current_turn == 2}

        def on_trajectory_end(self, requests: Any) -> None:
            ended.append(requests[0].uuid)

    trajectory = await play_swift(Masks, ["a", "b", "c"], max_turns=5)
    assert (trajectory.error, trajectory.stop_reason, ended) == (None, StopReason.ENV_DONE, ["g0/0"])
    assert (trajectory.turn_scores, spans(trajectory)) == ((0.5, 0.5), [("a", False), ("b", True)])


# --- mistakes -----------------------------------------------------------------------------------------------------------


def ask(**changes: Any) -> Any:
    """Return a run that asks the engine with a changed config."""

    async def run(engine: Any, request: Any, config: Any) -> Any:
        for name, value in changes.items():
            setattr(config, name, value)
        return await engine.infer_async(request, config)

    return running(run)


async def silent(engine: Any, request: Any, config: Any) -> Any:
    return []


async def breaks(engine: Any, request: Any, config: Any) -> Any:
    raise KeyError("solution")


def adding(**result: Any) -> Any:
    return stepping(lambda request, choice, turn: {**again(request, choice, turn), **result})


def ending(**result: Any) -> Any:
    """Return a scheduler whose `on_turn_end` returns `result`."""

    class Ends(stepping()):  # type: ignore[misc]
        async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            return result

    return Ends


def said(request: RolloutInferRequest, content: Any) -> RolloutInferRequest:
    request.messages.append({"role": "user", "content": content})
    return request


@pytest.mark.parametrize(
    ("scheduler", "names"),
    [
        (stepping(lambda *_: None), r"Steps\.step returned None .*'g0/0'.*infer_request"),
        (stepping(lambda *_: {}), r"Steps\.step returned {} .*'g0/0'"),
        (MultiTurnScheduler, "step"),
        (adding(response_loss_mask=[1]), "response_token_ids.*'g0/0'"),
        (adding(response_token_ids=[1, 2], response_loss_mask=[1]), r"response_loss_mask .*\(1 and 2 .*'g0/0'"),
        (adding(rollout_infos={"x": object()}), "rollout_infos .*'g0/0'"),
        (adding(respone_loss_mask=[0], my_own=1), "'respone_loss_mask'.*'response_loss_mask'"),
        (adding(response_token_ids=[5], response_loss_mask=[0.5]), r"response_loss_mask holds 0\.5"),
        (adding(response_token_ids=[5], response_loss_mask=[-1]), "response_loss_mask holds -1"),
        (adding(response_token_ids=[5], rollout_logprobs=[-1.0, -2.0]), "rollout_logprobs has 2 .* 1 response_token_ids"),
        (adding(response_token_ids=["a"]), r"response_token_ids is \['a'\] .*'g0/0'"),
        (adding(response_token_ids=[5]), "turn 1 of trajectory 'g0/0' begin with 5"),
        (adding(response_token_ids=[10**6], response_loss_mask=[0]), "'g0/0' hold 1000000; the tokenizer has"),
        (stepping(lambda request, *_: {"infer_request": RolloutInferRequest([*request.messages, "go"])}), "message 'go'"),
        (stepping(lambda request, *_: {"infer_request": said(request, 42)}), "'g0/0' has the message .*42"),
        (ending(score="high"), "the score of turn 1 is 'high'"),
        (ending(done="false"), r"Ends\.on_turn_end returned done as 'false' .*'g0/0'"),
        (running(silent), r"Runs\.run returned an empty list .*'g0/0'"),
        (running(breaks), r"Runs\.run raised KeyError: 'solution' .*'g0/0'"),
        (ask(n=2), r"request_config\.n is 2"),
        (ask(temperature=2.0), r"request_config\.temperature is 2\.0"),
    ],
)
async def test_mistake_of_a_scheduler_is_named_with_its_trajectory(scheduler: Any, names: str) -> None:
    trajectory = await play_swift(scheduler, ["a", "b"])
    assert trajectory.stop_reason is StopReason.ERROR
    assert re.search(names, str(trajectory.error), re.DOTALL), trajectory.error


async def test_error_beside_a_reached_limit_is_named() -> None:
    async def breaks_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("the search broke")

    async def run(engine: Any, request: Any, config: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(breaks_when_cancelled())
            await asyncio.sleep(0)  # the task begins to wait
            for _ in range(2):
                choice = (await engine.infer_async(request, config)).choices[0]
                request.messages.append({"role": "assistant", "content": choice.message.content})
                again(request, choice, 1)

    trajectory = await play_swift(running(run), ["a"], limits=Limits(max_turns=1))
    assert trajectory.is_failed and "ExceptionGroup" in str(trajectory.error)


async def test_stop_of_a_request_may_be_one_text() -> None:
    texts: list[Any] = []

    async def run(engine: Any, request: Any, config: Any) -> Any:
        config.stop = "c:"
        response = await engine.infer_async(request, config)
        texts.append(response.choices[0].message.content)
        return RolloutOutput(response=response)

    await play_swift(running(run), ["a:b c: d"])
    assert texts == ["a:b "]


@pytest.mark.parametrize("form", [tuple, np.array, list])
async def test_ids_and_masks_of_a_step_may_be_arrays(form: Any) -> None:
    def step(request: Any, choice: Any, turn: int) -> Any:
        ids, mask = form(choice.token_ids), form([0, *[1] * (len(choice.token_ids) - 1)])
        return {**again(request, choice, turn), "response_token_ids": ids, "response_loss_mask": mask}

    trajectory = await play_swift(stepping(step), ["abcd", "e"], max_turns=2)
    assert trajectory.error is None
    first = next(s for s in trajectory.segments[0].spans if s.source is SpanSource.SAMPLED)
    assert first.loss_weights.tolist() == [0.0, *[1.0] * (len(first) - 1)]


async def test_key_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for scheduler in (adding(my_own=1), ending(finished=True)):
        assert (await play_swift(scheduler, ["a"], max_turns=3)).error is None
    assert caplog.text.count("Steps.step returned the key 'my_own'") == 1
    assert caplog.text.count("Ends.on_turn_end returned the key 'finished'") == 1


@pytest.mark.parametrize(
    ("method", "answer", "names"),
    [
        ("reset", ("Go.", {}), r"Wrong\.reset returned \('Go\.', \{\}\) .*'g0/0'.*system_message"),
        ("reset", (7, {}, ""), r"Wrong\.reset returned \(7"),
        ("step", ("Go.", None, False, {}), r"Wrong\.step returned \('Go\.', None.*reward"),
        ("step", ("Go.", "1", False, {}), r"Wrong\.step returned .*reward"),
        ("step", ("Go.", 1.0, "false", {}), r"Wrong\.step returned .*done"),
        ("step", (7, 1.0, False, {}), r"Wrong\.step returned .*observation"),
    ],
)
async def test_wrong_answer_of_an_environment_is_named(method: str, answer: Any, names: str, endless: list[Any]) -> None:
    async def wrong(self: Any, _: Any) -> Any:
        return answer

    envs["wrong"] = type("Wrong", (Endless,), {method: wrong})
    trajectory = await play_swift("gym_scheduler", ["a"], extra={"env_config": {"name": "wrong"}})
    assert re.search(names, str(trajectory.error)), trajectory.error
    assert len(endless) == 1


def test_mistake_of_a_row_or_name_is_refused_before_the_run() -> None:
    refuses(lambda: SwiftScheduler(dict), ConfigError, "RolloutScheduler")  # type: ignore[arg-type]
    refuses(lambda: SwiftScheduler("gym_schedule"), ConfigError, "'gym_schedule'", "'gym_scheduler'")
    refuses(lambda: SwiftScheduler("math_tip_trick").check_task(task(ground_truth=None)), DataError, "'t0' has no solution")
    refuses(lambda: SwiftScheduler("gym_scheduler").check_task(task()), DataError, "'t0' does not name an environment")
    refuses(
        lambda: SwiftScheduler("gym_scheduler", gym_env="math_enf").check_task(task()),
        ConfigError,
        "'math_enf'",
        "'math_env'",
    )
    for key in ("env_config", "ctx_config"):
        written = task(extra={key: '{"name": "math_env"}'})
        refuses(lambda t=written: SwiftScheduler("gym_scheduler", gym_env="math_env").check_task(t), DataError, "'t0'", key)
    SwiftScheduler("gym_scheduler", gym_env="math_env").check_task(task())
    SwiftScheduler("openenv_scheduler").check_task(task())


# --- rewards ------------------------------------------------------------------------------------------------------------


class Records(ORM):
    arguments: dict[str, Any] = {}  # noqa: RUF012

    def __call__(self, completions: Any, **kwargs: Any) -> Any:
        Records.arguments = {"completions": completions, **kwargs}
        return [1.0] * len(completions)


class Waits(AsyncORM):
    async def __call__(self, completions: Any, solution: Any) -> Any:
        await asyncio.sleep(0)
        return [0.5 if s == "4" else None for s in solution]


async def test_reward_functions_get_what_they_get_in_ms_swift() -> None:
    orms["records"], orms["waits"] = Records, Waits
    trajectory = await play_swift(stepping(), ["a", "b"], max_turns=2, extra={"level": 3})
    found = await score(trajectory, ["records", "waits"], weights=[1.0, 2.0])
    assert found == {"score": 2.0, "records": 1.0, "waits": 0.5}
    arguments = Records.arguments
    expected = {"completions": ["b"], "level": [3], "solution": ["4"], "request_id": ["g0/0"], "finish_reason": ["stop"]}
    expected |= {"is_truncated": [False], "rollout_infos": [{"num_turns": 2}]}
    assert {name: arguments[name] for name in expected} == expected
    assert [len(ids) for ids in arguments["response_token_ids"]] == [2]
    assert arguments["trajectory_inputs"]["g0/0"][0]["messages"][-1]["content"] == "b"
    assert arguments["trainer_state"].global_step == 0


PROMPTS_REASONING = CHAT_TEMPLATE.replace("assistant\\n' -}}{%- endif -%}", "assistant\\n<think>\\n' -}}{%- endif -%}")


@pytest.mark.parametrize("scheduler", [NativeScheduler(), SwiftScheduler(stepping(), max_turns=1)])
async def test_completion_begins_with_reasoning_of_the_prompt(scheduler: Any) -> None:
    reply = "2\n</think>\n\n<answer>4</answer>"
    context = scripted_context([reply], scheduler=scheduler, rewards={"*": lambda trajectory: 1.0})
    context.codec = Codec(tiny_tokenizer(), chat_template=PROMPTS_REASONING)
    trajectory = await run_episode(context, task(), id="e")
    assert reward_rows(trajectory)[0]["messages"][-1]["content"] == f"<think>\n{reply}"
    assert (await score(trajectory, ["format"]))["score"] == 1.0


def half_of_solved(completions: Any, solution: Any) -> Any:
    return [0.5 * (s == "4") for s in solution]


@pytest.mark.parametrize("function", [half_of_solved, functools.partial(half_of_solved), Waits])
async def test_function_gets_only_the_columns_that_it_names(function: Any) -> None:
    orms[name := f"of_{type(function).__name__}"] = function
    trajectory = await play_swift(stepping(), ["a"], max_turns=1)
    assert (await score(trajectory, [name]))["score"] == 0.5


async def test_reward_registered_again_replaces_the_old_one() -> None:
    trajectory = await play_swift(stepping(), ["a"], max_turns=1)
    for value in (0.25, 0.75):

        class Fixed(ORM):
            def __call__(self, completions: Any, value: float = value, **kwargs: Any) -> Any:
                return [value]

        orms["edited"] = Fixed
        assert (await score(trajectory, ["edited"]))["score"] == value


@pytest.mark.parametrize(
    ("names", "options", "error", "words"),
    [
        (["nothing"], {}, RewardError, "request_id=g0/0"),
        (["few"], {}, RewardError, r"'few' returned \[\]"),
        (["words"], {}, RewardError, "'words' returned the score 'high'"),
        (["endless"], {}, RewardError, "'endless' returned the score inf"),
        ([], {"use_gym_env": True}, RewardError, "request_id=g0/0 has no total_reward"),
        (["few"], {"weights": [1, 2]}, ConfigError, "reward_weights has 2 entries for 1"),
        (["acuracy"], {}, ConfigError, r"'acuracy'.*'accuracy'"),
        (["by_length"], {}, RewardError, "request_id=g0/0: its 2 outputs"),
    ],
)
async def test_impossible_rewards_are_named(names: list[str], options: Any, error: type[Exception], words: str) -> None:
    orms["nothing"] = lambda completions, **kwargs: [None]
    orms["few"] = lambda completions, **kwargs: []
    orms["words"] = lambda completions, **kwargs: ["high"]
    orms["endless"] = lambda completions, **kwargs: [math.inf]
    orms["by_length"] = lambda completions, **kwargs: [float(len(c)) for c in completions]
    scheduler = "thinking_tips_scheduler" if "by_length" in names else stepping()
    trajectory = await play_swift(scheduler, ["<think>x</think>4", "<think>y</think>422"], max_turns=2, ground_truth="9")
    with pytest.raises(error, match=words):
        await score(trajectory, names, **options)


@pytest.mark.parametrize("total", ["high", None, math.nan])
async def test_non_numeric_total_reward_is_named(total: Any) -> None:
    trajectory = await play_swift(adding(rollout_infos={"total_reward": total}), ["a", "b"], max_turns=2)
    with pytest.raises(RewardError, match=f"total_reward of request_id=g0/0 is {total!r}"):
        await score(trajectory, use_gym_env=True)


@pytest.mark.parametrize("scores", [np.array([0.5]), (0.5,), [np.float32(0.5)], [0.5, None], [0.5, np.float32("nan")]])
async def test_scores_may_be_arrays_and_leave_functions_out(scores: Any) -> None:
    orms["first"] = lambda completions, **kwargs: scores[:1]
    orms["second"] = lambda completions, **kwargs: scores[1:] if len(scores) > 1 else [0.0]
    trajectory = await play_swift(stepping(), ["a", "b"], max_turns=2)
    assert (await score(trajectory, ["first", "second"]))["score"] == 0.5


@pytest.mark.parametrize(("names", "total"), [(["score", "half"], 2.0), (["half", "half"], 1.5)])
async def test_every_named_function_counts_in_the_sum(names: list[str], total: float) -> None:
    orms["score"] = lambda completions, **kwargs: [1.0]
    orms["half"] = lambda completions, **kwargs: [0.5]
    trajectory = await play_swift(stepping(), ["a", "b"], max_turns=2)
    assert (await score(trajectory, names, weights=[1.0, 2.0]))["score"] == total


def test_shipped_rewards_score_as_described() -> None:
    assert orms["format"]()(["<think>a</think>\n<answer>b</answer>", "b"]) == [1.0, 0.0]
    assert orms["react_format"]()(["<think>a</think>\nAction: x\nAction Input: y", "b"]) == [1.0, 0.0]
    assert orms["accuracy"]()(["<answer>1/2</answer>", "\\boxed{3}"], solution=["\\boxed{0.5}", "4"]) == [1.0, 0.0]
    assert orms["repetition"]()(["a b c a b c", "a b"]) == [-0.25, 0.0]
    args = SimpleNamespace(max_completion_length=10, soft_cache_length=4)
    assert orms["soft_overlong"](args)(["x", "x"], response_token_ids=[list(range(8)), [[1, 2], [3]]]) == [-0.5, 0.0]
    cosine = orms["cosine"](args)(["<answer>1</answer>"] * 2, solution=["1", "2"], response_token_ids=[[], [1] * 10])
    assert cosine == [1.0, 0.0]
    call = 'Action: get\nAction Input: {"a": 1}'
    assert orms["toolbench"]()([call, call], solution=[call, "Action: put\nAction Input: {}"]) == [1.0, 0.0]
