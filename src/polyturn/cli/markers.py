"""Markers: finds the control texts that a chat template writes, and adds a token for each of them to a tokenizer.

A template can be examined with the tokenizer of another model if its `<|…|>`, `[INST]`, `<start_of_turn>` and tool tags are
single tokens, as they are in its own model.

    template_markers("{{ '<|user|>\\n' + m.content + '<|end|>' }}")   ->  ("<|user|>", "<|end|>")

A piped marker always counts. A bare tag or bracket counts if it is in a short literal of the template, or in a conversation
rendered without tools. A tag that occurs only in the prose of an instruction is text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import TemplateError
from polyturn.tokens.lexed import lexed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIPED = re.compile(r"<[|｜][^|｜<>\s]{1,60}[|｜]?>|<[^|｜<>\s/]{1,60}[|｜]>|\]~!?b[\[\]]|\[e~\[")
"""`<|im_start|>`, `<｜User｜>`, `<|turn>` with `<turn|>`, and brackets with a tilde."""
_BARE = re.compile(r"(?<!<)</?[A-Za-z][\w:.-]{0,60}>(?!>)|\[/?[A-Za-z]*[A-Z]{2,}[A-Z_]*\]")
"""`<start_of_turn>`, `</tool_call>`, `[INST]`, `[gMASK]`."""
_MAX_FRAME_WORDS = 4
"""The most words between the tags of a literal; a literal with more words is prose."""


def template_markers(template: str) -> tuple[str, ...]:
    """Return the control texts that `template` writes, in order of first occurrence.

    Raises:
        TemplateError: the template is not valid Jinja.
    """
    markers: dict[str, None] = {}
    mentioned: set[str] = set()
    for literal in _literals(template):
        markers.update(dict.fromkeys(_PIPED.findall(literal)))
        tags = _BARE.findall(literal)
        mentioned.update(tags)
        if len(_BARE.sub(" ", _PIPED.sub(" ", literal)).split()) <= _MAX_FRAME_WORDS:
            markers.update(dict.fromkeys(tags))
    for text in _renders(template):
        markers.update(dict.fromkeys(_PIPED.findall(text)))
        markers.update(dict.fromkeys(_BARE.findall(text)))
    for tag in list(markers):  # add the other tag of each pair, which some templates do not write but test for
        other = tag.replace("</", "<", 1) if tag.startswith("</") else tag.replace("<", "</", 1)
        if other in mentioned:
            markers[other] = None
    return tuple(markers)


def add_template_markers(
    tokenizer: PreTrainedTokenizerBase, template: str | None = None
) -> tuple[PreTrainedTokenizerBase, tuple[str, ...]]:
    """Return a tokenizer that has a token for every marker of `template`, and the markers that it lacked.

    Args:
        tokenizer: Not changed; if a marker is missing, the result is a copy.
        template: A Jinja template; None uses the tokenizer's template.

    Raises:
        TemplateError: there is no template, or it is not valid Jinja.
    """
    source = template if template is not None else tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    if source is None:
        raise TemplateError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; name one to take the markers from"
        )
    known = {str(t) for t in tokenizer.added_tokens_decoder.values()}
    # Some vocabularies (Gemma's) have the text as an ordinary token, which does not count as a control token.
    missing = tuple(m for m in template_markers(source) if m not in known)
    if not missing:
        return tokenizer, ()
    from tokenizers import AddedToken

    changed = copy.deepcopy(tokenizer)
    changed.add_tokens([AddedToken(m, special=True, normalized=False) for m in missing], special_tokens=True)
    return changed, missing


def _literals(template: str) -> Iterator[str]:
    """Yield the text of the template outside of Jinja tags, and its string literals."""
    return (value for kind, value in lexed(template) if kind in ("data", "string"))


def _renders(template: str) -> Iterator[str]:
    """Yield renders of canned conversations without tools; conversations that the template refuses are skipped."""
    from transformers.utils.chat_template_utils import render_jinja_template

    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    call: dict[str, Any] = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": "1"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call00000"}
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}
    dialogues: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": "Be brief."}, user, answer, user],
        [user, {**answer, "reasoning_content": "Hm", "thinking": "Hm"}],
        [user, calling, result],
        [user, calling, result, answer],
        [parts],
    ]
    for messages in dialogues:
        for opened in (False, True):
            try:
                rendered = render_jinja_template([messages], chat_template=template, add_generation_prompt=opened)[0]
            except Exception:
                continue
            yield str(rendered[0])
