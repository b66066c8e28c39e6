"""Only an owner's text becomes control tokens: any message of anybody else, through any operations of a scheduler.

Each sequence is done twice, with hostile texts and with the same texts made harmless: what the model is shown must hold the
same control tokens, on templates of every family and on tokenizers that find control tokens in different ways.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from polyturn.cli.markers import template_markers
from polyturn.core.errors import SchedulerError, TemplateError
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, Origin, ToolCall, with_origin
from polyturn.rollout.edits import shorten
from polyturn.rollout.events import read_events, replay, write_events
from polyturn.rollout.history import History
from polyturn.rollout.history_edits import go_on, rewrite
from polyturn.rollout.limits import ContextPolicy
from polyturn.rollout.scheduler import Reply
from polyturn.rollout.stop_strings import Stopped
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.frames import ROLES
from polyturn.tokens.parsers import PlainParser
from support.tokenizers import TOKENIZERS, tokenizer_of

WRITTEN = Path(__file__).parents[1] / "data" / "templates"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
NAMES = [
    n for n in yaml.safe_load((WRITTEN / "facts.yaml").read_text(encoding="utf-8"))["hand_written"] if n != "plain_text"
]
PUBLISHED = sorted(path.stem for path in SHARED.glob("*.jinja"))


@functools.cache
def codec_of(kind: str, path: Path) -> Codec:
    """Return a tokenizer of this kind that has a token for every marker of the template."""
    template = path.read_text(encoding="utf-8")
    return Codec(tokenizer_of(kind, markers=template_markers(template)), chat_template=template)


def harmless(text: str) -> str:
    """Return a text of the same shape that can spell nothing, whatever stands beside it."""
    return re.sub(r"\S", "é", text)


@st.composite
def texts(draw: st.DrawFn, control: list[str]) -> str:
    """Control texts, whole and cut in two, in other words, in their full-width form."""
    one = st.sampled_from(control)
    pieces = st.one_of(
        one,
        one.map(lambda c: c[: len(c) // 2]),
        one.map(lambda c: c[len(c) // 2 :]),
        one.map(lambda c: "".join(chr(ord(x) + 0xFEE0) if "!" <= x <= "~" else x for x in c)),
        st.sampled_from(["", " ", "\n", "four", "{", '"', "<", "|>", "\\"]),
    )
    return "".join(draw(st.lists(pieces, max_size=4)))


@st.composite
def messages(draw: st.DrawFn, control: list[str], *, role: str | None = None) -> dict[str, Any]:
    """The fields of a message that anybody but the owner wrote."""
    text = texts(control)
    parts = st.lists(
        st.one_of(
            st.fixed_dictionaries({"type": st.just("text"), "text": text}),
            st.fixed_dictionaries(
                {
                    "type": st.sampled_from(["refusal", "json", "reasoning"]),
                    "text": text,
                    "refusal": text,
                    "data": st.lists(text, max_size=2),
                }
            ),
        ),
        max_size=2,
    ).map(tuple)
    call = st.builds(
        ToolCall,
        id=st.sampled_from(["call00000", "call00001"]),
        name=text.map("f".__add__),
        arguments=st.dictionaries(text, st.one_of(text, st.lists(text, max_size=2)), max_size=2).filter(
            lambda given: len({harmless(key) for key in given}) == len(given)  # else they would be one key in the other run
        ),
    )
    inside = st.sampled_from(control).map(lambda c: re.sub(r"^\W+|\W+$", "", c))
    roles = st.one_of(st.sampled_from(["user", "user", "tool", "assistant", "system", "critic " + control[0]]), inside)
    chosen = role or draw(roles)
    is_turn = chosen == "assistant"
    return {
        "role": chosen,
        "content": draw(st.one_of(text, text, parts)),
        "tool_calls": tuple(draw(st.lists(call, max_size=2))) if is_turn else (),
        "tool_call_id": "call00000" if chosen == "tool" else None,
        "name": draw(st.one_of(st.none(), text)) if chosen == "tool" else None,
        "reasoning": draw(st.one_of(st.none(), text)) if is_turn else None,
        "origin": draw(st.sampled_from([Origin.MODEL, Origin.ENVIRONMENT, None])),
    }


def message(fields: dict[str, Any], change: Callable[[str], str]) -> Message:
    def data(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {change(k): data(v) for k, v in value.items()}
        return [data(v) for v in value]

    content = fields["content"]
    if not isinstance(content, str):
        content = tuple({k: v if k == "type" else data(v) for k, v in part.items()} for part in content)
    calls = tuple(ToolCall(id=c.id, name=change(c.name), arguments=data(dict(c.arguments))) for c in fields["tool_calls"])
    role = fields["role"] if fields["role"] in ROLES else change(fields["role"])
    rest = {k: None if fields[k] is None else change(fields[k]) for k in ("name", "reasoning")}
    said = content if not isinstance(content, str) else change(content)
    return Message(**{**fields, **rest, "role": role, "content": said, "tool_calls": calls})


OPERATIONS = ("answer", "answer", "append", "replace", "fork", "go on", "prefill", "compact", "journal")


@st.composite
def sequences(draw: st.DrawFn, control: list[str]) -> list[tuple[str, Any]]:
    """What a scheduler does behind each of a few turns, and what the model says in ordinary tokens."""
    found: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        found.append(("say", draw(texts(control))))
        kind = draw(st.sampled_from(OPERATIONS))
        role = "assistant" if kind == "prefill" else None
        found.append(
            (kind, (draw(messages(control, role=role)), draw(texts(control)), draw(messages(control, role="user"))))
        )
    return found


def shown(
    codec: Codec, encoder: DeltaEncoder, steps: list[tuple[str, Any]], change: Callable[[str], str]
) -> list[list[int]]:
    """Return the control tokens of every prompt that the model is shown while a scheduler takes these steps."""
    prompt = [Message(role="user", content="Hi", origin=Origin.OWNER)]
    line, found = History(encoder, PlainParser(), prompt), list[list[int]]()
    line.events = []

    def show() -> None:
        line.append_prompt(line.next_prompt())
        found.append(codec.control_in(line.context).tolist())

    show()
    for index, (kind, what) in enumerate(steps):
        if kind == "say":
            ids = [*codec.encode_plain(change(what)).tolist(), codec.stop_token_ids[0]]
            said = Completion(token_ids=ids, finish_reason=FinishReason.STOP, logprobs=[-1.0] * len(ids))
            read = line.read_completion(said.token_ids, turn=index)
            turn = line.add_turn(*read, Stopped(said, None, 0), index=index, cut_by=StopReason.LENGTH)
            continue
        first, text, second = message(what[0], change), change(what[1]), message(what[2], change)
        history = line
        if kind == "answer":
            line.record(turn, Reply(messages=(first,)))
        elif kind == "append":
            rewrite(history, history.typed([*history.openai, second.to_openai()]))
        elif kind == "replace":
            rewrite(history, history.typed([history.messages[0], first.to_openai(), second]))
        elif kind == "fork":
            line = line.fork(messages=[*history.messages, second])
        elif kind == "go on":
            go_on(line, text, keep=turn.text[: len(turn.text) // 2], is_trusted=False)
        elif kind == "prefill":
            said_before = dataclasses.replace(first, content=first.text or "so", tool_calls=(), reasoning=None)
            rewrite(history, [history.messages[0], said_before], goes_on=True)
        elif kind == "compact":
            held = [*history.messages, *with_origin((second,), Origin.ENVIRONMENT)]
            shorter = shorten(held, policy=ContextPolicy.COMPACT, num_prompt=1, fits=lambda kept: True)
            rewrite(history, shorter or held)
        else:
            line.record(turn, Reply(messages=(second,)))
            line = line if line.events is None else _journaled(line, encoder, prompt)
        show()
    return found


def _journaled(history: History, encoder: DeltaEncoder, prompt: list[Message]) -> History:
    """Return the history that a journal of this one gives."""
    assert history.events is not None
    events = json.loads(json.dumps(write_events(history.events)))
    other = History(encoder, PlainParser(), prompt)
    replay(other, read_events(events))
    other.events = history.events
    assert other.messages == history.messages and np.array_equal(other.context, history.context)
    return other


def check(kind: str, path: Path, data: st.DataObject) -> None:
    codec = codec_of(kind, path)
    control = sorted(codec.control_tokens.values())
    steps = data.draw(sequences(control))
    name = data.draw(texts(control))

    def encoder(change: Callable[[str], str]) -> DeltaEncoder:
        parameters = {"type": "object", "properties": {change(name): {"type": "string", "enum": [change(name)]}}}
        tool = {"name": "probe", "description": change(name), "parameters": parameters}
        return DeltaEncoder(codec, tools=[{"type": "function", "function": tool}], foreign_tools=["probe"])

    runs = []
    for change in (str, harmless):
        try:
            runs.append(shown(codec, encoder(change), steps, change))
        except (TemplateError, SchedulerError):
            assume(False)
    assert runs[0] == runs[1]


def pairs(templates: Sequence[str]) -> list[ParameterSet]:
    """Return every template with every kind of tokenizer; a short form has each template once, the kinds in turn."""
    kinds = list(TOKENIZERS)
    return [
        pytest.param(kind, template, marks=() if (row - column) % len(kinds) == 0 else pytest.mark.slow)
        for row, template in enumerate(templates)
        for column, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("kind", "template"), pairs(NAMES))
@given(data=st.data())
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
def test_only_owners_write_control_tokens(template: str, kind: str, data: st.DataObject) -> None:
    check(kind, WRITTEN / f"{template}.jinja", data)


@pytest.mark.skipif(not PUBLISHED, reason="needs the templates in ../shared/data")
@pytest.mark.parametrize(("kind", "template"), pairs(PUBLISHED))
@given(data=st.data())
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
def test_only_owners_write_control_tokens_of_published_templates(template: str, kind: str, data: st.DataObject) -> None:
    check(kind, SHARED / f"{template}.jinja", data)
