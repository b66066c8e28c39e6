"""How a test says that a call is refused: the error's type, and the key and the value that its message must hold.

refuses(lambda: Limits(max_turns=0), ConfigError, "max_turns", "0")
await refuses_later(lambda: engine.generate(request), EngineError, "'r1'")
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest


def refuses(call: Callable[[], object], error: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> None:
    """Check that `call` raises `error`, and that its message holds each of `words`."""
    with pytest.raises(error) as caught:
        call()
    _check(caught.value, words)


async def refuses_later(call: Callable[[], Awaitable[Any]], error: type[BaseException], *words: str) -> None:
    """Check that what `call` returns raises `error` when it is awaited."""
    with pytest.raises(error) as caught:
        await call()
    _check(caught.value, words)


def _check(error: BaseException, words: tuple[str, ...]) -> None:
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in {error}"
