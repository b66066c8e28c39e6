"""How reward functions are called: with which arguments and text, in batches, at a rate; and the overlong penalty."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import ConfigError, DataError, RewardError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, ToolCall
from polyturn.core.task import InteractionRef, Task, ToolKwargs
from polyturn.core.trajectory import Segment, Span, SpanRef, SpanSource, Trajectory, Turn
from polyturn.rewards import math
from polyturn.rewards.calls import Batch
from polyturn.rewards.code import Sandbox
from polyturn.rewards.function import extra_info
from polyturn.rewards.options import BatchOptions, CallOptions, CallRate
from polyturn.rewards.overlong import Overlong
from polyturn.rewards.router import RewardRef, RewardRouter, Weighing
from support.isolated import need_isolation
from support.refusals import refuses, refuses_later
from support.virtual_time import run_virtual


def turn(text: str = "x", **fields: Any) -> Turn:
    message = Message(role="assistant", content=text, **fields)
    heard = (Message(role="tool", content="#### 72 <answer>72</answer>"),)
    return Turn(index=0, message=message, finish_reason=FinishReason.STOP, observation=heard)


def trajectory(*turns: Turn, id: str = "t/0", segments: tuple[Segment, ...] = (), **fields: Any) -> Trajectory:
    task = Task(**{"id": "t", "prompt": (Message(role="user", content="?"),), "ground_truth": "72", **fields})
    return Trajectory(id=id, task=task, segments=segments, turns=turns, stop_reason=StopReason.STOP)


async def test_function_scores_what_no_route_names() -> None:
    def zero(trajectory: Trajectory) -> float:
        return 0.0

    def half(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
        return 0.5

    router = RewardRouter({"mine/*": zero}, function=half)
    sources = ("mine/a", "openai/gsm8k", "unheard of", None)
    made = [trajectory(turn("#### 72"), data_source=source) for source in sources]
    assert [(await router.score(t)).total for t in made] == [0.0, 0.5, 0.5, 0.5]
    router.check([t.task for t in made])


async def test_function_gets_its_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info, bonus, *, scale=1.0):\n"
        "    return {'score': scale * (solution_str == ground_truth) + bonus, 'pred': solution_str}\n"
        "def score(trajectory, bonus): return bonus\n"
    )
    kwargs = {"bonus": 0.5, "scale": 2.0}
    routes = {"a": RewardRef(target="mine.py:compute_score", kwargs=kwargs)}
    routes["b"] = RewardRef(target="mine.py:score", kwargs={"bonus": 0.25})
    router = RewardRouter(routes, base=tmp_path)
    reward = await router.score(trajectory(turn("72"), data_source="a"))
    assert (reward.total, reward.info) == (2.5, {"pred": "72"})
    assert (await router.score(trajectory(turn(), data_source="b"))).total == 0.25


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"bonnus": 1}, r"'f' takes the parameters \['solution_str', 'bonus'\], and its kwargs set 'bonnus'"),
        ({}, "needs the parameter 'bonus', which nothing fills"),
        ({"bonus": 1, "solution_str": "x"}, "its kwargs set 'solution_str', which the run fills"),
    ],
)
def test_kwargs_that_do_not_fit_are_refused(kwargs: dict[str, Any], says: str) -> None:
    def f(solution_str: str, bonus: float) -> float:
        return bonus

    with pytest.raises(ConfigError, match=says):
        RewardRouter(function=RewardRef(target=f, kwargs=kwargs))
    refuses(lambda: RewardRouter({"x": RewardRef(target="tools", kwargs={"a": 1})}), ConfigError, "'tools'")


async def test_batch_function_gets_lists_of_at_most_its_size() -> None:
    calls: list[int] = []

    def batch(data_sources, solution_strs, ground_truths, extra_infos, offset=0.0):  # type: ignore[no-untyped-def]
        calls.append(len(solution_strs))
        assert len(data_sources) == len(ground_truths) == len(extra_infos) == len(solution_strs)
        return [{"score": float(s) + offset, "n": i["num_turns"]} for s, i in zip(solution_strs, extra_infos, strict=True)]

    router = RewardRouter(
        function=RewardRef(target=batch, kwargs={"offset": 0.5}), calls=CallOptions(batch=BatchOptions(size=3, wait_s=3600))
    )
    rewards = await asyncio.gather(*(router.score(trajectory(turn(str(i)))) for i in range(6)))
    assert [r.total for r in rewards] == [i + 0.5 for i in range(6)]
    assert rewards[0].info == {"n": 3}
    assert calls == [3, 3]


async def test_batch_is_called_after_its_wait() -> None:
    calls: list[list[str]] = []

    def batch(solution_strs: list[str]) -> list[float]:
        calls.append(sorted(solution_strs))
        return [1.0 for _ in solution_strs]

    router = RewardRouter(function=batch, calls=CallOptions(batch=BatchOptions(size=None, wait_s=0)))
    await asyncio.gather(*(router.score(trajectory(turn(str(number)))) for number in range(3)))
    await router.score(trajectory(turn("later")))
    assert calls == [["0", "1", "2"], ["later"]]


async def test_batch_must_return_a_score_for_each() -> None:
    arrays = RewardRouter(function=lambda solution_strs: np.ones(len(solution_strs)))
    assert (await arrays.score(trajectory(turn()))).total == 1.0
    short = RewardRouter(function=lambda solution_strs: [1.0])
    found = await asyncio.gather(*(short.score(trajectory(turn())) for _ in range(2)), return_exceptions=True)
    assert {type(e) for e in found} == {RewardError}


async def test_cancelled_trajectory_is_left_out_of_its_batch() -> None:
    seen: list[list[int]] = []

    async def call(items: Any) -> list[int]:
        seen.append(list(items))
        return list(items)

    batch = Batch(call, size=3, wait_s=0.02)
    first, second = asyncio.create_task(batch(1)), asyncio.create_task(batch(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 2
    assert seen == [[2]]


def test_batch_serves_one_event_loop_after_another() -> None:
    router = RewardRouter(function=lambda solution_strs: [1.0 for _ in solution_strs])
    for _ in range(2):
        assert asyncio.run(router.score(trajectory(turn()))).total == 1.0


async def test_no_more_calls_at_once_than_allowed() -> None:
    live, most = 0, 0

    async def slow(solution_str: str) -> float:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await asyncio.sleep(0.01)
        live -= 1
        return 1.0

    router = RewardRouter(function=slow, calls=CallOptions(rate=CallRate(max_concurrent=2)))
    await asyncio.gather(*(router.score(trajectory(turn())) for _ in range(6)))
    assert most == 2


def test_rate_spreads_calls_outside_their_deadline() -> None:
    started: list[float] = []

    async def note(solution_str: str) -> float:
        started.append(asyncio.get_running_loop().time())
        return 1.0

    async def score_four() -> None:
        router = RewardRouter(function=note, calls=CallOptions(rate=CallRate(calls_per_minute=3), timeout_s=5))
        await asyncio.gather(*(router.score(trajectory(turn())) for _ in range(4)))

    run_virtual(score_four())
    assert started == pytest.approx([0, 20, 40, 60])


def thinking() -> Trajectory:
    call = ToolCall(id="c", name="calc", raw='<tool_call>{"name": "calc"}</tool_call>')
    first = turn("First. Then.", tool_calls=(call,), written=f"First. {call.raw} Then.")
    return trajectory(first, turn("#### 7", reasoning="7 it is.", written="[THINK]7 it is.[/THINK]#### 7"))


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("answer", "#### 7"),
        ("turn", "[THINK]7 it is.[/THINK]#### 7"),
        ("turns", 'First. <tool_call>{"name": "calc"}</tool_call> Then.\n[THINK]7 it is.[/THINK]#### 7'),
    ],
)
async def test_scored_text_is_the_models_own(which: Any, text: str) -> None:
    assert thinking().text_of(which) == text
    assert trajectory().text_of(which) == ""
    router = RewardRouter(function=lambda solution_str: float(solution_str == text), calls=CallOptions(text=which))
    assert (await router.score(thinking())).total == 1.0


def test_unrecorded_text_is_an_error() -> None:
    record = trajectory(turn("Yes."), turn("#### 7", reasoning="7 it is."))
    assert record.text_of("answer") == "#### 7"
    for which in ("turn", "turns"):
        with pytest.raises(DataError, match=r"set reward\.text"):
            record.text_of(which)


@pytest.mark.parametrize(
    "source", ["openai/gsm8k", "math_dapo", "searchR1_nq", "HuggingFaceH4/MATH-500", "hiyouga/geometry3k"]
)
async def test_tool_results_are_never_scored(source: str) -> None:
    truth = {"target": ["72"]} if source == "searchR1_nq" else "72"
    reward = await RewardRouter().score(trajectory(turn("I do not know."), data_source=source, ground_truth=truth))
    assert reward.total <= 0.0


def test_extra_info_has_the_kwargs_of_tools_and_interactions() -> None:
    made = trajectory(
        turn(),
        extra={"index": 3},
        tools_kwargs={"calc": ToolKwargs(create_kwargs={"ground_truth": "72"})},
        interaction=InteractionRef(name="gsm8k", kwargs={"query": "q"}),
    )
    info = extra_info(made, {})
    assert (info["index"], info["interaction_kwargs"]) == (3, {"query": "q"})
    assert info["tools_kwargs"] == {"calc": {"create_kwargs": {"ground_truth": "72"}}}


def test_missing_extra_is_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    RewardRouter(sandbox=Sandbox(url="http://localhost:1")).check([trajectory(data_source="apps").task])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(lambda: RewardRouter().check([trajectory(data_source="lighteval/MATH").task]), ConfigError, "polyturn[math]")


def of_length(sampled: int, observed: int = 0) -> Trajectory:
    spans = (
        Span(ids=np.zeros(50, np.int32), source=SpanSource.PROMPT),
        Span(ids=np.zeros(sampled, np.int32), source=SpanSource.SAMPLED, turn=0, policy_version=0),
        Span(ids=np.zeros(observed, np.int32), source=SpanSource.OBSERVATION, turn=0),
    )
    made = Turn(
        index=0,
        message=Message(role="assistant", content="#### 72"),
        finish_reason=FinishReason.STOP,
        spans=(SpanRef(0, 1), SpanRef(0, 2)),
    )
    return trajectory(made, segments=(Segment(spans=spans),), data_source="openai/gsm8k")


@pytest.mark.parametrize(("length", "penalty"), [(10, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (150, -0.5)])
async def test_response_near_the_limit_costs_something(length: int, penalty: float) -> None:
    router = RewardRouter(weighing=Weighing(overlong=Overlong(max_tokens=100, buffer=20, penalty=0.5)))
    for made in (of_length(length), of_length(length - 10, observed=10)):
        reward = await router.score(made)
        assert reward.components["overlong"] == pytest.approx(penalty)
        assert reward.components["outcome"] == 1.0
        assert reward.total == pytest.approx(1.0 + penalty)


async def test_penalty_does_not_depend_on_the_weights() -> None:
    router = RewardRouter(weighing=Weighing(weights={"outcome": 0.5}, overlong=Overlong(max_tokens=100, buffer=20)))
    assert (await router.score(of_length(100))).total == pytest.approx(-0.5)
    for buffer in (-1, 101):
        with pytest.raises(ConfigError, match=f"buffer is {buffer}"):
            Overlong(max_tokens=100, buffer=buffer)


async def test_prompt_after_a_rewrite_costs_nothing() -> None:
    before = of_length(40)
    shorter = (
        Span(ids=np.zeros(200, np.int32), source=SpanSource.PROMPT, turn=0),
        Span(ids=np.zeros(30, np.int32), source=SpanSource.SAMPLED, turn=1, policy_version=0),
    )
    first = dataclasses.replace(before.turns[0], spans=(*before.turns[0].spans, SpanRef(1, 0)))
    second = dataclasses.replace(before.turns[0], index=1, spans=(SpanRef(1, 1),))
    segments = (*before.segments, Segment(spans=shorter))
    rewritten = dataclasses.replace(before, turns=(first, second), segments=segments)
    assert Overlong(max_tokens=100, buffer=20).score(rewritten) == 0.0
    assert Overlong(max_tokens=80, buffer=20).score(rewritten) == -0.5


PROGRAM = "```python\n{}\n```"


@pytest.mark.clock  # one deadline serves the endless programs and the right one
async def test_endless_programs_do_not_harm_the_right_one() -> None:
    need_isolation()
    tests = {"inputs": ["1"] * 4, "outputs": ["2"] * 4}
    router = RewardRouter(sandbox=Sandbox(url=None, timeout_s=2.0), calls=CallOptions(timeout_s=3.0))
    bodies = [*["while True: pass"] * 2, "print(int(input()) + 1)"]
    made = [trajectory(turn(PROGRAM.format(b)), data_source="apps", ground_truth=tests) for b in bodies]
    rewards = await asyncio.gather(*map(router.score, made))
    assert [reward.total for reward in rewards] == [0.0, 0.0, 1.0]


@pytest.mark.clock  # one deadline serves the hostile answers and the right one
async def test_endless_comparisons_do_not_harm_the_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math.checkers, "_free", threading.Semaphore(1))
    router = RewardRouter(calls=CallOptions(timeout_s=120.0))
    assert math.is_equal("0.25", r"\frac{50}{200}")  # a checker has started
    monkeypatch.setattr(math.checkers, "timeout_s", 3.0)
    answers = [*(rf"9^{{9^{{9^{{9^{n}}}}}}} + {n}" for n in (5, 6)), r"\frac{143}{286}"]
    made = [trajectory(turn(rf"\boxed{{{a}}}"), data_source="HuggingFaceH4/MATH-500", ground_truth="0.5") for a in answers]
    *endless, right = await asyncio.gather(*map(router.score, made), return_exceptions=True)
    assert [type(result) for result in endless] == [RewardError, RewardError]
    assert not isinstance(right, BaseException) and right.total == 1.0


async def test_function_that_hangs_after_asking_the_library_fails() -> None:
    def slow(trajectory: Trajectory) -> float:
        math.is_equal("0.125", r"\frac{25}{200}")
        threading.Event().wait()
        return 1.0

    router = RewardRouter(function=slow, calls=CallOptions(timeout_s=0.2))
    await refuses_later(lambda: router.score(trajectory(turn())), RewardError, "longer than 0.2 s")


async def test_endless_integer_is_not_a_reward() -> None:
    with pytest.raises(RewardError, match="return a finite number"):
        await RewardRouter(function=lambda trajectory: 10**400).score(trajectory(turn()))


def test_infos_of_turns_may_have_non_text_keys() -> None:
    made = Turn(
        index=0,
        message=Message(role="assistant", content="x"),
        finish_reason=FinishReason.STOP,
        info={0: "a", "_b": 1},  # type: ignore[dict-item]
    )
    assert extra_info(trajectory(made), {})["rollout_infos"] == {0: "a", "num_turns": 1}
