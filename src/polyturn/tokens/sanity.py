"""Does incremental encoding say what the template would say? `check` asks it of one trajectory, `probe` of a template.

`check` compares token ids, turn by turn, with a full render of the same messages (invariant I5) and names the first
difference and its class. It is a metric: it never raises and never changes a token.

    check(held_ids, encoder.full(messages), codec)  ->  None, or
    Difference(kind="reasoning_stripped", turn=1, held="<think>\\n2 and 2…", full="The answer…", …)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import ConfigError, TemplateError, did_you_mean
from polyturn.core.messages import Message, ToolCall
from polyturn.tokens.codec import Codec
from polyturn.tokens.parsers import HermesParser

MODES = ("strict", "ignore_strippable", "disable", "off")
"""`strict` reports every difference, `ignore_strippable` none that leaves the text the same up to white space; `off` and
`disable` are one."""

KINDS = ("generation_prompt", "merge", "whitespace", "tool_call_json", "reasoning_stripped", "other")
"""How a turn's held ids differ from the full render: the template opens turns differently in a history; the same text in
other tokens; other white space; the same tool calls written differently; reasoning dropped; anything else."""

_STRIPPABLE = ("merge", "whitespace")
_CONTEXT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where the held ids and a full render part."""

    kind: str
    """One of `KINDS`."""
    index: int
    """The first token of the held ids that differs."""
    full_index: int
    """The same place in the full render."""
    block: int
    """The number of end-of-turn tokens before it."""
    held: str
    """The held text there, with a few tokens before and after."""
    full: str
    """The full render's text there."""

    def __str__(self) -> str:
        return f"{self.kind} at token {self.index}: held {self.held!r}, the template writes {self.full!r}"


def check_mode(mode: str) -> str:
    """Return `mode` if there is such a mode, with "off" as "disable".

    Raises:
        ConfigError: there is no such mode.
    """
    if mode not in MODES:
        raise ConfigError(f"there is no sanity-check mode {mode!r}.{did_you_mean(mode, MODES)}")
    return "disable" if mode == "off" else mode


def check(
    incremental_ids: Sequence[int] | Ids, full_ids: Sequence[int] | Ids, codec: Codec, mode: str = "strict"
) -> Difference | None:
    """Compare the ids that an episode holds with a full render of its messages.

    What the template writes behind the last turn (its end token where the completion was cut, a newline) is no difference:
    the episode had no reason to write it.

    Args:
        incremental_ids: [T] the held ids, ending with the last completion.
        full_ids: [T'] `DeltaEncoder.full` of the same messages.
        codec: The codec of both.
        mode: One of `MODES`.

    Returns:
        The first difference that the mode does not ignore, or None.

    Raises:
        ConfigError: there is no such mode.
    """
    mode = check_mode(mode)
    if mode == "disable":
        return None
    held, full = ids_array(incremental_ids), ids_array(full_ids)
    shared = min(len(held), len(full))
    if (
        np.array_equal(held[:shared], full[:shared])
        and _is_ending(held[shared:], codec)
        and _is_ending(full[shared:], codec)
    ):
        return None
    ends = np.array(codec.stop_token_ids, np.int32)
    held_blocks, full_blocks = _blocks(held, ends), _blocks(full, ends)
    for number in range(max(len(held_blocks), len(full_blocks))):
        a = held_blocks[number] if number < len(held_blocks) else slice(len(held), len(held))
        b = full_blocks[number] if number < len(full_blocks) else slice(len(full), len(full))
        if np.array_equal(held[a], full[b]):
            continue
        is_last = a.stop >= len(held) or b.stop >= len(full)
        if is_last and _differ_by_ending(held[a], full[b], codec):
            continue
        kind = classify(codec.decode(held[a]), codec.decode(full[b]), codec)
        if mode == "ignore_strippable" and kind in _STRIPPABLE:
            continue
        offset = _first_difference(held[a], full[b])
        i, j = a.start + offset, b.start + offset
        return Difference(
            kind=kind,
            index=i,
            full_index=j,
            block=number,
            held=codec.decode(held[max(i - _CONTEXT, 0) : i + _CONTEXT]),
            full=codec.decode(full[max(j - _CONTEXT, 0) : j + _CONTEXT]),
        )
    return None


