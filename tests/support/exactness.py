"""Does an episode hold exactly what was sampled, and around it exactly what the template writes? One dialogue at a time.

`examine` runs a dialogue as a real episode, whose model says what the oracle found it would say, and compares every id that
the engine was shown and every token that would train with the oracle's reading. What it returns is empty for a right one.

    examine(subject, dialogue)  ->  [Violation(rule="between", detail="turn 0: held '…', the template writes '…'")]
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyturn.batching.samples import to_samples
from polyturn.core.errors import TemplateError, one_line
from polyturn.core.messages import Message, ToolCall
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.tokens.codec import Codec
from support.dialogue_runner import RecordedDialogue
from support.dialogues import Dialogue
from support.differences import check
from support.oracle import Oracle, RefusedError, tame
from support.template_case import TemplateCase

_NUMBER = re.compile(r"\d+")

RULES = {
    "prompt": "the first prompt is not the ids of the rendered conversation",
    "kept": "the prompt that the engine saw, or what was sampled behind it, is not in the sample as it was (I1)",
    "weights": "ids, weights, logprobs and turns of a sample have different lengths (I2)",
    "owned": "the tokens that train are not the sampled ones, each once (I3, I4)",
    "between": "the text between two turns is not what the template writes there",
    "invented": "between two turns stands text that is nowhere in a render of the conversation",
    "inference": "with full renders, the engine is not shown what the template writes at inference",
    "control": "between two turns stands a control token that the template did not write",
    "full": "the full render is not the ids of the rendered conversation",
    "unreported": "the held ids differ from a full render and the check is silent (I5)",
    "reported": "the check reports a difference where there is none",
    "unexplained": "the check gives a difference a class that this template cannot cause",
    "refused": "the encoder refuses what the template renders",
}
"""What can be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One way in which an episode did not hold what it should."""

    template: str
    rule: str
    """One of `RULES`."""
    kind: str
    seed: int
    detail: str


def examine(subject: TemplateCase, told: Dialogue, *, is_uncanonical: bool = False) -> list[Violation]:
    """Run `told` with the template of `subject` and return the violations.

    Args:
        subject: The template.
        told: The dialogue.
        is_uncanonical: Let the model sample the same text in other tokens than the tokenizer would choose.
    """
    oracle, codec = subject.oracle, subject.codec
    out: list[Violation] = []

    def report(rule: str, detail: str) -> None:
        out.append(Violation(template=subject.name, rule=rule, kind=told.kind, seed=told.seed, detail=detail))

    told = subject.with_tools(told)
    try:
        texts = [oracle.says(told, turn) for turn in range(len(told.turns))]
        betweens = [oracle.between(told, turn) for turn in range(len(told.turns) - 1)]
        shown = oracle.render(told.messages, told.tools)
    except RefusedError:
        subject.counts["refused"] += 1
        return out
    said = [_sampled(codec, text, seed=told.seed if is_uncanonical else None) for text in texts]
    subject.counts["examined"] += 1
    try:
        run = subject.runner.tell(told, said)
    except TemplateError as problem:
        silent = any(
            m.text.strip() and tame(m).text.strip()[:4] not in oracle.between(told, k, is_tame=True)
            for k, t in enumerate(told.turns)
            for m in t.answer
        )
        if silent:
            subject.counts["silent"] += 1
        else:
            report("refused", one_line(problem))
        return out

    # What the engine was shown: the prompt as rendered, then what was sampled, then what the template writes between.
    expected = oracle.ids(oracle.render(told.prompt, told.tools, prompt=True))
    if run.prompts[0] != expected:
        report("prompt", _first(oracle, run.prompts[0], expected))
    differs_between = []
    for turn in range(len(told.turns) - 1):
        before, after = [*run.prompts[turn], *said[turn]], run.prompts[turn + 1]
        if after[: len(before)] != before:
            report("kept", f"turn {turn}: the next prompt does not begin with what was shown and sampled")
            return out
        heard = after[len(before) :]
        texts_ok = [oracle.normal(t) for t in _endings(betweens[turn], said[turn], oracle)]
        own = oracle.control(oracle.ids(oracle.between(told, turn, is_tame=True)))
        found = oracle.control(heard)
        if oracle.decode(heard) not in texts_ok:
            got = oracle.decode(heard)
            differs_between.append((turn, got, texts_ok[-1]))
            lines = [line for line in re.split("|".join(map(re.escape, (*oracle.markers, "\n"))), got) if len(line) >= 12]
            written = _NUMBER.sub("0", oracle.normal(betweens[turn] + "\n" + shown))  # a template may count its messages
            for line in lines:
                if _NUMBER.sub("0", line) not in written:
                    report("invented", f"turn {turn}: {line!r} stands nowhere in what the template writes")
            # The template looks further back than the turn before: what it writes around harmless text is the measure.
            history = (*told.before(turn), told.turns[turn].message)
            quiet = run.encoder.extend([tame(m) for m in told.turns[turn].answer], last_id=before[-1], history=history)
            own = oracle.control(quiet.tolist())
        if found not in (own, own[1:]):
            report("control", f"turn {turn}: {oracle.decode(found)!r}, the template writes {oracle.decode(own)!r}")
    held = [*run.prompts[-1], *said[-1]]
    out += _samples(subject, told, run, said)
    out += _against_full(subject, told, run, held, shown, differs_between)
    return out


def examine_inference(subject: TemplateCase, told: Dialogue) -> list[Violation]:
    """Run `told` with every turn sampled from a full render, and return the violations.

    The engine must be shown what the template writes at inference, to the letter, and every sampled token must train once,
    in the context that it was sampled in, however many segments the history's changes make.
    """
    oracle, out = subject.oracle, []

    def report(rule: str, detail: str) -> None:
        out.append(Violation(template=subject.name, rule=rule, kind=told.kind, seed=told.seed, detail=detail))

    told = subject.with_tools(told)
    try:
        texts = [oracle.says(told, turn) for turn in range(len(told.turns))]
        shown = [
            [oracle.render(told.before(turn), told.tools, prompt=True, is_joined=joined) for joined in (False, True)]
            for turn in range(len(told.turns))
        ]
    except RefusedError:
        return out
    said = [subject.codec.encode(text).tolist() for text in texts]
    try:
        run = subject.inference_runner.tell(told, said)
    except TemplateError as problem:
        report("refused", one_line(problem))
        return out
    subject.counts["at inference"] += 1
    for turn, prompt in enumerate(run.prompts):
        fitting = [text for text in shown[turn] if oracle.decode(prompt) == oracle.normal(text)]
        if not fitting:
            report("inference", f"turn {turn}: shown {oracle.decode(prompt)!r}, the template writes {shown[turn][0]!r}")
            continue
        is_hostile = any(oracle.is_hostile(m.text) for t in told.turns[:turn] for m in t.answer)
        if not is_hostile and oracle.control(prompt) != oracle.control(oracle.ids(fitting[0])):
            report("control", f"turn {turn}: {oracle.decode(oracle.control(prompt))!r}")
    subject.counts["segments"] += len(run.trajectory.segments)
    return out + _samples(subject, told, run, said)


def examine_text(subject: TemplateCase, text: str) -> list[Violation]:
    """Let every field that an environment writes say `text`, and return the violations by its ids.

    A user's reply, a tool's result, a result's name, and parts of a content; in the turn after a completion and in a
    history that is rendered again.
    """
    oracle, encoder = subject.oracle, subject.runner.encoder(has_tools=subject.shows_results)
    base = subject.dialogue(0, "tool_calls" if subject.shows_results else "plain")
    out: list[Violation] = []

    def report(rule: str, what: str, detail: str) -> None:
        out.append(Violation(template=subject.name, rule=rule, kind=what, seed=0, detail=f"{what} {text!r}: {detail}"))

    asks, last = Message(role="user", content="Hi"), subject.codec.stop_token_ids[0]
    plain = Message(role="assistant", content="So.")
    heard = {
        "a user's reply": (plain, Message(role="user", content=text)),
        "a part of a reply": (plain, Message(role="user", content=({"type": "text", "text": text},))),
    }
    if subject.shows_results:
        call = ToolCall(id="call00000", name="look_up", arguments={"query": "x"})
        calling = Message(role="assistant", content="", tool_calls=(call,))
        result = Message(role="tool", content="4", tool_call_id=call.id, name=call.name)
        named = replace(calling, tool_calls=(replace(call, name=text),))
        asked = replace(calling, tool_calls=(replace(call, arguments={"query": text}),))
        heard |= {
            "a tool's result": (calling, replace(result, content=text)),
            "a tool's name": (named, replace(result, name=text)),
            "a call's argument": (asked, result),
        }
    for what, (said, message) in heard.items():
        try:
            shown = oracle.render([asks, said, message], base.tools, prompt=True)
            quiet = subject.quiet(what, [asks, tame(said), tame(replace(message, content=message.text))], base.tools)
        except RefusedError:
            continue
        ids = encoder.extend([message], last_id=last, history=[asks, said]).tolist()
        if oracle.control(ids) != quiet.behind_a_turn:
            report("control", what, f"behind a turn: {oracle.decode(oracle.control(ids))!r}")
        if quiet.is_plain and not oracle.normal(shown).endswith(oracle.decode(ids)):
            report("between", what, f"behind a turn: {oracle.decode(ids)!r}, written {shown!r}")
        ids = encoder.start([asks, said, message]).tolist()
        if oracle.control(ids) != quiet.in_a_history:
            report("control", what, f"in a history: {oracle.decode(oracle.control(ids))!r}")
        if oracle.decode(ids) != oracle.normal(shown):
            report("full", what, f"in a history: {oracle.decode(ids)!r}, written {shown!r}")
    return out


def _samples(subject: TemplateCase, told: Dialogue, run: RecordedDialogue, said: Sequence[Sequence[int]]) -> list[Violation]:
    """Check what would train: each sampled token once, with a weight, in the context that it was sampled in."""
    out = []

    def report(rule: str, detail: str) -> None:
        out.append(Violation(template=subject.name, rule=rule, kind=told.kind, seed=told.seed, detail=detail))

    group = TrajectoryGroup(id="g", task=run.trajectory.task, trajectories=(run.trajectory,))
    samples = to_samples(group, temperature=1.0)
    owned: list[tuple[int, int]] = []
    for sample in samples:
        lengths = {len(sample.token_ids), len(sample.loss_weights), len(sample.turn_ids)}
        if sample.rollout_logprobs is not None:
            lengths.add(len(sample.rollout_logprobs))
        if len(lengths) > 1:
            report("weights", f"arrays of different lengths {sorted(lengths)}")
        for position in np.flatnonzero(sample.loss_weights).tolist():
            owned.append((int(sample.turn_ids[position]), int(sample.token_ids[position])))
    owned.sort(key=lambda pair: pair[0])  # of one turn they stay in order, wherever its segment stands
    if owned != [(turn, int(i)) for turn, ids in enumerate(said) for i in ids]:
        report("owned", "the tokens with a weight are not the sampled ones, each once and in order")
    for turn, ids in enumerate(said):
        seen = [*run.prompts[turn], *ids]
        if ids and not any(s.token_ids[: len(seen)].tolist() == seen for s in samples):
            report("kept", f"turn {turn}: no sample begins with what the engine saw and sampled")
    return out


def _against_full(
    subject: TemplateCase,
    told: Dialogue,
    run: RecordedDialogue,
    held: list[int],
    shown: str,
    differs_between: Sequence[tuple[int, str, str]],
) -> list[Violation]:
    """Check that a difference from a full render is reported and explained, and that nothing else is."""
    oracle, codec, out = subject.oracle, subject.codec, []

    def report(rule: str, detail: str) -> None:
        out.append(Violation(template=subject.name, rule=rule, kind=told.kind, seed=told.seed, detail=detail))

    full = run.encoder.full(told.messages)
    is_hostile = any(oracle.is_hostile(m.text) for t in told.turns for m in t.answer)
    if not is_hostile and full.tolist() != oracle.ids(shown):
        report("full", _first(oracle, full.tolist(), oracle.ids(shown)))
    if is_hostile and oracle.decode(full.tolist()) != oracle.normal(shown):
        report("full", f"text of the full render: {oracle.decode(full.tolist())!r}, not {shown!r}")
    found = check(held, full, codec)
    subject.counts["equal" if found is None else found.kind] += 1
    whole = full.tolist()
    n = min(len(held), len(whole))
    is_equal = held[:n] == whole[:n] and _is_ending(oracle, held[n:]) and _is_ending(oracle, whole[n:])
    if is_equal and found is not None:
        report("reported", f"a difference where there is none: {found}")
    if not is_equal and found is None and not _differs_in_last_ending(oracle, held, whole):
        report("unreported", _first(oracle, held, whole))
    if found is not None and found.kind not in (*subject.lossy, "merge") and not is_equal:
        report("unexplained", str(found))
    if not subject.looks_back or found is None:
        for turn, got, expected in differs_between:
            report("between", f"turn {turn}: held {got!r}, the template writes {expected!r}")
    return out


def _sampled(codec: Codec, text: str, *, seed: int | None) -> list[int]:
    """Return ids that say `text`: the tokenizer's, or with a seed others, cut where it would not cut."""
    if seed is None:
        return codec.encode(text).tolist()
    draw = random.Random(seed)
    pieces: list[str] = []
    for piece in re.split(
        "(" + "|".join(map(re.escape, sorted(codec.control_tokens.values(), key=len, reverse=True))) + ")", text
    ):
        if piece in codec.control_tokens.values() or len(piece) < 2:
            pieces.append(piece)
        else:
            at = draw.randint(1, len(piece) - 1)
            pieces += [piece[:at], piece[at:]]
    return [i for p in pieces for i in codec.encode(p).tolist()]


