"""The plan of micro-batches: each sample once, ranks in step and balanced, prefixes shared where it pays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyturn.batching.layout import LayoutSettings, layout
from polyturn.batching.microbatch import plan
from polyturn.core.errors import ConfigError
from polyturn.core.sample import TrainSample
from support.refusals import refuses
from support.samples import sample_of


def sample(ids: list[int], weighted: int, index: int = 0) -> TrainSample:
    """Return a sample whose last `weighted` tokens count."""
    weights = np.zeros(len(ids), np.float32)
    weights[len(ids) - weighted :] = 1
    return sample_of(("g", str(index), 0), ids, weights)


def group(prefix: int, own: int, members: int = 8, *, seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 1000, prefix).tolist()
    return [sample([*common, *rng.integers(0, 1000, own).tolist()], own, i) for i in range(members)]


kinds = st.sampled_from([{}, {"packed": True}, {"shared_prefix": True, "min_saving": 0.0, "min_shared": 1}])


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=10),
    num_ranks=st.integers(1, 4),
    budget=st.integers(1, 40),
    kind=kinds,
)
def test_each_sample_is_planned_once_and_ranks_are_in_step(rows, num_ranks, budget, kind):
    """I6, I7: whatever the number of ranks, no sample is left out or counted twice, and all ranks run as many passes."""
    samples = [sample(ids, len(ids) - 1, i) for i, ids in enumerate(rows)]
    settings = LayoutSettings(max_tokens_per_batch=budget, **kind)
    planned = plan(samples, settings=settings, num_ranks=num_ranks)
    assert len(planned.ranks) == num_ranks and len({len(r) for r in planned.ranks}) == 1
    counted = [i for r in planned.ranks for b in r if not b.is_padding for i in b.samples]
    assert sorted(counted) == list(range(len(samples)))
    for batch in (b for r in planned.ranks for b in r):
        assert batch.cost <= budget or len(batch.samples) == 1
    coefs = [s.loss_weights for s in samples]
    laid_out = [layout(samples, coefs=coefs, settings=settings, batches=r) for r in planned.ranks]
    assert sum(float(b.loss_coef_S.sum()) for r in laid_out for b in r) == sum(s.num_weighted for s in samples)
    costs = [b.input_ids_BT.numel() for r in laid_out for b in r]
    assert costs == [b.cost for r in planned.ranks for b in r]


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=8),
    kind=kinds,
    budget=st.integers(1, 40),
)
def test_every_target_follows_its_own_context(rows, kind, budget):
    """I6 for each layout: walking back from a target over the tokens that it sees gives the sample's own tokens."""
    samples = [sample(ids, len(ids) - 1, i) for i, ids in enumerate(rows)]
    settings = LayoutSettings(max_tokens_per_batch=budget, **kind)
    seen = []
    for batch in layout(samples, coefs=[s.loss_weights for s in samples], settings=settings):
        ids = batch.input_ids_BT.flatten().numpy()
        width = batch.input_ids_BT.shape[1]
        for q, i, t, target in zip(batch.flat_S.tolist(), batch.sample_S, batch.token_S, batch.targets_S, strict=True):
            if batch.packing is None:
                context = ids[q - q % width : q + 1]
            else:
                context = ids[[k for k in range(q + 1) if q < batch.packing.until_N[k]]]
            assert context.tolist() == samples[i].token_ids[:t].tolist()
            assert int(target) == samples[i].token_ids[t]
            seen.append((int(i), int(t)))
    assert sorted(seen) == [(i, t) for i, s in enumerate(samples) for t in range(1, len(s))]


def test_common_prefix_is_computed_once() -> None:
    samples = group(80, 20)
    planned = plan(samples, settings=LayoutSettings(shared_prefix=True))
    assert planned.kind == "shared"
    (batch,) = planned.ranks[0]
    assert batch.cost == 80 + 8 * 19  # the last token of each is only a target
    assert batch.shared == (0,) + (80,) * 7


def test_halves_of_a_micro_batch_share_their_prefixes() -> None:
    planned = plan(group(80, 20), settings=LayoutSettings(shared_prefix=True), num_ranks=2)
    assert [[batch.shared for batch in batches] for batches in planned.ranks] == [[(0, 80, 80, 80)]] * 2
    assert [[batch.cost for batch in batches] for batches in planned.ranks] == [[80 + 4 * 19]] * 2


def test_prefixes_are_not_shared_where_it_does_not_pay() -> None:
    samples = group(10, 90)
    assert plan(samples, settings=LayoutSettings(shared_prefix=True)).kind == "rows"
    assert plan(samples, settings=LayoutSettings(shared_prefix=True, packed=True)).kind == "packed"


def test_ranks_are_balanced() -> None:
    rng = np.random.default_rng(0)
    samples = [sample([1] * int(n), 1, i) for i, n in enumerate(rng.integers(10, 400, 200))]
    for packed in (False, True):
        planned = plan(samples, settings=LayoutSettings(max_tokens_per_batch=1024, packed=packed), num_ranks=8)
        costs = [sum(batch.cost for batch in batches) for batches in planned.ranks]
        assert max(costs) < 1.15 * np.mean(costs)


def test_fewer_samples_than_ranks_are_padded() -> None:
    planned = plan([sample([1, 2, 3], 2), sample([4, 5], 1, 1)], settings=LayoutSettings(), num_ranks=4)
    assert [len(r) for r in planned.ranks] == [1, 1, 1, 1]
    assert [r[0].is_padding for r in planned.ranks] == [False, False, True, True]
    assert all(r[0].samples == (1,) for r in planned.ranks[2:])  # the shortest


def test_wrong_settings_are_refused() -> None:
    refuses(lambda: plan([], settings=LayoutSettings(), num_ranks=0), ConfigError, "num_ranks is 0")
    refuses(lambda: LayoutSettings(min_saving=2), ConfigError, "min_saving is 2")
