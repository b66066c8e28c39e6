"""A chat template under examination: its codec, its oracle, and what can be found out about it by rendering.

    load_subjects(folder, facts, tokenizer)  ->  [Subject(name="qwen3", …), …]
    subject.kinds                            ->  the kinds of dialogue that the template can render
    subject.quiet(…)                         ->  the control tokens that it writes of itself around an answer

What rendering cannot tell (that roles must alternate, which differences are the template's own) is given as facts.
`exactness.py` runs dialogues with a subject and judges them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.cli.markers import add_template_markers, template_markers
from polyturn.core.messages import Message
from polyturn.tokens.codec import Codec
from support.dialogue_runner import Runner
from support.dialogues import KINDS, MARKERS, TOOL_KINDS, Dialogue, dialogue
from support.oracle import Oracle, RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """The control tokens that a template writes of itself around one answer."""

    behind_a_turn: list[int]
    in_a_history: list[int]
    is_plain: bool
    """What is written behind a turn is the end of what is written in a history."""


@dataclass(kw_only=True)
class TemplateCase:
    """One template under examination, with what rendering cannot tell about it."""

    name: str
    codec: Codec
    oracle: Oracle
    markers: tuple[str, ...]
    alternates: bool = False
    looks_back: bool = False
    """What the template writes between two turns depends on more than the turn before: no delta can know it."""
    lossy: tuple[str, ...] = ()
    """The kinds of difference from a full render that are the template's own doing."""
    _quiet: dict[tuple[str, str], Quiet] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """How many dialogues were examined, refused by the template, and equal to or different from a full render, by kind."""

    @classmethod
    def of(cls, name: str, template: str, tokenizer: PreTrainedTokenizerBase, facts: Mapping[str, Any]) -> TemplateCase:
        """Return the template `name` with a copy of `tokenizer` that knows its markers.

        Args:
            name: What it is called in a report.
            template: Jinja text.
            tokenizer: Stays as it is.
            facts: What tests/data/templates/facts.yaml says of it, which explains each entry.
        """
        own, _ = add_template_markers(tokenizer, template)
        return cls(
            name=name,
            codec=Codec(own, chat_template=template),
            oracle=Oracle(own, template, **{k: facts[k] for k in ("ends", "openers", "closes") if k in facts}),
            markers=template_markers(template),
            alternates=bool(facts.get("alternates")),
            looks_back=bool(facts.get("looks_back")),
            lossy=tuple(facts.get("lossy", ())),
        )

    @cached_property
    def runner(self) -> Runner:
        """Runs dialogues with this template."""
        return Runner(self.codec)

    @cached_property
    def inference_runner(self) -> Runner:
        """Runs dialogues whose every turn is sampled from a full render."""
        return Runner(self.codec, renders_history=True)

    def with_tools(self, told: Dialogue) -> Dialogue:
        """Return `told` with its tools' schemas as a run spells them."""
        if not told.tools:
            return told
        return replace(told, tools=tuple(self.runner.context(has_tools=True).tools.schemas.values()))

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template renders a system message."""
        try:
            self.oracle.render([Message(role="system", content="Be brief."), Message(role="user", content="Hi")])
        except RefusedError:
            return False
        return True

    @cached_property
    def shows_results(self) -> bool:
        """Whether the template renders what a tool answers."""
        probe = self.dialogue(0, "tool_calls")
        try:
            shown = self.oracle.render(probe.messages, probe.tools)
        except RefusedError:
            return False
        results = [m.text.strip()[:4] for m in probe.messages if m.role == "tool"]
        return bool(results) and all(r in shown for r in results)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of dialogue that the template can render."""
        return KINDS if self.shows_results else tuple(k for k in KINDS if k not in TOOL_KINDS)

    def quiet(self, what: str, messages: Sequence[Message], tools: Sequence[Any]) -> Quiet:
        """Return the template's own text around `messages`, in which nothing is hostile.

        Raises:
            RefusedError: the template cannot render them.
        """
        asks, said, heard = messages
        blank = [bool(m.text.strip()) for m in messages], [c.name.strip() for c in said.tool_calls] == [""]
        key = (what, str(blank))
        if key not in self._quiet:
            encoder = self.runner.encoder(has_tools=self.shows_results)
            shown = self.oracle.render(messages, tools, prompt=True)
            last = self.codec.stop_token_ids[0]
            behind = encoder.extend([heard], last_id=last, history=[asks, said]).tolist()
            self._quiet[key] = Quiet(
                behind_a_turn=self.oracle.control(behind),
                in_a_history=self.oracle.control(self.oracle.ids(shown)),
                is_plain=shown.endswith(self.oracle.decode(behind)),
            )
        return self._quiet[key]

    def dialogue(self, seed: int, kind: str) -> Dialogue:
        """Return the dialogue of `seed`, hostile ones in this template's own control texts too."""
        markers = tuple(dict.fromkeys((*MARKERS, *self.markers * 2)))
        has_system = None if self.takes_system else False
        has_tools = None if kind in TOOL_KINDS or self.shows_results else False
        return dialogue(seed, kind, markers=markers, alternates=self.alternates, has_system=has_system, has_tools=has_tools)


def load_subjects(
    folder: Path, facts: Mapping[str, Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, *, only: Sequence[str] = ()
) -> list[TemplateCase]:
    """Return the templates of `folder` that `facts` has an entry for, in the order of `facts`."""
    return [
        TemplateCase.of(name, (folder / f"{name}.jinja").read_text(encoding="utf-8"), tokenizer, entry)
        for name, entry in facts.items()
        if not only or name in only
    ]