def _endings(between: str, said: Sequence[int], oracle: Oracle) -> list[str]:
    """Return the texts that may follow a completion: `between` without the end or the opener that the model has written."""
    last = oracle.decode(said[-1:]) if said else ""
    for end in (*oracle.ends, *oracle.openers.values()):
        if last in (*oracle.ends, *oracle.openers.values(), oracle.tokenizer.eos_token) and between.startswith(end):
            return [between[len(end) :]]
    return [between]


def _is_ending(oracle: Oracle, ids: Sequence[int]) -> bool:
    text = oracle.decode(ids)
    for end in (*oracle.ends, *oracle.closes, *oracle.openers.values(), oracle.tokenizer.eos_token):
        text = text.replace(end, "")
    return not text.strip()


def _differs_in_last_ending(oracle: Oracle, held: Sequence[int], full: Sequence[int]) -> bool:
    n = next((i for i, (a, b) in enumerate(zip(held, full, strict=False)) if a != b), min(len(held), len(full)))
    return _is_ending(oracle, held[n:]) and _is_ending(oracle, full[n:])


def _first(oracle: Oracle, got: Sequence[int], expected: Sequence[int]) -> str:
    n = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    around = slice(max(n - 8, 0), n + 12)
    return f"token {n}: {oracle.decode(got[around])!r}, expected {oracle.decode(expected[around])!r}"
