"""Checks of a Ray cluster before anything is placed there."""

from __future__ import annotations

import pytest

from polyturn.core.errors import ConfigError
from support.refusals import refuses


def test_unreachable_cluster_is_refused() -> None:
    placement = pytest.importorskip("polyturn.cluster.placement")
    refuses(lambda: placement.Cluster("127.0.0.1:1"), ConfigError, "'127.0.0.1:1'")


def test_cluster_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = pytest.importorskip("polyturn.cluster.placement")
    from ray._private import utils

    here = {"ray_version": "2.0.0", "python_version": "3.11.7"}

    def connect(**options: object) -> None:  # as `ray.init` does where it finds such a cluster
        utils.check_version_info(here, "process 7", raise_on_mismatch=True)

    monkeypatch.setattr(placement.ray, "init", connect)
    with pytest.raises(ConfigError, match=r"'auto' .*2\.0\.0") as told:
        placement.Cluster("auto")
    assert "\n" not in str(told.value)


def test_request_beyond_one_node_is_told_from_a_full_cluster() -> None:
    placement = pytest.importorskip("polyturn.cluster.placement")
    nodes = [{"CPU": 64.0, "GPU": 8.0}, {"CPU": 8.0}]

    def why(**resources: float) -> str:
        need = placement.ResourceRequest(count=2, resources=resources)
        found: str = placement.beyond_one_node("inference server", need, nodes)
        return found

    assert why(GPU=8, CPU=2) == why() == ""
    assert "{'GPU': 8.0}" in why(GPU=16)
    assert "{'sandbox': 0}" in why(sandbox=1)
