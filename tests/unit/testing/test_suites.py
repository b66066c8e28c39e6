"""The suites that authors of plug-ins run find and name every way to break a contract, all at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

import polyturn
from polyturn.core.errors import ToolError
from polyturn.core.lifecycle import StopReason
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing import ContractError, check_interaction, check_reward, check_scheduler, check_tool
from polyturn.testing.suites.common import LONGEST_BLOCK_S, Pulse
from polyturn.tools.base import BaseTool
from support.refusals import refuses, refuses_later

SCHEMA = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Take a guess.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The guess."}},
            "required": ["answer"],
        },
    },
}


class Tutor(BaseInteraction):
    """A good one: state under ids, freed at the end."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config or {"name": "tutor"})
        self.attempts: dict[str, int] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = await super().start_interaction(instance_id, **kwargs)
        self.attempts[instance_id] = 0
        return instance_id

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        self.attempts[instance_id] += 1
        is_right = kwargs.get("ground_truth", "4") in messages[-1]["content"]
        return is_right or self.attempts[instance_id] > 2, f"attempt {self.attempts[instance_id]}", float(is_right), {}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        del self.attempts[instance_id]  # type: ignore[arg-type]


async def test_good_interaction_passes() -> None:
    await check_interaction(Tutor(), says=["5", "6", "4"], ground_truth="4")


class Kept(Tutor):
    async def snapshot(self, instance_id: str) -> int:
        return self.attempts[instance_id]

    async def restore(self, instance_id: str, state: int) -> None:
        self.attempts[instance_id] = state


class ClaimsToKeepNothing(Tutor):
    stateless = True


class CannotBeWritten(Kept):
    async def snapshot(self, instance_id: str) -> Any:
        return {self.attempts[instance_id]: object()}


class KeepsHalf(Tutor):
    async def snapshot(self, instance_id: str) -> int:
        return 1


async def test_state_for_another_process_is_checked() -> None:
    says = ["5", "6", "4"]
    await check_interaction(Kept(), says=says, ground_truth="4")
    for wrong, words in (
        (ClaimsToKeepNothing(), "continues in another process differs"),
        (CannotBeWritten(), "continuing after a reply raised TypeError.*return JSON data from snapshot"),
        (KeepsHalf(), "it offers snapshot without restore; offer both, or neither"),
    ):
        with pytest.raises(ContractError, match=words):
            await check_interaction(wrong, says=says, ground_truth="4")


async def test_tool_with_hidden_state_is_found() -> None:
    class Guesses(BaseTool):
        stateless = True
        count = 0

        def __init__(self) -> None:
            super().__init__({}, SCHEMA)
            self.counts: dict[str, int] = {}

        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            self.counts[str(instance_id)] = 0
            return instance_id

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
            self.counts[instance_id] += 1
            return f"guess {self.counts[instance_id]}"

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            del self.counts[instance_id]

    with pytest.raises(ContractError, match="put all state that calls change into snapshot"):
        await check_tool(Guesses(), calls=[{"answer": "1"}, {"answer": "2"}])


def compute() -> None:
    """Hold the event loop for longer than a plug-in may, however busy the machine is."""
    until = time.thread_time() + 1.2 * LONGEST_BLOCK_S
    while time.thread_time() < until:
        pass


async def test_sleep_without_await_blocks_the_loop() -> None:
    async with Pulse() as pulse:
        before = pulse.num_wakes
        while pulse.num_wakes < before + 50:
            time.sleep(Pulse.INTERVAL_S)  # noqa: ASYNC251
    assert pulse.longest_s > LONGEST_BLOCK_S


