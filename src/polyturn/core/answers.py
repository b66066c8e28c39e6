"""Answers of a service, read up to a bound, because a broken or hostile one may send any number of bytes.

    body = await whole(response.content.iter_any())      aiohttp; httpx: response.aiter_bytes()

What is counted is what comes out of the decompression, so that a small answer cannot unfold into a large one.
"""

from __future__ import annotations

from collections.abc import AsyncIterable

from polyturn.core.errors import PolyturnError

MAX_ANSWER_BYTES = 64 << 20


class LargeAnswerError(PolyturnError, ValueError):
    """An answer that is larger than it may be; what it was read from is to be closed."""


async def whole(chunks: AsyncIterable[bytes], *, limit: int | None = None) -> bytes:
    """Return all of `chunks`.

    Raises:
        LargeAnswerError: they are more than `limit` bytes, `MAX_ANSWER_BYTES` where none is given; no more is read.
    """
    body, limit = bytearray(), MAX_ANSWER_BYTES if limit is None else limit
    async for chunk in chunks:
        if len(body) + len(chunk) > limit:
            raise LargeAnswerError(f"the answer is larger than {limit} bytes")
        body += chunk
    return bytes(body)