def classify(held: str, full: str, codec: Codec) -> str:
    """Say how the text of a turn differs from the template's text of it: one of `KINDS`."""
    if held == full:
        return "merge"
    if _squeeze(held) == _squeeze(full):
        return "whitespace"
    prompt = codec.generation_prompt
    if prompt and (prompt in held) != (prompt in full):
        return "generation_prompt"
    if prompt:
        held, full = held.rpartition(prompt)[2], full.rpartition(prompt)[2]
    parser = HermesParser()
    a, b = parser.parse(held), parser.parse(full)
    same_calls = [(c.name, c.arguments) for c in a.tool_calls] == [(c.name, c.arguments) for c in b.tool_calls]
    if a.tool_calls and same_calls and a.reasoning == b.reasoning and _squeeze(a.content) == _squeeze(b.content):
        return "tool_call_json"
    if _squeeze(_without_reasoning(held)) == _squeeze(_without_reasoning(full)):
        return "reasoning_stripped"
    if a.reasoning != b.reasoning and same_calls and _squeeze(a.content) == _squeeze(b.content):
        return "reasoning_stripped"
    return "other"


def _without_reasoning(text: str) -> str:
    return re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _blocks(ids: Ids, ends: Ids) -> list[slice]:
    """Cut ids behind each end-of-turn token."""
    cuts = (np.flatnonzero(np.isin(ids, ends)) + 1).tolist()
    starts = [0, *cuts]
    return [slice(a, b) for a, b in zip(starts, [*cuts, len(ids)], strict=True) if b > a]