class Leaks(Tutor):
    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Forget to forget."""


class OneAtATime(Tutor):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        self.count = self.attempts["all"] = self.attempts.get("all", 0) + 1
        return False, f"attempt {self.count}", 0.0, {}


class SameId(Tutor):
    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.attempts["same"] = 0
        return "same"


class Blocks(Tutor):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        if instance_id == "alone" or "awkward" in instance_id:
            compute()
        return True, "", 0.0, {}


class Odd(Tutor):
    reply: Any = None

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return self.reply


class Meddles(Tutor):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        messages.pop()
        return True, "", 0.0, {}


class TakesNoKwargs(Tutor):
    async def start_interaction(self, instance_id: str | None = None) -> str:  # type: ignore[override]
        return await super().start_interaction(instance_id)


class NeedsANumber(Tutor):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return True, "", float(messages[-1]["content"]) * 0, {}


def odd(reply: Any) -> Odd:
    made = Odd()
    made.reply = reply
    return made


@pytest.mark.parametrize(
    ("interaction", "says"),
    [
        (Leaks(), "'attempts' keeps state of every ended episode; free it in finalize_interaction"),
        (OneAtATime(), "a concurrent episode differs.*under its instance id"),
        (SameId(), r"start_interaction\(None\) returned 'same' twice"),
        (Blocks(), r"an episode blocked the event loop, and so all other episodes, for \d+\.\d s"),
        (odd("fine"), r"generate_response returned 'fine'; return \(should_terminate, content, score, metadata\)"),
        (odd(("yes", "x", 0.0, {})), "returned should_terminate='yes'; return True or False"),
        (odd((True, "x", float("nan"), {})), "returned the score nan; return a finite number"),
        (odd((True, "x", 1.0, [])), "metadata of type list"),
        (Meddles(), "generate_response changed its argument messages"),
        (TakesNoKwargs(), r"start_interaction raised TypeError.*accept \*\*kwargs"),
        (NeedsANumber(), "an episode after a message that is empty raised ValueError"),
    ],
)
async def test_broken_interaction_is_named_with_its_fault(interaction: Any, says: str) -> None:
    with pytest.raises(ContractError, match=rf"(?s)^interaction {type(interaction).__name__} breaks its contract:.*{says}"):
        await check_interaction(interaction, says=["7", "8"])


async def test_all_problems_are_listed_at_once() -> None:
    await refuses_later(lambda: check_interaction(odd(("yes", 3, "high", {}))), ContractError, "1.", "2.", "3.")


async def test_interaction_in_an_older_form_passes() -> None:
    class Older(Tutor):
        async def calculate_score(self) -> float:  # type: ignore[override]
            return 0.0

    await check_interaction(Older())


class Guess(BaseTool):
    """A good one."""

    def __init__(self, schema: Any = None) -> None:
        super().__init__({}, schema or SCHEMA)
        self.truth: dict[str, Any] = {}

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> Any:
        instance_id, said = await super().create(instance_id)
        self.truth[instance_id] = ground_truth
        return instance_id, said

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters["answer"] == "refuse":
            raise ToolError("ask something else")
        return "right" if parameters["answer"] == self.truth[instance_id] else "wrong", 0.5, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.truth[instance_id]


@polyturn.tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: Which one.
    """
    return 2 * number


async def test_good_tools_pass() -> None:
    await check_tool(Guess(), calls=[{"answer": "4"}, {"answer": "refuse"}], create_kwargs={"ground_truth": "4"})
    await check_tool(double, calls=[{"number": 2}])


