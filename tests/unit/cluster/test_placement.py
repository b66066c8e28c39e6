"""Checks of a Ray cluster and of its workers before anything is placed there."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from polyturn.build.cluster import check_travels
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, EngineError
from polyturn.engines.base import ModelFolder
from polyturn.engines.launcher import LaunchSpec
from polyturn.infra.live import LiveObject
from support.refusals import refuses, refuses_later

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


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


async def test_server_that_cannot_start_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = pytest.importorskip("polyturn.cluster.servers")
    monkeypatch.setattr(servers.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    (folder := tmp_path / "model").mkdir()

    class Files:
        def here(self) -> ModelFolder:
            return ModelFolder(folder, is_temporary=True)

    spec = LaunchSpec(command=("/no/such/python", "{model}"))
    await refuses_later(lambda: servers.ServerActor().start(spec, Files()), EngineError, "/no/such/python")
    assert not folder.exists()


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


# --- Requirements of rollout workers, before any of them is started


def test_object_that_cannot_travel_is_refused() -> None:
    lock = LiveObject(threading.Lock(), name="mine:lock")
    values = {"model": {"path": "any"}, "rollout": {"scheduler": lock}}
    refuses(
        lambda: check_travels(load_config(RunConfig, None, values=values).config),
        ConfigError,
        "rollout.scheduler",
        "mine:lock",
    )


PROGRAM = """
import sys
from polyturn.cluster.worker_pool import travelling
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers import SingleTurn

class Says(MultiTurnScheduler):
    stateless = True
    scores_turns = False
    def check_task(self, task): ...

class SaysAgain(SingleTurn):
    stateless = True

class SaysNothing(SingleTurn):
    def check_task(self, task): ...

sys.stdout.buffer.write(travelling([Says, SaysAgain, SaysNothing]))
"""


def test_declarations_of_schedulers_travel() -> None:
    sent = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True).stdout
    read = "import pickle, sys; print([(s.stateless, s.scores_turns) for s in pickle.load(sys.stdin.buffer)])"
    arrived = subprocess.run([sys.executable, "-c", read], input=sent, check=True, capture_output=True).stdout
    assert arrived.decode().strip() == "[(True, False), (True, None), (False, None)]"
