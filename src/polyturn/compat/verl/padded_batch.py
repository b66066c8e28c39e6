"""Converts trajectories to verl's padded layout, a tensordict with one row per training sample.

    prompts            [ pad pad | system user <assistant header>     ]                             left-padded
    responses          [ turn 0 | observation | turn 1 | pad pad      ]                             right-padded
    response_mask      [ 1 … 1  | 0 …       0 | 1 … 1  | 0 0          ]    the tokens that the loss may use
    rollout_log_probs  [ lp …   | 0 …       0 | lp …   | 0 0          ]
    rm_scores          [ 0 …                     0   r | 0 0          ]    r at the model's last token

    DataProto.from_tensordict(to_dataproto(groups, pad_token_id=tokenizer.pad_token_id))

A trajectory with a rewritten history has several segments and so several rows, all with its reward and its group's `uid`;
`segment` numbers them. A failed trajectory has no row, as in polyturn's own training.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import ConfigError, DataError
from polyturn.core.messages import to_openai
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, Trajectory, TrajectoryGroup
from polyturn.rewards.function import extra_info

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)

Positions = Callable[[Segment], NDArray[np.integer] | None]
"""Segment -> [3, T] positions of its tokens for a model with M-RoPE, or None if token t has position t."""


def to_dataproto(
    groups: Sequence[TrajectoryGroup],
    *,
    pad_token_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
    positions: Positions | None = None,
) -> TensorDict:
    """Return the rows of all trajectories that did not fail, in the order of groups.

    Args:
        groups: Finished groups.
        pad_token_id: The id that pads prompts and responses.
        prompt_length: Width P of the prompts; the default is the longest.
        response_length: Width R of the responses; the default is the longest.
        positions: For models with M-RoPE; `position_ids` is then [B, 4, P + R]: the plain positions and these three.

    Returns:
        A tensordict of batch size [B]. Tensors: prompts [B, P]; responses, response_mask, turn_ids, rm_scores and, if
        every completion has logprobs, rollout_log_probs [B, R]; input_ids, attention_mask, position_ids [B, P + R];
        __num_turns__, segment [B]. The other columns are not tensors: uid, request_id, data_source, ability, reward_model,
        extra_info, index, raw_prompt, messages, reward_scores, turn_scores, tool_rewards, turn_spans, multi_modal_data,
        and every key that a reward function returned for some row, with None for the others.

    Raises:
        DataError: there are no rows, or one is too long.
        ConfigError: tensordict is not installed.
    """
    rows = [
        _row(group, trajectory, index)
        for group in groups
        for trajectory in group.trajectories
        if not trajectory.is_failed
        for index, segment in enumerate(trajectory.segments)
        if segment.sampled_mask.any()
    ]
    if not rows:
        raise DataError(f"there are no rows: in {len(groups)} groups, no successful trajectory has a sampled token")
    num_prompt = _width([r.num_prompt for r in rows], prompt_length, rows, name="prompt_length")
    num_response = _width([len(r.segment) - r.num_prompt for r in rows], response_length, rows, name="response_length")
    tensors = _tensors(rows, num_prompt, num_response, pad_token_id, positions)
    reported = {key for row in rows for key in row.reward_info}
    extras = sorted(reported - set(rows[0].other) - set(tensors))
    if dropped := sorted(reported - set(extras)):
        logger.warning("the reward function's values %s are dropped, because columns have these names; rename them", dropped)
    other = {key: [row.other[key] for row in rows] for key in rows[0].other}
    return _tensordict(tensors, {**other, **{key: [row.reward_info.get(key) for row in rows] for key in extras}})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One segment of one trajectory."""

    id: str
    segment: Segment
    index: int
    num_prompt: int
    """Number of tokens before the first sampled one."""
    num_turns: int
    reward: float
    reward_info: Mapping[str, Any]
    other: Mapping[str, Any]
    """The columns that are not tensors."""