def _first_difference(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _is_ending(ids: Ids, codec: Codec) -> bool:
    """Return whether `ids` is what a template writes behind the last turn: at most end tokens and white space."""
    rest = ids[~np.isin(ids, np.array(codec.stop_token_ids, np.int32))]
    return not codec.decode(rest).strip()


def _differ_by_ending(a: Ids, b: Ids, codec: Codec) -> bool:
    n = _first_difference(a, b)
    return _is_ending(a[n:], codec) and _is_ending(b[n:], codec)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What a chat template does with canned dialogues. None: the template cannot render that dialogue."""

    keeps_turn_before_user: bool | None
    """The text up to the end of a turn stays as it was when a user message follows."""
    keeps_turn_before_tool: bool | None
    """The same when a tool result follows a call."""
    keeps_reasoning_before_user: bool | None
    """The same for a turn with reasoning."""
    renders_tools: bool
    """Tool schemas appear in the text."""
    renders_calls: bool
    """A turn's tool calls appear in the text of a history."""
    renders_results: bool
    """A tool's results appear in the text."""
    renders_parallel_results: bool
    """Two results that answer two calls of one turn appear in the text."""
    takes_system: bool
    needs_user_first: bool
    """A conversation cannot be rendered without a user message."""
    strips_reasoning: bool
    """Reasoning of a past turn is left out of the text once a user message follows."""
    generation_prompt_is_header: bool
    """A history's turns open with exactly the generation prompt."""
    writes_dates: bool
    """The text has a date in it that no message said; a render tomorrow may differ."""
    needs_alternation: bool
    """Two user messages in a row are refused."""
    strategy: str
    """How histories grow: "append" (sampled ids stay, new messages are appended)."""
    reason: str
    """One sentence on what the strategy means for this template."""
    error: str | None
    """Why the run cannot use this template; None if it can."""

    def require(self) -> None:
        """Raise TemplateError if the template cannot be used."""
        if self.error is not None:
            raise TemplateError(self.error)


_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def probe(codec: Codec, *, tools: Sequence[Mapping[str, Any]] = ()) -> TemplateReport:
    """Render canned dialogues with the run's own tokenizer and template and report what the template does.

    Args:
        codec: The tokenizer and template to look at.
        tools: The run's tool schemas; a template that cannot render them is then an error.
    """
    schemas = tuple(tools) or (_TOOL,)
    system, user = Message(role="system", content="Be brief."), Message(role="user", content="First question?")
    again = Message(role="user", content="Second question?")
    turn = Message(role="assistant", content="Zq0answerZ")
    thinking = Message(role="assistant", content="Zq0answerZ", reasoning="Zq0thoughtZ")
    calling, results = _tool_dialogue()

    def text(*messages: Message, with_tools: bool = False, prompt: bool = False) -> str | None:
        try:
            return codec.render(messages, tools=schemas if with_tools else (), add_generation_prompt=prompt)
        except TemplateError:
            return None

    takes_system = text(system, user) is not None
    start = (system, user) if takes_system else (user,)
    plain, header = text(*start, turn), text(*start, prompt=True)
    # A template may need arguments in the tool result's place, so tools and tool messages are probed together and apart.
    schema_text = text(*start, with_tools=True)
    name = str(schemas[0].get("function", schemas[0]).get("name", ""))
    renders_tools = schema_text is not None and name in schema_text
    one = text(*start, calling[0], results[0], with_tools=renders_tools)
    two = text(*start, calling[1], *results, with_tools=renders_tools)
    renders_calls = one is not None and "Zq0argumentZ" in one
    renders_results = one is not None and "Zq0resultZ" in one
    reasoned = text(*start, thinking, again)
    dated = (plain or "") + (schema_text or "")
    strips = reasoned is not None and "Zq0thoughtZ" not in reasoned
    error = _problem(codec, num_tools=len(tools), plain=plain, tools=renders_tools, results=renders_results)
    reason = "sampled ids are kept and new messages appended"
    if strips:
        reason += "; a full render leaves past reasoning out, the held ids keep it"
    if renders_results and not renders_calls:
        reason += "; a full render leaves past tool calls out, the held ids keep them"
    return TemplateReport(
        keeps_turn_before_user=_keeps(plain, text(*start, turn, again), codec),
        keeps_turn_before_tool=_keeps(text(*start, calling[0], with_tools=renders_tools), one, codec),
        keeps_reasoning_before_user=_keeps(text(*start, thinking), reasoned, codec),
        renders_tools=renders_tools,
        renders_calls=renders_calls,
        renders_results=renders_results,
        renders_parallel_results=two is not None and "Zq0resultZ" in two and "Zq1resultZ" in two,
        takes_system=takes_system,
        needs_user_first=text(turn) is None,
        strips_reasoning=strips,
        generation_prompt_is_header=plain is not None and header is not None and plain.startswith(header + turn.text),
        writes_dates=re.search(r"\b(19|20)\d\d\b", dated) is not None,
        needs_alternation=text(*start, again) is None,
        strategy="append",
        reason=reason,
        error=error,
    )


def _tool_dialogue() -> tuple[tuple[Message, Message], tuple[Message, Message]]:
    """Return a turn with one call and one with two, and two results."""
    calls = tuple(ToolCall(id=f"call_0_{i}", name=f"Zq{i}toolZ", arguments={"key": f"Zq{i}argumentZ"}) for i in range(2))
    results = tuple(
        Message(role="tool", content=f"Zq{i}resultZ", tool_call_id=c.id, name=c.name) for i, c in enumerate(calls)
    )
    one, two = (Message(role="assistant", content="", tool_calls=calls[:n]) for n in (1, 2))
    return (one, two), (results[0], results[1])


def _keeps(before: str | None, after: str | None, codec: Codec) -> bool | None:
    """Return whether `after` starts with `before` up to the end of its last turn."""
    if before is None or after is None:
        return None
    end = codec.turn_end
    if end is not None:
        before = before[: before.rfind(codec.control_tokens[end]) + len(codec.control_tokens[end])]
    return after.startswith(before)


def _problem(codec: Codec, *, num_tools: int, plain: str | None, tools: bool, results: bool) -> str | None:
    if codec.chat_template is None:
        return f"the tokenizer {codec.tokenizer.name_or_path!r} has no chat template; give one as `chat_template`"
    if plain is None:
        return "the chat template cannot render a user message and an answer; use the template that belongs to the model"
    if num_tools and not tools:
        return f"the run has {num_tools} tool(s) and the chat template renders none; use a template that does, or no tools"
    if num_tools and not results:
        return f"the run has {num_tools} tool(s) and the chat template renders no tool results; use a template that does"
    return None
