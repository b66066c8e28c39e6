"""Random dialogues are what their seed and kind say, and the oracle reads a template without the encoder."""

import itertools
import random

import pytest

from polyturn.core.errors import ConfigError
from polyturn.core.messages import Message
from polyturn.testing.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from support.dialogues import KINDS, MARKERS, TOOL_KINDS, dialogue, dialogues, hostile_text
from support.oracle import Oracle, RefusedError, tame


def test_the_same_seed_gives_the_same_dialogue_and_another_one_does_not() -> None:
    assert dialogue(3, "parallel_calls") == dialogue(3, "parallel_calls")
    assert dialogue(3, "parallel_calls") != dialogue(4, "parallel_calls")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_what_it_is_named_for(kind: str) -> None:
    told = list(dialogues(40, kinds=[kind]))
    turns = [t for d in told for t in d.turns]
    heard = [m for t in turns for m in t.answer]
    seen = {
        "plain": all(t.message.text for t in turns),
        "reasoning": any(t.message.reasoning for t in turns),
        "tool_calls": all(any(t.message.tool_calls for t in d.turns) for d in told),
        "parallel_calls": any(len(t.message.tool_calls) > 1 for t in turns),
        "reasoning_and_tools": any(t.message.reasoning and t.message.tool_calls for t in turns),
        "empty": any(not m.text for m in heard) and any(m.text and not m.text.strip() for m in heard),
        "unicode": any(not m.text.isascii() for m in heard),
        "cut": any(t.is_cut for t in turns),
        "hostile": any(marker in m.text for m in heard for marker in MARKERS),
    }
    assert seen[kind]
    assert {d.prompt[0].role for d in told} == {"system", "user"}
    assert kind not in TOOL_KINDS or all(d.tools for d in told)


def test_every_result_answers_a_call_of_the_turn_before_it() -> None:
    for told in dialogues(90):
        for turn in told.turns[:-1]:
            ids = [m.tool_call_id for m in turn.answer if m.role == "tool"]
            assert ids == [c.id for c in turn.message.tool_calls]
            assert all(len(i) == 9 and i.isalnum() for i in ids)


def test_dialogues_that_alternate_have_no_two_users_in_a_row() -> None:
    for told in dialogues(90, alternates=True):
        roles = [m.role for m in told.messages]
        assert ("user", "user") not in itertools.pairwise(roles)
        assert ("tool", "user") not in itertools.pairwise(roles)


def test_an_unknown_kind_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'hostile'"):
        dialogue(0, "hostil")


def test_hostile_texts_hold_whole_and_broken_markers() -> None:
    texts = [hostile_text(random.Random(seed), ["<|im_end|>"]) for seed in range(50)]
    assert any("<|im_end|>" in t for t in texts)
    assert any("<" in t and "<|im_end|>" not in t for t in texts)


def test_the_oracle_says_what_the_template_makes_of_a_turn() -> None:
    oracle = Oracle(tiny_tokenizer(), CHAT_TEMPLATE, ends=["<|im_end|>"])
    told = dialogue(1, "plain", num_turns=2, has_system=False)
    answer = told.turns[0].answer[0].text
    assert oracle.says(told, 0) == f"{told.turns[0].message.text}<|im_end|>"
    assert oracle.between(told, 0) == f"<|im_end|>\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"


def test_the_oracle_passes_on_what_a_template_refuses() -> None:
    oracle = Oracle(tiny_tokenizer(), "{{ raise_exception('never') }}", ends=["<|im_end|>"])
    with pytest.raises(RefusedError, match="never"):
        oracle.render([Message(role="user", content="Hi")])


def test_tame_text_keeps_its_length_and_blanks_and_loses_its_brackets() -> None:
    assert tame(Message(role="user", content=" <|im_end|>\n")).text == " xxim_endxx\n"
