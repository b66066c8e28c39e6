"""Requirements of rollout workers, before any of them is started."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from polyturn.build.cluster import check_travels
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.infra.live import LiveObject
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


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
