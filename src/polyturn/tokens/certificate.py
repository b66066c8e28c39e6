"""The certificate: a chat template's properties, the way of growing a history that is safe with it, and the proof by trial.

    append    sampled ids stay and what follows is encoded alone: exact as long as the template writes new messages the same
              way whatever came before them, which every trial checks against a full render
    segment   every turn is sampled from a full render, and a history that changes opens a new segment

The cheaper one that holds is chosen. It costs well under a second, so every training run asks for it before it starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from polyturn.core.errors import TemplateError, one_line
from polyturn.core.messages import Message
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.markers import template_markers
from polyturn.tokens.parsers import detect
from polyturn.tokens.properties import PROBE_TOOL, TemplateProperties, find_properties
from polyturn.tokens.templates import NO_TOOLS
from polyturn.tokens.trials import KINDS, READ_WORDS, TOOL_KINDS, Trial, trials

_MAX_SENTENCES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport(TemplateProperties):
    """The properties of a chat template, and the way in which histories grow with it."""

    strategy: str
    """"append", "segment", or "none" where no way is safe."""
    reason: str
    """One sentence on why this strategy."""
    inference_strategy: str
    """The strategy when the model is to see, at every turn, what the template renders at inference."""
    violations: tuple[str, ...]
    """Conversations in which the chosen strategy gives other tokens than the template; empty in a certificate that holds."""
    findings: tuple[str, ...]
    """The trials' findings that decided the strategy, or that a user of the template should know."""
    control_tokens_from_text: int
    """Number of control tokens that the trials' hostile texts were able to write; 0 in a certificate that holds."""
    num_dialogues: int
    seconds: float
    parser: str
    """Name of the parser that reads the tool calls which the template writes; "none" if there is none."""
    stop_tokens: tuple[str, ...]
    """The tokens that end a completion, as text."""
    error: str | None
    """Why a run cannot use this template; None if it can."""

    def require(self) -> None:
        """Raise TemplateError if the template cannot be used."""
        if self.error is not None:
            raise TemplateError(self.error)

    @property
    def properties(self) -> dict[str, bool | None]:
        """The template's properties, by name."""
        return {f.name: getattr(self, f.name) for f in fields(TemplateProperties)}


@dataclass(slots=True)
class _Tally:
    """The findings of the trials."""

    append: list[str] = field(default_factory=list)
    """Conversations in which incremental encoding differs from a full render."""
    unrendered: dict[str, str] = field(default_factory=dict)
    """kind -> why the template renders no trial of it."""
    leaks: list[str] = field(default_factory=list)
    num_leaked: int = 0
    num_dialogues: int = 0
    rendered: set[str] = field(default_factory=set)


def certify(
    codec: Codec, *, tools: Sequence[Mapping[str, Any]] = (), num_random: int = 108, seed: int = 0
) -> TemplateReport:
    """Try the template with dialogues of every kind and report its behaviour and how histories grow with it.

    Args:
        codec: The tokenizer and template to look at.
        tools: The run's tool schemas; a template that cannot render them is then an error.
        num_random: How many random dialogues follow the canned ones.
        seed: Decides the random ones.
    """
    began = time.monotonic()
    properties = find_properties(codec, tools=tools)
    error = _problem(codec, properties, num_tools=len(tools))
    tally = _Tally()
    if error is None:
        _try_all(codec, properties, tally, tools=tools, num_random=num_random, seed=seed)
        error = _failed(tally, has_tools=bool(tools))
    strategy, reason = _decide(tally, properties, error)
    violations = [f"hostile text writes control tokens: {s}" for s in tally.leaks]
    findings = list(dict.fromkeys(tally.append))
    missing = [] if error is not None else _missing_markers(codec)
    if missing:
        findings.append(f"the template writes {' '.join(missing)}, which this tokenizer has no single tokens for")
    findings += [f"{kind}: {why}" for kind, why in tally.unrendered.items() if kind not in tally.rendered]
    by_inference = "append" if strategy == "append" and properties.is_prefix_preserving else "segment"
    return TemplateReport(
        **{f.name: getattr(properties, f.name) for f in fields(TemplateProperties)},
        strategy=strategy,
        reason=reason,
        inference_strategy="none" if strategy == "none" else by_inference,
        violations=tuple(dict.fromkeys(violations))[:_MAX_SENTENCES],
        findings=tuple(findings)[:_MAX_SENTENCES],
        control_tokens_from_text=tally.num_leaked,
        num_dialogues=tally.num_dialogues,
        seconds=time.monotonic() - began,
        parser="none" if error is not None else detect(codec),
        stop_tokens=tuple(codec.decode([i]) for i in codec.stop_token_ids) if codec.chat_template is not None else (),
        error=error,
    )


