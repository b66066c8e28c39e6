"""Compares the token ids of one trajectory with a full render of its messages, turn by turn (invariant I5).

`differences` names the kind of each difference. The result is only a metric: a difference raises no error and changes no
token. `probe.py` examines templates in general.

    differences(held_ids, encoder.full(messages), codec)  ->  (Difference(kind="reasoning_stripped", block=1,
                                                                  kept="<think>\\n2 and 2…", full="The answer…", …), …)
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import ConfigError, TemplateError, did_you_mean, one_line
from polyturn.tokens.codec import Codec
from polyturn.tokens.parsers import HermesParser, ToolCallParser, build_parser

MODES = ("strict", "ignore_strippable", "disable", "off")
"""`strict` reports every difference. `ignore_strippable` ignores turns that differ only in white space or in how the same
text is split into tokens. `off`, or `disable`, turns the check off."""

KINDS = ("generation_prompt", "merge", "whitespace", "tool_call_json", "reasoning_stripped", "end_token", "other")
"""Kinds of differences between an episode's ids and a full render:

generation_prompt     the template opens past turns differently from the generation prompt
merge                 the text is the same, but it is split into other tokens
whitespace            only white space differs
tool_call_json        the tool calls are the same, but their text differs
reasoning_stripped    the full render omits or changes reasoning
end_token             the turn ends with another token than the template writes after a past turn
other                 anything else
"""

UNEXPLAINED = KINDS[-1]
"""The kind that may be an error. The other kinds result from how the template writes past turns or how the model writes
text; then the sampled ids are right."""

_CAUSES = {
    "generation_prompt": "the template opens past turns differently from the generation prompt",
    "merge": "the model sampled a text in other tokens than the tokenizer chooses",
    "whitespace": "the template writes other white space than the model",
    "tool_call_json": "the template writes a tool call in another form than the model",
    "reasoning_stripped": "the template writes a past turn without its reasoning, or changes the reasoning",
    "end_token": "the template ends a past turn with another token than the model",
}
"""Kind -> its harmless cause, as a sentence."""
_STRIPPABLE = ("merge", "whitespace")
_CONTEXT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A turn whose ids in the episode differ from the full render."""

    kind: str
    """One of `KINDS`."""
    index: int
    """Index of the first differing token in the episode's ids."""
    full_index: int
    """Index of the same position in the full render."""
    block: int
    """Index of the differing block; blocks are the parts of the ids that end with an end-of-turn token."""
    kept: str
    """The text of the episode around this position, a few tokens before and after it."""
    full: str
    """The text of the full render around the same position."""

    def __str__(self) -> str:
        """One line: what differs, and what to do."""
        if (cause := _CAUSES.get(self.kind)) is not None:
            return f"{self.kind} at token {self.index}: {cause}; nothing to do, the sampled ids are trained"
        return (
            f"{self.kind} at token {self.index}: the episode has {self.kept!r}, its template would write {self.full!r}; the "
            "sampled ids are trained; check that the template does not rewrite its history (`polyturn check`)"
        )


def check_mode(mode: str) -> str:
    """Check a mode and return it, with "disable" as "off".

    Raises:
        ConfigError: there is no such mode.
    """
    if mode not in MODES:
        raise ConfigError(f"there is no sanity-check mode {mode!r}.{did_you_mean(mode, MODES)}")
    return "off" if mode == "disable" else mode


def differences(
    incremental_ids: Sequence[int] | Ids,
    full_ids: Sequence[int] | Ids,
    codec: Codec,
    mode: str = "strict",
    *,
    parser: ToolCallParser | None = None,
) -> tuple[Difference, ...]:
    """Compare the ids of an episode with a full render of its messages.

    Template text after the last turn (its end token if the completion was cut, a newline) does not count as a difference,
    because it is not yet encoded in the episode.

    Args:
        incremental_ids: [T] the ids of the episode, ending with the last completion.
        full_ids: [T'] `DeltaEncoder.full` of the same messages.
        codec: The codec with which both were encoded.
        mode: "strict" or "ignore_strippable".
        parser: Reads calls and reasoning, to classify differences; None detects the parser from the template.

    Returns:
        One difference for each turn that differs, except those that the mode ignores.
    """
    ends = np.array(sorted({*codec.stop_token_ids, *codec.turn_ends.closing}), np.int32)
    kept_ids = _without_ending(ids_array(incremental_ids), ends, codec)
    full = _without_ending(ids_array(full_ids), ends, codec)
    if np.array_equal(kept_ids, full):
        return ()
    differences_found = []
    for a, b, block in _unequal_turns(kept_ids, full, ends):
        kind = _kind_of(kept_ids[a], full[b], ends, codec, parser)
        if mode == "ignore_strippable" and (kind in _STRIPPABLE or _is_space(kept_ids[a], full[b], codec)):
            continue
        offset = _first_difference(kept_ids[a], full[b])
        i, j = a.start + offset, b.start + offset
        differences_found.append(
            Difference(
                kind=kind,
                index=i,
                full_index=j,
                block=block,
                kept=codec.decode(kept_ids[max(i - _CONTEXT, 0) : i + _CONTEXT]),
                full=codec.decode(full[max(j - _CONTEXT, 0) : j + _CONTEXT]),
            )
        )
    return tuple(differences_found)


