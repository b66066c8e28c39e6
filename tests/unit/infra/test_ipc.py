"""Two processes call each other over one socket: answers, errors, cancellation, and the end of a peer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

from polyturn.core.errors import EngineError
from polyturn.infra.ipc import Peer
from support.refusals import refuses_later


async def pair(methods: dict[str, Callable[..., Any]]) -> tuple[Peer, Peer]:
    """Return a peer that calls, and the one that offers `methods`."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    peers = [Peer(offered, on_end=lambda: EngineError("the other is gone")) for offered in ({}, methods)]
    for peer, end in zip(peers, ends, strict=True):
        await peer.connect(end)
    return peers[0], peers[1]


async def test_calls_run_concurrently_and_keep_their_errors() -> None:
    may_go_on = asyncio.Event()

    async def wait(value: int) -> int:
        await may_go_on.wait()
        return value

    async def refuse(what: str) -> None:
        may_go_on.set()
        raise EngineError(f"no {what}")

    async def fail() -> None:
        raise KeyError("a bug")

    ours, theirs = await pair({"wait": wait, "refuse": refuse, "fail": fail})
    waiting = [asyncio.create_task(ours.call("wait", number)) for number in range(3)]
    await refuses_later(lambda: ours.call("refuse", "room"), EngineError, "no room")
    assert await asyncio.gather(*waiting) == [0, 1, 2]
    await refuses_later(lambda: ours.call("fail"), RuntimeError, "another process of the run", "'a bug'")
    ours.close()
    theirs.close()


async def test_cancellation_and_end_of_peer_reach_the_other_side() -> None:
    cancelled, begun = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    ours, theirs = await pair({"wait": wait})
    running = asyncio.create_task(ours.call("wait"))
    await begun.wait()
    running.cancel()
    await cancelled.wait()
    cancelled.clear()
    begun.clear()
    running = asyncio.create_task(ours.call("wait"))
    await begun.wait()
    theirs.close()
    await refuses_later(lambda: running, EngineError, "the other is gone")
    await refuses_later(lambda: ours.call("wait"), EngineError, "the other is gone")
    await cancelled.wait()


async def test_notified_method_runs_and_its_error_is_dropped() -> None:
    noted: list[int] = []

    async def note(value: int) -> None:
        noted.append(value)

    ours, theirs = await pair({"note": note})
    for value in (1, 2):
        ours.notify("note", value)
    ours.notify("missing")
    await ours.call("note", 3)
    assert noted == [1, 2, 3]
    theirs.close()
    await refuses_later(lambda: ours.call("note", 4), EngineError, "the other is gone")
    ours.notify("note", 5)


async def test_unpicklable_value_fails_only_its_call() -> None:
    class Own:
        """Belongs to no module, like the classes in a program's main file."""

    class TwoWordsError(EngineError):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(f"{first} {second}")

    async def same(value: Any) -> Any:
        return value

    async def unreadable() -> Any:
        return threading.Lock()

    async def two_words() -> None:
        raise TwoWordsError("no", "room")

    ours, theirs = await pair({"same": same, "unreadable": unreadable, "two_words": two_words})
    assert type(await ours.call("same", Own())) is Own
    await refuses_later(lambda: ours.call("same", threading.Lock()), TypeError, "cannot pickle", "lock")
    await refuses_later(
        lambda: ours.call("unreadable"), RuntimeError, "another process of the run", "cannot pickle ", "lock"
    )
    await refuses_later(lambda: ours.call("two_words"), RuntimeError, "another process of the run", "TwoWordsError: no room")
    assert await ours.call("same", 3) == 3
    ours.close()
    theirs.close()
