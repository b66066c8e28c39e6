"""Splits a turn into reasoning and the rest, by the reasoning tags of a model family.

    <think>2 and 2</think>Four.     ->  ("2 and 2", "Four.")
    2 and 2</think>Four.            ->  ("2 and 2", "Four.")     <think> is in the generation prompt
    <think>2 and                    ->  ("2 and", "")            the completion was cut

The names are those of SGLang's `--reasoning-parser`; several of them have the same tags.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from polyturn.infra.plugins import Registry


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around reasoning; both "" for text in which nothing is reasoning."""

    opens: str
    closes: str


reasoning_formats: Registry[ReasoningFormat] = Registry("reasoning_parsers")

THINK = ReasoningFormat("<think>", "</think>")
for _name in (
    "qwen3", "qwen3-thinking", "deepseek-r1", "deepseek-v3", "glm45", "interns1", "kimi_k2", "mimo", "minimax",
    "minimax-append-think", "nemotron_3", "step3",
):  # fmt: skip
    reasoning_formats.register(_name)(THINK)
reasoning_formats.register("kimi")(ReasoningFormat("◁think▷", "◁/think▷"))
reasoning_formats.register("mistral")(ReasoningFormat("[THINK]", "[/THINK]"))
reasoning_formats.register("gpt-oss")(ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"))
reasoning_formats.register("none")(ReasoningFormat("", ""))


def split_reasoning(
    text: str, tags: ReasoningFormat, *, call_tags: tuple[str, str] = ("", ""), is_open: bool = False
) -> tuple[str | None, str]:
    """Return the reasoning (or None) and the text without it, in linear time.

    A tag inside a call is part of the call. The opening tag may be missing because it is in the generation prompt. If the
    closing tag is missing, everything after the opening tag is reasoning.

    Args:
        text: The text of the model.
        tags: The tags around reasoning.
        call_tags: The opening and the closing tag of a call.
        is_open: Whether the text begins inside reasoning.
    """
    if not tags.opens or not (is_open or tags.opens in text or tags.closes in text):
        return None, text
    tags_found = list(_tags(tags, call_tags).finditer(text))
    is_open = is_open and not text.lstrip().startswith(tags.opens)
    if not tags_found and not is_open:
        return None, text
    open_call, close_call = call_tags
    thoughts: list[str] = []
    kept: list[str] = []
    position = 0
    inside = tags.opens if is_open else ""  # the tag that is open
    for index, tag in enumerate(tags_found):
        if inside == tags.opens:
            if tag[0] == tags.closes:
                thoughts.append(text[position : tag.start()])
                position, inside = tag.end(), ""
        elif tag[0] == tags.closes:
            following = tags_found[index + 1][0] if index + 1 < len(tags_found) else ""
            if not thoughts and not (inside and close_call and following == close_call):  # opened by the generation prompt
                thoughts.append(text[: tag.start()])
                kept.clear()
                position, inside = tag.end(), ""
        elif inside:
            inside = "" if tag[0] == close_call else inside
        elif tag[0] == tags.opens:
            kept.append(text[position : tag.start()])
            position, inside = tag.end(), tags.opens
        elif tag[0] == open_call:
            inside = open_call
    (thoughts if inside == tags.opens else kept).append(text[position:])
    if not thoughts:
        return None, text
    return "\n".join(t.strip("\n") for t in thoughts), "".join(kept).lstrip("\n")


@functools.cache
def _tags(tags: ReasoningFormat, call_tags: tuple[str, str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(t) for t in (*call_tags, tags.opens, tags.closes) if t))