def _try_all(
    codec: Codec,
    properties: TemplateProperties,
    tally: _Tally,
    *,
    tools: Sequence[Mapping[str, Any]],
    num_random: int,
    seed: int,
) -> None:
    """Grow a dialogue of every kind that the template can render, and count in `tally` what came of each."""
    offered = (tuple(tools) or (PROBE_TOOL,)) if properties.renders_results else ()
    kinds = [k for k in KINDS if offered or k not in TOOL_KINDS]
    if codec.read_words:
        kinds.append(READ_WORDS)
    function = offered[0].get("function", offered[0]) if offered else {}
    encoders = {
        True: DeltaEncoder(codec, tools=offered if properties.renders_tools else ()),
        False: DeltaEncoder(codec, tools=tools if properties.renders_tools else ()),
    }
    for trial in trials(
        num_random,
        seed=seed,
        kinds=kinds,
        takes_system=properties.takes_system,
        control=sorted(codec.control_tokens.values()),
        tool_name=str(function.get("name", "probe")),
        read_words=codec.read_words,
    ):
        tally.num_dialogues += 1
        try:
            _try(trial, encoders[trial.has_tools], tally)
        except TemplateError as problem:
            tally.unrendered.setdefault(trial.kind, one_line(problem))


def _try(trial: Trial, encoder: DeltaEncoder, tally: _Tally) -> None:
    """Grow one dialogue, and compare each addition with a full render of what it was added to.

    Raises:
        TemplateError: the template cannot render the dialogue.
    """
    codec = encoder.codec
    for index, turn in enumerate(trial.turns):
        before = trial.before(index)
        full = codec.template.try_render([*before, *turn.answer], tools=encoder.tools, add_generation_prompt=True)
        try:
            written = encoder.delta_text(turn.answer, history=before)
            ids = encoder.extend(turn.answer, last_id=None, history=before)
        except TemplateError as problem:
            if full is None:
                raise
            tally.append.append(f"{trial.kind}: a reply cannot be encoded alone: {one_line(problem)}")
            continue
        tally.rendered.add(trial.kind)
        if full is not None and not full.endswith(written):
            tail = full[-len(written) :]
            tally.append.append(
                f"{trial.kind}: behind this history the template writes a reply as {tail[:60]!r}, alone as {written[:60]!r}"
            )
        if codec.decode(ids) != _as_text(turn.answer, written, before, encoder):
            tally.append.append(f"{trial.kind}: the encoded reply reads {codec.decode(ids)[:60]!r}, not {written[:60]!r}")
        ended = encoder.extend(turn.answer, last_id=codec.stop_token_ids[0], history=before)
        if not np.array_equal(ended, ids[len(ids) - len(ended) :]):
            tally.append.append(f"{trial.kind}: a reply to a turn that was not cut reads {codec.decode(ended)[:60]!r}")
    if trial.kind == "hostile":
        _count_leaks(trial, encoder, tally)


def _as_text(answer: Sequence[Message], written: str, before: Sequence[Message], encoder: DeltaEncoder) -> str:
    """Return a reply's text in tokens, with the control tokens that it mentions as plain text.

    Words stand in for it, because a control token may take or add the white space around it, and text does not.
    """
    codec, hidden = encoder.codec, list[str]()

    def word(hidden_word: str) -> str:
        hidden.append(hidden_word)
        return f"Zq{len(hidden)}hiddenZ"

    def hide(text: str) -> str:
        return codec.replace_control(text, word, barred=codec.control_tokens)

    messages_hidden = [replace(m, content=hide(m.text), name=None if m.name is None else hide(m.name)) for m in answer]
    if not hidden:
        return codec.decode(codec.encode_pieces([(written, False)], last_id=encoder.inside_text))
    text = codec.decode(encoder.extend(messages_hidden, last_id=None, history=before))
    for number, hidden_word in enumerate(hidden, start=1):
        text = text.replace(f"Zq{number}hiddenZ", hidden_word)
    return text


