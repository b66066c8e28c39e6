"""A history is pure: one value says what comes next, and its replayed events restore it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import SchedulerError
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, Origin
from polyturn.rollout.events import read_events, replay, write_events
from polyturn.rollout.history import History
from polyturn.rollout.history_edits import go_on, rewrite, shorten_to_fit
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.rollout.next_prompt import Append, Continue, Given, Render
from polyturn.rollout.open_turn import OpenTurn, Reply
from polyturn.rollout.stop_strings import Stopped
from polyturn.testing.episodes import tiny_codec, turn_ids
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import HermesParser, ToolCallParser
from support.refusals import refuses

PROMPT = [Message(role="user", content="What is 2+2?", origin=Origin.OWNER)]


def user(text: str) -> Message:
    return Message(role="user", content=text, origin=Origin.ENVIRONMENT)


def history(parser: ToolCallParser | None = None, **options: Any) -> History:
    return History(DeltaEncoder(tiny_codec()), parser or HermesParser(), PROMPT, **options)


def say(found: History, text: str, *, is_closed: bool = True) -> OpenTurn:
    found.append_prompt(found.next_prompt())
    ids = turn_ids(text, is_closed=is_closed)
    completion = Completion(
        token_ids=ids,
        logprobs=-np.ones(len(ids), np.float32),
        finish_reason=FinishReason.STOP,
        policy_versions=((0, 3), (1, 4)) if len(ids) > 1 else ((0, 3),),
        info={"prefilled_tokens": np.int64(7)},
    )
    index = len(found.turns)
    message, text = found.read_completion(completion.token_ids, turn=index)
    return found.add_turn(message, text, Stopped(completion, None, 2), index=index, cut_by=StopReason.LENGTH)


def answers(found: History) -> None:
    found.record(say(found, "<think>two</think>3"), Reply(messages=(user("No."),)))


def edits(found: History) -> None:
    turn = say(found, "<think>two</think>3")
    rewrite(found, [*PROMPT, turn.message])
    found.record(turn, Reply(messages=(user("Again."),)))


def goes_on(found: History) -> None:
    say(found, "It is 3")
    go_on(found, " no,", keep="It is", is_trusted=False)


def prefills(found: History) -> None:
    say(found, "It is 3")
    rewrite(found, [*PROMPT, Message(role="assistant", content="It is not", origin=Origin.OWNER)], goes_on=True)


def gives_ids(found: History) -> None:
    say(found, "It is 3")
    found.show_ids(np.concatenate([found.context, turn_ids("so", is_closed=False)]))


def shortens(found: History) -> None:
    for _ in range(3):
        found.record(say(found, "3"), Reply(messages=(user("No, it is not that, by far."),)))
    limits = Limits(max_context=found.next_prompt().length, context_policy=ContextPolicy.DROP_OLDEST)
    assert shorten_to_fit(found, limits)


def shortens_what_goes_on(found: History) -> None:
    for _ in range(3):
        found.record(say(found, "3"), Reply(messages=(user("No, it is not that, by far."),)))
    goes_on(found)
    limits = Limits(max_context=found.next_prompt().length, context_policy=ContextPolicy.DROP_OLDEST)
    assert shorten_to_fit(found, limits)


def shortens_a_prefill(found: History) -> None:
    for _ in range(3):
        found.record(say(found, "3"), Reply(messages=(user("No, it is not that, by far."),)))
    say(found, "It is 3")
    rewrite(found, [*found.messages[:-1], Message(role="assistant", content="It is not", origin=Origin.OWNER)], goes_on=True)
    limits = Limits(max_context=found.next_prompt().length, context_policy=ContextPolicy.DROP_OLDEST)
    assert shorten_to_fit(found, limits)


def weighs(found: History) -> None:
    turn = say(found, "It is 3")
    found.weigh(turn, 0.5)
    found.weigh(turn, np.arange(turn.num_tokens))
    found.record(turn, Reply(messages=(user("No."),)))


EDITS: list[tuple[Callable[[History], None], type[Any]]] = [
    (answers, Append), (edits, Render), (goes_on, Continue), (prefills, Render), (gives_ids, Given), (shortens, Append),
    (shortens_what_goes_on, Continue), (shortens_a_prefill, Continue), (weighs, Append),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), [(shortens_what_goes_on, "It is no,"), (shortens_a_prefill, "It is not")])
def test_shortened_history_keeps_a_message_that_goes_on(edit: Callable[[History], None], said: str):
    found = history()
    edit(found)
    shown = tiny_codec().decode(found.context)
    assert shown.endswith(f"<|im_start|>assistant\n{said}") and shown.count("<|im_start|>assistant") < 4
    turn = say(found, " 4.")
    assert turn.message.text == f"{said} 4." and found.messages[-1] is turn.message


def test_next_prompt_encodes_only_new_messages():
    found = history()
    assert list(found.to_encode) == PROMPT
    answers(found)
    assert [message.text for message in found.to_encode] == ["No."]


def test_cut_tokens_count_for_no_limit():
    found = history()
    goes_on(found)
    turn = found.turns[-1]
    assert turn.num_tokens < len(turn.completion.token_ids)
    assert found.progress(elapsed_s=0.0).response_tokens == turn.num_tokens


@pytest.mark.parametrize(("edit", "coming"), EDITS)
@pytest.mark.parametrize("renders_history", [False, True])
def test_replayed_events_restore_a_history(edit: Callable[[History], None], coming: type[Any], renders_history: bool):
    first = history(renders_history=renders_history)
    first.events = []
    edit(first)
    assert isinstance(first.next, coming)
    events = json.loads(json.dumps(write_events(first.events)))
    parser = SilentParser()
    second = history(parser, renders_history=renders_history)
    replay(second, read_events(events))
    parser.may_parse = True
    for _ in range(2):
        assert second.messages == first.messages and np.array_equal(second.context, first.context)
        assert all(a.same_as(b) for a, b in zip(second.builder.build(), first.builder.build(), strict=True))
        for one, other in zip(second.turns, first.turns, strict=True):
            assert one.spans == other.spans and (one.message, one.text) == (other.message, other.text)
            assert (one.num_tokens, one.is_continued) == (other.num_tokens, other.is_continued)
            assert one.completion.policy_versions == other.completion.policy_versions
        assert second.progress(elapsed_s=0.0) == first.progress(elapsed_s=0.0)
        assert (second.num_cut, second.prompt, second.prompt_tokens) == (first.num_cut, first.prompt, first.prompt_tokens)
        assert np.array_equal(second.next_prompt().ids, first.next_prompt().ids)
        for found in (first, second):
            say(found, "4")


class SilentParser(HermesParser):
    """Must not be called while events are replayed."""

    may_parse = False

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        assert self.may_parse, "a replay parses nothing"
        return super().parse(*args, **kwargs)


@pytest.mark.parametrize(
    "edit",
    [
        lambda found: go_on(found, "so", keep=None, is_trusted=False),
        lambda found: rewrite(found, [*PROMPT, Message(role="assistant", content="It is")], goes_on=True),
    ],
)
def test_message_cannot_go_on_before_a_waiting_answer(edit: Callable[[History], None]) -> None:
    found = history()
    answers(found)
    refuses(lambda: edit(found), SchedulerError, "messages as well")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(), StopReason.STOP),
        (Reply(goes_on=True), None),
        (Reply(messages=(user("No."),)), None),
        (Reply(messages=(user("Bye."),), is_done=True), StopReason.ENV_DONE),
    ],
)
def test_record_returns_why_the_episode_ends(reply: Reply, reason: StopReason | None) -> None:
    line = history()
    assert line.record(say(line, "3"), reply) is reason


def test_sampled_spans_are_found_in_any_order():
    found = history()
    turn = say(found, "3")
    found.record(turn, Reply(messages=(user("No."),)))
    say(found, "4")
    turn.spans.reverse()
    found.weigh(turn, 0.5)
    (segment,) = found.builder.build()
    assert set(segment.loss_weights[segment.turn_ids == turn.index].tolist()) == {0.0, 0.5}


def test_prompt_before_a_prefill_is_never_left_out():
    found, rules = history(), Message(role="system", content="Be brief.", origin=Origin.OWNER)
    rewrite(found, [rules, *PROMPT, Message(role="assistant", content="It", origin=Origin.OWNER)], goes_on=True)
    for _ in range(3):
        found.record(say(found, " is 3"), Reply(messages=(user("No, it is not that, by far."),)))
    limits = Limits(max_context=found.next_prompt().length, context_policy=ContextPolicy.DROP_OLDEST)
    assert shorten_to_fit(found, limits) and found.messages[:2] == (rules, *PROMPT)


def test_ids_of_an_agent_are_not_shortened():
    found = history()
    answers(found)
    answers(found)
    found.show_ids(found.context)
    limits = Limits(max_context=8, context_policy=ContextPolicy.DROP_OLDEST)
    assert not shorten_to_fit(found, limits) and isinstance(found.next, Given)
