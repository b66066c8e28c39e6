"""Schedulers in ms-swift's interface over native episodes: what they see, what is trained, and what their mistakes say."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from polyturn.compat.swift.adapter import SwiftScheduler, to_request
from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.compat.swift.gym_env import ContextManager, Env, context_managers, envs
from polyturn.compat.swift.orm import ORM, AsyncORM, orms
from polyturn.compat.swift.reward_adapter import score
from polyturn.compat.swift.schedulers import GYMScheduler
from polyturn.compat.swift.template import ThinkingTemplate
from polyturn.compat.swift.turn_weights import OUTPUTS
from polyturn.core.errors import ConfigError, DataError, RewardError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.outputs import reward_rows
from polyturn.serving.protocol import RolloutInferRequest, RolloutOutput
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.testing.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from polyturn.tokens.codec import Codec


async def play(
    scheduler: Any, says: Any, *, limits: Limits | None = None, max_turns: int | None = 3, **fields: Any
) -> Trajectory:
    context = scripted_context(
        says,
        scheduler=SwiftScheduler(scheduler, max_turns=max_turns),
        rewards={"openai/gsm8k": lambda trajectory: 1.0},
        limits=limits,
    )
    return await run_episode(context, task(**fields), id="g0/0")


def spans(trajectory: Trajectory, segment: int = 0) -> list[tuple[str, str, bool]]:
    codec, ends = tiny_codec(), tiny_codec().decode(np.array(tiny_codec().stop_token_ids[:1], np.int32))
    return [
        (s.source.value, codec.decode(s.ids).removesuffix(ends), bool(s.loss_weights.any()))
        for s in trajectory.segments[segment].spans
        if s.source is SpanSource.SAMPLED
    ]


class Again(MultiTurnScheduler):
    """Asks again, and writes down what it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        self.seen.append((current_turn, [m["content"] for m in infer_request.messages], dict(infer_request.data_dict)))
        infer_request.messages.append({"role": "user", "content": f"Again {current_turn}."})
        return {"infer_request": infer_request}


# --- what a scheduler sees ----------------------------------------------------------------------------------------------


async def test_turns_count_from_one_and_all_columns_of_the_row_arrive() -> None:
    again = Again()
    again.seen = seen = []
    made = SwiftScheduler(again, max_turns=None)
    context = scripted_context(["a", "b"], scheduler=made, rewards={"*": lambda trajectory: 1.0}, limits=Limits(max_turns=2))
    trajectory = await run_episode(context, task("Hi", ground_truth="4", extra={"level": 3}), id="e")
    assert seen[0] == (1, ["Hi", "a"], {"level": 3, "solution": "4", "data_source": "openai/gsm8k"})
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert [m.text for m in trajectory.messages] == ["Hi", "a", "Again 1.", "b"]


