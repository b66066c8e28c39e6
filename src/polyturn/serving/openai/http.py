"""How the endpoint reads requests and writes answers, whatever they are about.

    Refused            an error in the form that the client's library reads (`guarded`)
    a value of a type that no check knows   a sentence, and no stack trace (`readable`)

Separate because it knows nothing of episodes: keys, bodies and errors are the same for all that is served here.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from polyturn.core.errors import PolyturnError, one_line
from polyturn.core.reward import MAX_REWARD, as_score
from polyturn.serving.openai.chat_request import BadRequest
from polyturn.serving.rules import given_tokens
from polyturn.serving.wire import dumps

logger = logging.getLogger(__name__)


def guarded(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], error: Callable[[BadRequest], dict[str, Any]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler whose errors are written as a client's library reads them."""

    async def run(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequest as problem:
            refused = problem
        except web.HTTPRequestEntityTooLarge:
            refused = BadRequest("the body is larger than this server takes", status=413, code="too_large")
        except PolyturnError as problem:
            refused = BadRequest(one_line(problem), status=500, code="server_error")
        except Exception as problem:
            logger.exception("a request to %s broke", request.rel_url.name)
            refused = BadRequest(f"the server failed: {type(problem).__name__}", status=500, code="server_error")
        # A client may not repeat by itself what the episode has seen: its library asks again only where this is absent.
        answer = json_answer(error(refused), status=refused.status, headers={"x-should-retry": "false"})
        if refused.status in (408, 413):  # the rest of the body is not waited for
            answer.force_close()
        return answer

    return run


@contextmanager
def readable() -> Iterator[None]:
    """Refuse a request that has a value of another type somewhere, where no check has a sentence of its own for it.

    Raises:
        Refused: it has.
    """
    try:
        yield
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as problem:
        raise BadRequest(
            f"a part of the request has another type than the API gives it ({one_line(problem):.200})"
        ) from problem


def read_reward(given: Any) -> tuple[float, dict[str, Any]]:
    """Return a reward and what is recorded beside it, from a number or a mapping with "reward" or "score".

    Raises:
        Refused: there is no finite number.
    """
    values = dict(given) if isinstance(given, Mapping) else {"reward": given}
    score = values.pop("reward", values.pop("score", None))
    number = as_score(score) if isinstance(score, bool | int | float) else None
    if number is None:
        raise BadRequest(
            f"the reward is {given!r:.100}; give a finite number of at most {MAX_REWARD:g}, or an object with "
            "one as `reward`",
            param="reward",
        )
    return number, values


def check_key(request: web.Request, keys: Sequence[bytes], *, wants: str) -> None:
    """Refuse a request that has none of `keys`; without keys, everyone may ask.

    Raises:
        Refused: it has none of them; `wants` is what it is told.
    """
    if not keys:
        return
    headers = {name: request.headers.get(name, "") for name in ("authorization", "x-api-key")}
    given = [one.encode("utf-8", "surrogateescape") for one in given_tokens(headers)]
    if not sum(hmac.compare_digest(one, key) for one in given for key in keys):  # all of them, whichever is right
        raise BadRequest(wants, status=401, code="unauthorized")


def json_answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an answer in JSON."""
    return web.Response(body=dumps(value), status=status, content_type="application/json", headers=headers)


async def stream_answer(request: web.Request, events: Iterator[bytes]) -> web.StreamResponse:
    """Write an answer as server-sent events, which are all there already."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    await stream.write(b"".join(events))
    await stream.write_eof()
    return stream
