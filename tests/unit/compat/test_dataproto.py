"""The padded layout: its positions, its zeros, and that it has every token and reward of a rollout."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from polyturn.compat.verl import to_dataproto
from polyturn.core.errors import DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import Task, ToolKwargs
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory, TrajectoryGroup
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from support.parts import add
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # the first test imports torch's compiler

PAD = 7


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


def group(*trajectories: Trajectory, id: str = "g0") -> TrajectoryGroup:
    return TrajectoryGroup(id=id, task=trajectories[0].task, trajectories=trajectories)


async def run(*says: str, id: str = "g0/0", **fields: Any) -> Trajectory:
    context = scripted_context(says, tools=[add], interactions={"gsm8k": Gsm8kInteraction({"name": "gsm8k"})})
    return await run_episode(context, task(interaction="gsm8k", **fields), id=id, seed=1)


async def test_prompts_are_padded_left_and_responses_right() -> None:
    short, long = await run("#### 4", id="g0/0"), await run(CALL, "#### 5", "#### 4", id="g0/1")
    batch = to_dataproto([group(short, long)], pad_token_id=PAD)
    assert batch.batch_size == torch.Size([2])
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], dim=1))
    for row, trajectory in enumerate((short, long)):
        segment = trajectory.segments[0]
        attended = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][attended].tolist() == segment.token_ids.tolist()
        assert set(batch["input_ids"][row][~attended].tolist()) <= {PAD}
        num_prompt = int(segment.sampled_mask.argmax())
        width = batch["prompts"].shape[1]
        start = width - num_prompt
        assert attended.nonzero()[:, 0].tolist() == list(range(start, start + len(segment)))
        assert batch["position_ids"][row][attended].tolist() == list(range(len(segment)))
        assert batch["position_ids"][row][~attended].sum() == 0


async def test_masks_logprobs_and_turns_are_those_of_the_spans() -> None:
    trajectory = await run(CALL, "#### 5", "#### 4")
    batch = to_dataproto([group(trajectory)])
    segment = trajectory.segments[0]
    response = slice(int(segment.sampled_mask.argmax()), None)
    assert batch["response_mask"][0].tolist() == (segment.loss_weights[response] > 0).tolist()
    assert batch["rollout_log_probs"][0].tolist() == segment.logprobs[response].tolist()
    assert batch["rollout_log_probs"][0][batch["response_mask"][0] == 0].abs().sum() == 0
    assert batch["turn_ids"][0].tolist() == segment.turn_ids[response].tolist()
    assert batch["rm_scores"].sum() == trajectory.reward.total == 1.0  # type: ignore[union-attr]
    last = int(np.flatnonzero(segment.sampled_mask[response])[-1])
    assert batch["rm_scores"][0, last] == 1.0
    spans = batch["turn_spans"][0]
    assert [(s["turn"], s["source"]) for s in spans] == [
        (0, "sampled"), (0, "observation"), (1, "sampled"), (1, "observation"), (2, "sampled")
    ]  # fmt: skip
    assert spans[0]["start"] == 0 and spans[-1]["end"] == batch["responses"].shape[1]


async def test_columns_have_their_documented_names(caplog: pytest.LogCaptureFixture) -> None:
    row = {"extra": {"index": 5, "ability": "math"}, "tools_kwargs": {"add": ToolKwargs(create_kwargs={"x": 1})}}
    trajectory = await run(CALL, "#### 5", "#### 4", **row)
    trajectory = dataclasses.replace(
        trajectory,
        reward=dataclasses.replace(trajectory.reward, info={"acc": 1.0, "pred": "4", "index": 9}),  # type: ignore[type-var]
    )
    other = await run("#### 4", id="g1/0")
    batch = to_dataproto([group(trajectory), group(other, id="g1")])
    first = batch[0]
    assert "['index'] are dropped" in caplog.text
    assert list(batch["uid"]) == ["g0", "g1"]
    assert [first[key] for key in ("request_id", "data_source", "ability", "index")] == ["g0/0", "openai/gsm8k", "math", 5]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "4"}
    assert first["raw_prompt"] == [{"role": "user", "content": "What is 2+2?"}]
    assert [m["role"] for m in first["messages"]["messages"]] == [
        "user", "assistant", "tool", "assistant", "user", "assistant", "user"
    ]  # fmt: skip
    assert first["turn_scores"] == [0.0, 1.0]
    assert first["reward_scores"] == {"user_turn_rewards": [0.0, 1.0]}
    assert first["tool_rewards"] == []
    assert first["interaction_kwargs"]["ground_truth"] == "4"
    assert first["tools_kwargs"]["add"]["create_kwargs"] == {"x": 1}
    assert first["extra_info"]["index"] == 5
    assert batch["__num_turns__"].tolist() == [7, 3]
    assert list(batch["acc"]) == [1.0, None] and list(batch["pred"]) == ["4", None]


async def test_failed_trajectories_have_no_row() -> None:
    fine = await run("#### 4")
    failed = dataclasses.replace(fine, id="g0/1", stop_reason=StopReason.ERROR, error="it broke")
    assert list(to_dataproto([group(fine, failed)])["request_id"]) == ["g0/0"]
    refuses(lambda: to_dataproto([group(failed)]), DataError, "1 groups")


def segment(num_prompt: int, *turns: int, weights: Any = None, logprobs: bool = True) -> Segment:
    spans = [Span(ids=np.arange(num_prompt), source=SpanSource.PROMPT)]
    for number, length in enumerate(turns):
        scores = np.full(length, -0.5, np.float32) if logprobs else None
        of_turn: Any = {"turn": number, "policy_version": 0, "logprobs": scores, "weights": weights}
        spans += [Span(ids=np.arange(length), source=SpanSource.SAMPLED, **of_turn)]
        spans += [Span(ids=np.arange(1), source=SpanSource.OBSERVATION, turn=number)]
    return Segment(spans=tuple(spans))


def made(*segments: Segment, **fields: Any) -> Trajectory:
    task = Task(id="t", prompt=())
    return Trajectory(id="g0/0", task=task, segments=segments, turns=(), stop_reason=StopReason.STOP, **fields)


def test_each_segment_is_a_row_with_the_groups_uid() -> None:
    batch = to_dataproto([group(made(segment(3, 2), segment(5, 1, 2)))])
    assert batch["segment"].tolist() == [0, 1]
    assert list(batch["uid"]) == ["g0", "g0"]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 0, 1, 1, 0]]


def test_mask_holds_the_tokens_with_a_weight() -> None:
    batch = to_dataproto([group(made(segment(1, 3, weights=np.array([1, 0, 0.5], np.float32), logprobs=False)))])
    assert batch["response_mask"].tolist() == [[1, 0, 1, 0]]
    assert batch["loss_weights"].tolist() == [[1, 0, 0.5, 0]]
    assert "rollout_log_probs" not in batch


def test_widths_may_be_fixed() -> None:
    rows = [group(made(segment(3, 2)))]
    batch = to_dataproto(rows, prompt_length=5, response_length=8)
    assert (batch["prompts"].shape, batch["responses"].shape) == ((1, 5), (1, 8))
    refuses(lambda: to_dataproto(rows, response_length=2), DataError, "g0/0, segment 0 has 3 tokens", "response_length is 2")
    refuses(lambda: to_dataproto(rows, prompt_length=2), DataError, "prompt_length is 2")


def test_positions_of_images_follow_the_plain_ones() -> None:
    batch = to_dataproto(
        [group(made(segment(2, 2)))],
        positions=lambda s: np.stack([np.arange(len(s)) * k for k in (1, 2, 3)]),
        prompt_length=3,
    )
    assert batch["position_ids"][0].tolist() == [
        [0, 0, 1, 2, 3, 4],
        [0, 0, 1, 2, 3, 4],
        [0, 0, 2, 4, 6, 8],
        [0, 0, 3, 6, 9, 12],
    ]
