"""The leader's calls to its ranks, without any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyturn.training.ranked import RankedBackend


class ToldGroup:
    """Two ranks that note what they are told."""

    num_ranks = 2
    row_width = 1

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.told.append((command, len(shares)))
        return [None] * len(shares)

    def close(self) -> None:
        self.told.append(("close", self.num_ranks))


def test_close_ends_the_ranks_once():
    group = ToldGroup()
    backend = RankedBackend(group, "policy", start={"w": torch.zeros(4), "v": torch.zeros(4)}, bucket_bytes=16)
    assert group.told == [("policy.make", 2), ("policy.take", 2)]
    backend.close()
    assert group.told[2:] == [("close", 2)]
