"""DeltaEncoder: what the template writes between two completions, encoded without looking at the history.

    held      ...<|im_start|>assistant\\nLet me add.<tool_call>{...}</tool_call><|im_end|>
    extend    \\n<|im_start|>user\\n<tool_response>\\n4\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

The new messages are rendered after a short base conversation (system, user, an assistant's turn; with as many tool calls,
under the same names and ids, as tool messages follow), and what stands after the base's last turn is the delta: first
the token that ends a turn, dropped when the completion ended with one, then the messages, then the generation prompt.

Environment text cannot speak in control tokens. Text without control tokens is encoded in one go with the template text
around it, which keeps the ids equal to those of a full render (invariant I5). Control text inside it is fenced (see
`codec`): then the ids are those of a full render in which that text is ordinary text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import TemplateError
from polyturn.core.messages import Message, ToolCall
from polyturn.tokens.codec import Codec

_SYSTEM = Message(role="system", content="You are a helpful assistant.")
_USER = Message(role="user", content="Hi")
_ANCHOR = "Zq7Anchor"
"""Starts the words that the base's last turn says, in its content and in its last call (some templates leave out the one or
the other): what stands behind the last of them is the end of that turn, then the new messages. Letters and digits only, so
that no template trims, escapes or otherwise changes it."""
_MAX_PROMPTS = 64
"""Prompts whose ids are kept, so that the members of a group encode theirs once."""
_SLOT = re.compile(r"Zq7Slot(\d+)(content|name|id)Z")


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a template writes around the contents of one shape of new messages."""

    literals: tuple[str, ...]
    """Template text; between literals i and i + 1 stands slot i."""
    slots: tuple[tuple[int, str], ...]
    """(index of the message, "content", "name" or "id")."""
    control: tuple[int, ...]
    """The control tokens of the template text, in order: encoding with real contents must give exactly these."""

    def fill(self, values: Mapping[tuple[int, str], str]) -> str:
        out = [self.literals[0]]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            out += (values[slot], literal)
        return "".join(out)


