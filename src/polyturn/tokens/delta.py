"""DeltaEncoder: encodes only the text between two completions, without rendering the history again.

    history   ...<|im_start|>assistant\\nLet me add.<tool_call>{...}</tool_call><|im_end|>
    extend    \\n<|im_start|>user\\n<tool_response>\\n4\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

The new messages are rendered after a short base conversation instead of the history. The base copies only the properties of
the history that the delta may depend on: it has a system message and an earlier tool result if the history has them, and it
ends with an assistant turn that makes the calls that the new tool messages answer. The delta is the text after this turn's
content and calls: the token that ends the turn (dropped if the completion ended with it), the messages, and the generation
prompt.

The author of a text decides whether it may become control tokens (`trust`). Text without control tokens is encoded together
with the template text around it, so its ids equal those of a full render (invariant I5). Text that must not become control
tokens is replaced by placeholder words before the render and encoded as ordinary text in their positions.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import ConfigError, TemplateError
from polyturn.core.messages import Message, Origin, ToolCall
from polyturn.tokens.codec import Codec
from polyturn.tokens.frames import (
    Frame,
    find_frame,
    origin_of,
    outline,
    prompt_key,
    shape,
    trials,
    unused_word,
    values,
    with_slots,
)
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.tokens.trust import Change, Hiding, TrustRule, Written
from polyturn.tokens.turn_ends import behind_anchor, split_turn

_SYSTEM = Message(role="system", content="Zq7BaseSystemZ")
_USER = Message(role="user", content="Zq7BaseUserZ")
_ANCHOR = "Zq7Anchor"
"""Prefix of the marker word in the base's last turn. The turn has the marker in its content and in the arguments of its
calls, because some templates omit one of the two. The text after the last marker is the end of that turn and the new
messages. The marker has only letters and digits, so that no template trims or escapes it."""
_ROLE = operator.attrgetter("role")
_MAX_PROMPTS = 64
"""Maximum number of prompts whose ids are cached. The cache saves work because the members of a group have the same
prompt."""


class _Past(NamedTuple):
    """The properties of a history that the base conversation copies."""

    system: bool
    results: bool
    """Whether the history has a tool message before its last assistant turn."""


class DeltaEncoder:
    """Encodes prompts, and the messages after a completion, for one set of tools. Episodes with the same tools share it."""

    def __init__(
        self,
        codec: Codec,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        foreign_tools: Collection[str] = (),
        escape_prompts: str = "delimiters",
        escape_observations: bool = True,
        media: MediaProcessor | None = None,
    ) -> None:
        """Create an encoder.

        Args:
            codec: The tokenizer and template.
            tools: The tool schemas of every render.
            foreign_tools: Names of the tools whose schemas were written by a server or an agent, not by the owner.
            escape_prompts: See `TrustRule`.
            escape_observations: See `TrustRule`.
            media: Expands the placeholders of media with the model's processor; None for a text model.

        Raises:
            ConfigError: `escape_prompts` is not one of `trust.ESCAPES`.
        """
        self.codec = codec
        self.tools = tuple(tools)
        self._foreign_tools = frozenset(foreign_tools)
        self._rule = TrustRule(codec, escape_prompts=escape_prompts, escape_observations=escape_observations)
        self._frames: dict[tuple[object, ...], Frame | None] = {}
        self._prompts: dict[tuple[object, ...], Ids] = {}
        self._media = media

    def start(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Ids:
        """Encode a whole conversation and the generation prompt.

        Raises:
            TemplateError: the template cannot render the messages, or writes no placeholder for a medium.
            ConfigError: a message has media and there is no processor.
            DataError: a medium cannot be processed.
        """

        def render(change: Change) -> str:
            return self.codec.template.render(
                [self._rule.changed(m, change) for m in messages],
                tools=self._changed_tools(change),
                add_generation_prompt=add_generation_prompt,
            )

        # The members of a group have the same prompt; encode it once.
        key = prompt_key(messages) if add_generation_prompt else None
        ids = None if key is None else self._prompts.get(key)
        if ids is None:
            ids = self._encode(render, self._rule.written(messages, self.tools, foreign=self._foreign_tools))
            if key is not None:
                if len(self._prompts) >= _MAX_PROMPTS:
                    del self._prompts[next(iter(self._prompts))]
                self._prompts[key] = ids
        return self._with_media(ids, messages)

    def full(self, messages: Sequence[Message]) -> Ids:
        """Encode a whole conversation without generation prompt, for the sanity check; raises like `start`."""
        return self.start(messages, add_generation_prompt=False)

    def continuation(self, *texts: tuple[str, Origin], last_id: int | None = None) -> Ids:
        """Encode consecutive texts that continue an assistant message.

        Args:
            texts: Each text with its author.
            last_id: The token before the first text; None if the texts follow the generation prompt.
        """
        if last_id is None:
            opened = self.codec.encode(self.codec.generation_prompt)
            last_id = int(opened[-1]) if len(opened) else None
        written = [Written(*text) for text in texts]
        return self._encode(lambda change: "".join(change(*w) for w in written), written, control=None, last_id=last_id)

    def assistant(self, message: Message) -> Ids:
        """Return the ids that a model would sample to write `message`: everything after the generation prompt, including
        the token that ends the turn. For supervised training only; sampled ids are never encoded again.

        Raises:
            TemplateError: the template opens an assistant turn of a history differently from its generation prompt.
        """
        opened = self._opening

        def render(change: Change) -> str:
            whole = self.codec.template.render([_USER, self._rule.changed(message, change)], tools=self.tools)
            if not whole.startswith(opened):
                raise TemplateError(
                    "the chat template opens an assistant's turn in a history differently from its generation prompt, so a "
                    "message cannot be converted to the ids that a model samples; train on recorded trajectories instead"
                )
            return whole[len(opened) :]

        ids = self._encode(render, self._rule.written([message]), last_id=int(self.codec.encode(opened)[-1]))
        stops = self.codec.stop_token_ids
        ends = [index for index, token in enumerate(ids.tolist()) if token in stops]
        if ends:
            return ids[: ends[-1] + 1]
        behind_calls = self.codec.turn_ends.behind_calls if message.tool_calls else None
        return ids_array([*ids, stops[0] if behind_calls is None else behind_calls])

    @functools.cached_property
    def _opening(self) -> str:
        """The template text before the assistant turn of the shortest conversation."""
        return self.codec.template.render([_USER], tools=self.tools, add_generation_prompt=True)

    def extend(self, new: Sequence[Message], *, last_id: int | None, history: Sequence[Message] = ()) -> Ids:
        """Encode the text after a completion: the rest of its turn, the new messages, the generation prompt.

        Args:
            new: The messages that answer the completion, at least one.
            last_id: The completion's last token; None for an empty completion. If it does not end a turn, the completion
                was cut, and the template's end token comes first.
            history: The messages before `new`. Only their roles matter; their contents are not rendered.

        Raises:
            TemplateError, ConfigError, DataError: see `start`.
        """
        past = self._past(history)
        # A frame is the same for all contents, so it cannot be used if a name or a content may change the template's output.
        frame = None if self._is_read(new) else self._frame(new, past)
        if frame is None:
            ids = self._encode_rendered(new, past)
        else:
            written = [Written(text, origin_of(new[index])) for (index, _), text in values(new).items()]
            fill = functools.partial(frame.fill, new)
            ids = self._encode(fill, written, control=frame.control, last_id=self.inside_text)
        return self._with_media(self._behind(ids, last_id), new)

    def _behind(self, ids: Ids, last_id: int | None) -> Ids:
        """Drop the tokens at the start of `ids` that end a turn and that a completion ending with `last_id` already has."""
        if last_id not in self.codec.stop_token_ids or not len(ids):
            return ids
        ends = self.codec.turn_ends
        # White space may precede the end token, and a past turn may end with another token than the sampled turn.
        for index, token in enumerate(ids.tolist()):
            if token == last_id:
                return ids[index + 1 :]
            if token not in ends.closing and not self.codec.decode([token]).isspace():
                break
        return ids[1:] if int(ids[0]) in ends.past else ids

    def delta_text(self, new: Sequence[Message], *, history: Sequence[Message] = ()) -> str:
        """Render the text that `extend` encodes, starting with the end token of the completion's turn.

        Raises:
            TemplateError: the template cannot render the messages.
        """
        return self._render_delta(new, self._past(history))

    def _encode(
        self,
        render: Callable[[Change], str],
        written: Sequence[Written],
        *,
        control: tuple[int, ...] | None = None,
        last_id: int | None = None,
    ) -> Ids:
        """Render texts and encode the result, without letting a text become a control token that it must not become.

        Args:
            render: Renders the texts after applying a change to each of them.
            written: The texts.
            control: The control tokens of the template text, in order; None if unknown.
            last_id: The token before the rendered text; None if there is none.

        Raises:
            TemplateError: the template cannot render the texts.
        """
        hiding, control_in = Hiding(self._rule, self.codec, written), self.codec.control_in
        # First hide only control texts, so that all other text merges with the template text as in a full render.
        ids = hiding.encode(render(hiding.control), last_id=last_id)
        if control is None and not self._rule.may_spell_with_template(written):
            return ids
        if control is not None and tuple(control_in(ids).tolist()) == control:
            return ids
        # Template and text may form a control token together, or the template may change the text into one. So render again
        # with placeholder words for every text that may take part in this.
        closed = hiding.encode(render(hiding.whole), last_id=last_id)
        return ids if control is None and np.array_equal(control_in(ids), control_in(closed)) else closed

    def _with_media(self, ids: Ids, messages: Sequence[Message]) -> Ids:
        """Replace the placeholder of each medium of `messages` in `ids` by its expansion.

        Each medium is processed separately; the ids equal those of processing the whole conversation at once.
        """
        if self._media is not None:
            return self._media.expand(ids, messages)
        for message in messages:
            if message.media:
                kinds = sorted({medium.kind for medium in message.media})
                raise ConfigError(
                    f"a {message.role} message shows {' and '.join(kinds)} and the run has no processor; use a model that "
                    "comes with one, or name a function that makes one in model.processor"
                )
        return ids

    # New messages.

    def _frame(self, new: Sequence[Message], past: _Past) -> Frame | None:
        """Return the frame for messages of this shape, built on first use; None if no frame reproduces the template."""
        form = shape(new)
        if form is None:
            return None
        key = (past, *form)
        if key in self._frames:
            return self._frames[key]
        marked = with_slots(new)
        text = self._render_delta(marked, past)
        for index, message in enumerate(marked):
            if not message.text or message.text in text:
                continue
            other = [replace(m, content="Two words.") if i == index else m for i, m in enumerate(marked)]
            if self._render_delta(other, past) == text:
                raise TemplateError(
                    f"the chat template leaves out the content of a {message.role} message, so the model never reads it; "
                    f"use a template that renders {message.role} messages"
                )
        text_outline, frame = outline(new, text), None
        # A template may write the tool schemas after an assistant turn, for example before the last user message.
        tools = self._changed_tools(lambda original, origin: original + "x")
        repeats_tools = tools != self.tools and self._render_delta(new, past, tools=tools) != self._render_delta(new, past)
        if text_outline is not None and not repeats_tools:
            control = tuple(self.codec.control_in(self.codec.encode("".join(text_outline.literals))).tolist())
            tried = [(trial, self._render_delta(trial, past)) for trial in trials(new)]
            frame = find_frame(text_outline, tried, control=control)
        self._frames[key] = frame
        return frame

    def _is_read(self, new: Sequence[Message]) -> bool:
        """Return whether one of `new` has a name, or a word in its content, that may change the template's output."""
        if any(m.name in self.codec.literals for m in new):
            return True
        lowered = [m.text.casefold() for m in new]  # a template may compare lower-case text
        return any(word.casefold() in text for word in self.codec.read_words for text in lowered)

    @functools.cached_property
    def inside_text(self) -> int:
        """A token of ordinary text. A delta is encoded as if it followed this token instead of the completion."""
        return int(self.codec.encode_plain("a")[-1])

    def _encode_rendered(self, new: Sequence[Message], past: _Past) -> Ids:
        def render(change: Change) -> str:
            return self._render_delta([self._rule.changed(m, change) for m in new], past, tools=self._changed_tools(change))

        written = self._rule.written(new, self.tools, foreign=self._foreign_tools)
        return self._encode(render, written, last_id=self.inside_text)

    def _changed_tools(self, change: Change) -> tuple[Mapping[str, Any], ...]:
        return tuple(self._rule.changed_tools(self.tools, change, foreign=self._foreign_tools))

    def _render_delta(self, new: Sequence[Message], past: _Past, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Render the text from the end of the assistant turn on. `tools`, if given, replace the encoder's tools."""
        codec, template = self.codec, self.codec.template
        tools = self.tools if tools is None else tools
        anchor = unused_word((w.text for w in self._rule.written(new)), _ANCHOR)
        moved = False
        for base in self._bases(new, past, anchor):
            text = template.try_render([*base, *new], tools=tools, add_generation_prompt=True)
            if text is None:
                continue
            behind = behind_anchor(text, anchor)
            if behind is None:
                raise TemplateError(
                    "the chat template leaves out the content of assistant messages; use one that renders them"
                )
            # A template may move the system message into the last user turn. The text after the anchor then contains the
            # base's own system message, so try the next base.
            moved = any(m.text in behind and not any(m.text in n.text for n in new) for m in (_SYSTEM, _USER))
            if not moved:
                break
        else:
            if not moved:  # raise the template's own error
                base = next(self._bases(new, past, anchor))
                template.render([*base, *new], tools=tools, add_generation_prompt=True)
            raise TemplateError(
                "the chat template repeats earlier messages after later ones, so new messages cannot be encoded alone; "
                "sample from full renders (rollout.use_inference_chat_template: true)"
            )
        alone = behind_anchor(template.try_render(base, tools=tools), anchor)
        split = split_turn(alone, behind, codec.turn_ends, codec)
        if split is None:
            raise TemplateError(
                "the chat template changes how an assistant's turn ends when messages follow it; incremental encoding needs "
                f"a template that only appends (it wrote {(alone or '')[:40]!r}, then {behind[:40]!r})"
            )
        return behind[split:]

    # The base conversation.

    def _past(self, history: Sequence[Message]) -> _Past:
        if not history:
            return _Past(self._takes_system, results=False)
        last = len(history) - 1
        while last > 0 and history[last].role != "assistant":
            last -= 1
        return _Past(history[0].role == "system", results="tool" in map(_ROLE, itertools.islice(history, max(last, 0))))

    @functools.cached_property
    def _takes_system(self) -> bool:
        return self.codec.template.try_render([_SYSTEM, _USER], tools=self.tools) is not None

    def _bases(self, new: Sequence[Message], past: _Past, anchor: str) -> Iterator[list[Message]]:
        """Yield base conversations for `new`: first the one that matches `past`, then variants for stricter templates."""
        calls: list[ToolCall] = []
        for index, message in enumerate(new):
            if message.role != "tool":
                break
            call_id = message.tool_call_id or f"call_{index}"
            calls.append(ToolCall(id=call_id, name=message.name or "tool", arguments={"x": anchor}))
        start = [_SYSTEM, _USER] if past.system else [_USER]
        earlier = ToolCall(id="call_e_0", name="tool", arguments={"x": "1"})
        round_ = [
            Message(role="assistant", content="", tool_calls=(earlier,)),
            Message(role="tool", content="1", tool_call_id=earlier.id, name=earlier.name),
        ]
        prefixes = [[*start, *round_], start] if past.results else [start]
        for prefix in (*prefixes, [_USER]):
            for calls_tried in (tuple(calls), tuple(calls[:1])):
                yield [*prefix, Message(role="assistant", content=anchor, tool_calls=calls_tried)]
