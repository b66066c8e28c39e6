"""Ranks that torchrun started meet once for each run of their program."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from support.forked import ONE_THREAD, Forked
from support.ranks import RUNS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_meet_again_when_one_is_late(late: int) -> None:
    """The store is the launcher's, as with torchrun, and keeps the values of the first run."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LATE": str(late)}
    env = {**os.environ, **ONE_THREAD, **shared, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [Forked(call="support.ranks:meet", env={**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.wait(240) == 0, rank.err
            assert rank.out.splitlines() == ["[0, 1]"] * RUNS
    finally:
        for rank in ranks:
            rank.kill()
