"""Partner: a model that writes the next message of a conversation, for a simulated user or a judge.

    partner = partner_of(PartnerSettings.read(config, who="user.yaml"), who="user.yaml", base=folder, policies=policies)
    await partner.say([{"role": "system", …}, {"role": "user", …}], seed=7)     ->  PartnerReply(text="…")

A partner is part of the environment: it gets plain messages, and its reasoning is removed, because the trained model must
not read it. It is a model at an endpoint (`EndpointPartner`) or a further policy of the run (`PolicyPartner`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from polyturn.core.errors import ConfigError, EngineError, one_line
from polyturn.core.generation import SamplingParams
from polyturn.core.secrets import token_from
from polyturn.infra.settings import AtLeastOne, Seconds, Text
from polyturn.partners.answer_cache import AnswerCache
from polyturn.partners.client import ChatClient, Endpoint, check_reachable
from polyturn.partners.policy import SAMPLED_WITH, FrozenPolicy, Policies, SpeakerSampling, policy_named, sampled_with

logger = logging.getLogger(__name__)

_THOUGHTS = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
_OPENED = re.compile(r"\A.*?</think(?:ing)?>", re.DOTALL)


class PartnerSettings(SpeakerSampling):
    """The model of a partner, and the limits of its requests."""

    policy: Text | None = None
    """The name of a further policy of the run, instead of an endpoint."""
    base_url: Text | None = None
    """The endpoint's address, without /chat/completions."""
    model: Text | None = None
    """The model's name at the endpoint."""
    api_key_env: Text | None = None
    """The environment variable with the key; null sends no key."""
    max_concurrent: AtLeastOne = 16
    """Largest number of concurrent requests to the host, including those of other clients."""
    timeout_s: Seconds = 60.0
    """Seconds within which one attempt must finish."""
    max_tries: AtLeastOne = 5
    """Largest number of attempts if the server is busy or fails."""
    backoff_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds before the second attempt; the wait doubles, with jitter, up to a minute."""
    deadline_s: Seconds = 120.0
    """Seconds within which an answer must come, including all attempts."""
    cache: Text | None = None
    """A file that keeps answers, so that equal requests are sent once; relative to the configuration file."""
    extra: Mapping[str, Any] = Field(default_factory=dict)
    """Further keys of the request body."""

    def refuse_endpoint(self, *, but: Sequence[str], who: str, instead: str) -> None:
        """Refuse settings of an endpoint if the partner's model is not at an endpoint.

        Raises:
            ConfigError: such a setting is set.
        """
        for name in PartnerSettings.model_fields:
            if name in self.model_fields_set and name not in (*but, *SAMPLED_WITH) and getattr(self, name) is not None:
                raise ConfigError(f"{who}: {name} is for a model at an endpoint, but {instead}; remove one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartnerReply:
    """One answer."""

    text: str
    """Without reasoning."""
    is_cut: bool = False
    """Whether a limit cut the reply."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cached: bool = False
    """Whether the reply came from the cache."""
    version: int | None = None
    """For a policy of the run: the version of its weights."""