def refused(problem: TemplateError, ids: Sequence[int] | Ids, codec: Codec) -> Difference:
    """Return the difference to report if the template refuses to render the whole conversation."""
    text = codec.decode(ids_array(ids)[-2 * _CONTEXT :])
    return Difference(kind="other", index=0, full_index=0, block=0, kept=text, full=one_line(problem))


def classify(text: str, full: str, codec: Codec, parser: ToolCallParser | None = None) -> str:
    """Classify the difference between the text of a turn and the template's text for it: one of `KINDS`."""
    if text == full:
        return "merge"
    if _squeeze(text) == _squeeze(full):
        return "whitespace"
    prompt = codec.generation_prompt
    if prompt and not codec.opens_as_prompted and (prompt in text) != (prompt in full):
        return "generation_prompt"
    # The generation prompt may open reasoning that a history omits, so first compare both texts without reasoning.
    answers = _without_reasoning(text), _without_reasoning(full)
    if _squeeze(answers[0]) == _squeeze(answers[1]):
        return "reasoning_stripped"
    for ours, theirs, opened in ((text, full, prompt), (*answers, _without_reasoning(prompt))):
        if opened:
            ours, theirs = ours.rpartition(opened)[2], theirs.rpartition(opened)[2]
        if _squeeze(_without_reasoning(ours)) == _squeeze(_without_reasoning(theirs)):
            return "reasoning_stripped"
        for reader in (_detected(codec) if parser is None else parser, HermesParser()):
            kind = _read_alike(ours, theirs, reader)
            if kind is not None:
                return kind if (ours, theirs) != answers and opened == prompt else "reasoning_stripped"
    return "other"


@functools.lru_cache(maxsize=8)
def _detected(codec: Codec) -> ToolCallParser:
    return build_parser(codec)


def _read_alike(text: str, full: str, parser: ToolCallParser) -> str | None:
    """Classify the difference of two texts that a parser reads as the same calls and content; None if it does not."""
    a, b = parser.parse(text), parser.parse(full)
    same_calls = [(c.name, c.arguments) for c in a.tool_calls] == [(c.name, c.arguments) for c in b.tool_calls]
    if not same_calls or _squeeze(a.content) != _squeeze(b.content):
        return None
    if _squeeze(a.reasoning or "") != _squeeze(b.reasoning or ""):
        return "reasoning_stripped"
    return "tool_call_json" if a.tool_calls else None


def _kind_of(ids: Ids, full: Ids, ends: Ids, codec: Codec, parser: ToolCallParser | None) -> str:
    """Classify the difference between the ids of a turn and of its full render."""
    a, b = ids[: _body(ids, ends)], full[: _body(full, ends)]
    if np.array_equal(a, b):
        return "end_token"
    return classify(codec.decode(a), codec.decode(b), codec, parser)


def _is_space(ids: Ids, full: Ids, codec: Codec) -> bool:
    return _squeeze(codec.decode(ids)) == _squeeze(codec.decode(full))


def _without_reasoning(text: str) -> str:
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _unequal_turns(ids: Ids, full: Ids, ends: Ids) -> Iterator[tuple[slice, slice, int]]:
    """Yield (slice of `ids`, slice of `full`, block) for each differing turn.

    If consecutive differing turns are not equally many on both sides, they are yielded as one pair of slices.
    """
    ours, theirs = _blocks(ids, ends), _blocks(full, ends)
    matcher = difflib.SequenceMatcher(
        None, [ids[s].tobytes() for s in ours], [full[s].tobytes() for s in theirs], autojunk=False
    )
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        if a_end - a == b_end - b:
            yield from zip(ours[a:a_end], theirs[b:b_end], range(a, a_end), strict=True)
        else:
            yield _joined(ours, a, a_end, len(ids)), _joined(theirs, b, b_end, len(full)), a


def _joined(blocks: Sequence[slice], first: int, end: int, length: int) -> slice:
    if first == end:
        here = blocks[first].start if first < len(blocks) else length
        return slice(here, here)
    return slice(blocks[first].start, blocks[end - 1].stop)


def _blocks(ids: Ids, ends: Ids) -> list[slice]:
    """Split ids after each end-of-turn token."""
    cuts = (np.flatnonzero(np.isin(ids, ends)) + 1).tolist()
    starts = [0, *cuts]
    return [slice(a, b) for a, b in zip(starts, [*cuts, len(ids)], strict=True) if b > a]


def _first_difference(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _body(ids: Ids, ends: Ids) -> int:
    """Return the length of `ids` without trailing end tokens."""
    others = np.flatnonzero(~np.isin(ids, ends))
    return int(others[-1]) + 1 if len(others) else 0


def _without_ending(ids: Ids, ends: Ids, codec: Codec) -> Ids:
    """Return `ids` without the template text after the last turn: end tokens and the white space around them."""
    stop = len(ids)
    closing = set(ends.tolist())
    while stop and (int(ids[stop - 1]) in closing or codec.decode([int(ids[stop - 1])]).isspace()):
        stop -= 1
    return ids[:stop]
