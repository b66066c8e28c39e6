"""An HTTP client for tools whose servers are not ours: many calls at once, and no answer larger than is wanted.

Separate because two protocols need it and each brings an HTTP library of its own, with the same interface under another
name: the library is an argument. Deadlines are the calls' own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from types import ModuleType
from typing import Any


def http_client(
    library: ModuleType,
    headers: Mapping[str, str],
    *,
    max_connections: int,
    max_bytes: Callable[[Any], int | None],
    too_large: type[Exception],
) -> Any:
    """Return an asynchronous client.

    Args:
        library: httpx, or one like it.
        headers: Sent with every request.
        max_connections: Connections at once.
        max_bytes: Is shown each response before its body is read; returns how large that may be, None for no bound.
        too_large: What reading a larger one raises, an error of the library.
    """

    async def look(response: Any) -> None:
        if (limit := max_bytes(response)) is not None:
            response.stream = _bounded(library, response.stream, limit, too_large)

    return library.AsyncClient(
        headers=dict(headers),
        timeout=library.Timeout(30.0, read=None),
        limits=library.Limits(max_connections=max_connections, max_keepalive_connections=64),
        event_hooks={"response": [look]},
    )


def _bounded(library: ModuleType, stream: Any, limit: int, too_large: type[Exception]) -> Any:
    base: Any = library.AsyncByteStream  # the client takes nothing else

    class Bounded(base):  # type: ignore[misc]
        async def __aiter__(self) -> AsyncIterator[bytes]:
            total = 0
            async for chunk in stream:
                total += len(chunk)
                if total > limit:
                    raise too_large(f"the answer is larger than {limit} bytes; ask for less at once")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()