async def test_both_forms_of_the_constructor_are_understood() -> None:
    class Early(Again):
        def __init__(self, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(max_turns, *args, **kwargs)

    class Late(Again):
        def __init__(self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
            super().__init__(infer_engine, max_turns, *args, **kwargs)

    class Bare(Again):
        def __init__(self) -> None:
            super().__init__()

    class Told(Again):
        def __init__(self, max_turns: int, tokenizer: Any, **kwargs: Any) -> None:
            super().__init__(max_turns=max_turns, **kwargs)
            assert tokenizer.encode("a")

    for cls in (Early, Late, Bare, Told):
        trajectory = await play(cls, ["a", "b", "c"], max_turns=2)
        assert trajectory.error is None
        assert len(trajectory.turns) == 2
    assert (Early(3).max_turns, Late(None, 4).max_turns, Again(5).max_turns) == (3, 4, 5)


async def test_the_engine_is_found_through_the_scheduler_and_unknown_names_raise() -> None:
    found: dict[str, Any] = {}

    class Looks(Again):
        def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
            found["ids"] = self.tokenizer.encode("a", add_special_tokens=False)
            found["thinks"] = self.template.template_meta.is_thinking
            found["unknown"] = hasattr(self, "max_concurrent_envs")
            return True

    assert (await play(Looks, ["a"])).error is None
    assert found["ids"] and found["unknown"] is False
    with pytest.raises(AttributeError, match="Again object has no attribute nothing"):
        _ = Again().nothing


@pytest.mark.parametrize("thinks", [False, True])
async def test_whether_the_model_writes_reasoning_is_told_by_the_templates_meta_and_by_its_class(thinks: bool) -> None:
    found: list[bool] = []

    class Looks(Again):
        def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
            template = self.infer_engine.default_template
            found.extend((template.template_meta.is_thinking, isinstance(template, ThinkingTemplate)))
            return True

    context = scripted_context(["a"], scheduler=SwiftScheduler(Looks), rewards={"*": lambda trajectory: 1.0})
    context.codec = Codec(tiny_tokenizer(), chat_template=CHAT_TEMPLATE if thinks else CHAT_TEMPLATE.replace("think", "x"))
    assert (await run_episode(context, task(), id="g0/0")).error is None
    assert found == [thinks, thinks]


async def test_the_choice_has_what_was_sampled_and_at_the_end_the_messages() -> None:
    seen: list[Any] = []

    class Looks(Again):
        def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> None:
            seen.append(response_choice)

    trajectory = await play(Looks, ["a", "b"], max_turns=2)
    ids = trajectory.segments[0].spans[1].ids.tolist()
    first, last = seen
    assert first.token_ids == ids and len(first.logprobs["content"]) == len(ids)
    assert (first.finish_reason, first.message.content, first.index) == ("stop", "a", 0)
    assert [m["content"] for m in last.messages] == ["What is 2+2?", "a", "Again 1.", "b"]


def test_media_of_a_prompt_become_side_lists_with_tags() -> None:
    shown = ({"type": "image", "image": "a.png"}, {"type": "text", "text": "Color?"})
    request = to_request(task(extra={"data_dict": {"x": 1}, "y": 2}), uuid="u")
    assert (request.data_dict["x"], request.data_dict["y"], request.uuid) == (1, 2, "u")
    row = task()
    row = type(row)(id="t", prompt=(Message(role="user", content=shown),))
    assert to_request(row, uuid="u").messages == [{"role": "user", "content": "<image>Color?"}]
    assert to_request(row, uuid="u").images == ["a.png"]


# --- what is trained ----------------------------------------------------------------------------------------------------


async def test_math_tips_drops_what_it_cuts_away_and_masks_the_hint() -> None:
    trajectory = await play("math_tip_trick", ["ab</think>41<answer>41</answer>", "  42"], ground_truth="42")
    assert [m.text for m in trajectory.messages] == ["What is 2+2?", "abBut wait... It seems I made a mistake,  42"]
    assert spans(trajectory) == [("sampled", "ab", True), ("sampled", "  42", True)]
    assert trajectory.metrics["dropped_cut"] == 19
    right = await play("math_tip_trick", ["42"], ground_truth="42")
    assert len(right.turns) == 1
    wrong = await play("math_tip_trick", ["abc", "x"], ground_truth="42")
    assert len(wrong.turns) == 2, "a hint is given once"


async def test_thinking_tips_is_a_segment_for_each_turn_and_one_reward() -> None:
    trajectory = await play("thinking_tips_scheduler", ["<think>x</think>41", "<think>y</think>42"], ground_truth="42")
    assert [len(s.spans) for s in trajectory.segments] == [2, 2]
    rows = reward_rows(trajectory)
    assert [len(row["messages"]) for row in rows] == [2, 4]
    assert rows[1]["messages"][1]["content"] == "41", "the history has no reasoning"
    assert [row["rollout_infos"]["num_turns"] for row in rows] == [1, 2]
    assert (await score(trajectory, ["thinking_tips"]))["score"] == 1.0
    cut = await play("thinking_tips_scheduler", ["x" * 30], ground_truth="42", limits=Limits(max_tokens_per_turn=4))
    assert len(cut.turns) == 1


async def test_a_text_that_is_changed_without_ids_opens_a_segment_and_the_sampled_one_stays() -> None:
    class Changes(Again):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages[-1]["content"] = "Something else."
            return super().step(infer_request, response_choice, current_turn)

    trajectory = await play(Changes, ["abc", "d"], max_turns=2)
    assert len(trajectory.segments) == 2
    assert spans(trajectory, 0) == [("sampled", "abc", True)]
    assert spans(trajectory, 1) == [("sampled", "d", True)]
    assert "Something else." in tiny_codec().decode(trajectory.segments[1].spans[0].ids)


async def test_a_mask_weighs_the_sampled_tokens_and_ids_of_ones_own_are_never_trained() -> None:
    class Masks(Again):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            ids = response_choice.token_ids
            return {
                **super().step(infer_request, response_choice, current_turn),
                "response_token_ids": [ids[0], 7, 7, *ids[1:]],
                "response_loss_mask": [1] * (len(ids) + 2),
            }

    trajectory = await play(Masks, ["abcd", "e"], max_turns=2)
    sampled = [s for segment in trajectory.segments for s in segment.spans if s.source is SpanSource.SAMPLED]
    assert sampled[0].loss_weights.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0][: len(sampled[0].ids)]


async def test_a_run_of_ones_own_trains_only_what_it_returns() -> None:
    class BestOfThree(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            tries = [
                await self.infer_engine.infer_async(RolloutInferRequest(list(infer_request.messages)), request_config)
                for _ in range(3)
            ]
            best = tries[1]
            said = {"role": "assistant", "content": best.choices[0].message.content}
            return RolloutOutput(
                response=best, messages=[*infer_request.messages, said], response_token_ids=best.choices[0].token_ids
            )

    trajectory = await play(BestOfThree, ["a", "b", "c"])
    weights = [bool(s.loss_weights.any()) for s in trajectory.segments]
    assert weights == [False, True, False]
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
        return "Go on.", 0.5, False, {}

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
async def test_an_environment_is_closed_once_on_every_exit(
    endless: list[Any], says: list[Any], limits: Limits, reason: StopReason
) -> None:
    trajectory = await play("gym_scheduler", says, limits=limits, **ROW)
    assert trajectory.stop_reason is reason, trajectory.error
    assert len(endless) == 1


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_close_that_raises_does_not_cost_the_trajectory(
    endless: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_done: bool
) -> None:
    async def close(self: Any) -> None:
        self.closed.append(self)
        raise OSError("the socket is gone")

    async def step(self: Any, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        return "Done.", 0.5, is_done, {}

    monkeypatch.setattr(Endless, "close", close)
    monkeypatch.setattr(Endless, "step", step)
    trajectory = await play("gym_scheduler", ["a"], max_turns=2, **ROW)
    assert trajectory.error is None and trajectory.reward is not None
    assert trajectory.stop_reason is (StopReason.ENV_DONE if is_done else StopReason.MAX_TURNS)
    assert len(endless) == 1
    assert "Endless.close raised in trajectory g0/0: OSError: the socket is gone" in caplog.text


async def test_an_environment_is_closed_where_the_episode_is_cancelled(endless: list[Any]) -> None:
    Endless.is_reset = asyncio.Event()
    context = scripted_context(["a"], scheduler=SwiftScheduler("gym_scheduler"), latency_s=3600.0)
    running = asyncio.create_task(run_episode(context, task(**ROW), id="e"))
    await Endless.is_reset.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(endless) == 1


async def test_an_environment_that_is_not_done_does_not_overrule_a_cut_but_check_finished_does(
    endless: list[Any],
) -> None:
    class GoesOn(GYMScheduler):
        def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
            return False

    short = Limits(max_turns=2, max_tokens_per_turn=2)
    assert len((await play("gym_scheduler", ["aaaa"], limits=short, **ROW)).turns) == 1
    assert len((await play(GoesOn, ["aaaa"], limits=short, **ROW)).turns) == 2


async def test_a_context_manager_shortens_what_the_model_is_shown(endless: list[Any]) -> None:
    class KeepsLast(ContextManager):
        def manage_context(self, history: Any, trajectory_id: str) -> Any:
            return history[-1:]

    context_managers["keeps_last"] = KeepsLast
    row = {"extra": {**ROW["extra"], "ctx_config": {"name": "keeps_last"}}}
    trajectory = await play("gym_scheduler", ["a", "b"], max_turns=2, **row)
    assert len(trajectory.segments) == 2
    assert "Go.\n" not in tiny_codec().decode(trajectory.segments[1].spans[0].ids)


# --- mistakes -----------------------------------------------------------------------------------------------------------


def returning(value: Any) -> type[MultiTurnScheduler]:
    class Returns(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            return value(infer_request) if callable(value) else value

    return Returns


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (returning(None), "Returns.step returned None in trajectory 'g0/0'; return a dict with 'infer_request'"),
        (returning({}), "Returns.step returned {} in trajectory 'g0/0'"),
        (
            returning(lambda r: {"infer_request": r, "response_loss_mask": [1]}),
            "You must return response_token_ids if you want to return response_loss_mask (in trajectory 'g0/0')",
        ),
        (
            returning(lambda r: {"infer_request": r, "response_token_ids": [1, 2], "response_loss_mask": [1]}),
            "response_loss_mask must have the same length as response_token_ids (1 and 2 in trajectory 'g0/0')",
        ),
        (
            returning(lambda r: {"infer_request": r, "rollout_infos": {"x": object()}}),
            "rollout_infos of trajectory 'g0/0' cannot be written as JSON",
        ),
        (MultiTurnScheduler, "Please implement the `step` method in your MultiTurnScheduler subclass"),
    ],
)
async def test_what_a_step_does_wrong_is_named_with_its_trajectory(scheduler: Any, says: str) -> None:
    trajectory = await play(scheduler, ["a", "b"])
    assert trajectory.stop_reason is StopReason.ERROR
    assert says in str(trajectory.error)


async def test_what_a_run_does_wrong_is_named_with_its_trajectory() -> None:
    class Silent(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            return []

    class Several(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            request_config.n = 2
            return await self.infer_engine.infer_async(infer_request, request_config)

    class Hot(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            request_config.temperature = 2.0
            return await self.infer_engine.infer_async(infer_request, request_config)

    class Breaks(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            raise KeyError("solution")

    for cls, says in (
        (Silent, "Silent.run returned an empty list in trajectory 'g0/0'"),
        (Several, "request_config.n is 2; a request draws one reply"),
        (Hot, "request_config.temperature is 2.0 and the run samples with"),
        (Breaks, "Breaks.run raised KeyError: 'solution' in trajectory 'g0/0'"),
    ):
        trajectory = await play(cls, ["a"])
        assert says in str(trajectory.error)


async def test_one_failing_trajectory_leaves_the_others_alone() -> None:
    class FailsFirst(Again):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            if infer_request.uuid == "e0":
                raise ValueError("no")
            return super().step(infer_request, response_choice, current_turn)

    context = scripted_context(
        ["a"], scheduler=SwiftScheduler(FailsFirst, max_turns=2), rewards={"openai/gsm8k": lambda trajectory: 1.0}
    )
    found = await asyncio.gather(*(run_episode(context, task(), id=f"e{i}") for i in range(4)))
    assert [t.is_failed for t in found] == [True, False, False, False]


async def test_a_slow_step_blocks_no_other_episode_unless_the_object_is_shared() -> None:
    meeting = threading.Barrier(4)
    inside: list[int] = []

    class Meets(Again):
        """Returns from its step once all four episodes are in theirs."""

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            meeting.wait(timeout=120)
            return super().step(infer_request, response_choice, current_turn)

    class TakesTurns(Again):
        shared = True

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            inside.append(1)
            time.sleep(0.01)
            assert len(inside) == 1, "two episodes are in the step of one object"
            inside.pop()
            return super().step(infer_request, response_choice, current_turn)

    for cls in (Meets, TakesTurns):
        context = scripted_context(
            ["a"], scheduler=SwiftScheduler(cls, max_turns=2), rewards={"openai/gsm8k": lambda trajectory: 1.0}
        )
        found = await asyncio.gather(*(run_episode(context, task(), id=f"e{i}") for i in range(4)))
        assert [t.error for t in found] == [None] * 4


def test_a_class_that_is_no_scheduler_and_a_name_that_is_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match="it must be a RolloutScheduler"):
        SwiftScheduler(dict)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"multi_turns: there is no 'gym_schedule'. Did you mean 'gym_scheduler'"):
        SwiftScheduler("gym_schedule")


# --- rewards ------------------------------------------------------------------------------------------------------------


class Records(ORM):
    told: dict[str, Any] = {}  # noqa: RUF012

    def __call__(self, completions: Any, **kwargs: Any) -> Any:
        Records.told = {"completions": completions, **kwargs}
        return [1.0] * len(completions)


class Waits(AsyncORM):
    async def __call__(self, completions: Any, solution: Any) -> Any:
        await asyncio.sleep(0)
        return [0.5 if s == "4" else None for s in solution]


async def test_reward_functions_are_told_what_they_are_told_there() -> None:
    orms["records"], orms["waits"] = Records, Waits
    trajectory = await play(Again, ["a", "b"], max_turns=2, extra={"level": 3})
    found = await score(trajectory, ["records", "waits"], weights=[1.0, 2.0])
    assert found == {"score": 2.0, "records": 1.0, "waits": 0.5}
    told = Records.told
    assert told["completions"] == ["b"] and told["level"] == [3] and told["solution"] == ["4"]
    assert told["request_id"] == ["g0/0"] and told["finish_reason"] == ["stop"] and told["is_truncated"] == [False]
    assert told["rollout_infos"] == [{"num_turns": 2}]
    assert [len(ids) for ids in told["response_token_ids"]] == [2]
    assert told["trajectory_inputs"]["g0/0"][0]["messages"][-1]["content"] == "b"
    assert told["trainer_state"].global_step == 0


async def test_rewards_that_cannot_be_are_named() -> None:
    orms["nothing"] = lambda completions, **kwargs: [None]
    orms["few"] = lambda completions, **kwargs: []
    orms["by_length"] = lambda completions, **kwargs: [float(len(c)) for c in completions]
    trajectory = await play(Again, ["a", "b"], max_turns=2)
    for names, options, says in (
        (["nothing"], {}, "no reward function has a score for request_id=g0/0"),
        (["few"], {}, "the reward function 'few' returned [] for 1 completions"),
        ([], {"use_gym_env": True}, "rollout_infos of request_id=g0/0 has no total_reward"),
    ):
        with pytest.raises(RewardError) as problem:
            await score(trajectory, names, **options)
        assert says in str(problem.value)
    with pytest.raises(ConfigError, match="reward_weights has 2 entries for 1 reward functions"):
        await score(trajectory, ["few"], weights=[1, 2])
    with pytest.raises(ConfigError, match=r"orms: there is no 'acuracy'. Did you mean 'accuracy'"):
        await score(trajectory, ["acuracy"])
    two = await play("thinking_tips_scheduler", ["<think>x</think>4", "<think>y</think>422"], ground_truth="9")
    with pytest.raises(RewardError, match="Inconsistent rewards detected for request_id=g0/0: its 2 outputs"):
        await score(two, ["by_length"])


def test_the_shipped_rewards_score_as_described() -> None:
    assert orms["format"]()(["<think>a</think>\n<answer>b</answer>", "b"]) == [1.0, 0.0]
    assert orms["react_format"]()(["<think>a</think>\nAction: x\nAction Input: y", "b"]) == [1.0, 0.0]
    assert orms["accuracy"]()(["<answer>1/2</answer>", "\\boxed{3}"], solution=["\\boxed{0.5}", "4"]) == [1.0, 0.0]
    assert orms["repetition"]()(["a b c a b c", "a b"]) == [-0.25, 0.0]
    args = type("Args", (), {})()
    args.max_completion_length, args.soft_cache_length = 10, 4
    assert orms["soft_overlong"](args)(["x", "x"], response_token_ids=[list(range(8)), [[1, 2], [3]]]) == [-0.5, 0.0]
    cosine = orms["cosine"](args)(["<answer>1</answer>"] * 2, solution=["1", "2"], response_token_ids=[[], [1] * 10])
    assert cosine == [1.0, 0.0]
    call = 'Action: get\nAction Input: {"a": 1}'
    assert orms["toolbench"]()([call, call], solution=[call, "Action: put\nAction Input: {}"]) == [1.0, 0.0]


def test_rows_that_a_shipped_scheduler_cannot_run_are_refused_before_the_run() -> None:
    with pytest.raises(DataError, match="task 't0' has no solution, which MathTipsScheduler compares"):
        SwiftScheduler("math_tip_trick").check_task(task(ground_truth=None))
    with pytest.raises(DataError, match="task 't0' names no environment"):
        SwiftScheduler("gym_scheduler").check_task(task())
    with pytest.raises(ConfigError, match=r"envs: there is no 'math_enf'. Did you mean 'math_env'"):
        SwiftScheduler("gym_scheduler", gym_env="math_enf").check_task(task())
    SwiftScheduler("gym_scheduler", gym_env="math_env").check_task(task())
    SwiftScheduler("openenv_scheduler").check_task(task())


async def test_a_tool_message_of_a_step_is_shown_as_one() -> None:
    class Tool(Again):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages.append({"role": "tool", "content": "5"})
            return {"infer_request": infer_request}

    trajectory = await play(Tool, ["a", "b"], max_turns=2)
    assert trajectory.error is None and len(trajectory.segments) == 1
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]


async def test_a_run_that_catches_every_error_and_asks_again_still_ends() -> None:
    class Stubborn(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            while True:
                try:
                    response = await self.infer_engine.infer_async(infer_request, request_config)
                    infer_request.messages += [
                        {"role": "assistant", "content": response.choices[0].message.content},
                        {"role": "user", "content": "Again."},
                    ]
                except Exception:
                    continue

    class InTasks(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(self.infer_engine.infer_async(infer_request, request_config))

    for cls in (Stubborn, InTasks):
        trajectory = await play(cls, ["a"], limits=Limits(max_turns=3))
        assert trajectory.stop_reason is StopReason.MAX_TURNS and len(trajectory.turns) == 3
