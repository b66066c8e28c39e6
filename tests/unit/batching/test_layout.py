"""The layout: targets shifted once, prefixes shared, every token sees its own row, nothing lost, nothing twice (I6)."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyturn.batching.layout import LayoutSettings, layout, scatter_back
from polyturn.batching.packing import common_prefix, pack, sorted_rows
from polyturn.core.errors import AlignmentError, ConfigError
from polyturn.core.sample import TrainSample
from support.refusals import refuses
from support.samples import sample_of


def sample(ids: list[int], weights: list[float], index: int = 0, **arrays: object) -> TrainSample:
    return sample_of(("g", str(index), 0), np.array(ids, np.int32), np.array(weights, np.float32), **arrays)


def weights_of(samples: list[TrainSample]) -> list[np.ndarray]:
    return [s.loss_weights for s in samples]


def test_targets_are_the_next_tokens() -> None:
    one = sample([10, 11, 12, 13, 14, 15, 16], [0, 0, 1, 1, 0, 0.5, 0], advantages=np.arange(7, dtype=np.float32))
    (batch,) = layout([one], coefs=weights_of([one]), settings=LayoutSettings())
    assert batch.input_ids_BT.tolist() == [[10, 11, 12, 13, 14]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.flat_S.tolist() == [1, 2, 4]
    assert batch.targets_S.tolist() == [12, 13, 15]
    assert batch.loss_coef_S.tolist() == [1, 1, 0.5]
    assert batch.advantages_S.tolist() == [2, 3, 5]
    assert batch.token_S.tolist() == [2, 3, 5]
    assert batch.temperature_S is None
    assert batch.old_logprobs_S is None


def test_rows_are_padded_on_the_right_and_keep_their_temperature() -> None:
    samples = [sample([1, 2, 3], [0, 0, 1], 0, temperature=0.5), sample([4, 5], [0, 1], 1)]
    (batch,) = layout(samples, coefs=weights_of(samples), settings=LayoutSettings())
    assert batch.input_ids_BT.tolist() == [[4, 0], [1, 2]]
    assert batch.flat_S.tolist() == [0, 3]
    assert batch.targets_S.tolist() == [5, 3]
    assert batch.temperature_S.tolist() == [1.0, 0.5]
    assert batch.num_tokens == 3


def test_batches_keep_their_budgets() -> None:
    samples = [sample([1] * (n + 1), [0] + [1] * n, i) for i, n in enumerate([2, 9, 2, 3, 2])]
    settings = LayoutSettings(max_tokens_per_batch=8)
    batches = layout(samples, coefs=weights_of(samples), settings=settings)
    assert [tuple(b.input_ids_BT.shape) for b in batches] == [(3, 2), (1, 3), (1, 9)]  # the last is longer than the budget
    settings = LayoutSettings(max_tokens_per_batch=100, max_targets_per_batch=4)
    batches = layout(samples, coefs=weights_of(samples), settings=settings)
    assert [b.num_targets for b in batches] == [4, 2, 3, 9]


lengths = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=0, max_size=12), min_size=0, max_size=8)


@given(tails=lengths, budget=st.integers(1, 60), max_targets=st.one_of(st.none(), st.integers(1, 12)))
def test_layout_and_back_is_a_bijection_on_weighted_tokens(tails, budget, max_targets):
    """I6: every weighted token is a target exactly once, and numbers put on targets come back to their own tokens."""
    rng = np.random.default_rng(0)
    samples = []
    for i, tail in enumerate(tails):
        n = len(tail) + 1
        values = rng.normal(size=n).astype(np.float32)
        samples.append(sample(rng.integers(0, 99, n).tolist(), [0.0, *tail], i, old_logprobs=values, temperature=1.0 + i))
    settings = LayoutSettings(max_tokens_per_batch=budget, max_targets_per_batch=max_targets)
    coefs = [s.loss_weights * 3.0 for s in samples]
    batches = layout(samples, coefs=coefs, settings=settings)
    sizes = [len(s) for s in samples]
    masks = [s.loss_weights != 0 for s in samples]

    places = [(int(i), int(t)) for b in batches for i, t in zip(b.sample_S, b.token_S, strict=True)]
    assert sorted(places) == [(i, int(t)) for i, m in enumerate(masks) for t in np.flatnonzero(m)]

    def back(values: list[torch.Tensor]) -> list[list[float]]:
        return [v.tolist() for v in scatter_back(batches, values, lengths=sizes)]

    assert back([b.targets_S for b in batches]) == [(s.token_ids * m).tolist() for s, m in zip(samples, masks, strict=True)]
    assert back([b.old_logprobs_S for b in batches]) == [
        (s.old_logprobs * m).tolist() for s, m in zip(samples, masks, strict=True)
    ]
    assert back([b.loss_coef_S for b in batches]) == [c.tolist() for c in coefs]
    for batch in batches:
        rows, columns = np.divmod(batch.flat_S.numpy(), batch.input_ids_BT.shape[1])
        assert batch.input_ids_BT.numel() <= budget or batch.input_ids_BT.shape[0] == 1
        for row, column, i, t in zip(rows, columns, batch.sample_S, batch.token_S, strict=True):
            context = batch.input_ids_BT[row, : column + 1].tolist()
            assert context == samples[i].token_ids[:t].tolist()


GOOD = sample([1, 2], [0, 1])


@pytest.mark.parametrize(
    ("samples", "coefs", "key"),
    [
        ([sample([1, 2], [1, 1])], [np.ones(2)], "first token"),
        ([GOOD], [np.ones(3)], r"\(3,\)"),
        ([GOOD, GOOD.replace(advantages=np.ones(2))], [np.ones(2)] * 2, "advantages"),
    ],
)
def test_misaligned_samples_are_refused(samples: list[TrainSample], coefs: list[np.ndarray], key: str) -> None:
    with pytest.raises(AlignmentError, match=key):
        layout(samples, coefs=coefs, settings=LayoutSettings())
    refuses(lambda: LayoutSettings(max_tokens_per_batch=0), ConfigError, "max_tokens_per_batch is 0")


def test_padding_of_a_micro_batch_is_bounded() -> None:
    samples = [sample([7] * n, [0.0] + [1.0] * (n - 1), index=n) for n in (10, 11, 12, 60, 61, 62)]
    coefs = [s.loss_weights for s in samples]
    tight = layout(samples, coefs=coefs, settings=LayoutSettings(max_tokens_per_batch=10_000, max_padding_per_batch=20))
    loose = layout(samples, coefs=coefs, settings=LayoutSettings(max_tokens_per_batch=10_000, max_padding_per_batch=1000))
    assert [b.input_ids_BT.shape[0] for b in tight] == [3, 3]
    assert [b.input_ids_BT.shape[0] for b in loose] == [6]
    assert all(b.input_ids_BT.numel() - b.num_tokens <= 20 for b in tight)


def test_rows_that_branch_twice_share_their_prefixes() -> None:
    rows = [np.array(r) for r in ([1, 2, 3, 4, 5], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9])]
    packing = pack(rows, shared=[0, 3, 4])
    assert packing.pieces == (3, 2, 1, 1, 1)
    assert [p.tolist() for p in packing.row_indices] == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 2, 5, 7]]
    assert packing.rows == (((0, 2), ()), ((2, 4), (0,)), ((4, 5), (0, 2)))
    assert packing.until_N.tolist() == [8, 8, 8, 5, 5, 8, 7, 8]
    assert packing.positions_N.tolist() == [0, 1, 2, 3, 4, 3, 4, 4]


def test_rows_are_sorted_by_tokens_not_bytes() -> None:
    rows = [np.array(r, np.int32) for r in ([256, 1], [2, 300], [2], [70000])]
    assert sorted_rows(rows) == [2, 1, 0, 3]


rows_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


@given(rows=rows_of_few_tokens, min_shared=st.integers(1, 4))
def test_each_token_sees_its_own_row_only(rows, min_shared):
    """Pieces, `until` and places agree: a row is its context and its own pieces, in order."""
    arrays = [np.array(r) for r in rows]
    arrays = [arrays[i] for i in sorted_rows(arrays)]
    common = [0] + [common_prefix(a, b) for a, b in itertools.pairwise(arrays)]
    packing = pack(arrays, shared=[n if n >= min_shared else 0 for n in common])
    flat = np.full(packing.num_tokens, -1)
    for row, place in zip(arrays, packing.row_indices, strict=True):
        assert ((flat[place] == -1) | (flat[place] == row)).all()
        flat[place] = row
        assert packing.positions_N[place].tolist() == list(range(len(row)))
    assert (flat >= 0).all() and sum(packing.pieces) == packing.num_tokens
    ends = np.cumsum(packing.pieces)
    for row, place in zip(packing.rows, packing.row_indices, strict=True):
        pieces = [*row.context, *range(*row.own)]
        assert place.tolist() == [t for p in pieces for t in range(ends[p] - packing.pieces[p], ends[p])]
        for t, q in enumerate(place):
            seen = [k for k in range(packing.num_tokens) if k <= q < packing.until_N[k]]
            assert seen == place[: t + 1].tolist()
