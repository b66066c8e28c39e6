"""Many gradients are summed in one call, with the rows of one call per tensor."""

import pytest

from polyturn.training.megatron.buckets import in_buckets
from support.ranks import results_of_ranks


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", [2, 3])
def test_bucket_gives_the_rows_of_a_call_per_tensor(tmp_path, ranks: int):
    for one in results_of_ranks("support.bucket_ranks:measure", ranks, tmp_path / "measured.json"):
        assert max(one["rows"], one["whole"]) < 1e-6
        assert one["calls"] == {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1, "all_reduce": 1}


def test_bucket_has_one_kind_and_a_bounded_size():
    sizes = [("a", "dense", 4), ("b", "expert", 4), ("c", "dense", 5), ("d", "dense", 2), ("e", "expert", 20)]
    assert in_buckets(sizes, limit=10) == [["a", "c"], ["b"], ["d"], ["e"]]