class KeepsInstances(Guess):
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget to forget."""


class CannotRelease(Guess):
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await super().release(instance_id)
        raise OSError("no")


class Shares(Guess):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.count = self.truth["count"] = self.truth.get("count", 0) + 1
        return str(self.count)


class Raises(Guess):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise KeyError("boom")


class NoReward(Guess):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return float("inf")


class Sleeps(Guess):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if instance_id in ("alone", "side-0", "many-0"):
            compute()
        return "done"


def without_descriptions() -> Any:
    function = {
        "name": "guess",
        "description": "",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}},
    }
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("tool", "calls", "says"),
    [
        (KeepsInstances(), [{"answer": "4"}], "'truth' keeps state of every ended episode; free it in release"),
        (CannotRelease(), [{"answer": "4"}], "release failed for episode ….*OSError: no"),
        (Shares(), [{"answer": "4"}], "a concurrent episode differs"),
        (Raises(), [{"answer": "4"}], r"failed \(exception\).*KeyError.*raise ToolError"),
        (NoReward(), [{"answer": "4"}], "an episode raised RewardError.*return a finite number"),
        (Sleeps(), [{"answer": "4"}], "an episode blocked the event loop"),
        (Guess(), [{"answr": "4"}], "does not fit the schema.*'answer'"),
        (
            Guess(without_descriptions()),
            [{"answer": "4"}],
            "no description, which the model needs.*'answer' has no description",
        ),
    ],
)
async def test_broken_tool_is_named_with_its_fault(tool: Any, calls: Any, says: str) -> None:
    with pytest.raises(ContractError, match=rf"(?s)^tool guess breaks its contract:.*{says}"):
        await check_tool(tool, calls=calls)


def right(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    return {"score": float(ground_truth in solution_str), "pred": solution_str[:10]}


async def test_good_rewards_pass() -> None:
    await check_reward(right, {"#### 4": 1.0, "#### 5": 0.0}, ground_truth="4")
    await check_reward(right, ["#### 4"], ground_truth="4", extra_info={"index": 1})
    await check_reward(lambda solution_strs: [1.0 for _ in solution_strs], {"a": 1.0, "b": 1.0}, ground_truth="4")


def first_word(solution_str: str) -> float:
    return float(solution_str.split()[0] == "yes")


def last_turn(trajectory: Any) -> float:
    return float(trajectory.turns[-1].message.text == "yes")


def whole_conversation(trajectory: Any) -> float:
    return float("yes" in "".join(m.text for m in trajectory.messages))


class Counts:
    calls = 0

    def __call__(self, solution_str: str) -> float:
        self.calls += 1
        return self.calls


async def blocks(solution_str: str) -> float:
    if solution_str == "yes":
        compute()
    return float(solution_str == "yes")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (first_word, r"first_word breaks .*a message that is empty raised RewardError.*IndexError"),
        (last_turn, "the score of a trajectory without turns, which a limit may cause raised RewardError.*IndexError"),
        (whole_conversation, "'no' is scored differently after a tool result with the other answers"),
        (lambda solution_str: 0.5, "'yes' is scored 0.5, not 1"),
        (lambda solution_str: float("nan"), "raised RewardError.*nan"),
        (blocks, "the score of 'yes' blocked the event loop"),
    ],
)
async def test_broken_reward_is_named_with_its_fault(function: Any, says: str) -> None:
    with pytest.raises(ContractError, match=rf"(?s)^reward .*{says}"):
        await check_reward(function, {"yes": 1.0, "no": 0.0}, ground_truth="yes")


async def test_reward_with_a_memory_is_found() -> None:
    with pytest.raises(ContractError, match="scored differently in concurrent calls; do not keep state between calls"):
        await check_reward(Counts(), ["a", "b"], ground_truth="4")


class Hints(MultiTurnScheduler):
    """A good one."""

    async def step(self, episode: Any, turn: Any) -> Any:
        return None if "4" in turn.message.text else "Think again."


async def test_good_schedulers_pass() -> None:
    await check_scheduler(Hints(), says=["5", "4"])
    await check_scheduler(MultiTurnScheduler(), says=["5", "4"], interactions={"tutor": Tutor()}, interaction="tutor")


class Forever(MultiTurnScheduler):
    async def run(self, episode: Any) -> StopReason:
        await episode.prepare()
        for _ in range(6):
            await episode.generate()
            turn = episode.turns[-1]
            episode.record(turn, self.again())
            await episode.prepare()
        return StopReason.STOP

    @staticmethod
    def again() -> Any:
        from polyturn.rollout.scheduler import Reply

        return Reply.of("Again.")


class Remembers(MultiTurnScheduler):
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def step(self, episode: Any, turn: Any) -> Any:
        self.seen.append(turn.message.text)
        return f"That was number {len(self.seen)}."


class Breaks(MultiTurnScheduler):
    async def step(self, episode: Any, turn: Any) -> Any:
        raise KeyError("boom")


class Holds(MultiTurnScheduler):
    async def step(self, episode: Any, turn: Any) -> Any:
        if len(episode.turns) == 1:
            compute()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (Forever(), r"another turn was asked for at 4 turns .*await `prepare` before each `generate`"),
        (Remembers(), "a concurrent episode differs.*values of its attributes are shared"),
        (Breaks(), "an episode failed: SchedulerError: .*KeyError"),
        (Holds(), "an episode blocked the event loop"),
    ],
)
async def test_broken_scheduler_is_named_with_its_fault(scheduler: Any, says: str) -> None:
    with pytest.raises(ContractError, match=rf"(?s)^scheduler {type(scheduler).__name__} breaks its contract:.*{says}"):
        await check_scheduler(scheduler)


class NeverReplies(Tutor):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(3600)  # noqa: ASYNC251


class NeverAnswers(Guess):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        time.sleep(3600)  # noqa: ASYNC251


class NeverSteps(MultiTurnScheduler):
    async def step(self, episode: Any, turn: Any) -> Any:
        time.sleep(3600)  # noqa: ASYNC251


async def never_scores(solution_str: str) -> float:
    time.sleep(3600)  # noqa: ASYNC251
    return 0.0


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (lambda: check_interaction(NeverReplies()), "NeverReplies.generate_response"),
        (lambda: check_tool(NeverAnswers(), calls=[{"answer": "1"}, {"answer": "2"}]), "NeverAnswers.execute"),
        (lambda: check_scheduler(NeverSteps()), "NeverSteps.step"),
        (lambda: check_reward(never_scores, {"yes": 1.0, "no": 0.0}, ground_truth="yes"), "never_scores"),
    ],
)
async def test_call_that_never_returns_ends_the_check(check: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyturn.testing.suites.common.INTERRUPT_S", 1.0)
    with pytest.raises(ContractError, match=rf"1\. .* blocked the event loop for 1 s, in {name} \({__file__}") as caught:
        await check()
    assert "2. " not in str(caught.value)


def test_unknown_check_comes_with_the_nearest() -> None:
    refuses(lambda: polyturn.testing.check_interactions, AttributeError, "'check_interaction'")
