"""ModelEndpoint: one HTTP server for many episodes, each with its own unguessable base URL.

    POST /episodes/{id}/v1/chat/completions   /v1/responses   /v1/messages   /v1/messages/count_tokens
    GET  /episodes/{id}/v1/models             POST /episodes/{id}/v1/reward  {"reward": 1.0}
    POST /v1/chat/completions, …              the same without an episode, if the server offers it

A request needs its episode's key (`Authorization: Bearer KEY`, or `x-api-key: KEY`) and passes the rules that all servers
share (`serving/auth.py`). Posting a reward needs a separate reward key, because the agent may pass the API key on to code
that the model wrote. A request cannot make this machine read a file or an address, and every error has the form that the
client's library reads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.infra.aio import PerLoop
from polyturn.serving.auth import ServerRules, check_token
from polyturn.serving.auth import guarded as guard_app
from polyturn.serving.body import Refusal, while_wanted
from polyturn.serving.listen import bind, origin_of, serving
from polyturn.serving.openai import chat, messages, responses
from polyturn.serving.openai.chat_request import BadRequest, ChatRequest, ChatResponse
from polyturn.serving.openai.http import (
    Handler,
    check_key,
    guarded,
    json_answer,
    read_object,
    read_reward,
    readable,
    stream_answer,
)

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""Seconds without a complete request head after which a connection is closed; longer than clients keep an idle one."""
MAX_REQUESTS = 100_000
"""Largest number of concurrent requests; high because agents wait long for a completion."""
EPISODE_KEY = "the API key does not belong to this episode; pass the api_key that came with the base_url"
"""The error for a request to an episode with another key."""
REWARD_KEY = "a reward needs the episode's reward key; the API key only gives access to the model"
"""The error for a request that posts a reward or fetches a trajectory without the reward key."""
SERVER_TOKEN = "this server requires its token as the API key: Authorization: Bearer TOKEN, or x-api-key: TOKEN"
"""The error for a request outside any episode without the token."""
MAX_ENDED = 4096
"""Number of ended episodes to remember, so that a late request gets the reason."""


class Answerer(Protocol):
    """Answers requests: an episode's session, or a service without episodes."""

    async def ask(self, ask: ChatRequest) -> list[ChatResponse]:
        """Answer one request."""
        ...

    def count_tokens(self, ask: ChatRequest) -> int:
        """Return the number of tokens in a request's prompt; called in a thread."""
        ...

    def give_reward(self, score: float, info: Mapping[str, Any]) -> None:
        """Set the episode's reward."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of an agent's episode."""

    base_url: str
    """For clients of OpenAI's API; ends with /v1."""
    anthropic_base_url: str
    """For clients of Anthropic's API, which add /v1 themselves."""
    api_key: str = field(repr=False)
    """Gives access to the model only."""
    reward_key: str | None = field(default=None, repr=False)
    """Needed to post the episode's reward; None if rewards are not posted."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """An episode or a service that answers requests, with its keys."""

    answerer: Answerer
    keys: tuple[bytes, ...]
    """Keys that give access; empty lets every request in."""
    reward_keys: tuple[bytes, ...] | None = None
    """Keys that allow posting a reward; None refuses every posted reward."""
    kept: responses.ResponseCache = field(default_factory=responses.ResponseCache)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """The options that all episodes of a server share."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    reach_as: str | None = None
    """The host in the addresses that agents get, if not `host`: for example this machine's name inside a container."""
    models: tuple[str, ...] = ("polyturn",)
    any_model: bool = True
    """Whether a request may name a model that is not listed, as agents written for another model do."""
    ignore: frozenset[str] = frozenset()
    """Unsupported parameters to ignore instead of refusing them."""
    rules: ServerRules = field(default_factory=lambda: ServerRules(max_requests=MAX_REQUESTS))
    """Access rules of every request. The token gives access to every episode. Requests outside an episode require it; if
    there is no token, they are open."""


