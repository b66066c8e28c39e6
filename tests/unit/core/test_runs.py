"""A sample travels as runs of equal values, and arrives to the last bit."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyturn.core.runs import packed, unpacked
from polyturn.core.sample import SampleId, TrainSample

VALUES = st.sampled_from([0.0, -0.0, 1.0, 0.7, float("nan"), float("-inf")])


@given(st.lists(st.tuples(VALUES, st.integers(1, 90)), max_size=6))
def test_any_array_comes_back_bit_for_bit(runs):
    array = np.concatenate([np.empty(0, np.float32), *(np.full(n, value, np.float32) for value, n in runs)])
    back = unpacked(packed(array))
    assert back.dtype == array.dtype and back.tobytes() == array.tobytes()
    ids = array.view(np.int32)
    assert unpacked(packed(ids)).tobytes() == ids.tobytes() and unpacked(packed(None)) is None


def sample(num_tokens: int) -> TrainSample:
    weights, turns = np.zeros(num_tokens, np.float32), np.full(num_tokens, -1, np.int32)
    for turn in range(3):
        begin = num_tokens - 90 + 30 * turn
        weights[begin : begin + 20], turns[begin : begin + 30] = 1, turn
    return TrainSample(
        id=SampleId("g1", "g1/0", 0),
        token_ids=np.random.default_rng(0).integers(0, 150_000, num_tokens),
        loss_weights=weights,
        turn_ids=turns,
        rollout_logprobs=-weights * np.random.default_rng(1).random(num_tokens, np.float32),
        advantages=0.7 * weights,
    )


def test_sample_with_a_long_prompt_pickles_small():
    short, long = sample(258), sample(4258)
    assert pickle.loads(pickle.dumps(long)).same_as(long)
    assert not pickle.loads(pickle.dumps(long)).loss_weights.flags.writeable
    assert len(pickle.dumps(short)) < 2600, "of 5 arrays of 258 tokens, 5,160 bytes"
    assert len(pickle.dumps(long)) - len(pickle.dumps(short)) < 4.1 * 4000
