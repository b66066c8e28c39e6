"""Reads requests and writes answers of the endpoint, for all of its APIs.

BadRequest                       becomes an error in the form that the client's library reads (`guarded`)
a value of an unexpected type    becomes a BadRequest (`readable`)
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from polyturn.core.errors import PolyturnError, one_line
from polyturn.core.reward import MAX_REWARD, as_score
from polyturn.serving import body
from polyturn.serving.auth import request_tokens
from polyturn.serving.body import BodyError
from polyturn.serving.openai.chat_request import BadRequest

logger = logging.getLogger(__name__)

MAX_VALUES = 1 << 15
"""Largest number of lists and objects in one request (messages, parts, calls, schemas); converting them stays fast."""
Handler = Callable[[Request], Awaitable[Response]]


def guarded(handler: Handler, error: Callable[[BadRequest], dict[str, Any]]) -> Handler:
    """Return a handler that writes its errors in the form that the client's library reads."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except BadRequest as problem:
            refused = problem
        except ClientDisconnect:  # the client disconnected, or the middleware refused its body
            raise
        except PolyturnError as problem:
            refused = BadRequest(one_line(problem), status=500, code="server_error")
        except Exception as problem:
            logger.exception("a request to %s failed", request.url.path.rpartition("/")[2])
            refused = BadRequest(f"the server failed: {type(problem).__name__}", status=500, code="server_error")
        # A client's library must not retry a request that the episode has already seen; this header prevents it.
        return json_answer(error(refused), status=refused.status, headers={"x-should-retry": "false"})

    return run


async def read_object(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """Return a request's body, which must be a JSON object.

    Raises:
        BadRequest: the body is not a JSON object.
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
    """Turn errors from values of an unexpected type into a `BadRequest`.

    Raises:
        BadRequest: the code in the context failed on such a value.
    """
    try:
        yield
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as problem:
        raise BadRequest(f"a part of the request has the wrong type ({one_line(problem):.200})") from problem


def read_reward(value: Any) -> tuple[float, dict[str, Any]]:
    """Return a reward and further info, from a number or a mapping with "reward" or "score".

    Raises:
        BadRequest: the reward is missing or not a finite number.
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
    """Refuse a request without one of `keys`; if `keys` is empty, every request passes.

    Raises:
        BadRequest: the request has none of them; `wants` is the message.
    """
    if not keys:
        return
    headers = {name: request.headers.get(name, "") for name in ("authorization", "x-api-key")}
    offered_keys = [one.encode("utf-8", "surrogateescape") for one in request_tokens(headers)]
    if not sum(
        hmac.compare_digest(one, key)
        for one in offered_keys
        for key in keys
        # Compares with all keys, so the time does not depend on which one matches.
    ):
        raise BadRequest(wants, status=401, code="unauthorized")


def json_answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json", headers=headers)


def stream_answer(events: Iterator[bytes]) -> Response:
    """Return an answer as server-sent events, all in one body."""
    return Response(b"".join(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
