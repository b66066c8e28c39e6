"""What stays of a completion when its message goes on: sampled ids, and text that ends inside a token."""

from __future__ import annotations

import numpy as np

from polyturn.core.errors import SchedulerError
from polyturn.core.generation import Completion, FinishReason
from polyturn.rollout.edits import kept_of
from polyturn.testing.episodes import tiny_codec, turn_ids
from support.refusals import refuses

SAID = "The answer is eight, grüße."


def completion(text: str = SAID) -> Completion:
    ids = turn_ids(text)
    return Completion(token_ids=ids, logprobs=-np.ones(len(ids), np.float32), finish_reason=FinishReason.STOP)


def test_text_keeps_whole_tokens_and_the_rest_as_text() -> None:
    said, codec = completion(), tiny_codec()
    for length in range(len(SAID) + 1):
        wanted = SAID[:length]
        kept = kept_of(codec, said, wanted)
        assert kept.text + kept.rest == wanted
        assert codec.decode(said.token_ids[: kept.num_tokens]) == kept.text
        assert kept.rest == "" or not wanted.startswith(codec.decode(said.token_ids[: kept.num_tokens + 1]))


def test_other_text_cannot_be_kept():
    refuses(lambda: kept_of(tiny_codec(), completion(), "Another"), SchedulerError, "'Another'")
    refuses(lambda: kept_of(tiny_codec(), completion("Hi"), 99), SchedulerError, "99")
