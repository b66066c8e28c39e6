"""ChatPartner: a model behind an endpoint that says one thing at a time: a simulated user, a judge.

    partner = ChatPartner(ChatPartnerSettings(base_url="http://127.0.0.1:8000/v1", model="user"), who="user.yaml")
    await partner.say([{"role": "system", …}, {"role": "user", …}], seed=7)     ->  ChatReply(text="…")

Separate from `ChatEngine`, which plays the model that is evaluated: a partner is part of the environment, is asked with
plain messages, has a cache for repeatability, and its reasoning, which the evaluated model must not read, is stripped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from polyturn.core.errors import ConfigError, EngineError, did_you_mean, one_line
from polyturn.core.secrets import token_from
from polyturn.engines.answer_cache import AnswerCache
from polyturn.engines.chat_client import ChatClient, Endpoint, check_reachable

logger = logging.getLogger(__name__)

_THOUGHTS = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
_OPENED = re.compile(r"\A.*?</think(?:ing)?>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPartnerSettings:
    """Which model speaks, how it is asked, and what that may cost."""

    base_url: str = ""
    """The address, up to and without /chat/completions."""
    model: str = ""
    """The model's name there."""
    api_key_env: str | None = None
    """The environment variable that holds the key; None asks without one."""
    temperature: float = 0.7
    """Of the sampling."""
    top_p: float = 1.0
    """Of the sampling."""
    max_tokens: int = 512
    """Tokens of one answer at most."""
    max_concurrent: int = 16
    """Requests under way at the host at once, everyone's included."""
    timeout_s: float = 60.0
    """Deadline of one attempt."""
    max_tries: int = 5
    """Attempts where the server is busy or fails."""
    backoff_s: float = 1.0
    """The wait before the second attempt; it doubles, with chance, up to a minute."""
    deadline_s: float = 120.0
    """Deadline of one answer, with all its attempts."""
    cache: str | None = None
    """A file that keeps the answers, so that the same question is asked once; relative to the file that names it."""
    extra: Mapping[str, Any] | None = None
    """Further keys of the request, for this server."""

    @classmethod
    def read(cls, config: Mapping[str, Any], *, who: str) -> ChatPartnerSettings:
        """Take the settings of a voice out of a config that may hold others.

        Raises:
            ConfigError: one of them cannot work.
        """
        settings = {f.name: config[f.name] for f in fields(cls) if config.get(f.name) is not None}
        for name in ("base_url", "model"):
            if not isinstance(settings.get(name), str) or not settings[name].strip():
                example = "http://127.0.0.1:8000/v1" if name == "base_url" else "the model's name at the endpoint"
                raise ConfigError(f"{who}: {name} is {config.get(name)!r}; give {example!r}, or the like")
        for name in ("max_tokens", "max_concurrent", "max_tries", "timeout_s", "deadline_s"):
            check_positive(settings.get(name, 1), name=name, who=who, is_whole=name.startswith("max"))
        for name, high in (("temperature", math.inf), ("top_p", 1.0), ("backoff_s", math.inf)):
            check_within(settings.get(name, 0.5), 0.0, high, name=name, who=who)
        for name in ("api_key_env", "cache"):
            if not isinstance(settings.get(name, ""), str):
                raise ConfigError(f"{who}: {name} is {settings[name]!r:.100}; give a name")
        if not isinstance(settings.get("extra", {}), Mapping):
            raise ConfigError(f"{who}: extra is {settings['extra']!r:.100}; give further keys of the request as a mapping")
        return cls(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One answer."""

    text: str
    """Without reasoning."""
    is_cut: bool = False
    """Whether it ran into `max_tokens`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cached: bool = False
    """Whether the answer came from the cache."""
    version: int | None = None
    """Of a policy of the run: the version of its weights."""


class SpeakingPolicy(Protocol):
    """A speaker of single messages: a model behind an endpoint (`ChatPartner`) or a policy of the run (`PolicyPartner`)."""

    num_asked: int
    """Answers that were given and were in no cache."""

    def require(self) -> None:
        """Refuse a voice that cannot answer.

        Raises:
            ConfigError: it cannot.
        """
        ...

    def in_use(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep open between answers what is worth it."""
        ...

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> ChatReply:
        """Answer messages; a session is the id of a conversation that goes on.

        Raises:
            EngineError: there is no answer.
        """
        ...

    async def end(self, session: str) -> None:
        """Forget a conversation."""
        ...


class ChatPartner:
    """Asks an endpoint for one answer at a time."""

    def __init__(self, settings: ChatPartnerSettings, *, who: str, base: Path | None = None) -> None:
        """Take the settings; nothing is connected yet.

        Raises:
            ConfigError: the address is none, the key's variable is not set, or the cache cannot be used.
        """
        self.settings = settings
        self._who = who
        try:
            self._endpoint = Endpoint(
                url=settings.base_url,
                model=settings.model,
                key=token_from({"token_env": settings.api_key_env}, where="api_key_env"),
                max_tokens=settings.max_tokens,
                max_concurrent=settings.max_concurrent,
                timeout_s=settings.timeout_s,
                max_tries=settings.max_tries,
                backoff_s=settings.backoff_s,
            )
            self._client = ChatClient(self._endpoint)
        except ConfigError as problem:
            raise ConfigError(f"{who}: {problem}") from problem
        self._cache = None if settings.cache is None else AnswerCache((base or Path()) / settings.cache)
        self.num_asked = 0
        """Answers that came from the endpoint and not from the cache."""

    def require(self) -> None:
        """Refuse an endpoint that does not answer, unless the cache may stand in for it.

        Raises:
            ConfigError: it does not, and nothing is cached.
        """
        try:
            check_reachable(self._endpoint)
        except ConfigError as problem:
            if self._cache is not None and self._cache.num_answers:
                logger.warning("%s: %s; %d answers of its cache are used", self._who, problem, self._cache.num_answers)
                return
            raise ConfigError(f"{self._who}: {problem}") from problem

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keep the connections open between answers."""
        async with self._client.in_use():
            yield

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> ChatReply:
        """Return the model's reply to `messages`; with a cache, the same seed gives the same reply.

        Raises:
            EngineError: the endpoint refused, or did not answer in time.
            ConfigError: it would refuse every request.
        """
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [dict(m) for m in messages],
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": seed % (1 << 31),
            **(settings.extra or {}),
        }
        request = {"url": settings.base_url.rstrip("/"), "max_tokens": settings.max_tokens, **body}
        if self._cache is not None and (kept := await self._cache.get(request)) is not None:
            return ChatReply(**{**kept, "is_cached": True})
        try:
            async with asyncio.timeout(settings.deadline_s), self._client.in_use():
                reply = _read(await self._client.ask(body), url=settings.base_url)
        except TimeoutError as problem:
            raise EngineError(
                f"{settings.base_url} gave no answer within {settings.deadline_s:g} s; raise deadline_s, or serve it faster"
            ) from problem
        self.num_asked += 1
        if self._cache is None:
            return reply
        return ChatReply(**{**await self._cache.put(request, asdict(reply)), "is_cached": False})

    async def end(self, session: str) -> None:
        """Forget nothing: an endpoint is told whole conversations."""


def without_thoughts(text: str) -> str:
    """Return a text without its reasoning, also where the template opened it or a limit cut it."""
    return _OPENED.sub("", _THOUGHTS.sub("", text)).strip()


def check_positive(value: Any, *, name: str, who: str, is_whole: bool) -> None:
    """Refuse a setting that is no number above 0.

    Raises:
        ConfigError: it is not.
    """
    is_number = isinstance(value, int) or (isinstance(value, float) and not is_whole)
    if not is_number or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{who}: {name} is {value!r}; give a {'whole ' if is_whole else ''}number above 0")


def check_within(value: Any, low: float, high: float, *, name: str, who: str) -> None:
    """Refuse a setting that is no number from `low` to `high`.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        bound = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise ConfigError(f"{who}: {name} is {value!r:.100}; give a number {bound}")


def refuse_unknown(config: Mapping[str, Any], known: Sequence[str], *, who: str) -> None:
    """Refuse a config with a key that nothing reads, or that holds a secret.

    Raises:
        ConfigError: it has one.
    """
    for name in config:
        if name in ("api_key", "key", "token"):
            raise ConfigError(
                f"{who}: {name} would stand in the run's records; put the key into an environment variable, and name that "
                "in api_key_env"
            )
        if name not in known:
            raise ConfigError(f"{who}: there is no setting {name!r}.{did_you_mean(str(name), known)}")


def names_of(settings: type) -> list[str]:
    """Return the names of a settings class."""
    return [f.name for f in fields(settings)]


def _read(reply: Any, *, url: str) -> ChatReply:
    try:
        choice = reply["choices"][0]
        text, counted = choice["message"].get("content") or "", reply.get("usage") or {}
        return ChatReply(
            text=without_thoughts(str(text)),
            is_cut=choice.get("finish_reason") == "length",
            prompt_tokens=int(counted.get("prompt_tokens") or 0),
            completion_tokens=int(counted.get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as problem:
        raise EngineError(f"{url} answered no chat completion ({one_line(problem)}): {reply!r:.300}") from None