def _row(group: TrajectoryGroup, trajectory: Trajectory, index: int) -> _Row:
    segment, reward, task = trajectory.segments[index], trajectory.reward, trajectory.task
    num_prompt = int(segment.sampled_mask.argmax())
    scored = {} if reward is None else dict(reward.components)
    info = extra_info(
        trajectory, {name.removeprefix("tool/"): value for name, value in scored.items() if name.startswith("tool/")}
    )
    messages = info.pop("messages")
    scores = {name: info.pop(name) for name in ("turn_scores", "tool_rewards", "rollout_reward_scores")}
    num_turns = info.pop("num_turns")
    return _Row(
        id=f"{trajectory.id}, segment {index}",
        segment=segment,
        index=index,
        num_prompt=num_prompt,
        num_turns=num_turns,
        reward=0.0 if reward is None else reward.total,
        reward_info={} if reward is None else reward.info,
        other={
            "uid": group.id,
            "request_id": trajectory.id,
            "data_source": task.data_source,
            "ability": task.extra.get("ability"),
            "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
            "extra_info": info,
            "index": task.extra.get("index", task.id),
            "raw_prompt": to_openai(task.prompt),
            "messages": {"messages": messages},
            "reward_scores": scores["rollout_reward_scores"],
            "turn_scores": scores["turn_scores"],
            "tool_rewards": scores["tool_rewards"],
            "turn_spans": _turn_spans(segment, num_prompt),
            "multi_modal_data": _media(segment),
            **_kwargs(task),
        },
    )


def _kwargs(task: Task) -> dict[str, Any]:
    interaction = {} if task.interaction is None else dict(task.interaction.kwargs)
    return {
        "interaction_kwargs": interaction,
        "tools_kwargs": {name: dataclasses.asdict(kwargs) for name, kwargs in task.tools_kwargs.items()},
    }


def _turn_spans(segment: Segment, num_prompt: int) -> list[dict[str, Any]]:
    """Return the spans of a response: [{"turn": 0, "source": "sampled", "start": 0, "end": 17}, …]."""
    spans, at = [], -num_prompt
    for span in segment.spans:
        if at >= 0 and len(span):
            spans.append({"turn": span.turn, "source": span.source.value, "start": at, "end": at + len(span)})
        at += len(span)
    return spans


def _media(segment: Segment) -> dict[str, list[Any]]:
    media: dict[str, list[Any]] = {}
    for medium in segment.media:
        media.setdefault(medium.kind, []).append(medium)
    return media


def _width(lengths: Sequence[int], wanted: int | None, rows: Sequence[_Row], *, name: str) -> int:
    longest = max(lengths)
    if wanted is not None and longest > wanted:
        row = rows[lengths.index(longest)]
        raise DataError(f"{row.id} has {longest} tokens, but {name} is {wanted}; raise {name}, or lower the run's limits")
    return longest if wanted is None else wanted


def _tensors(
    rows: Sequence[_Row], num_prompt: int, num_response: int, pad: int, positions: Positions | None
) -> dict[str, NDArray[Any]]:
    shape = (len(rows), num_prompt + num_response)
    ids, attention = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
    weights, turns = np.zeros(shape, np.float32), np.full(shape, -1, np.int64)
    logprobs, scores = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    rope = np.zeros((len(rows), 3, shape[1]), np.int64)
    has_logprobs = True
    for number, row in enumerate(rows):
        segment, start = row.segment, num_prompt - row.num_prompt
        here = slice(start, start + len(segment))
        ids[number, here], attention[number, here] = segment.token_ids, 1
        weights[number, here], turns[number, here] = segment.loss_weights, segment.turn_ids
        logprobs[number, here] = segment.logprobs
        has_logprobs &= all(span.logprobs is not None for span in segment.spans if span.policy_version is not None)
        scores[number, start + int(np.flatnonzero(segment.sampled_mask)[-1])] = row.reward
        if positions is not None:
            columns = positions(segment)
            rope[number, :, here] = np.arange(len(segment)) if columns is None else columns
    plain = np.clip(attention.cumsum(axis=1) - 1, 0, None) * attention
    out = {
        "prompts": ids[:, :num_prompt],
        "responses": ids[:, num_prompt:],
        "response_mask": (weights > 0).astype(np.int64)[:, num_prompt:],
        "loss_weights": weights[:, num_prompt:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": plain if positions is None else np.concatenate([plain[:, None], rope], axis=1),
        "turn_ids": turns[:, num_prompt:],
        "rm_scores": scores[:, num_prompt:],
        "__num_turns__": np.array([row.num_turns for row in rows], np.int32),
        "segment": np.array([row.index for row in rows], np.int32),
    }
    return {**out, "rollout_log_probs": logprobs[:, num_prompt:]} if has_logprobs else out


def _tensordict(tensors: Mapping[str, NDArray[Any]], other: Mapping[str, Sequence[Any]]) -> TensorDict:
    try:
        import torch
        from tensordict import NonTensorStack, TensorDict
    except ImportError as problem:
        raise ConfigError(
            "a batch for verl's trainers needs tensordict, which is not installed: pip install 'polyturn[verl]'"
        ) from problem
    size = len(next(iter(tensors.values())))
    tensordict = TensorDict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in tensors.items()}, batch_size=[size])
    for key, values in other.items():
        tensordict.set(key, NonTensorStack(*values))
    return tensordict
