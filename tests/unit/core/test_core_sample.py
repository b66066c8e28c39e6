"""A training sample: every array has the length of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import AlignmentError
from polyturn.core.sample import SampleId, TrainSample

BASE: dict[str, Any] = {
    "id": SampleId("g", "t", 0),
    "token_ids": [1, 2, 3],
    "loss_weights": [0, 1, 0.5],
    "turn_ids": [-1, 0, 0],
}
PER_TOKEN = ["rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "versions"]


@pytest.mark.parametrize("name", ["loss_weights", "turn_ids", *PER_TOKEN])
def test_array_of_another_length_is_refused_by_name(name: str) -> None:
    with pytest.raises(AlignmentError, match=rf"trajectory='t'.*{name} has 2 entries for 3"):
        TrainSample(**{**BASE, name: [0, 0]})


@pytest.mark.parametrize("name", PER_TOKEN)
def test_replace_checks_and_leaves_the_original(name: str) -> None:
    sample = TrainSample(**BASE)
    values = getattr(sample.replace(**{name: [1, 2, 3]}), name)
    assert values.dtype == (np.int32 if name == "versions" else np.float32)
    assert not values.flags.writeable
    assert getattr(sample, name) is None
    with pytest.raises(AlignmentError, match=name):
        sample.replace(**{name: [1]})


def test_weighted_tokens_are_counted_not_summed() -> None:
    assert TrainSample(**BASE).num_weighted == 2
    assert len(TrainSample(**BASE)) == 3
