"""What is asked of a Ray cluster before anything is placed there."""

from __future__ import annotations

import pytest

from polyturn.core.errors import ConfigError


def test_an_address_where_nothing_answers_is_a_sentence_and_not_minutes() -> None:
    placement = pytest.importorskip("polyturn.cluster.placement")
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127\.0\.0\.1:1' .*ray='local'"):
        placement.Cluster("127.0.0.1:1")


def test_a_cluster_of_another_version_is_a_sentence_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = pytest.importorskip("polyturn.cluster.placement")
    from ray._private import utils

    here = {"ray_version": "2.0.0", "python_version": "3.11.7"}

    def connect(**options: object) -> None:  # as `ray.init` does where it finds such a cluster
        utils.check_version_info(here, "process 7", raise_on_mismatch=True)

    monkeypatch.setattr(placement.ray, "init", connect)
    with pytest.raises(ConfigError, match=r"at 'auto' is of another version .*Ray: 2\.0\.0.*; install the same Ray") as told:
        placement.Cluster("auto")
    assert "\n" not in str(told.value)


def test_what_no_node_could_hold_is_told_apart_from_a_cluster_that_is_full() -> None:
    placement = pytest.importorskip("polyturn.cluster.placement")
    nodes = [{"CPU": 64.0, "GPU": 8.0}, {"CPU": 8.0}]

    def why(**resources: float) -> str:
        need = placement.ResourceRequest(count=2, resources=resources)
        found: str = placement.beyond_one_node("inference server", need, nodes)
        return found

    assert why(GPU=8, CPU=2) == why() == ""
    assert "Each inference server is on one node" in why(GPU=16) and "is {'GPU': 8.0}" in why(GPU=16)
    assert "the most that one has is {'sandbox': 0}" in why(sandbox=1)
