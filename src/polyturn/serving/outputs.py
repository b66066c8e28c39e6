"""Converts a finished trajectory to the outputs that a rollout server sends, and to rows for reward functions.

    rollout_outputs(trajectory)  ->  [RolloutOutput(response_token_ids=[[…], […]], rollout_infos={…, "num_turns": 2})]
    reward_rows(trajectory)      ->  [{"messages": […], "request_id": "g0/1", "rollout_infos": {…}, "solution": "4", …}]

Both are computed from the trajectory, so they do not depend on where the episode ran. A native scheduler's trajectory gives
one output per segment; a user's own `run` gives the outputs that it returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from polyturn.core.generation import FinishReason
from polyturn.core.media import media_of
from polyturn.core.messages import Message
from polyturn.core.trajectory import SpanSource, Trajectory, Turn
from polyturn.rollout.open_turn import PROMPTED_REASONING
from polyturn.serving.rollout_protocol import (
    MEDIA,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutOutput,
    UsageInfo,
)

OUTPUTS = "_outputs"
"""The key in a turn's info for the outputs that a user's own scheduler returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputTurns:
    """The turns, messages and infos of one output."""

    turns: tuple[Turn, ...]
    messages: list[dict[str, Any]]
    infos: Mapping[str, Any]


class _Tokens(NamedTuple):
    """Token ids, masks and logprobs of an output: one list per assistant message."""

    ids: list[list[int]]
    masks: list[list[int]]
    logprobs: list[list[float]]


def rollout_outputs(trajectory: Trajectory) -> list[RolloutOutput]:
    """Return the outputs of a trajectory. Masks are 1 for tokens with a loss weight above 0; only these have a logprob."""
    outputs = []
    for part in _parts(trajectory):
        tokens = _tokens(trajectory, part.turns)
        last = part.turns[-1]
        text = part.messages[-1]["content"] if part.messages else last.message.text
        num = sum(map(len, tokens.ids))
        choice = ChatCompletionResponseChoice(
            index=0,
            message=ChatMessage(role="assistant", content=text),
            finish_reason="length" if last.finish_reason is FinishReason.LENGTH else "stop",
            token_ids=_sampled(trajectory, last),
            messages=part.messages,
        )
        prompt = int(trajectory.metrics.get("prompt_tokens", 0))
        outputs.append(
            RolloutOutput(
                response=ChatCompletionResponse(
                    model="polyturn", choices=[choice], usage=UsageInfo(prompt, num, prompt + num), id=trajectory.id
                ),
                messages=part.messages,
                response_token_ids=tokens.ids,
                response_loss_mask=tokens.masks,
                rollout_logprobs=tokens.logprobs,
                rollout_infos=dict(part.infos),
            )
        )
    return outputs


def reward_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return one row per output: the columns of the task's row, the conversation and its infos."""
    task = trajectory.task
    columns = dict(task.extra)
    if task.ground_truth is not None:
        columns.setdefault("solution", task.ground_truth)
    if task.data_source is not None:
        columns.setdefault("data_source", task.data_source)
    media = {name: _media(trajectory, kind) for name, kind in MEDIA.items()}
    rows = []
    for part in _parts(trajectory):
        ids = _tokens(trajectory, part.turns).ids
        last = part.turns[-1]
        is_cut = last.finish_reason is FinishReason.LENGTH
        rows.append(
            {
                **{name: items for name, items in media.items() if items},
                **columns,
                "messages": _with_prompted_reasoning(part.messages, trajectory),
                "prompt_id": f"prompt_{task.id}",
                "request_id": trajectory.id,
                "finish_reason": "length" if is_cut else "stop",
                "is_truncated": is_cut,
                "rollout_infos": dict(part.infos),
                "response_token_ids": ids[0] if len(ids) == 1 else ids,
                **{name: part.infos[name] for name in MEDIA if part.infos.get(name)},
            }
        )
    return rows


def _parts(trajectory: Trajectory) -> list[_OutputTurns]:
    recorded = [one for turn in trajectory.turns for one in turn.info.get(OUTPUTS, ())]
    if recorded:
        return [
            _OutputTurns(
                turns=tuple(t for t in trajectory.turns if t.index in one["turns"]),
                messages=list(one["messages"]),
                infos=one["rollout_infos"],
            )
            for one in recorded
        ]
    groups: dict[int, list[Turn]] = {}
    for turn in trajectory.turns:
        groups.setdefault(turn.spans[0].segment, []).append(turn)
    parts = []
    infos: dict[str, Any] = {}
    for turns in groups.values():
        for turn in turns:
            infos.update({k: v for k, v in turn.info.items() if not k.startswith("_")})
        until = turns[-1].index + 1
        parts.append(
            _OutputTurns(
                turns=tuple(turns),
                messages=_conversation(trajectory, until),
                infos={**infos, "num_turns": until},
            )
        )
    return parts


def _conversation(trajectory: Trajectory, until: int) -> list[dict[str, Any]]:
    """Return the conversation up to a turn, with each reply exactly as sampled."""
    messages: list[Message] = list(trajectory.task.prompt)
    for turn in trajectory.turns[:until]:
        if not turn.is_continued:
            messages += [turn.message, *(turn.observation if turn.index + 1 < until else ())]
    return [m.to_openai() if m.written is None else {"role": m.role, "content": m.written} for m in messages]


def _with_prompted_reasoning(messages: Sequence[Mapping[str, Any]], trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return messages in which each reply begins with the reasoning that the generation prompt wrote before it.

    Reward functions that check the form of a reply look for its `<think>`, which may be in the prompt.
    """
    prompted: dict[str, str] = {}
    """Reply -> the reasoning before it."""
    last = ""
    continues = False
    for turn in trajectory.turns:
        last = last if continues else turn.info.get(PROMPTED_REASONING, "")
        prompted[turn.message.text if turn.message.written is None else turn.message.written] = last
        continues = turn.is_continued
    whole = []
    for message in messages:
        content, before = message["content"], ""
        if message["role"] == "assistant" and isinstance(content, str):
            before = prompted.get(content, last if message is messages[-1] else "")
        is_missing = bool(before) and not content.startswith(before)
        whole.append({**message, "content": before + content} if is_missing else dict(message))
    return whole


def _tokens(trajectory: Trajectory, turns: Sequence[Turn]) -> _Tokens:
    tokens = _Tokens([], [], [])
    continues = False
    for turn in turns:
        if not continues:
            tokens.ids.append([])
            tokens.masks.append([])
            tokens.logprobs.append([])
        for span in map(trajectory.span, turn.spans):
            if span.source is not SpanSource.SAMPLED and not turn.is_continued:
                continue
            is_trained = span.loss_weights > 0
            tokens.ids[-1].extend(span.ids.tolist())
            tokens.masks[-1].extend(is_trained.astype(np.int64).tolist())
            if span.logprobs is not None:
                tokens.logprobs[-1].extend(span.logprobs[is_trained].tolist())
        continues = turn.is_continued
    return tokens


def _sampled(trajectory: Trajectory, turn: Turn) -> list[int]:
    spans = [s for s in map(trajectory.span, turn.spans) if s.source is SpanSource.SAMPLED]
    return [int(i) for span in spans for i in span.ids]


def _media(trajectory: Trajectory, kind: str) -> list[Any]:
    return [m.source for message in trajectory.messages for m in media_of(message.content) if m.kind == kind]
