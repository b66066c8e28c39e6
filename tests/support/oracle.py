"""Oracle: what a chat template writes around a conversation, found by rendering all of it.

An independent reading, to hold polyturn.tokens against: it uses the tokenizer's own `apply_chat_template` and `encode` on
the real history, never a short one, and nothing of what it judges.

    oracle.says(dialogue, 0)      "So it is 4.<|im_end|>"                      what the model would have to say
    oracle.between(dialogue, 0)   "\\n<|im_start|>user\\nNo.<|im_end|>\\n…"      what the template writes until turn 1
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polyturn.core.messages import Message
from support.dialogues import Dialogue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD = "Zq9Oracle"
"""Stands at the end of what a turn says, so that what follows it can be found."""


class RefusedError(Exception):
    """The template raises on these messages; the message is the template's."""


class Oracle:
    """Renders and encodes whole conversations with one tokenizer and one template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        *,
        ends: Sequence[str] = (),
        openers: Mapping[str, str] | None = None,
        closes: Sequence[str] = (),
    ) -> None:
        """Take what cannot be found by rendering.

        Args:
            tokenizer: With a token for every marker of the template.
            template: The Jinja template.
            ends: The texts that end an assistant's turn, as its model writes them or a history has them.
            openers: For a template without ends: role -> the text that opens that role's turn, which ends the one before.
            closes: What the template writes behind an end.
        """
        self.tokenizer: Any = tokenizer
        self.ends = tuple(ends)
        self.openers = dict(openers or {})
        self.closes = tuple(closes)
        self._template = template
        self._reads_thinking = re.search(r"\.thinking\b|\[.thinking.\]", template) is not None
        self._reads_reasoning = self._reads_thinking or "reasoning_content" in template
        self._added = {int(i) for i, t in tokenizer.added_tokens_decoder.items() if str(t).strip()}
        self.markers = [str(t) for t in tokenizer.added_tokens_decoder.values() if str(t).strip()]
        """The texts of all control tokens."""
        normalizer = tokenizer.backend_tokenizer.normalizer
        self.normal = normalizer.normalize_str if normalizer is not None else str
        """Text as the tokenizer keeps it: some write it in a canonical Unicode form first."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, prompt: bool = False, is_joined: bool | None = None
    ) -> str:
        """Return the text of a whole conversation; with `prompt`, up to where the model speaks.

        With `is_joined`, reasoning stands in the content, as where a server has no parser for it; None does so where the
        template has no field for it.

        Raises:
            RefusedError: the template raises.
        """
        tries = [(self._reads_thinking, False), (False, False), (self._reads_thinking, True)]
        problem: Exception | None = None
        joins = not self._reads_reasoning if is_joined is None else is_joined
        for thinking, as_json in tries:
            told = [_joined(m) if joins else m for m in messages]
            dicts = [_to_dict(m, thinking=thinking, arguments_as_json=as_json) for m in told]
            try:
                return str(
                    self.tokenizer.apply_chat_template(
                        dicts,
                        tools=list(tools) or None,
                        chat_template=self._template,
                        add_generation_prompt=prompt,
                        tokenize=False,
                    )
                )
            except Exception as raised:
                problem = problem or raised
        raise RefusedError(str(problem)) from problem

    def ids(self, text: str) -> list[int]:
        """Return the ids of a whole rendered conversation that no hostile text stands in."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def control(self, ids: Sequence[int]) -> list[int]:
        """Return the control tokens among `ids`."""
        return [int(i) for i in ids if int(i) in self._added]

    def is_hostile(self, text: str) -> bool:
        """Return whether `text` holds a control text."""
        return any(t in text for t in self.markers)

    def says(self, dialogue: Dialogue, turn: int) -> str:
        """Return the text that the model would have to write in turn `turn`, with its end unless it is cut.

        Where a history's turns open otherwise than the generation prompt, it is what follows a history's opening; the
        reasoning that a template never shows is said all the same.
        """
        spoken = dialogue.turns[turn]
        before = dialogue.before(turn)
        reasoning = spoken.message.reasoning
        shown, joins = self.render((*before, spoken.message), dialogue.tools), None
        marked = (*before, replace(spoken.message, reasoning=_WORD))
        if reasoning and _WORD not in self.render(marked, dialogue.tools):  # it cuts reasoning out of contents
            shown, joins = self.render((*before, spoken.message), dialogue.tools, is_joined=False), False
        asked = self.render(before, dialogue.tools, prompt=True, is_joined=joins)
        if not shown.startswith(asked):
            word = Message(role="assistant", content=_WORD)
            asked = self.render((*before, word), dialogue.tools, is_joined=joins).rpartition(_WORD)[0]
        said = shown[_shared(asked, shown) :]
        if reasoning and (joins is False or reasoning.strip() not in said):
            opened = "" if asked.rstrip("\n").endswith("<think>") else "<think>\n"
            said = f"{opened}{reasoning}\n</think>\n\n{said}"
        cut = max((said.rfind(end) for end in self.ends), default=-1)
        end = next((e for e in self.ends if cut >= 0 and said.startswith(e, cut)), "")
        if cut >= 0:
            said = said[:cut]
        elif not self.openers:
            end = str(self.tokenizer.eos_token)
        if self.openers and cut < 0:
            role = spoken.answer[0].role if spoken.answer else "user"
            end = self.openers.get(role, "")
        return said if spoken.is_cut else said + end

    def between(self, dialogue: Dialogue, turn: int, *, is_tame: bool = False) -> str:
        """Return the template's text between turn `turn` and the model's next text, the turn's end included.

        Args:
            dialogue: The conversation.
            turn: A turn that is answered.
            is_tame: Write a harmless letter for every bracket in the environment's texts, whose control tokens are then the
                template's own.

        Raises:
            RefusedError: the template raises, or does not show what this turn says.
        """
        spoken = dialogue.turns[turn]
        answer = tuple(tame(m) for m in spoken.answer) if is_tame else spoken.answer
        before = (
            tuple(tame(m) if m.role != "assistant" else m for m in dialogue.before(turn))
            if is_tame
            else dialogue.before(turn)
        )
        word = f"{_WORD}{turn}Z"
        calls = tuple(replace(c, arguments={**c.arguments, "z": word}) for c in spoken.message.tool_calls)
        said = replace(spoken.message, content=word, tool_calls=calls)
        text = self.render((*before, said, *answer), dialogue.tools, prompt=True)
        _, found, behind = text.rpartition(word)
        if not found:
            raise RefusedError("the template shows nothing of what the turn says")
        starts = [i for i in (behind.find(e) for e in (*self.ends, *self.openers.values())) if i >= 0]
        return behind[min(starts) :] if starts else behind


def tame(message: Message) -> Message:
    """Return `message` with a letter for every bracket and bar in what is not the template's, blanks as they were."""
    name = None if message.name is None else _tame_text(message.name)
    calls = tuple(
        replace(c, name=_tame_text(c.name), arguments={k: _tame_text(v) for k, v in c.arguments.items()})
        for c in message.tool_calls
    )
    content = _tame_text(message.content) if isinstance(message.content, str) else message.content
    return replace(message, content=content, name=name, tool_calls=calls)


def _tame_text(value: Any) -> Any:
    return re.sub(r"[<>\[\]|｜]", "x", value) if isinstance(value, str) else value


def _joined(m: Message) -> Message:
    if not m.reasoning:
        return m
    return replace(m, reasoning=None, content=f"<think>\n{m.reasoning}\n</think>\n\n{m.text}".rstrip("\n"))


def _to_dict(m: Message, *, thinking: bool, arguments_as_json: bool) -> dict[str, Any]:
    parts = () if isinstance(m.content, str) else m.content
    is_text = all(p.get("type", "text") == "text" for p in parts)
    out: dict[str, Any] = {"role": m.role, "content": m.text if is_text else [dict(p) for p in parts]}
    if m.reasoning is not None:
        out["reasoning_content"] = m.reasoning
        if thinking:
            out["thinking"] = m.reasoning
    if m.tool_calls:
        out["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {
                    "name": c.name,
                    "arguments": json.dumps(dict(c.arguments), ensure_ascii=False)
                    if arguments_as_json
                    else dict(c.arguments),
                },
            }
            for c in m.tool_calls
        ]
    if m.role == "tool":
        out |= {"tool_call_id": m.tool_call_id, "name": m.name}
    return out


def _shared(a: str, b: str) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
