"""Reading and writing of the endpoint's requests and answers, whatever their API.

    BadRequest                              an error in the form that the client's library reads (`guarded`)
    a value of a type that no check knows   a sentence, and no stack trace (`readable`)
    a client that leaves                    ends what is done for it (`while_wanted`)

Separate because it knows nothing of episodes: keys, bodies and errors are the same for all that is served here.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from polyturn.core.errors import PolyturnError, one_line
from polyturn.core.reward import MAX_REWARD, as_score
from polyturn.serving import body
from polyturn.serving.auth import given_tokens
from polyturn.serving.body import BodyError, dumps
from polyturn.serving.openai.chat_request import BadRequest

logger = logging.getLogger(__name__)

MAX_VALUES = 1 << 15
"""Lists and objects in one request: messages, parts, calls, schemas. So many are made into messages in no time."""
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


def guarded(handler: Handler, error: Callable[[BadRequest], dict[str, Any]]) -> Handler:
    """Return a handler whose errors are written as a client's library reads them."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except BadRequest as problem:
            refused = problem
        except ClientDisconnect:  # it left, or its body was refused by the guard in front
            raise
        except PolyturnError as problem:
            refused = BadRequest(one_line(problem), status=500, code="server_error")
        except Exception as problem:
            logger.exception("a request to %s broke", request.url.path.rpartition("/")[2])
            refused = BadRequest(f"the server failed: {type(problem).__name__}", status=500, code="server_error")
        # A client may not repeat by itself what the episode has seen: its library asks again only where this is absent.
        return json_answer(error(refused), status=refused.status, headers={"x-should-retry": "false"})

    return run


async def while_wanted(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it if the client leaves. The body must have been read.

    Raises:
        ClientDisconnect: the client left.
    """
    asking, has_left = asyncio.current_task(), False
    assert asking is not None

    async def watch() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        asking.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and asking.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


async def read_object(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return a request's body, a JSON object.

    Raises:
        BadRequest: it is none.
    """
    content = await request.body()
    if not content and may_be_empty:
        return {}
    try:
        return await body.read_object(content, max_values=MAX_VALUES)
    except BodyError as problem:
        raise BadRequest(str(problem), code="invalid_json") from problem


@contextmanager
def readable() -> Iterator[None]:
    """Refuse a request that has a value of another type somewhere, where no check has a sentence of its own for it.

    Raises:
        BadRequest: it has.
    """
    try:
        yield
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as problem:
        raise BadRequest(
            f"a part of the request has another type than the API gives it ({one_line(problem):.200})"
        ) from problem


def read_reward(value: Any) -> tuple[float, dict[str, Any]]:
    """Return a reward and what is recorded beside it, from a number or a mapping with "reward" or "score".

    Raises:
        BadRequest: there is no finite number.
    """
    values = dict(value) if isinstance(value, Mapping) else {"reward": value}
    score = values.pop("reward", values.pop("score", None))
    number = as_score(score) if isinstance(score, bool | int | float) else None
    if number is None:
        raise BadRequest(
            f"the reward is {value!r:.100}; give a finite number of at most {MAX_REWARD:g}, or an object with "
            "one as `reward`",
            param="reward",
        )
    return number, values


def check_key(request: Request, keys: Sequence[bytes], *, wants: str) -> None:
    """Refuse a request that has none of `keys`; without keys, every request passes.

    Raises:
        BadRequest: it has none of them; `wants` is the message.
    """
    if not keys:
        return
    headers = {name: request.headers.get(name, "") for name in ("authorization", "x-api-key")}
    offered_keys = [one.encode("utf-8", "surrogateescape") for one in given_tokens(headers)]
    if not sum(hmac.compare_digest(one, key) for one in offered_keys for key in keys):  # all of them, whichever is right
        raise BadRequest(wants, status=401, code="unauthorized")


def json_answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    return Response(dumps(value), status_code=status, media_type="application/json", headers=headers)


def stream_answer(events: Iterator[bytes]) -> Response:
    """Return an answer as server-sent events, which are all there already."""
    return Response(b"".join(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
