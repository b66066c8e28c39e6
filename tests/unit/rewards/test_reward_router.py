"""RewardRouter: the scorer of a task, the parts of a reward and further values; a failure is never 0.0."""

from __future__ import annotations

import asyncio
import dataclasses
import json
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
from polyturn.core.trajectory import ToolResult, Trajectory, TrajectoryGroup, Turn
from polyturn.data.rows import task_from_row
from polyturn.evaluation.repeated import repeated_metrics
from polyturn.evaluation.statistics import statistics
from polyturn.rewards.options import CallOptions
from polyturn.rewards.router import RewardRouter, Weighing
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task
from polyturn.tracking.dump import TrajectoryDump
from polyturn.training.rollout_metrics import rollout_metrics
from support.refusals import refuses, refuses_later

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
    refuses(
        lambda: RewardRouter().check([made.task]),
        UnknownNameError,
        "data_source 'openai/gsm8'",
        "Did you mean 'openai/gsm8k'",
    )


async def test_unknown_data_source_is_an_error_when_scored() -> None:
    with pytest.raises(RewardError, match="'nope'"):
        await RewardRouter().score(trajectory(turn("x", interaction=1.0), data_source="nope", interaction="i"))


def test_task_needs_something_that_scores_it() -> None:
    router = RewardRouter({"chat": "interaction", "agent": "tools"})
    nothing = trajectory().task
    router.check([trajectory(interaction="i").task, trajectory(data_source="chat", interaction="i").task])
    router.check([nothing, trajectory(data_source="agent").task], tools=["search"])
    router.check([trajectory(tools=("search",)).task])
    for one in (nothing, trajectory(tools=()).task, trajectory(data_source="chat").task):
        with pytest.raises(DataError, match="'t1' has nothing that scores it"):
            router.check([one])


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


class Reports(MultiTurnScheduler):
    async def step(self, episode: Any, turn: Any) -> Reply | None:
        if turn.index == 1:
            return None
        return Reply.of("more").__class__(
            messages=Reply.of("more").messages, info={"tries": turn.index, "images": ["shown.png"], "seen": True}
        )

    async def on_turn_end(self, episode: Any, turn: Any) -> None:
        turn.info["tries"] = turn.index + 1


async def test_infos_and_columns_reach_the_reward_function_and_media_replace_the_rows() -> None:
    told: dict[str, Any] = {}

    def score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        told.update(extra_info)
        return 1.0

    row = {
        "prompt": "What?", "data_source": "mine", "ground_truth": "4", "difficulty": 3, "env_config": {"seed": 1},
        "extra_info": {"index": 7, "images": ["row.png"]},
    }  # fmt: skip
    task = task_from_row(row, index=0, split="train", source="rows.jsonl")
    assert {"difficulty": 3, "env_config": {"seed": 1}, "index": 7}.items() <= dict(task.extra).items()
    context = scripted_context(["a", "b"], scheduler=Reports(), rewards={"mine": score})
    t = await run_episode(context, task, id="e")
    assert not t.is_failed, t.error
    assert told["rollout_infos"] == {"tries": 2, "seen": True, "images": ["shown.png"], "num_turns": 2}
    assert told["images"] == ["shown.png"] and told["difficulty"] == 3 and told["env_config"] == {"seed": 1}


class Unwritable:
    def __repr__(self) -> str:
        raise ZeroDivisionError("no words for it")


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append({"again": value})
    return value


ODD: dict[str, Any] = {
    "a number too long to print": 10**5000,
    "not a number": float("nan"),
    "deep": deep(100_000),
    "half too deep": deep(300),
    "a circle": circle(),
    "unwritable": Unwritable(),
    "half a pair": "\ud800",
    "a set": {1, "a"},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_value_beside_a_score_is_recorded(name: str, tmp_path: Path) -> None:
    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        return {"score": 1.0, "pred": ODD[name], "judge_tokens": ODD[name], "acc": 0.5}

    spec = GroupSpec(id="g0", task=task("2+2?", ground_truth="4"), size=2)
    (played,) = asyncio.run(RolloutPool(scripted_context(["It is 5."])).run([spec]))
    router = RewardRouter(function=score)
    rewarded = tuple(dataclasses.replace(t, reward=asyncio.run(router.score(t))) for t in played.trajectories)
    group: TrajectoryGroup = dataclasses.replace(played, trajectories=rewarded)
    for trajectory in group.trajectories:
        assert trajectory.reward.numbers["acc"] == 0.5
        assert all(abs(number) < 1e16 for number in trajectory.reward.numbers.values())
    assert rollout_metrics([group], version=0)
    assert statistics([group])["all"].success.mean == 1.0
    (table,) = repeated_metrics([group]).values()
    assert table["acc"]["mean@2"] == 0.5
    written = TrajectoryDump(tmp_path / "dump", lambda ids: "text").write(1, [group])
    assert [json.loads(line)["score"] for line in written.read_text().splitlines()] == [1.0, 1.0]
    with ParquetStore(tmp_path) as store:
        store.add(group, step=1, split="train")
    for trajectory in open_store(tmp_path).trajectories():
        assert trajectory.reward.info["acc"] == 0.5 and "pred" in trajectory.reward.info
