"""Transfers the result of a scheduler's `run` to the episode's record: which turns count, with their weights and infos.

    run returned  one RolloutOutput of turns 0 and 1     both count; its masks become weights
                  [output of turn 0, output of turn 1]   both count; reward functions see each as a separate sample
                  the best of three tries                the other two turns get weight 0

An output contains the sampled ids and texts as objects (`SampledId`, `SampledText`), so a turn is recognised by object
identity, and two turns with equal ids are never confused. If an output has other objects, such as numbers from a tensor or
from JSON, turns are recognised by content, going backwards from the turn of the output's response.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polyturn.compat.swift.engine import EpisodeEngine, InferCall
from polyturn.core.errors import SchedulerError
from polyturn.serving.outputs import OUTPUTS
from polyturn.serving.rollout_protocol import RolloutOutput, SampledId

if TYPE_CHECKING:
    from polyturn.core.arrays import Floats
    from polyturn.rollout.episode import Episode


def settle(
    episode: Episode,
    engine: EpisodeEngine,
    outputs: Sequence[RolloutOutput],
    *,
    prompt: Sequence[Mapping[str, Any]],
    is_own_loop: bool,
) -> None:
    """Set the weights of a trajectory's turns from its outputs, and record the outputs for reward functions.

    Args:
        episode: The episode.
        engine: The engine of the scheduler.
        outputs: The result of the scheduler's `run`.
        prompt: The row's messages. An output without messages gets these, followed by its response.
        is_own_loop: Whether the user wrote the loop. If so, only its outputs determine which turns count.
    """
    if not outputs:
        return
    turns = _SampledTurns(engine.calls)
    weights: dict[int, Floats] = {}
    silent: set[int] = set()
    for output in outputs:
        if output.messages is None:
            message = {"role": "assistant", "content": output.response.choices[0].message.content}
            output.messages = [*_without_answer(prompt), message]
        last = turns.anchor(output)
        spoken = turns.of_messages(output.messages, last, start=_num_prompt(prompt, output.messages))
        turn_weights = (
            _weights_in(turns, output, spoken, last, episode.id) if is_own_loop else dict.fromkeys(range(len(turns.calls)))
        )
        if not turn_weights:
            raise SchedulerError(
                f"an output of trajectory {episode.id!r} has no tokens that were sampled in it; return the response of an "
                "infer_async, its token_ids, or its text in messages"
            )
        for i, mine in turn_weights.items():
            mine = np.ones(turns.calls[i].turn.num_tokens, np.float32) if mine is None else mine
            weights[i] = np.maximum(weights[i], mine) if i in weights else mine
        silent |= {i for at, i in spoken if _is_silent(output.messages[at])}
        _record(output, [turns.calls[i].turn for i in sorted(turn_weights)])
    for i, call in enumerate(turns.calls):
        if i in silent or i not in weights:
            episode.weigh(call.turn, 0.0)
        elif is_own_loop and not weights[i].all():
            episode.weigh(call.turn, weights[i])


class _TokenSource(NamedTuple):
    """The turn and index at which an id was sampled."""

    turn: int
    at: int


class _SampledTurns:
    """Finds the turns of a trajectory in a scheduler's outputs."""

    def __init__(self, calls: Sequence[InferCall]) -> None:
        self.calls = calls
        self._ids = {
            id(token): _TokenSource(i, at)
            for i, one in enumerate(calls)
            for at, token in enumerate(one.ids[: one.turn.num_tokens])
        }
        self._texts = {id(one.text): i for i, one in enumerate(calls)}

    def anchor(self, output: RolloutOutput) -> int:
        """Return the turn of the output's response; the last turn if the response is not from this engine."""
        for i, one in enumerate(self.calls):
            if one.response is output.response:
                return i
        choice = output.response.choices[0]
        of_ids = [source.turn for token in choice.token_ids or () if (source := self.source_of(token)) is not None]
        of_text = self._texts.get(id(choice.message.content), len(self.calls) - 1)
        return of_ids[0] if of_ids else of_text

    def source_of(self, token: int) -> _TokenSource | None:
        """Return the turn and index of a sampled id; None for a plain number."""
        return self._ids.get(id(token)) if isinstance(token, SampledId) else None

    def of_messages(self, messages: Sequence[Mapping[str, Any]], last: int, *, start: int) -> list[tuple[int, int]]:
        """Return (message, turn) in order, for each turn up to `last` in the messages from `start` on."""
        spans: list[tuple[int, int]] = []
        before = last + 1
        for at in reversed(range(start, len(messages))):
            content = messages[at].get("content")
            if messages[at].get("role") != "assistant" or not isinstance(content, str):
                continue
            turn = self._texts.get(id(content))
            if turn is None:
                turn = self._find_text(content, before)
            while turn is not None:  # includes earlier turns that the same message continues
                spans.append((at, turn))
                before = min(before, turn)
                turn = turn - 1 if self.calls[turn].turn.said_before and turn > 0 else None
        return spans[::-1]

    def of_ids(self, output: RolloutOutput, last: int, spoken: Collection[int]) -> list[list[_TokenSource | None]]:
        """Return the source of each id of an output, list by list; None for ids added by the scheduler."""
        lists = [[self.source_of(token) for token in ids] for ids in output.response_token_ids]
        flat = [token for ids in output.response_token_ids for token in ids]
        sources = [source for one in lists for source in one]
        # Turns found in the messages come first, because another turn may have the same ids, or end with them.
        named = sorted({*spoken, last}, reverse=True)
        end = len(flat)
        for i in (*named, *(i for i in reversed(range(last)) if i not in named)):
            own = [at for at, source in enumerate(sources) if source is not None and source.turn == i]
            if own:
                end = min(end, own[0]) if i in named else end
                continue
            ids = [int(token) for token in self.calls[i].ids[: self.calls[i].turn.num_tokens]]
            at, length = _find_ids(flat[:end] if i in named else flat, ids, sources)
            if length < len(ids) and i not in named:
                continue  # another turn with the same beginning
            for k in range(length):
                sources[at + k] = _TokenSource(i, k)
            end = at if length and i in named else end
        rest = iter(sources)
        return [[next(rest) for _ in one] for one in lists]

    def _find_text(self, content: str, before: int) -> int | None:
        """Return the latest turn before `before` whose text is `content`; else the latest whose text is part of it."""
        texts = [(i, self.calls[i].turn.said_before, self.calls[i].text) for i in reversed(range(before))]
        whole = (i for i, said_before, text in texts if content == said_before + text)
        parts = (i for i, _, text in texts if text and text in content)
        return next(whole, next(parts, None))


