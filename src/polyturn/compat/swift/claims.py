"""From what a scheduler's `run` returned to the episode's record: which turns count, with which weights and infos.

    run returned  one RolloutOutput of turns 0 and 1     both count; its masks become weights
                  [output of turn 0, output of turn 1]   both count, each read as a sample of its own by reward functions
                  the best of three tries                the other two turns weigh 0

A weight is only ever read off a mask where the ids beside it are the sampled ones, at their place; an output cannot give
weight to anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from polyturn.compat.swift.engine import Asked, EpisodeEngine
from polyturn.compat.swift.protocol import RolloutOutput
from polyturn.core.errors import SchedulerError

if TYPE_CHECKING:
    from polyturn.core.arrays import Floats
    from polyturn.rollout.episode import Episode

OUTPUT = "_output"
"""Key in the info of the last turn of an output: {"messages": …, "rollout_infos": …, "turns": [0, 1]}."""


def settle(episode: Episode, engine: EpisodeEngine, outputs: Sequence[RolloutOutput], *, is_own_loop: bool) -> None:
    """Let the outputs of a trajectory say what is trained, and record what reward functions read."""
    if not outputs:
        return
    claimed: set[int] = set()
    for output in outputs:
        turns = _turns_of(output, engine.asked) if is_own_loop else list(engine.asked)
        if not turns:
            raise SchedulerError(
                f"an output of trajectory {episode.id!r} holds nothing that was sampled in it; return the response of an "
                "infer_async, its token_ids, or its text in messages"
            )
        if is_own_loop and output.response_token_ids:
            _weigh(episode, output, turns)
        _loss_flags(episode, output, turns)
        claimed.update(a.turn.index for a in turns)
        messages = output.messages or []
        output.response.choices[0].messages = messages
        info = turns[-1].turn.info
        info.update({k: v for k, v in output.rollout_infos.items() if k != "num_turns"})
        info[OUTPUT] = {
            "messages": [dict(m) for m in messages],
            "rollout_infos": dict(output.rollout_infos),
            "turns": [a.turn.index for a in turns],
        }
    for asked in engine.asked:
        if asked.turn.index not in claimed:
            episode.weigh(asked.turn, 0.0)


def _turns_of(output: RolloutOutput, asked: Sequence[Asked]) -> list[Asked]:
    """Return the turns that an output holds: by its response, its ids, or its text."""
    flat = [i for ids in output.response_token_ids for i in ids]
    said = [
        m["content"] for m in output.messages or [] if m.get("role") == "assistant" and isinstance(m.get("content"), str)
    ]
    found, start, place = [], 0, 0
    for one in asked:
        is_it = one.response is output.response
        ids = one.turn.completion.token_ids[: one.turn.num_tokens].tolist()
        if flat:
            at = find(flat, ids, start)
            if at >= 0 and ids:
                is_it, start = True, at + len(ids)
        elif one.text and (at := next((i for i in range(place, len(said)) if one.text in said[i]), -1)) >= 0:
            is_it, place = True, at
        if is_it:
            found.append(one)
    return found


def _weigh(episode: Episode, output: RolloutOutput, turns: Sequence[Asked]) -> None:
    """Weigh the sampled tokens of an output as it does; sampled tokens that it does not hold weigh 0."""
    flat = [i for ids in output.response_token_ids for i in ids]
    masks = [m for mask in output.response_loss_mask for m in mask]
    if masks and len(masks) != len(flat):
        raise SchedulerError(
            f"response_loss_mask of trajectory {episode.id!r} has {len(masks)} entries for {len(flat)} response_token_ids; "
            "they must be as many"
        )
    start = 0
    for asked in turns:
        ids = asked.turn.completion.token_ids[: asked.turn.num_tokens].tolist()
        at = find(flat, ids, start)
        weights: Floats = np.zeros(len(ids), np.float32)
        kept = len(ids)
        if at < 0:
            at, kept = _longest(flat, ids, start)
        if masks:
            weights[:kept] = [float(m > 0) for m in masks[at : at + kept]]
        else:
            weights[:kept] = 1.0
        start = at + kept
        if masks or kept < len(ids):
            episode.weigh(asked.turn, weights)


def _loss_flags(episode: Episode, output: RolloutOutput, turns: Sequence[Asked]) -> None:
    """Leave out the turns whose message says `loss: False`."""
    silent = [
        m["content"]
        for m in output.messages or []
        if m.get("role") == "assistant" and (m.get("loss") is False or m.get("loss_scale") == 0)
    ]
    for asked in turns:
        if any(asked.turn.said_before + asked.text == text for text in silent):
            episode.weigh(asked.turn, 0.0)


def find(flat: Sequence[int], ids: Sequence[int], start: int) -> int:
    """Return where `ids` stand in `flat` from `start` on; -1 if they do not."""
    n = len(ids)
    if n == 0 or start + n > len(flat):
        return -1
    text, wanted = np.asarray(flat[start:], np.int64), np.asarray(ids, np.int64)
    for at in np.flatnonzero(text[: len(text) - n + 1] == wanted[0]):
        if np.array_equal(text[at : at + n], wanted):
            return start + int(at)
    return -1


def _longest(flat: Sequence[int], ids: Sequence[int], start: int) -> tuple[int, int]:
    """Return where from `start` on the longest beginning of `ids` stands, and how long it is."""
    best, length = start, 0
    for at in range(start, len(flat)):
        n = 0
        while n < len(ids) and at + n < len(flat) and flat[at + n] == ids[n]:
            n += 1
        if n > length:
            best, length = at, n
    return best, length