class Partner:
    """Base class of partners."""

    def __init__(self) -> None:
        self.num_asked = 0
        """Number of requests that the model has answered or is answering; answers from the cache do not count."""
        self.max_asked: int | None = None
        """Largest value of `num_asked`; None for no limit."""

    def require(self) -> None:
        """Check that the model can be reached.

        Raises:
            ConfigError: the model cannot be reached.
        """

    def in_use(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep connections open in the context."""
        return contextlib.nullcontext()

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> PartnerReply:
        """Return the answer to `messages`; `session` is the conversation's id if more requests will follow.

        Raises:
            EngineError: the model did not answer.
            ConfigError: an endpoint would refuse every request.
        """
        raise NotImplementedError

    async def end(self, session: str) -> None:
        """Forget a conversation, so that its resources can be freed."""

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count a request while it runs, so that concurrent ones stay below a limit; one that fails does not count.

        Raises:
            EngineError: the limit is reached.
        """
        if self.max_asked is not None and self.num_asked >= self.max_asked:
            raise EngineError(f"it has used its {self.max_asked} answers of this run; raise its max_calls")
        self.num_asked += 1
        try:
            yield
        except BaseException:
            self.num_asked -= 1
            raise


def partner_of(
    settings: PartnerSettings, *, who: str, base: Path | None = None, policies: Policies | None = None
) -> EndpointPartner | PolicyPartner:
    """Create a partner from its settings.

    Raises:
        UnknownNameError: the run has no policy of that name.
        ConfigError: a setting is missing or invalid.
    """
    if settings.policy is not None:
        policy = policy_named(settings.policy, policies or {}, who=who)
        settings.refuse_endpoint(but=("policy",), who=who, instead=f"policy is {policy.name!r}")
        return PolicyPartner(policy, sampling=sampled_with(policy, settings.model_dump(include={*SAMPLED_WITH}), who=who))
    for name, value in (("base_url", "an address such as http://127.0.0.1:8000/v1"), ("model", "its name at the endpoint")):
        if getattr(settings, name) is None:
            raise ConfigError(f"{who}: {name} is None; set it to {value}")
    return EndpointPartner(settings, who=who, base=base)


class EndpointPartner(Partner):
    """A partner whose model is at an endpoint."""

    def __init__(self, settings: PartnerSettings, *, who: str, base: Path | None = None) -> None:
        """Create a partner without connecting.

        Raises:
            ConfigError: the address is invalid, the key's variable is not set, or the cache cannot be used.
        """
        super().__init__()
        self.settings = settings
        self._who = who
        try:
            self._endpoint = Endpoint(
                url=settings.base_url or "",
                model=settings.model or "",
                key=token_from({"token_env": settings.api_key_env}, where="api_key_env"),
                max_tokens=512 if settings.max_tokens is None else settings.max_tokens,
                max_concurrent=settings.max_concurrent,
                timeout_s=settings.timeout_s,
                max_tries=settings.max_tries,
                backoff_s=settings.backoff_s,
            )
            self._client = ChatClient(self._endpoint)
        except ConfigError as problem:
            raise ConfigError(f"{who}: {problem}") from problem
        self._cache = None if settings.cache is None else AnswerCache((base or Path()) / settings.cache)

    def require(self) -> None:
        """Check that the endpoint answers; a cache with answers is enough.

        Raises:
            ConfigError: the endpoint does not answer and the cache is empty.
        """
        try:
            check_reachable(self._endpoint)
        except ConfigError as problem:
            if self._cache is None or not self._cache.num_answers:
                raise ConfigError(f"{self._who}: {problem}") from problem
            logger.warning("%s: %s; using %d cached answers", self._who, problem, self._cache.num_answers)

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keep the connections open in the context."""
        async with self._client.in_use():
            yield

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> PartnerReply:
        """Return the model's answer; with a cache, the same seed gives the same answer."""
        settings, endpoint = self.settings, self._endpoint
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [dict(m) for m in messages],
            "temperature": 0.7 if settings.temperature is None else settings.temperature,
            "top_p": 1.0 if settings.top_p is None else settings.top_p,
            "seed": seed % (1 << 31),
            **settings.extra,
        }
        request = {"url": endpoint.url.rstrip("/"), "max_tokens": endpoint.max_tokens, **body}
        if self._cache is not None and (kept := await self._cache.get(request)) is not None:
            return PartnerReply(**{**kept, "is_cached": True})
        try:
            with self._counting():
                async with asyncio.timeout(settings.deadline_s), self._client.in_use():
                    reply = _read(await self._client.ask(body), url=endpoint.url)
        except TimeoutError as problem:
            raise EngineError(
                f"{endpoint.url} did not answer within {settings.deadline_s:g} s; raise deadline_s, or use a faster server"
            ) from problem
        if self._cache is None:
            return reply
        return PartnerReply(**{**await self._cache.put(request, asdict(reply)), "is_cached": False})


class PolicyPartner(Partner):
    """A partner whose model is a further policy of the run."""

    def __init__(self, policy: FrozenPolicy, *, sampling: SamplingParams) -> None:
        super().__init__()
        self.policy = policy
        self._sampling = sampling

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> PartnerReply:
        """Return the policy's answer."""
        with self._counting():
            reply = await self.policy.say(messages, seed=seed, session=session, sampling=self._sampling)
        return PartnerReply(
            text=without_thoughts(reply.message.text),
            is_cut=reply.is_cut,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            version=reply.version,
        )

    async def end(self, session: str) -> None:
        """Release a conversation in the policy's engine."""
        await self.policy.end(session)


def without_thoughts(text: str) -> str:
    """Return a text without its reasoning, even if the template opened the reasoning or a limit cut it."""
    return _OPENED.sub("", _THOUGHTS.sub("", text)).strip()


def _read(answer: Any, *, url: str) -> PartnerReply:
    try:
        choice = answer["choices"][0]
        text, usage = choice["message"].get("content") or "", answer.get("usage") or {}
        if not isinstance(text, str):
            raise TypeError("its content is not a text")
        return PartnerReply(
            text=without_thoughts(text),
            is_cut=choice.get("finish_reason") == "length",
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as problem:
        raise EngineError(f"{url} did not answer with a chat completion ({one_line(problem)}): {answer!r:.300}") from None
