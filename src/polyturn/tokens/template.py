"""ChatTemplate: renders messages as text. It passes messages to the template as dicts, in a form that the template supports.

Templates disagree on the form of a message, and no list says which template needs which form. The usual form is OpenAI's,
with a call's arguments as an object. If a template cannot render this form, the forms below are tried, and the first one
that works is used for the whole run:

    arguments as JSON text            some templates paste them into text
    ids of nine letters and digits    some templates refuse any other call id
    content joined to the reasoning   some templates refuse a calling turn that has both
    reasoning in the content          some templates have no field for it, and expect it in tags inside the content
    contents as parts                 some templates ignore contents that are plain text
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from polyturn.core.errors import TemplateError, one_line
from polyturn.core.messages import Message, Origin, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHORT_ID = 9
_ALPHABET = string.ascii_letters + string.digits


class _Form(NamedTuple):
    """A form of calls and reasoning in message dicts."""

    json_arguments: bool = False
    short_ids: bool = False
    joined_reasoning: bool = False
    reasoning_in_content: bool = False
    only_parts: bool = False


_USER = Message(role="user", content="Hi")
_FORMS = (_Form(), _Form(json_arguments=True), _Form(short_ids=True), _Form(json_arguments=True, short_ids=True))


class ChatTemplate:
    """One Jinja template with its arguments. Safe to share between episodes and threads."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Wrap the template `source`, by default the tokenizer's. Templates read the tokenizer's special tokens, such as
        `bos_token`."""
        self._tokenizer: Any = tokenizer
        own = tokenizer.chat_template
        self.source: str | None = source or (own.get("default") if isinstance(own, dict) else own)
        self.kwargs = dict(kwargs or {})

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = False
    ) -> str:
        """Render `messages`.

        Args:
            messages: The conversation. A call that could not be parsed is rendered as the text that the model wrote.
            tools: Tool schemas in OpenAI's function form.
            add_generation_prompt: Whether to end with the text that opens an assistant turn.

        Raises:
            TemplateError: there is no template, or it is not valid Jinja, or it fails. The error names the kind of message
                on which it fails.
        """
        if self.source is None:
            raise TemplateError(
                f"the tokenizer {self._tokenizer.name_or_path!r} has no chat template; give one as `chat_template`"
            )
        try:
            return self._apply(messages, tools, add_generation_prompt, self._form_of(messages))
        except Exception as problem:
            line = _syntax_error_line(problem)
            if line is not None:
                raise TemplateError(
                    f"the chat template is not valid Jinja ({one_line(problem)}, line {line}); repair it"
                ) from problem
            kind = self._failing_kind(messages, tools)
            raise TemplateError(
                f"the chat template cannot render {kind} ({one_line(problem)}); use a template that can, or leave it out"
            ) from problem

    def try_render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
        form: _Form | None = None,
    ) -> str | None:
        """Render `messages` in the form `form`, by default the template's; None if rendering fails."""
        if self.source is None:
            return None
        try:
            return self._apply(messages, tools, add_generation_prompt, form or self._form_of(messages))
        except Exception:
            return None

    def shows_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a prompt contains the name of each tool; `tools` are schemas in OpenAI's function form."""
        text = self.try_render([Message(role="user", content="Hi")], tools=tools)
        return text is not None and all(tool["function"]["name"] in text for tool in tools)

    @functools.cached_property
    def _takes_only_parts(self) -> bool:
        """Whether the template renders text in parts but ignores contents that are plain text."""
        messages = [Message(role="user", content="Zq0textZ")]
        plain, parts = (self.try_render(messages, form=_Form(only_parts=only)) or "" for only in (False, True))
        return "Zq0textZ" not in plain and "Zq0textZ" in parts

    @functools.cached_property
    def has_reasoning_field(self) -> bool:
        """Whether the template renders the reasoning field of the last turn, with text or with a call. If not, the reasoning
        is written into the content, in <think> tags."""
        call = ToolCall(id="call_0_0", name="probe", arguments={"key": "Zq0argumentZ"})
        for content, calls in (("Zq0textZ", ()), ("", (call,))):
            turn = Message(role="assistant", content=content, reasoning="Zq0thoughtZ", tool_calls=calls)
            form = (self._form if calls else _Form())._replace(only_parts=self._takes_only_parts)
            if "Zq0thoughtZ" in (self.try_render([_USER, turn], form=form) or ""):
                return True
        return False

    @functools.cached_property
    def _form(self) -> _Form:
        """The simplest form in which this template renders a turn with one call."""
        call = ToolCall(id="call_0_0", name="probe", arguments={"key": "Zq0argumentZ"})
        result = Message(role="tool", content="Zq0resultZ", tool_call_id=call.id, name=call.name)

        def text(form: _Form, content: str, reasoning: str | None, *after: Message) -> str | None:
            turn = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=(call,))
            return self.try_render([_USER, turn, *after], form=form._replace(only_parts=self._takes_only_parts))

        chosen = _Form()
        # First try turns followed by a tool result, as in a history; then turns alone, because some templates render no
        # results.
        for after, form in itertools.product(((result,), ()), _FORMS):
            written = text(form, "", None, *after)
            if written is not None and "'key'" not in written:  # single quotes are Python's `repr` of a dict, not JSON
                chosen = form
                break
        both = ("Zq0textZ", "Zq0thoughtZ", result)
        joined = chosen._replace(joined_reasoning=True)
        return joined if text(chosen, *both) is None and text(joined, *both) is not None else chosen

    def _form_of(self, messages: Sequence[Message]) -> _Form:
        """Return the form in which this template renders these messages."""
        has_calls = any(m.tool_calls or m.tool_call_id for m in messages)
        form = (self._form if has_calls else _Form())._replace(only_parts=self._takes_only_parts)
        if any(m.reasoning for m in messages):
            form = form._replace(reasoning_in_content=not self.has_reasoning_field)
        return form

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool, form: _Form
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            [_wire(m, form) for m in messages],
            tools=[dict(t) for t in tools] or None,
            chat_template=self.source,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.kwargs,
        )
        return str(text)

    def _failing_kind(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Describe the first message that the template cannot render."""
        failing = len(messages)
        while failing > 1 and self.try_render(messages[: failing - 1], tools=tools) is None:
            failing -= 1
        if not messages:
            return "an empty conversation"
        return f"message {failing - 1}, {_kind(messages[failing - 1])}" + (" (with tools)" if tools else "")


def _wire(message: Message, form: _Form) -> dict[str, Any]:
    out = message.to_openai()
    if not isinstance(message.content, str):
        parts = [_template_part(p, message) for p in message.content]
        is_text = all(p.get("type", "text") == "text" for p in parts)
        out["content"] = "".join(str(p.get("text", "")) for p in parts) if is_text else parts
    broken = [c for c in message.tool_calls if c.error is not None and c.raw]
    if broken:
        text = out["content"] if isinstance(out["content"], str) else message.text
        out["content"] = "\n".join([t for t in (text, *(c.raw for c in broken)) if t])
        out["tool_calls"] = [
            call for call, c in zip(out["tool_calls"], message.tool_calls, strict=True) if c.error is None or not c.raw
        ]
        if not out["tool_calls"]:
            del out["tool_calls"]
    if form.reasoning_in_content and out.get("reasoning_content") and isinstance(out["content"], str):
        out["content"] = f"<think>\n{out.pop('reasoning_content')}\n</think>\n\n{out['content']}".rstrip("\n")
    if form.joined_reasoning and out.get("reasoning_content") and out.get("tool_calls") and isinstance(out["content"], str):
        out["reasoning_content"] = "\n\n".join(t for t in (out["reasoning_content"], out["content"]) if t)
        out["content"] = ""
    if form.only_parts and isinstance(out["content"], str):
        # A turn with calls may have no parts. Any other turn has at least one, because templates may read the first part
        # without checking that there is one.
        says = out["content"] or not out.get("tool_calls")
        out["content"] = [{"type": "text", "text": out["content"]}] if says else []
    if out.get("reasoning_content") is not None:
        out["thinking"] = out["reasoning_content"]
    for call in out.get("tool_calls", ()):
        if form.json_arguments:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if form.short_ids:
            call["id"] = _short_id(call["id"])
    if form.short_ids and "tool_call_id" in out:
        out["tool_call_id"] = _short_id(out["tool_call_id"])
    return out


def _template_part(part: Mapping[str, Any], message: Message) -> dict[str, Any]:
    """Convert a content part to the form that templates read: reasoning of the model becomes text in <think> tags."""
    if part.get("type") != "reasoning" or message.origin is not Origin.MODEL:
        return dict(part)
    return {"type": "text", "text": f"<think>{part['text']}{'' if part.get('is_open') else '</think>'}"}


def _short_id(call_id: str) -> str:
    if len(call_id) == _SHORT_ID and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    letters = []
    for _ in range(_SHORT_ID):
        number, rest = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[rest])
    return "".join(letters)


def _syntax_error_line(problem: Exception) -> int | None:
    from jinja2 import TemplateSyntaxError

    return problem.lineno if isinstance(problem, TemplateSyntaxError) else None


def _kind(message: Message) -> str:
    if message.role == "assistant" and message.tool_calls:
        return f"an assistant message with {len(message.tool_calls)} tool call(s)"
    if not isinstance(message.content, str):
        return f"a {message.role} message with content parts"
    article = "an" if message.role == "assistant" else "a"
    return f"{article} {message.role} message"
