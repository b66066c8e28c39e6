"""Reads the answer of a service up to a limit, because a broken or hostile service may send any number of bytes.

    body = await whole(response.content.iter_any())      aiohttp; httpx: response.aiter_bytes()

The limit applies to the decompressed bytes, so that a small answer cannot unfold into a large one.
"""

from __future__ import annotations

from collections.abc import AsyncIterable

from polyturn.core.errors import PolyturnError

MAX_ANSWER_BYTES = 64 << 20


class LargeAnswerError(PolyturnError, ValueError):
    """An answer exceeded its limit; close the connection that it was read from."""


async def whole(chunks: AsyncIterable[bytes], *, limit: int | None = None) -> bytes:
    """Return all of `chunks`, joined.

    Raises:
        LargeAnswerError: there are more than `limit` bytes (default: `MAX_ANSWER_BYTES`); reading stops there.
    """
    body, limit = bytearray(), MAX_ANSWER_BYTES if limit is None else limit
    async for chunk in chunks:
        if len(body) + len(chunk) > limit:
            raise LargeAnswerError(f"the answer is larger than {limit} bytes")
        body += chunk
    return bytes(body)