class DeltaEncoder:
    """Encodes prompts, and what follows a completion, for one set of tools. Shared by all episodes that have them."""

    def __init__(self, codec: Codec, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.codec = codec
        self.tools = tuple(tools)
        self._frames: dict[tuple[object, ...], _Frame | None] = {}
        self._controls: dict[tuple[object, ...], tuple[int, ...]] = {}
        """The template's own control tokens around the shapes that have no frame."""
        self._takes_system: bool | None = None
        self._prompts: dict[tuple[object, ...], Ids] = {}

    def start(self, messages: Sequence[Message]) -> Ids:
        """Return the ids of a whole conversation and the generation prompt.

        The prompt is its owner's text, encoded as rendered; environment text in it (tool results, and user messages
        behind an assistant's turn, as a rewritten history has them) is protected as in `extend`.

        Raises:
            TemplateError: the template cannot render the messages.
        """
        key = _prompt_key(messages)
        if key is None:
            return self._whole(messages, add_generation_prompt=True)
        if key not in self._prompts:
            if len(self._prompts) >= _MAX_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[key] = self._whole(messages, add_generation_prompt=True)
        return self._prompts[key]

    def full(self, messages: Sequence[Message]) -> Ids:
        """Return the ids of a whole conversation without generation prompt: what the sanity check compares with."""
        return self._whole(messages, add_generation_prompt=False)

    def assistant(self, message: Message) -> Ids:
        """Return the ids that a model would have to sample to say `message`: everything behind the generation prompt, up
        to and with the token that ends the turn. For supervised training only; sampled ids are never re-made.

        Raises:
            TemplateError: the template does not open a turn of the history the way it asks for one.
        """
        before = self._opening
        whole = self.codec.render([_USER, message], tools=self.tools)
        if not whole.startswith(before):
            raise TemplateError(
                "the chat template opens an assistant's turn in a history differently from its generation prompt, so no "
                "message can be turned into what a model would say; train on recorded trajectories instead"
            )
        ids: Ids = self.codec.encode(whole[len(before) :])
        stops = self.codec.stop_token_ids
        ends = [index for index, token in enumerate(ids.tolist()) if token in stops]
        return ids[: ends[-1] + 1] if ends else ids_array([*ids, stops[0]])

    @functools.cached_property
    def _opening(self) -> str:
        """What a template writes before a turn of the shortest conversation."""
        return self.codec.render([_USER], tools=self.tools, add_generation_prompt=True)

    def extend(self, new: Sequence[Message], *, last_id: int | None) -> Ids:
        """Return the ids that follow a completion: the rest of its turn, the new messages, the generation prompt.

        Args:
            new: The messages that answer the completion, at least one.
            last_id: The completion's last token; None for an empty one. Unless it ends a turn, the completion was cut, and
                the template's end token is written first.

        Raises:
            TemplateError: the template cannot render the messages.
        """
        ids = self._encode_new(new)
        if last_id is None or not len(ids):
            return ids
        is_end = last_id in self.codec.stop_token_ids and int(ids[0]) == self.codec.turn_end
        return ids[1:] if is_end or int(ids[0]) == last_id else ids

    def _encode_new(self, new: Sequence[Message]) -> Ids:
        codec = self.codec
        values = _values(new)
        shape = _shape(new)
        if shape is None:
            return self._encode_rendered(new)
        if shape not in self._frames:
            self._frames[shape] = self._build_frame(new)
        frame = self._frames[shape]
        if frame is None:
            return self._encode_rendered(new)
        if not any(map(codec.has_control, values.values())):
            ids = codec.encode(frame.fill(values))
            if tuple(codec.control_in(ids).tolist()) == frame.control:
                return ids
            # Template and content together spell a control token, or the tokenizer reads one in other text.
            marker = _marker(values.values())
            return codec.encode_fenced(frame.fill({k: marker + v + marker for k, v in values.items()}), marker)
        marker = _marker(values.values())
        return codec.encode_fenced(frame.fill({k: codec.fence(v, marker) for k, v in values.items()}), marker)

    # Frames: one real render for each shape of messages instead of one for each turn.

    def _build_frame(self, new: Sequence[Message]) -> _Frame | None:
        """Render the shape of `new` with placeholders; None if this template treats contents in a way of its own."""
        marked = [_with_slots(index, message) for index, message in enumerate(new)]
        pieces = _SLOT.split(self._render_delta(marked))
        frame = _Frame(
            literals=tuple(pieces[0::3]),
            slots=tuple((int(i), f) for i, f in zip(pieces[1::3], pieces[2::3], strict=True)),
            control=tuple(self.codec.control_in(self.codec.encode("".join(pieces[0::3]))).tolist()),
        )
        for index, message in enumerate(marked):
            if message.text and (index, "content") not in frame.slots:
                self._check_is_read(marked, index)
                return None
        for trial in (new, *([_with_text(i, m, t) for i, m in enumerate(new)] for t in _TRIALS)):
            if frame.fill(_values(trial)) != self._render_delta(trial):
                return None
        return frame

    def _check_is_read(self, marked: Sequence[Message], index: int) -> None:
        """Raise unless what message `index` says makes a difference to the text: the template only spells it differently."""
        other = [replace(m, content="Two words.") if i == index else m for i, m in enumerate(marked)]
        if self._render_delta(other) == self._render_delta(marked):
            role = marked[index].role
            raise TemplateError(
                f"the chat template leaves out what a {role} message says, so the model would never read it; use a template "
                f"that renders {role} messages"
            )

    def _encode_rendered(self, new: Sequence[Message]) -> Ids:
        values = _values(new)
        marker = _marker(values.values())
        fenced = [_map_text(m, lambda text: self.codec.fence(text, marker)) for m in new]
        ids = self.codec.encode_fenced(self._render_delta(fenced), marker)
        shape = _shape(new)
        expected = self._controls.get(shape) if shape is not None else None
        if expected is None:
            plain = [_map_text(m, lambda text: "x" if text.strip() else text) for m in new]
            expected = tuple(self.codec.control_in(self.codec.encode(self._render_delta(plain))).tolist())
            if shape is not None:
                self._controls[shape] = expected
        if tuple(self.codec.control_in(ids).tolist()) == expected:
            return ids
        closed = [_map_text(m, lambda text: marker + text + marker if text else text) for m in new]
        return self.codec.encode_fenced(self._render_delta(closed), marker)

    def _render_delta(self, new: Sequence[Message]) -> str:
        """Return what the template writes from the end of the assistant's turn on."""
        anchor = _marker(_values(new).values(), _ANCHOR)
        base = self._base(new, anchor)
        rendered = self.codec.render([*base, *new], tools=self.tools, add_generation_prompt=True)
        _, found, behind = rendered.rpartition(anchor)
        if not found:
            raise TemplateError(
                "the chat template leaves out what an assistant's turn says; use one that renders assistant messages"
            )
        end = self.codec.turn_end
        if end is not None:
            position = behind.find(self.codec.control_tokens[end])
            if position >= 0:
                return behind[position:]
        alone = self.codec.render(base, tools=self.tools).rpartition(anchor)[2]
        if not behind.startswith(alone):
            raise TemplateError(
                "the chat template changes how an assistant's turn ends when messages follow it; incremental encoding needs "
                f"a template that only appends (it wrote {alone[:40]!r}, then {behind[:40]!r})"
            )
        return behind[len(alone) :]

    def _base(self, new: Sequence[Message], anchor: str) -> list[Message]:
        """Return a conversation that `new` can follow: a system message where the template takes one, a user, a turn."""
        calls: list[ToolCall] = []
        for index, message in enumerate(new):
            if message.role != "tool":
                break
            call_id = message.tool_call_id or f"call_{index}"
            name = message.name if message.name and not self.codec.has_control(message.name) else "tool"
            calls.append(ToolCall(id=call_id, name=name, arguments={"x": anchor}))
        turn = Message(role="assistant", content=anchor, tool_calls=tuple(calls))
        if self._takes_system is None:
            self._takes_system = self._renders([_SYSTEM, _USER])
        return [_SYSTEM, _USER, turn] if self._takes_system else [_USER, turn]

    def _renders(self, messages: Sequence[Message]) -> bool:
        try:
            self.codec.render(messages, tools=self.tools)
        except TemplateError:
            return False
        return True

    def _whole(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Ids:
        codec = self.codec
        first_turn = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        foreign = {i for i, m in enumerate(messages) if m.role == "tool" or (m.role == "user" and i > first_turn)}
        texts = [text for i in foreign for text in _values([messages[i]]).values()]
        text = codec.render(messages, tools=self.tools, add_generation_prompt=add_generation_prompt)
        if not any(map(codec.has_control, texts)):
            return codec.encode(text)
        marker = _marker([text])
        fenced = [_map_text(m, lambda t: codec.fence(t, marker)) if i in foreign else m for i, m in enumerate(messages)]
        text = codec.render(fenced, tools=self.tools, add_generation_prompt=add_generation_prompt)
        return codec.encode_fenced(text, marker)


_TRIALS = (
    "Two words.",
    "a \"quote\", a \\ and a {brace}: <b>1 < 2 & 3</b>\n\n\tnext 'line' é 日",
    '{"a": [1, null]}',
    "  padded\n\n",
)
"""Contents that show whether a template trims, escapes or otherwise changes what it is given."""


def _kind(text: str) -> str:
    if not text:
        return "empty"
    if not text.strip():
        return "blank"
    return "text" if text == text.strip() else "padded"


def _shape(new: Sequence[Message]) -> tuple[object, ...] | None:
    """Return what the frame of `new` depends on; None where only a real render will do."""
    shape: list[object] = []
    for m in new:
        if not isinstance(m.content, str) or m.tool_calls or m.reasoning is not None:
            return None
        kind = _kind(m.content)
        if kind == "blank":
            return None
        shape.append((m.role, kind, m.name is None, m.tool_call_id is None))
    return tuple(shape)


def _prompt_key(messages: Sequence[Message]) -> tuple[object, ...] | None:
    """Return what the ids of a prompt depend on; None for one that holds a turn, which is not asked for twice."""
    if any(m.role == "assistant" or m.tool_calls or m.reasoning or not isinstance(m.content, str) for m in messages):
        return None
    return tuple((m.role, m.content, m.name, m.tool_call_id) for m in messages)


def _values(new: Sequence[Message]) -> dict[tuple[int, str], str]:
    """Return the environment's texts by slot."""
    out: dict[tuple[int, str], str] = {}
    for index, m in enumerate(new):
        out[index, "content"] = m.text
        if m.name is not None:
            out[index, "name"] = m.name
        if m.tool_call_id is not None:
            out[index, "id"] = m.tool_call_id
    return out


def _with_slots(index: int, m: Message) -> Message:
    return replace(
        m,
        content=f"Zq7Slot{index}contentZ" if m.text else "",
        name=None if m.name is None else f"Zq7Slot{index}nameZ",
        tool_call_id=None if m.tool_call_id is None else f"Zq7Slot{index}idZ",
    )


def _with_text(index: int, m: Message, text: str) -> Message:
    """Return `m` with a trial content of the same kind, and a trial name and id."""
    kind = _kind(m.text)
    content = {"empty": "", "text": text.strip(), "padded": f" \n{text.strip()}{index} \n"}[kind]
    name = None if m.name is None else f"trial_{index}"
    return replace(m, content=content, name=name, tool_call_id=None if m.tool_call_id is None else f"call_9_{index}")


def _map_text(m: Message, change: Callable[[str], str]) -> Message:
    content = m.content
    if isinstance(content, str):
        content = change(content)
    else:
        content = tuple({**p, "text": change(str(p["text"]))} if "text" in p else p for p in content)
    return replace(m, content=content, name=None if m.name is None else change(m.name))


def _marker(texts: Iterable[str], stem: str = "Zq7Fence") -> str:
    """Return a word that starts with `stem` and occurs in none of `texts`."""
    texts = list(texts)
    number = 0
    while any(f"{stem}{number}Z" in t for t in texts):
        number += 1
    return f"{stem}{number}Z"