def _weights_in(
    turns: _SampledTurns, output: RolloutOutput, spoken: Sequence[tuple[int, int]], last: int, name: str
) -> dict[int, Floats | None]:
    """Return turn -> weights of its tokens for the turns in an output; None means weight 1 for all tokens.

    As in ms-swift, the last list belongs to the last reply in the messages, and so on backwards. A masked list of the
    scheduler's own ids therefore leaves out one reply.
    """
    if not output.response_token_ids:
        is_ours = any(one.response is output.response for one in turns.calls)
        return dict.fromkeys(sorted({i for _, i in spoken} | ({last} if is_ours else set())))
    masks = output.response_loss_mask
    lengths = [len(ids) for ids in output.response_token_ids]
    if masks and [len(mask) for mask in masks] != lengths:
        raise SchedulerError(
            f"response_loss_mask of trajectory {name!r} has lists of {[len(m) for m in masks]} entries, but "
            f"response_token_ids of {lengths}; the lengths must be equal"
        )
    if odd := [value for mask in masks or () for value in mask if value not in (0, 1)]:
        raise SchedulerError(f"response_loss_mask of trajectory {name!r} holds {odd[0]!r:.40}; 1 trains an id, 0 does not")
    weights_by_turn: dict[int, Floats | None] = {}
    seen: set[_TokenSource] = set()
    replies = [at for at, message in enumerate(output.messages or ()) if message.get("role") == "assistant"]
    replaced: set[int] = set()
    for k, sources in enumerate(turns.of_ids(output, last, {i for _, i in spoken})):
        mask = masks[k] if masks else [1] * len(sources)
        known = [source for source in sources if source is not None]
        if any(mask) and not known:
            raise SchedulerError(
                f"list {k} of the {len(lengths)} in response_token_ids of trajectory {name!r} has no id that was sampled "
                "in it, but is not masked; return the token_ids of a choice, or mask the list with zeros"
            )
        if (twice := [source for source in known if source in seen]) or len(set(known)) < len(known):
            turn = (twice or known)[0].turn
            raise SchedulerError(
                f"list {k} of the {len(lengths)} in response_token_ids of trajectory {name!r} repeats ids of turn {turn}, "
                "which the output already has; return each sampled id once"
            )
        seen.update(known)
        for source, value in zip(sources, mask, strict=True):
            if source is not None:
                weights = weights_by_turn.setdefault(
                    source.turn, np.zeros(turns.calls[source.turn].turn.num_tokens, np.float32)
                )
                assert weights is not None
                weights[source.at] = float(value > 0)
        from_end = len(lengths) - k
        if sources and not known and from_end <= len(replies):
            replaced.add(replies[-from_end])
    if replaced or sum(length > 0 for length in lengths) < len({at for at, _ in spoken}):
        # Turns that are only in the messages, without ids: all of their sampled tokens are trained.
        for at, i in spoken:
            if at not in replaced:
                weights_by_turn.setdefault(i, None)
    return weights_by_turn


def _record(output: RolloutOutput, turns: Sequence[Any]) -> None:
    messages = [{k: str(v) if isinstance(v, str) else v for k, v in m.items()} for m in output.messages or ()]
    output.response.choices[0].messages = output.messages
    info = turns[-1].info
    info.update({k: v for k, v in output.rollout_infos.items() if k != "num_turns"})
    record = {"messages": messages, "rollout_infos": dict(output.rollout_infos), "turns": [t.index for t in turns]}
    info.setdefault(OUTPUTS, []).append(record)


def _num_prompt(prompt: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of messages that come from the row, including replies in its examples."""
    pairs = zip(messages, prompt, strict=False)
    alike = ((m.get("role"), m.get("content")) == (own.get("role"), own.get("content")) for m, own in pairs)
    return next((i for i, is_alike in enumerate(alike) if not is_alike), min(len(messages), len(prompt)))


def _without_answer(prompt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the row's messages without a final answer."""
    kept = prompt[:-1] if prompt and prompt[-1].get("role") == "assistant" else prompt
    return [dict(m) for m in kept]


def _is_silent(message: Mapping[str, Any]) -> bool:
    return message.get("loss") is False or message.get("loss_scale") == 0


def _find_ids(flat: Sequence[int], ids: Sequence[int], sources: Sequence[_TokenSource | None]) -> tuple[int, int]:
    """Return the last position in `flat`, among the unassigned ids, of the longest prefix of `ids`, and its length."""
    best, length = 0, 0
    for at in _starts(flat, ids):
        n = 0
        while n < len(ids) and at + n < len(flat) and flat[at + n] == ids[n] and sources[at + n] is None:
            n += 1
        if n > length:
            best, length = at, n
        if length == len(ids):
            break
    return best, length


def _starts(flat: Sequence[int], ids: Sequence[int]) -> Iterator[int]:
    return (at for at in reversed(range(len(flat))) if ids and flat[at] == ids[0])
