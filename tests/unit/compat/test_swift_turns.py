"""Replies that repeat or contain one another: each turn of an ms-swift scheduler keeps its tokens, weights and outputs."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.compat.swift.adapter import SwiftScheduler
from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.outputs import reward_rows, rollout_outputs
from polyturn.serving.protocol import RolloutOutput
from polyturn.testing.episodes import scripted_context, task

REPLIES = ["a", "b a", "a a", "c b a", "a b"]
"""Each is equal to another one, ends with it, begins with it, or holds it."""


async def play(scheduler: type[RolloutScheduler], says: list[str], *, row: Task | None = None, **kwargs: Any) -> Trajectory:
    context = scripted_context(says, scheduler=SwiftScheduler(scheduler, max_turns=len(says), **kwargs))
    trajectory = await run_episode(context, row or task(), id="g0/0")
    return trajectory


def sampled(trajectory: Trajectory) -> list[tuple[list[int], list[float]]]:
    """Return the ids and weights of each turn."""
    return [
        (
            [i for s in map(trajectory.span, turn.spans) if s.source is SpanSource.SAMPLED for i in s.ids.tolist()],
            [w for s in map(trajectory.span, turn.spans) if s.source is SpanSource.SAMPLED for w in s.loss_weights.tolist()],
        )
        for turn in trajectory.turns
    ]


class OutputOfEachTurn(MultiTurnScheduler):
    """Asks for another turn, and returns an output for each."""

    def __init__(self, *args: Any, writes: str = "itself", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writes = writes

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        outputs = []
        for turn in range(self.max_turns or 0):
            response = await self.infer_engine.infer_async(infer_request, request_config)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            ids: Any = choice.token_ids
            if self.writes == "copies":
                response, ids = copy.deepcopy(response), copy.deepcopy(ids)
            elif self.writes == "numbers":
                ids = json.loads(json.dumps(ids))
            elif self.writes == "texts":
                ids = []
            outputs.append(
                RolloutOutput(
                    response=response,
                    messages=[*infer_request.messages[:1], infer_request.messages[-1]],
                    response_token_ids=ids,
                    rollout_infos={"num_turns": turn + 1, "turn": turn},
                )
            )
            infer_request.messages.append({"role": "user", "content": "Again."})
        return outputs


class OneOutput(MultiTurnScheduler):
    """Asks for another turn, and returns one output of all."""

    def __init__(self, *args: Any, writes: str = "itself", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writes = writes

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
        lists: list[list[int]] = []
        for turn in range(self.max_turns or 0):
            if turn:
                infer_request.messages.append({"role": "user", "content": "Again."})
            response = await self.infer_engine.infer_async(infer_request, request_config)
            infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
            lists.append(response.choices[0].token_ids)
        if self.writes == "copies":
            response, lists = copy.deepcopy(response), copy.deepcopy(lists)
        elif self.writes == "numbers":
            lists = json.loads(json.dumps(lists))
        elif self.writes == "texts":
            lists = []
        return RolloutOutput(response=response, messages=infer_request.messages, response_token_ids=lists)


class Step(MultiTurnScheduler):
    """Writes a step and leaves the loop to the base class."""

    def __init__(self, *args: Any, writes: str = "itself", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writes = writes

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "Again."})
        ids = response_choice.token_ids
        if self.writes == "texts":
            return {"infer_request": infer_request}
        ids = json.loads(json.dumps(ids)) if self.writes == "numbers" else list(ids)
        return {"infer_request": infer_request, "response_token_ids": ids, "response_loss_mask": [1] * len(ids)}


@pytest.mark.parametrize("writes", ["itself", "copies", "numbers", "texts"])
@pytest.mark.parametrize("scheduler", [OutputOfEachTurn, OneOutput, Step])
@given(says=st.lists(st.sampled_from(REPLIES), min_size=1, max_size=5))
def test_every_sampled_token_keeps_its_weight_and_each_output_its_turns(
    scheduler: type[RolloutScheduler], writes: str, says: list[str]
) -> None:
    trajectory = asyncio.run(play(scheduler, says, writes=writes))
    assert trajectory.error is None
    turns = sampled(trajectory)
    assert len(turns) == len(says)
    assert all(set(weights) == {1.0} for _, weights in turns), "every sampled token is trained"
    outputs = rollout_outputs(trajectory)
    wanted = [[ids] for ids, _ in turns] if scheduler is OutputOfEachTurn else [[ids for ids, _ in turns]]
    assert [output.response_token_ids for output in outputs] == wanted
    assert all(all(map(all, output.response_loss_mask)) for output in outputs)
    rows = reward_rows(trajectory)
    ends = says if scheduler is OutputOfEachTurn else says[-1:]
    assert [row["messages"][-1]["content"] for row in rows] == ends
    if scheduler is OutputOfEachTurn:
        assert [row["rollout_infos"]["turn"] for row in rows] == list(range(len(says)))


@given(says=st.lists(st.sampled_from(REPLIES), min_size=2, max_size=4), data=st.data())
def test_a_choice_among_equal_replies_trains_the_chosen_one_alone(says: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(says) - 1))

    class Chooses(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            tries = []
            for _ in says:
                one = type(infer_request)(messages=list(infer_request.messages))
                tries.append(await self.infer_engine.infer_async(one, request_config))
            best = tries[chosen].choices[0]
            said = {"role": "assistant", "content": best.message.content}
            ids = list(best.token_ids)
            return RolloutOutput(response=tries[-1], messages=[*infer_request.messages, said], response_token_ids=ids)

    turns = sampled(asyncio.run(play(Chooses, says)))
    assert [bool(sum(weights)) for _, weights in turns] == [i == chosen for i in range(len(says))]


class SecondTry(MultiTurnScheduler):
    """Asks twice behind its first turn, and returns the first turn and the second try, in texts or numbers of its own."""

    def __init__(self, *args: Any, writes: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writes = writes

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
        chosen, written = [], list(infer_request.messages)
        for turn in range(3):
            infer_request.messages = list(written)
            response = await self.infer_engine.infer_async(infer_request, request_config)
            if turn != 1:
                text = response.choices[0].message.content
                chosen.append(response.choices[0].token_ids)
                said = {"role": "assistant", "content": "".join(text) if self.writes == "texts" else text}
                written += [said, {"role": "user", "content": "Again."}]
        ids = json.loads(json.dumps(chosen)) if self.writes == "numbers" else []
        return RolloutOutput(response=response, messages=written[:-1], response_token_ids=ids)


@pytest.mark.parametrize(
    ("writes", "says"),
    [("texts", ["aa a", "a a", " a"]), ("numbers", ["aa a", "", "a b"]), ("numbers", ["a b", "a b", "a"])],
)
async def test_a_turn_that_was_given_up_stays_untrained_whatever_part_of_another_it_repeats(
    writes: str, says: list[str]
) -> None:
    trajectory = await play(SecondTry, says, writes=writes)
    assert trajectory.error is None
    assert [set(weights) for _, weights in sampled(trajectory)] == [{1.0}, {0.0}, {1.0}]


async def test_a_repeated_message_that_says_loss_false_silences_its_own_turn_alone() -> None:
    class Silent(Step):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            if current_turn == 1:
                infer_request.messages[-1]["loss"] = False
            return super().step(infer_request, response_choice, current_turn)

    turns = sampled(await play(Silent, ["a", "a", "a"], writes="texts"))
    assert [bool(sum(weights)) for _, weights in turns] == [False, True, True]


@pytest.mark.parametrize(
    ("lists", "masks", "says"),
    [
        (lambda ids: [ids, [7, 7]], [], "list 1 of the 2 in response_token_ids of trajectory 'g0/0' holds no id"),
        (lambda ids: [ids, ids], [], "list 1 of the 2 in response_token_ids of trajectory 'g0/0' repeats ids of turn 0"),
        (lambda ids: [ids], [[1]], "response_loss_mask of trajectory 'g0/0' has lists of [1] entries for"),
        (lambda ids: [ids], [[1] * 9, [1]], "response_loss_mask of trajectory 'g0/0' has lists of [9, 1] entries for"),
    ],
)
async def test_further_lists_and_masks_of_another_length_are_an_error(lists: Any, masks: Any, says: str) -> None:
    class Returns(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            response = await self.infer_engine.infer_async(infer_request, request_config)
            said = {"role": "assistant", "content": response.choices[0].message.content}
            return RolloutOutput(
                response=response,
                messages=[*infer_request.messages, said],
                response_token_ids=lists(response.choices[0].token_ids),
                response_loss_mask=masks,
            )

    trajectory = await play(Returns, ["abc"])
    assert trajectory.error is not None and says in trajectory.error


async def test_an_output_without_messages_is_its_response_behind_the_prompt() -> None:
    class Bare(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            return RolloutOutput(response=await self.infer_engine.infer_async(infer_request, request_config))

    trajectory = await play(Bare, ["abc"])
    (row,) = reward_rows(trajectory)
    assert [(m["role"], m["content"]) for m in row["messages"]] == [("user", "What is 2+2?"), ("assistant", "abc")]
    assert all(set(weights) == {1.0} for _, weights in sampled(trajectory))


async def test_an_example_in_the_prompt_is_no_turn() -> None:
    """A discarded reply that an example of the row happens to spell stays discarded."""

    class SecondTry(RolloutScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            prompt = list(infer_request.messages)
            for _ in range(2):
                one = type(infer_request)(messages=list(prompt))
                response = await self.infer_engine.infer_async(one, request_config)
            said = {"role": "assistant", "content": response.choices[0].message.content}
            return RolloutOutput(response=response, messages=[*prompt, said])

    examples = (Message(role="user", content="1+3?"), Message(role="assistant", content="4"))
    row = task()
    row = dataclasses.replace(row, prompt=(*examples, *row.prompt))
    trajectory = await play(SecondTry, ["4", "5"], row=row)
    assert [bool(sum(weights)) for _, weights in sampled(trajectory)] == [False, True]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"respone_loss_mask": [0]}, "returned the key 'respone_loss_mask'.*Did you mean 'response_loss_mask'"),
        ({"response_token_ids": [5], "response_loss_mask": [0.5]}, "response_loss_mask holds 0.5"),
        ({"response_token_ids": [5], "response_loss_mask": [-1]}, "response_loss_mask holds -1"),
        (
            {"response_token_ids": [5], "rollout_logprobs": [-1.0, -2.0]},
            "rollout_logprobs has 2 entries .* for 1 response_token_ids",
        ),
    ],
)
async def test_a_mask_that_would_not_be_read_is_an_error(told: dict[str, Any], says: str) -> None:
    class Masks(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            infer_request.messages.append({"role": "user", "content": "Again."})
            return {"infer_request": infer_request, "my_own": 1, **told}

    trajectory = await play(Masks, ["one", "two"])
    assert trajectory.error is not None and re.search(says, trajectory.error), trajectory.error


async def test_a_mask_of_an_own_run_holds_ones_and_zeros() -> None:
    class Twos(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
            response = await self.infer_engine.infer_async(infer_request, request_config)
            ids = response.choices[0].token_ids
            messages = [*infer_request.messages, {"role": "assistant", "content": response.choices[0].message.content}]
            return RolloutOutput(
                response=response, messages=messages, response_token_ids=[ids], response_loss_mask=[[2] * len(ids)]
            )

    trajectory = await play(Twos, ["4"])
    assert trajectory.error is not None and "response_loss_mask of trajectory" in trajectory.error, trajectory.error
    assert "holds 2; 1 trains an id" in trajectory.error
