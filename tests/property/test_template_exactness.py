"""I1 to I5 over many templates: what an episode holds is what was sampled and, around it, what the template writes.

The oracle renders and encodes whole conversations with the tokenizer's own functions; the episode under test is a real one.
Hand-written templates always, the published ones with Qwen's vocabulary where they lie. The long form, a thousand dialogues
for each published template and ten thousand hostile texts, is benchmarks/token_exactness.py.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyturn.core.errors import TemplateError
from polyturn.core.messages import Message
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from support.cases import each
from support.dialogues import KINDS, hostile_text
from support.exactness import examine, examine_inference, examine_text
from support.oracle import tame
from support.refusals import refuses
from support.template_case import TemplateCase, load_subjects

WRITTEN = Path(__file__).parents[1] / "data" / "templates"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
FACTS: dict[str, Any] = yaml.safe_load((WRITTEN / "facts.yaml").read_text(encoding="utf-8"))
NUM_DIALOGUES = 2 * len(KINDS)
NUM_TEXTS = 12
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs the tokenizers and templates in ../shared/data")


@functools.cache
def written(name: str) -> TemplateCase:
    return load_subjects(WRITTEN, FACTS["hand_written"], tiny_tokenizer(1024), only=[name])[0]


@functools.cache
def qwen_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(SHARED / "tokenizers" / "qwen2"))


@functools.cache
def published(name: str) -> TemplateCase:
    return load_subjects(SHARED / "chat_templates", FACTS["published"], qwen_tokenizer(), only=[name])[0]


def violations(subject: TemplateCase, num: int) -> list[str]:
    """Examine `num` dialogues, every third of them with tokens that the tokenizer would not choose."""
    found = []
    for seed in range(num):
        told = subject.dialogue(seed, subject.kinds[seed % len(subject.kinds)])
        found += examine(subject, told, is_uncanonical=seed % 3 == 2)
    return [f"{v.rule} ({v.kind}, seed {v.seed}): {v.detail}" for v in found]


def inference_violations(subject: TemplateCase, num: int) -> list[str]:
    told = [subject.dialogue(seed, subject.kinds[seed % len(subject.kinds)]) for seed in range(num)]
    return [f"{v.rule} ({v.kind}, seed {v.seed}): {v.detail}" for t in told for v in examine_inference(subject, t)]


def prompt_violations(subject: TemplateCase) -> list[str]:
    """Let a prompt spell what ends and opens turns, in a user's and a system's message and a tool's description."""
    oracle, out = subject.oracle, []
    tools = subject.dialogue(0, "tool_calls").tools[:1] if subject.shows_results else ()
    for end in (*oracle.ends, *oracle.openers.values()):
        text = f"a {end} b {end}\nuser"
        described = [{**t, "function": {**t["function"], "description": text}} for t in tools]
        roles = ("user", "system", "user") if subject.takes_system else ("user",)
        said = {role: text if i == len(roles) - 1 else "Hi" for i, role in enumerate(roles)}
        messages = [Message(role=role, content=said[role]) for role in sorted(said)]
        shown = oracle.render(messages, described, prompt=True)
        own = oracle.render([tame(m) for m in messages], tools, prompt=True)
        ids = DeltaEncoder(subject.codec, tools=described).start(messages).tolist()
        if oracle.control(ids) != oracle.control(oracle.ids(own)) or oracle.decode(ids) != oracle.normal(shown):
            out.append(f"{end}: {oracle.decode(ids)!r}, with control {oracle.decode(oracle.control(ids))!r}")
    return out


def hostile_violations(subject: TemplateCase, num: int) -> list[str]:
    draw = random.Random(0)
    texts = [hostile_text(draw, (*subject.markers, "<|im_end|>", "</think>")) for _ in range(num)]
    return [v.detail for text in texts for v in examine_text(subject, text)]


def subjects() -> list[Any]:
    """Return (how it is loaded, name) of the templates; the published ones need the files beside the checkout."""
    found = each(3, [(written, name) for name in FACTS["hand_written"]])
    for case in each(3, [(published, name) for name in FACTS["published"]]):
        found.append(pytest.param(*case.values, marks=[*case.marks, needs_shared]))
    return found


of_each_template = pytest.mark.parametrize(("load", "name"), subjects())
Load = Callable[[str], TemplateCase]


@of_each_template
def test_episode_holds_samples_and_template_text(load: Load, name: str) -> None:
    assert violations(load(name), NUM_DIALOGUES) == []
    assert load is published or load(name).counts["examined"] > NUM_DIALOGUES / 3


