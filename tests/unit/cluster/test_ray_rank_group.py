"""The driver's client of the ranks on Ray: how often a share is sent, and a rank that fails alone. Ray itself is replaced
here."""

from __future__ import annotations

from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.training.rank_group import RankReply
from support.refusals import refuses


class Sent:
    """A reference to the answer of a rank, which is the message that the rank got."""

    def __init__(self, share: Any) -> None:
        self.share = share


class Rank:
    """An actor; its handle, its method and the method's call are the same object here."""

    def __init__(self) -> None:
        self.handle = self.run = self

    def remote(self, command: str, share: Any) -> Sent:
        return Sent(share)


def test_share_of_a_row_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = pytest.importorskip("polyturn.cluster.clients")
    stored: list[Any] = []

    def put(share: Any) -> str:
        stored.append(share)
        return f"reference {len(stored)}"

    monkeypatch.setattr(clients.ray, "put", put)
    monkeypatch.setattr(clients.ray, "wait", lambda refs, num_returns, timeout: (refs[:1], refs[1:]))
    monkeypatch.setattr(clients.ray, "get", lambda ref: RankReply(value=ref.share))
    group = clients.RayRankGroup([Rank() for _ in range(5)], row_width=2, on_close=lambda: None)
    first, second, alone = (["a"],), (["b"],), (["c"],)
    sent = group.call("policy.score", [first, first, second, second, alone])
    assert stored == [first, second]
    assert sent == ["reference 1", "reference 1", "reference 2", "reference 2", alone]


def test_error_of_one_rank_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = pytest.importorskip("polyturn.cluster.clients")

    def wait(refs: list[Sent], num_returns: int, timeout: float | None) -> tuple[list[Sent], list[Sent]]:
        """The second rank raises; the first waits for it in a collective."""
        if len(refs) == 2:
            return refs[1:], refs[:1]
        assert timeout is not None, "it would wait for ever"
        return [], refs

    monkeypatch.setattr(clients.ray, "wait", wait)
    monkeypatch.setattr(clients.ray, "get", lambda ref: RankReply(error=ConfigError("there is no such folder")))
    group = clients.RayRankGroup([Rank(), Rank()], row_width=1, on_close=lambda: None)
    refuses(lambda: group.call("policy.make", [(1,), (2,)]), ConfigError, "there is no such folder")
