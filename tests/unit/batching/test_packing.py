"""Packing: common prefixes once, and every token sees exactly its own row (I6)."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyturn.batching.packing import common_prefix, pack, sorted_rows


def test_rows_that_branch_twice_share_their_prefixes() -> None:
    rows = [np.array(r) for r in ([1, 2, 3, 4, 5], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9])]
    packing = pack(rows, shared=[0, 3, 4])
    assert packing.pieces == (3, 2, 1, 1, 1)
    assert [p.tolist() for p in packing.places] == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 2, 5, 7]]
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
    for row, place in zip(arrays, packing.places, strict=True):
        assert ((flat[place] == -1) | (flat[place] == row)).all()
        flat[place] = row
        assert packing.positions_N[place].tolist() == list(range(len(row)))
    assert (flat >= 0).all() and sum(packing.pieces) == packing.num_tokens
    ends = np.cumsum(packing.pieces)
    for row, place in zip(packing.rows, packing.places, strict=True):
        pieces = [*row.context, *range(*row.own)]
        assert place.tolist() == [t for p in pieces for t in range(ends[p] - packing.pieces[p], ends[p])]
        for t, q in enumerate(place):
            seen = [k for k in range(packing.num_tokens) if k <= q < packing.until_N[k]]
            assert seen == place[: t + 1].tolist()