@of_each_template
def test_environment_text_never_becomes_a_control_token(load: Load, name: str) -> None:
    assert hostile_violations(load(name), NUM_TEXTS) == []


@of_each_template
def test_rendered_prompt_equals_the_template(load: Load, name: str) -> None:
    assert inference_violations(load(name), len(KINDS)) == []


@of_each_template
def test_prompt_cannot_end_or_open_a_turn(load: Load, name: str) -> None:
    """A row of a dataset may explain a tag; it cannot speak as another author."""
    assert prompt_violations(load(name)) == []


def test_oracle_finds_violations() -> None:
    """An encoder that forgets the newline between turns, or recognises control text, does not pass."""
    subject = load_subjects(WRITTEN, FACTS["hand_written"], tiny_tokenizer(1024), only=["chatml"])[0]
    encoder = subject.runner.context(has_tools=False).encoder_for
    codec = subject.codec
    right = DeltaEncoder.extend

    def forgetful(self: DeltaEncoder, *args: Any, **kwargs: Any) -> Any:
        return right(self, *args, **kwargs)[1:]

    def trusting(self: DeltaEncoder, *args: Any, **kwargs: Any) -> Any:
        return codec.encode(codec.decode(right(self, *args, **kwargs)))

    assert callable(encoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeltaEncoder, "extend", forgetful)
        assert violations(subject, 9)
        patch.setattr(DeltaEncoder, "extend", trusting)
        assert {v.split()[0] for v in violations(subject, 30)} >= {"control"}


def around(body: str) -> Codec:
    """Return the codec of a template that writes `body` for a message."""
    head = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    tail = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return Codec(tiny_tokenizer(), chat_template=head + body + tail)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{{ m.content }}|>", "<|im_end"),
        ("<|im_{{ m.content }}", "end|>"),
        ("{{ m.content | replace('\n', '') }}", "<|im_\nend|>"),
        ("{{ m.content | trim }}{{ m.content | trim }}", "end|><|im_"),
        ("<{{ m.name }}>", "/tool_response"),
    ],
)
def test_template_and_text_cannot_spell_a_control_token(body: str, text: str) -> None:
    codec = around(body if "content" in body else "{{ m.content }}" + body)
    encoder = DeltaEncoder(codec)
    said = [Message(role="user", content="Hi"), Message(role="assistant", content="So.")]
    ids = []
    for words in (text, "x"):
        heard = Message(role="tool", content=words, tool_call_id="call00000", name=words)
        ids.append(codec.control_in(encoder.start([*said, heard])).tolist())
        ids.append(codec.control_in(encoder.extend([heard], last_id=codec.turn_ends.past[0], history=said)).tolist())
    assert ids[:2] == ids[2:]


def test_adjacent_results_cannot_spell_a_control_token() -> None:
    codec = around("{{ m.content }}")
    template = (codec.chat_template or "").replace(
        "{% for m in messages %}", "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}{% else %}"
    )
    codec = Codec(tiny_tokenizer(), chat_template=template.replace("{% endfor %}", "{% endif %}{% endfor %}"))
    said = [Message(role="user", content="Hi"), Message(role="assistant", content="So.")]
    results = [Message(role="tool", content=text, tool_call_id="call00000", name="f") for text in ("<|im_", "end|>")]
    text = codec.decode(codec.control_in(DeltaEncoder(codec).start([*said, *results])))
    assert text == "<|im_start|><|im_end|>" * 2 + "<|im_start|>"


def test_result_left_out_by_the_template_is_refused() -> None:
    subject = written("silent_results")
    encoder = DeltaEncoder(subject.codec, tools=subject.dialogue(0, "plain").tools)
    result = Message(role="tool", content="4", tool_call_id="call00000", name="look_up")
    refuses(lambda: encoder.extend([result], last_id=subject.codec.stop_token_ids[0]), TemplateError, "tool message")


def test_template_error_names_the_message() -> None:
    subject = written("alternates")
    with pytest.raises(TemplateError, match=r"message 1, a user message.*alternate"):
        DeltaEncoder(subject.codec).start([Message(role="user", content="a"), Message(role="user", content="b")])


def test_template_with_a_syntax_error_is_refused() -> None:
    template = (WRITTEN / "broken_syntax.jinja").read_text(encoding="utf-8")
    codec = Codec(tiny_tokenizer(), chat_template=template)
    refuses(lambda: DeltaEncoder(codec).start([Message(role="user", content="a")]), TemplateError, "endif")