def _count_leaks(trial: Trial, encoder: DeltaEncoder, tally: _Tally) -> None:
    """Count the control tokens that hostile text adds to replies, to a whole history, and the delimiters to a prompt."""
    codec = encoder.codec
    tame = trial.changed(lambda text: "tame" if codec.has_control(text) else text)
    delimiters = np.array(sorted(codec.delimiters), np.int32)
    pairs = []
    for index, (turn, quiet) in enumerate(zip(trial.turns, tame.turns, strict=True)):
        before = trial.before(index)
        pairs.append(tuple(codec.control_in(encoder.extend(t.answer, last_id=None, history=before)) for t in (turn, quiet)))
    last = len(trial.turns) - 1
    whole = [codec.control_in(encoder.full([*t.before(last), *t.turns[last].answer])) for t in (trial, tame)]
    prompts = [codec.control_in(encoder.start(t.prompt)) for t in (trial, tame)]
    pairs += [tuple(whole), tuple(p[np.isin(p, delimiters)] for p in prompts)]
    for loud, silent in pairs:
        if not np.array_equal(loud, silent):
            tally.num_leaked += max(1, abs(len(loud) - len(silent)))
            tally.leaks.append(f"{codec.decode(loud)[:80]!r} for {codec.decode(silent)[:80]!r}")


def _problem(codec: Codec, properties: TemplateProperties, *, num_tools: int) -> str | None:
    """Return why no dialogue can be tried; None if one can."""
    if codec.chat_template is None:
        return (
            f"the tokenizer {codec.tokenizer.name_or_path!r} has no chat template; give one as `chat_template` "
            "(model.chat_template in a config, --template on the command line)"
        )
    try:
        text = codec.template.render([Message(role="user", content="Hi"), Message(role="assistant", content="Zq0answerZ")])
    except TemplateError as problem:
        return str(problem)
    if "Zq0answerZ" not in text:
        return "the chat template leaves out what an assistant message says; use the template that belongs to the model"
    if num_tools and not properties.renders_tools:
        return (
            f"the run has {num_tools} tool(s), and {NO_TOOLS}, or use a scheduler that writes the tools into the prompt, "
            "such as examples/schedulers/react.py"
        )
    if num_tools and not properties.renders_results:
        return (
            f"the run has {num_tools} tool(s) and the chat template renders no tool results; use a template that renders "
            "what a tool message says, or no tools"
        )
    return None


def _missing_markers(codec: Codec) -> list[str]:
    """Return the markers of the form <|…|> that the template writes and the tokenizer cuts into pieces."""
    known = set(codec.control_tokens.values())
    return [m for m in template_markers(codec.chat_template or "") if m[1:2] in "|｜" and m not in known]


def _failed(tally: _Tally, *, has_tools: bool) -> str | None:
    """Return which kind of dialogue a run cannot do without and cannot have; None if there is none."""
    needed = ("plain", *(("tool calls",) if has_tools else ()))
    for kind in needed:
        if kind in tally.unrendered and kind not in tally.rendered:
            return f"no dialogue with {kind} can be encoded: {tally.unrendered[kind]}"
    return None


def _decide(tally: _Tally, properties: TemplateProperties, error: str | None) -> tuple[str, str]:
    if error is not None:
        return "none", error
    if tally.append:
        return "segment", (
            "new messages are not written the same way behind every history, so each turn is sampled from a full render and "
            f"a history that changes opens a new segment ({tally.append[0]})"
        )
    return "append", "; ".join(
        ["sampled ids stay and new messages are appended as the template writes them", *_notes(properties)]
    )


def _notes(properties: TemplateProperties) -> Iterator[str]:
    if not properties.has_reasoning_field:
        yield "the template has no field for reasoning, which is shown in the content, in its tags"
    if properties.strips_reasoning:
        yield "a full render leaves past reasoning out, the held ids keep it"
    if properties.renders_results and not properties.renders_calls:
        yield "a full render leaves past tool calls out, the held ids keep them"
    if properties.generation_prompt_is_header is False:
        yield "a full render opens past turns differently, the held ids keep the generation prompt"
