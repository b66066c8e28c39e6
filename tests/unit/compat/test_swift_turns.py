"""Replies that repeat or contain one another: each turn of an ms-swift scheduler keeps its tokens, weights and outputs."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.serving.outputs import reward_rows, rollout_outputs
from polyturn.serving.rollout_protocol import RolloutOutput
from polyturn.testing.episodes import task
from support.compat_parts import again, play_swift, running, sampled, stepping

REPLIES = ["a", "b a", "a a", "c b a", "a b"]
"""Each is equal to another one, ends with it, begins with it, or holds it."""
WAYS = ["itself", "copies", "numbers", "texts"]
"""How a scheduler writes the ids of a reply: the engine's list, a copy, one from JSON, none (its text alone)."""


async def play(scheduler: Any, says: list[str], *, row: Task | None = None, **options: Any) -> Trajectory:
    return await play_swift(scheduler, says, max_turns=len(says), row=row, options=options)


def written(value: Any, way: str) -> Any:
    if way == "copies":
        return copy.deepcopy(value)
    return json.loads(json.dumps(value)) if way == "numbers" else [] if way == "texts" else value


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Writes(MultiTurnScheduler):
    def __init__(self, *args: Any, way: str = "itself", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.way = way


class OutputOfEachTurn(Writes):
    """Asks for another turn, and returns an output for each."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        outputs, messages = [], infer_request.messages
        for turn in range(self.max_turns or 0):
            response = await self.infer_engine.infer_async(infer_request, request_config)
            choice = response.choices[0]
            messages.append(assistant(choice.message.content))
            outputs.append(
                RolloutOutput(
                    response=copy.deepcopy(response) if self.way == "copies" else response,
                    messages=[*messages[:1], messages[-1]],
                    response_token_ids=written(choice.token_ids, self.way),
                    rollout_infos={"num_turns": turn + 1, "turn": turn},
                )
            )
            messages.append({"role": "user", "content": "Again."})
        return outputs


class OneOutput(Writes):
    """Asks for another turn, and returns one output of all."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
        lists: list[list[int]] = []
        for turn in range(self.max_turns or 0):
            if turn:
                infer_request.messages.append({"role": "user", "content": "Again."})
            response = await self.infer_engine.infer_async(infer_request, request_config)
            infer_request.messages.append(assistant(response.choices[0].message.content))
            lists.append(response.choices[0].token_ids)
        response = copy.deepcopy(response) if self.way == "copies" else response
        ids = written(lists, self.way)
        return RolloutOutput(response=response, messages=infer_request.messages, response_token_ids=ids)


class Step(Writes):
    """Writes a step and leaves the loop to the base class."""

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        result = again(infer_request, response_choice, current_turn)
        ids = written(response_choice.token_ids, self.way)
        return {**result, "response_token_ids": ids, "response_loss_mask": [1] * len(ids)} if ids else result


class SecondTry(Writes):
    """Asks twice behind its first turn, and returns the first turn and the second try, in texts or numbers of its own."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
        chosen, history = [], list(infer_request.messages)
        for turn in range(3):
            infer_request.messages = list(history)
            response = await self.infer_engine.infer_async(infer_request, request_config)
            if turn != 1:
                text = response.choices[0].message.content
                chosen.append(response.choices[0].token_ids)
                history.append(assistant("".join(text) if self.way == "texts" else text))
                history.append({"role": "user", "content": "Again."})
        return RolloutOutput(response=response, messages=history[:-1], response_token_ids=written(chosen, self.way))


@pytest.mark.parametrize("listed", [[0], [2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("masked", [False, True])
async def test_turn_without_ids_is_trained_from_its_sampled_ids(listed: list[int], masked: bool) -> None:
    async def some(engine: Any, request: Any, config: Any) -> RolloutOutput:
        lists: list[list[int]] = []
        for turn in range(3):
            response = await engine.infer_async(request, config)
            request.messages.append(assistant(response.choices[0].message.content))
            lists += [response.choices[0].token_ids] if turn in listed else []
            if turn < 2:
                request.messages.append({"role": "user", "content": "Again."})
        masks = [[0] * len(ids) for ids in lists] if masked else []
        return RolloutOutput(
            response=response, messages=request.messages, response_token_ids=lists, response_loss_mask=masks
        )

    trajectory = await play(running(some), ["a", "b a", "c"])
    assert trajectory.error is None
    trained = [all(weights) for _, weights in sampled(trajectory)]
    assert trained == [turn not in listed or not masked for turn in range(3)]


@pytest.mark.parametrize(
    ("listed", "trained"),
    [
        (["own"], [True, True, False]),
        (["own", 2], [True, False, True]),
        ([1, "own"], [True, True, False]),
        ([0, "own", 2], [True, False, True]),
        (["own", 0, 1, 2], [True, True, True]),
    ],
)
async def test_own_ids_exclude_the_reply_they_stand_for_alone(listed: list[Any], trained: list[bool]) -> None:
    async def some(engine: Any, request: Any, config: Any) -> RolloutOutput:
        ids: dict[Any, list[int]] = {"own": [7, 7]}
        for turn in range(3):
            response = await engine.infer_async(request, config)
            request.messages.append(assistant(response.choices[0].message.content))
            ids[turn] = response.choices[0].token_ids
            if turn < 2:
                request.messages.append({"role": "user", "content": "Again."})
        return RolloutOutput(
            response=response,
            messages=request.messages,
            response_token_ids=[ids[one] for one in listed],
            response_loss_mask=[[int(one != "own")] * len(ids[one]) for one in listed],
        )

    trajectory = await play(running(some), ["a", "b a", "c"])
    assert trajectory.error is None
    assert [all(weights) for _, weights in sampled(trajectory)] == trained


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheduler", [OutputOfEachTurn, OneOutput, Step])
@given(says=st.lists(st.sampled_from(REPLIES), min_size=1, max_size=5))
def test_every_sampled_token_is_trained_and_in_its_output(
    scheduler: type[RolloutScheduler], way: str, says: list[str]
) -> None:
    trajectory = asyncio.run(play(scheduler, says, way=way))
    assert trajectory.error is None
    turns = sampled(trajectory)
    assert len(turns) == len(says)
    assert all(set(weights) == {1.0} for _, weights in turns)
    outputs = rollout_outputs(trajectory)
    wanted = [[ids] for ids, _ in turns] if scheduler is OutputOfEachTurn else [[ids for ids, _ in turns]]
    assert [output.response_token_ids for output in outputs] == wanted
    assert all(all(map(all, output.response_loss_mask)) for output in outputs)
    rows = reward_rows(trajectory)
    assert [row["messages"][-1]["content"] for row in rows] == (says if scheduler is OutputOfEachTurn else says[-1:])
    if scheduler is OutputOfEachTurn:
        assert [row["rollout_infos"]["turn"] for row in rows] == list(range(len(says)))


@given(says=st.lists(st.sampled_from(REPLIES), min_size=2, max_size=4), data=st.data())
def test_chosen_one_of_equal_replies_is_trained_alone(says: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(says) - 1))

    async def choose(engine: Any, request: Any, config: Any) -> RolloutOutput:
        tries = [await engine.infer_async(type(request)(messages=list(request.messages)), config) for _ in says]
        best = tries[chosen].choices[0]
        messages = [*request.messages, assistant(best.message.content)]
        return RolloutOutput(response=tries[-1], messages=messages, response_token_ids=list(best.token_ids))

    turns = sampled(asyncio.run(play(running(choose), says)))
    assert [bool(sum(weights)) for _, weights in turns] == [i == chosen for i in range(len(says))]


@pytest.mark.parametrize(
    ("way", "says"),
    [("texts", ["aa a", "a a", " a"]), ("numbers", ["aa a", "", "a b"]), ("numbers", ["a b", "a b", "a"])],
)
async def test_discarded_turn_stays_untrained_whatever_it_repeats(way: str, says: list[str]) -> None:
    trajectory = await play(SecondTry, says, way=way)
    assert trajectory.error is None
    assert [set(weights) for _, weights in sampled(trajectory)] == [{1.0}, {0.0}, {1.0}]


async def test_discarded_turn_that_an_example_spells_stays_untrained() -> None:
    async def second_try(engine: Any, request: Any, config: Any) -> RolloutOutput:
        prompt = list(request.messages)
        for _ in range(2):
            response = await engine.infer_async(type(request)(messages=list(prompt)), config)
        return RolloutOutput(response=response, messages=[*prompt, assistant(response.choices[0].message.content)])

    examples = (Message(role="user", content="1+3?"), Message(role="assistant", content="4"))
    row = dataclasses.replace(task(), prompt=(*examples, *task().prompt))
    trajectory = await play(running(second_try), ["4", "5"], row=row)
    assert [bool(sum(weights)) for _, weights in sampled(trajectory)] == [False, True]


async def test_loss_false_silences_its_own_turn_alone() -> None:
    def step(request: Any, choice: Any, turn: int) -> Any:
        if turn == 1:
            request.messages[-1]["loss"] = False
        return again(request, choice, turn)

    turns = sampled(await play(stepping(step), ["a", "a", "a"]))
    assert [bool(sum(weights)) for _, weights in turns] == [False, True, True]


@pytest.mark.parametrize(
    ("lists", "masks", "names"),
    [
        (lambda ids: [ids, [7, 7]], [], "list 1 of the 2 in response_token_ids of trajectory 'g0/0' has no id"),
        (lambda ids: [ids, ids], [], "list 1 of the 2 in response_token_ids of trajectory 'g0/0' repeats ids of turn 0"),
        (lambda ids: [ids], [[1]], "response_loss_mask of trajectory 'g0/0' has lists of [1] entries"),
        (lambda ids: [ids], [[1] * 9, [1]], "response_loss_mask of trajectory 'g0/0' has lists of [9, 1] entries"),
        (lambda ids: [ids], [[2] * 4], "holds 2"),
    ],
)
async def test_impossible_lists_of_an_output_are_named(lists: Any, masks: Any, names: str) -> None:
    async def run(engine: Any, request: Any, config: Any) -> RolloutOutput:
        response = await engine.infer_async(request, config)
        messages = [*request.messages, assistant(response.choices[0].message.content)]
        ids = lists(response.choices[0].token_ids)
        return RolloutOutput(response=response, messages=messages, response_token_ids=ids, response_loss_mask=masks)

    trajectory = await play(running(run), ["abc"])
    assert names in str(trajectory.error)


async def test_output_without_messages_is_the_prompt_and_its_response() -> None:
    async def bare(engine: Any, request: Any, config: Any) -> RolloutOutput:
        return RolloutOutput(response=await engine.infer_async(request, config))

    trajectory = await play(running(bare), ["abc"])
    (row,) = reward_rows(trajectory)
    assert [(m["role"], m["content"]) for m in row["messages"]] == [("user", "What is 2+2?"), ("assistant", "abc")]
    assert all(set(weights) == {1.0} for _, weights in sampled(trajectory))