class ModelEndpoint:
    """The HTTP server: it starts with the first `serving` context and stops after the last."""

    def __init__(self, options: EndpointOptions | None = None, *, plain: Answerer | None = None) -> None:
        self.options = options or EndpointOptions()
        # The key depends on the episode, so the middleware gets rules without the token.
        names = () if self.options.reach_as is None else (self.options.reach_as.lower(),)
        rules = self.options.rules
        check_token(rules.token)
        self._rules = dataclasses.replace(
            rules,
            token=None,
            allowed_hosts=rules.allowed_hosts.union(names),
        )
        self._plain = None if plain is None else _Tenant(plain, self._token(), ())
        self._tenants: dict[str, _Tenant] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._num_holders = 0
        self._origin: str | None = None
        self._lock = PerLoop(asyncio.Lock)
        """Held while the server starts or stops."""
        self._server = AsyncExitStack()

    @asynccontextmanager
    async def serving(self, bound: socket.socket | None = None, *, more: Sequence[Route] = ()) -> AsyncIterator[str]:
        """Serve while the context is open and yield the origin, http://HOST:PORT; may be entered more than once.

        Args:
            bound: The socket to listen on; None takes a free port.
            more: Further routes.

        Raises:
            ConfigError: the server cannot listen on the address.
        """
        self._num_holders += 1
        try:
            async with self._lock():
                if self._origin is None:
                    self._origin = await self._start(bound, more)
            yield self._origin
        finally:
            self._num_holders -= 1
            if self._num_holders == 0:
                async with self._lock():
                    if self._num_holders == 0:
                        self._origin = None
                        await self._server.aclose()

    async def _start(self, bound: socket.socket | None, more: Sequence[Route]) -> str:
        try:
            bound = bound or bind(self.options.host, self.options.port, is_only=True)
        except ConfigError as problem:
            raise ConfigError(f"the endpoint {problem}") from problem
        # Input that is not HTTP gets a 400 and is not worth a log line.
        options = {"timeout_keep_alive": KEEP_ALIVE_S, "log_level": "critical"}
        await self._server.enter_async_context(serving(self._app(more), self._rules, bound, **options))
        return origin_of(bound, host=self.options.reach_as)

    def admit(self, answerer: Answerer, *, origin: str, posts_reward: bool) -> tuple[str, Address]:
        """Add a session; return its secret name, which `dismiss` takes, and its address.

        Args:
            answerer: The session.
            origin: The server's origin, http://HOST:PORT.
            posts_reward: Whether a reward may be posted; otherwise there is no reward key and every post is refused.
        """
        name, key, token = secrets.token_urlsafe(18), secrets.token_urlsafe(24), self._token()
        reward_key = secrets.token_urlsafe(24) if posts_reward else None
        reward_keys = None if reward_key is None else (reward_key.encode(), *token)
        self._tenants[name] = _Tenant(answerer, (key.encode(), *token), reward_keys)
        base = f"{origin}/episodes/{name}"
        return name, Address(base_url=f"{base}/v1", anthropic_base_url=base, api_key=key, reward_key=reward_key)

    def dismiss(self, name: str, why: str) -> None:
        """Remove a session; later requests to it get the reason `why`."""
        if self._tenants.pop(name, None) is not None:
            self._ended[name] = why
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def check_token(self, request: Request) -> None:
        """Refuse a request without the server's token.

        Raises:
            BadRequest: the token is missing or wrong.
        """
        check_key(request, self._token(), wants=SERVER_TOKEN)

    def check_reward_key(self, request: Request, key: str) -> None:
        """Refuse a request that has neither the episode's reward key nor the server's token.

        Raises:
            BadRequest: both are missing or wrong.
        """
        check_key(request, (key.encode(), *self._token()), wants=REWARD_KEY)

    def _app(self, more: Sequence[Route]) -> Starlette:
        def route(path: str, method: str, handler: Handler, error: Any = chat.error) -> Route:
            return Route(path, guarded(handler, error), methods=[method])

        routes = list(more)
        for prefix in ("/episodes/{episode}/v1", "/v1"):
            routes += [
                route(f"{prefix}/chat/completions", "POST", self._chat),
                route(f"{prefix}/responses", "POST", self._responses),
                route(f"{prefix}/messages", "POST", self._messages, messages.error),
                route(f"{prefix}/messages/count_tokens", "POST", self._count_tokens, messages.error),
                route(f"{prefix}/models", "GET", self._models),
                route(f"{prefix}/models/{{model:path}}", "GET", self._model),
            ]
        for path in ("/episodes/{episode}/v1/reward", "/episodes/{episode}/reward"):
            routes.append(route(path, "POST", self._reward))
        app = Starlette(routes=[*routes, Route("/health", _health)], exception_handlers={404: _not_found, 405: _not_found})
        app.router.redirect_slashes = False
        guard_app(app, self._rules, format_refusal=_refusal)
        return app

    # Handlers.

    async def _chat(self, request: Request) -> Response:
        tenant, body = await self._open(request)
        model = self._check_model(body)
        with readable():
            ask = chat.parse(body, self.options.ignore)
        responses = await while_wanted(request, tenant.answerer.ask(ask))
        if body.get("stream"):
            return stream_answer(chat.events(body, responses, model=model))
        return json_answer(chat.reply(body, responses, model=model))

    async def _responses(self, request: Request) -> Response:
        tenant, body = await self._open(request)
        model = self._check_model(body)
        with readable():
            ask = responses.parse(body, tenant.kept, self.options.ignore)
        answers = await while_wanted(request, tenant.answerer.ask(ask))
        answer = responses.reply(body, answers, model=model)
        history = list(ask.messages[1:] if body.get("instructions") else ask.messages)
        tenant.kept.keep(answer["id"], [*history, answers[0].message])
        return stream_answer(responses.events(answer)) if body.get("stream") else json_answer(answer)

    async def _messages(self, request: Request) -> Response:
        tenant, body = await self._open(request)
        model = self._check_model(body)
        with readable():
            ask = messages.parse(body, self.options.ignore)
        responses = await while_wanted(request, tenant.answerer.ask(ask))
        answer = messages.reply(body, responses, model=model)
        return stream_answer(messages.events(answer)) if body.get("stream") else json_answer(answer)

    async def _count_tokens(self, request: Request) -> Response:
        tenant, body = await self._open(request)
        self._check_model(body)
        with readable():
            ask = messages.parse(body, self.options.ignore, needs_max_tokens=False)
        # A history that is too long is counted, too: agents send it to find out whether it is.
        return json_answer({"input_tokens": await asyncio.to_thread(tenant.answerer.count_tokens, ask)})

    async def _models(self, request: Request) -> Response:
        self._tenant(request)
        return json_answer({"object": "list", "data": [_model(name) for name in self.options.models]})

    async def _model(self, request: Request) -> Response:
        self._tenant(request)
        return json_answer(_model(self._check_model({"model": request.path_params["model"]})))

    async def _reward(self, request: Request) -> Response:
        tenant = self._tenant(request, gives_reward=True)
        score, info = read_reward(await read_object(request))
        tenant.answerer.give_reward(score, info)
        return json_answer({"reward": score})

    # Shared by the handlers.

    async def _open(self, request: Request) -> tuple[_Tenant, dict[str, Any]]:
        tenant = self._tenant(request)
        return tenant, await read_object(request)

    def _tenant(self, request: Request, *, gives_reward: bool = False) -> _Tenant:
        name = request.path_params.get("episode")
        if name is None:
            if self._plain is None:
                raise BadRequest(
                    "this server answers requests of episodes only: use the episode's base_url, …/episodes/ID/v1",
                    status=404,
                    code="not_found",
                )
            tenant = self._plain
        elif name in self._tenants:
            tenant = self._tenants[name]
        else:
            if name in self._ended:
                raise BadRequest(f"the episode has ended: {self._ended[name]}", status=410, code="episode_ended")
            raise BadRequest(
                "there is no such episode; use the base_url that came with the API key", status=404, code="not_found"
            )
        if gives_reward:
            if tenant.reward_keys is None:
                why = "this episode does not accept posted rewards; set reward: posted in rollout.scheduler_kwargs"
                raise BadRequest(why, status=403, code="no_reward")
            check_key(request, tenant.reward_keys, wants=REWARD_KEY)
        else:
            check_key(request, tenant.keys, wants=SERVER_TOKEN if name is None else EPISODE_KEY)
        return tenant

    def _check_model(self, body: Mapping[str, Any]) -> str:
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"model is {name!r:.80}; name one, for instance {self.options.models[0]!r}", param="model")
        if name not in self.options.models and not self.options.any_model:
            raise BadRequest(
                f"there is no model {name[:80]!r} here.{did_you_mean(name, self.options.models)}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return name

    def _token(self) -> tuple[bytes, ...]:
        return () if self.options.rules.token is None else (self.options.rules.token.encode(),)


def _refusal(path: str, refusal: Refusal) -> dict[str, Any]:
    """Return the error body for a refusal by the access rules; a client may retry."""
    code = {408: "timeout", 413: "too_large", 429: "rate_limited", 503: "overloaded"}.get(refusal.status, "invalid_request")
    write = messages.error if "/messages" in path else chat.error
    return write(BadRequest(refusal.message, status=refusal.status, code=code))


def _model(name: str) -> dict[str, Any]:
    body = {"id": name, "object": "model", "created": 0, "owned_by": "polyturn"}
    return {**body, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


async def _health(request: Request) -> Response:
    return json_answer({"status": "ok"})


async def _not_found(request: Request, problem: Exception) -> Response:
    message = BadRequest(
        f"there is nothing at {request.method} {request.scope['path'][-80:]}; a base_url ends with /v1 for OpenAI's clients "
        "and without it for Anthropic's",
        status=404,
        code="not_found",
    )
    return json_answer(chat.error(message), status=404, headers={"x-should-retry": "false"})
