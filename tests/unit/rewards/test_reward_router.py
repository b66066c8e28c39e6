"""RewardRouter: which function scores a task, the components of a reward, and that a failure is never 0.0."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.errors import ConfigError, DataError, RewardError, UnknownNameError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.task import InteractionRef, Task
from polyturn.core.trajectory import ToolResult, Trajectory, Turn
from polyturn.rewards.options import CallOptions
from polyturn.rewards.router import RewardRouter, Weighing
from support.refusals import refuses_later

GSM8K = "openai/gsm8k"


def turn(text: str = "", observed: str = "", steps: tuple[float, ...] = (), **scores: float) -> Turn:
    return Turn(
        index=0,
        message=Message(role="assistant", content=text),
        finish_reason=FinishReason.STOP,
        observation=(Message(role="user", content=observed),) if observed else (),
        tool_results=tuple(ToolResult(call_id="c", name="t", content="", reward=r) for r in steps),
        scores={k.replace("__", "/"): v for k, v in scores.items()},
    )


def trajectory(*turns: Turn, interaction: str | None = None, **fields: Any) -> Trajectory:
    ref = None if interaction is None else InteractionRef(name=interaction)
    task = Task(**{"id": "t1", "prompt": (Message(role="user", content="?"),), "interaction": ref, **fields})
    return Trajectory(id="t1/0", task=task, segments=(), turns=turns, stop_reason=StopReason.STOP)


async def scored(router: RewardRouter, made: Trajectory, **tools: float | None) -> Reward:
    return await router.score(made, tools)


def constant(value: float) -> Any:
    def score(trajectory: Trajectory) -> float:
        return value

    return score


async def test_gsm8k_scores_the_last_assistant_message_alone() -> None:
    router = RewardRouter()
    right = trajectory(
        turn("#### 1", observed="no"), turn("#### 72", observed="#### 3"), data_source=GSM8K, ground_truth="72"
    )
    echoed = trajectory(turn("#### 1", observed="#### 72"), data_source=GSM8K, ground_truth="72")
    assert (await router.score(right)).total == 1.0
    assert (await router.score(echoed)).total == 0.0
    assert (await router.score(trajectory(data_source=GSM8K, ground_truth="72"))).total == 0.0


async def test_exact_route_wins_over_globs_in_their_order() -> None:
    routes = {"math/*": constant(1), "*": constant(2), "math/hard": constant(3)}
    router = RewardRouter(routes)
    found = {name: (await router.score(trajectory(data_source=name))).total for name in ("math/hard", "math/x", "y", GSM8K)}
    assert found == {"math/hard": 3.0, "math/x": 1.0, "y": 2.0, GSM8K: 2.0}


def test_unknown_data_source_fails_the_check() -> None:
    made = trajectory(data_source="openai/gsm8", interaction="gsm8k")
    with pytest.raises(UnknownNameError, match=r"data_source 'openai/gsm8'.*Did you mean 'openai/gsm8k'"):
        RewardRouter().check([made.task])


async def test_unknown_data_source_is_an_error_when_scored() -> None:
    with pytest.raises(RewardError, match="'nope'"):
        await RewardRouter().score(trajectory(turn("x", interaction=1.0), data_source="nope", interaction="i"))


def test_task_needs_something_that_scores_it() -> None:
    router = RewardRouter({"chat": "interaction", "agent": "tools"})
    nothing = trajectory().task
    router.check([trajectory(interaction="i").task, trajectory(data_source="chat", interaction="i").task])
    router.check([nothing, trajectory(data_source="agent").task], tools=["search"])
    router.check([trajectory(tools=("search",)).task])
    for task in (nothing, trajectory(tools=()).task, trajectory(data_source="chat").task):
        with pytest.raises(DataError, match="'t1' has nothing that scores it"):
            router.check([task])


@pytest.mark.parametrize(("how", "score"), [("last", 0.25), ("sum", 0.75), ("max", 0.5), ("mean", 0.25)])
async def test_interaction_scores_are_aggregated(how: Any, score: float) -> None:
    turns = (turn(interaction=0.0), turn(interaction=0.5), turn(), turn(interaction=0.25), turn())
    reward = await RewardRouter(weighing=Weighing(interaction=how)).score(trajectory(*turns, interaction="i"))
    assert reward == Reward(total=score, components={"outcome": score, "tool_step": 0.0, "interaction": score})


async def test_interaction_without_turns_earns_nothing() -> None:
    reward = await RewardRouter().score(trajectory(interaction="i"))
    assert reward == Reward(total=0.0, components={"outcome": 0.0, "tool_step": 0.0})


async def test_tool_rewards_are_summed() -> None:
    reward = await scored(RewardRouter(), trajectory(turn()), a=0.5, b=0.25, c=None)
    assert reward.total == 0.75
    assert reward.components == {"outcome": 0.75, "tool_step": 0.0, "tool/a": 0.5, "tool/b": 0.25}


async def test_components_are_recorded_and_counted_once() -> None:
    turns = (turn(interaction=0.5, tool__a=-0.25), turn("#### 72", interaction=1.0, tool__a=-0.5, tool__b=0.25))
    made = trajectory(*turns, data_source=GSM8K, ground_truth="72", interaction="gsm8k")
    reward = await scored(RewardRouter(), made, a=1.0)
    assert reward.components == {"outcome": 1.0, "tool_step": -0.5, "interaction": 1.0, "tool/a": 1.0}
    assert reward.total == 0.5
    weighted = RewardRouter(weighing=Weighing(weights={"outcome": 2, "interaction": 0.5, "tool/a": 0.25, "tool/absent": 9}))
    assert (await scored(weighted, made, a=1.0)).total == 2.75


@given(
    outcome=st.floats(-5, 5),
    scores=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=5),
    tools=st.dictionaries(st.sampled_from("abc"), st.none() | st.floats(-5, 5)),
    source=st.sampled_from(["routed", None]),
    interaction=st.sampled_from(["i", None]),
)
def test_default_total_is_one_outcome_and_the_steps(
    outcome: float, scores: list, tools: dict, source: str | None, interaction: str | None
) -> None:
    turns = [turn(interaction=i, tool__a=s) if interaction else turn(tool__a=s) for i, s in scores]
    made = trajectory(*turns, data_source=source, interaction=interaction)
    reward = asyncio.run(RewardRouter({"routed": constant(outcome)}).score(made, tools))
    if source:
        expected = outcome
    elif interaction:
        expected = scores[-1][0] if scores else 0.0
    else:
        expected = sum(v for v in tools.values() if v is not None)
    assert reward.total == pytest.approx(expected + sum(s for _, s in scores), abs=1e-9)


async def test_function_gets_its_arguments_by_name() -> None:
    seen: dict[str, Any] = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):  # type: ignore[no-untyped-def]
        seen.update(locals())
        return {"score": 0.5, "acc": 1}

    made = trajectory(
        turn("first", observed="fb", interaction=0.5, steps=(-0.25,)),
        turn("last", interaction=1.0),
        data_source="mine",
        ground_truth="g",
        extra={"index": 3},
        interaction="i",
    )
    reward = await scored(RewardRouter({"mine": compute_score}), made, t=0.75)
    assert (reward.total, reward.info) == (0.5, {"acc": 1})
    assert (seen["data_source"], seen["solution_str"], seen["ground_truth"], seen["kwargs"]) == ("mine", "last", "g", {})
    assert seen["extra_info"] == {
        "index": 3,
        "rollout_infos": {"num_turns": 2},
        "num_turns": 4,
        "turn_scores": [0.5, 1.0],
        "tool_rewards": [-0.25],
        "rollout_reward_scores": {"t": 0.75, "user_turn_rewards": [0.5, 1.0]},
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "fb"},
            {"role": "assistant", "content": "last"},
        ],
    }


async def test_every_form_of_function_works(tmp_path: Path) -> None:
    async def with_await(trajectory: Trajectory) -> dict:
        await asyncio.sleep(0)
        return {"score": 1}

    def scorer(solution_str: str, ground_truth: str, method: str = "x") -> bool:
        return solution_str == ground_truth

    class Callable:
        async def __call__(self, trajectory: Trajectory) -> float:
            return 1.0

    (tmp_path / "mine.py").write_text("def score(trajectory):\n    return len(trajectory.turns)\n")
    routes = {
        "a": with_await,
        "b": scorer,
        "c": Callable(),
        "d": "mine.py:score",
        "e": "polyturn.rewards.gsm8k:compute_score",
    }
    routes |= {"f": "exact_match", "g": "gsm8k_flexible"}
    router = RewardRouter(routes, base=tmp_path)
    truth = {"b": "#### 7", "e": "7", "f": "#### 7", "g": "7"}
    for name in routes:
        made = trajectory(turn("#### 7"), data_source=name, ground_truth=truth.get(name))
        assert (await router.score(made)).total == 1.0, name


def raises(trajectory: Trajectory) -> float:
    raise ValueError("broken")


def leaves(trajectory: Trajectory) -> float:
    raise SystemExit


def hangs(trajectory: Trajectory) -> float:
    threading.Event().wait()
    return 1.0


async def hangs_politely(trajectory: Trajectory) -> float:
    await asyncio.sleep(3600)
    return 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "'raises' of trajectory 't1/0'.* ValueError: broken"),
        (leaves, "SystemExit"),
        (hangs, "longer than 0.05 s"),
        (hangs_politely, "longer than 0.05 s"),
        (constant(float("nan")), "nan"),
        (constant(float("-inf")), "-inf"),
        (lambda trajectory: None, "None"),
        (lambda trajectory: {"acc": 1}, "'score'"),
        (lambda trajectory: {"score": "x"}, "'x'"),
    ],
)
async def test_failing_reward_is_an_error_and_never_zero(function: Any, message: str) -> None:
    timeout_s = 0.05 if function in (hangs, hangs_politely) else 60.0
    with pytest.raises(RewardError, match=message):
        await RewardRouter({"x": function}, calls=CallOptions(timeout_s=timeout_s)).score(
            trajectory(turn("x"), data_source="x")
        )


async def test_shipped_reward_needs_a_ground_truth() -> None:
    made = trajectory(turn("#### 1"), data_source=GSM8K)
    await refuses_later(lambda: RewardRouter().score(made), RewardError, "'t1'", "ground_truth")
    for reward in ("gsm8k", "gsm8k_flexible", "exact_match", "math_dapo", "search_r1"):
        with pytest.raises(DataError, match="'t1' has no ground_truth"):
            RewardRouter({GSM8K: reward}).check([made.task])
    RewardRouter({GSM8K: constant(1)}).check([made.task])
    RewardRouter().check([trajectory(data_source=GSM8K, ground_truth=0).task])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (RewardRouter, {"routes": {"x": "gsm8"}}, "'gsm8'.*'gsm8k'"),
        (RewardRouter, {"routes": {"x": "no_such_module.f"}}, "no_such_module"),
        (RewardRouter, {"routes": {"x": lambda a, b: 1}}, r"\(a, b\)"),
        (RewardRouter, {"routes": {"x": lambda: 1}}, r"\(\)"),
        (RewardRouter, {"routes": {"x": lambda solution_str, other: 1}}, "'other'"),
        (RewardRouter, {"routes": {"x": int}}, "function"),
        (Weighing, {"weights": {"outcom": 1}}, "'outcom'.*'outcome'"),
        (Weighing, {"weights": {"outcome": float("nan")}}, "'outcome' is nan"),
        (Weighing, {"interaction": "first"}, "'first'"),
    ],
)
def test_router_that_cannot_work_is_a_config_error(make: Any, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)
