"""Partner: a model that answers one conversation at a time, for a simulated user or a judge.

    partner = partner_of(PartnerSettings.read(config, who="user.yaml"), who="user.yaml", base=folder, policies=policies)
    await partner.say([{"role": "system", …}, {"role": "user", …}], seed=7)     ->  PartnerReply(text="…")

A partner is part of the environment: it is asked with plain messages, and its reasoning, which the evaluated model must
not read, is removed. It is a model at an endpoint (`EndpointPartner`) or a further policy of the run (`PolicyPartner`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
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
    """Which model speaks, how it is asked, and what its answers may cost."""

    policy: Text | None = None
    """A further policy of the run, in place of an endpoint."""
    base_url: Text | None = None
    """The endpoint's address, up to and without /chat/completions."""
    model: Text | None = None
    """The model's name there."""
    api_key_env: Text | None = None
    """The environment variable that holds the key; null asks without one."""
    max_concurrent: AtLeastOne = 16
    """Requests under way at the host at once, those of other clients included."""
    timeout_s: Seconds = 60.0
    """Deadline of one attempt."""
    max_tries: AtLeastOne = 5
    """Attempts if the server is busy or fails."""
    backoff_s: Annotated[float, Field(ge=0)] = 1.0
    """The wait before the second attempt; it doubles, with jitter, up to a minute."""
    deadline_s: Seconds = 120.0
    """Deadline of one answer, with all its attempts."""
    cache: Text | None = None
    """A file that keeps answers, so that the same question is asked once; relative to the file that names it."""
    extra: Mapping[str, Any] = Field(default_factory=dict)
    """Further keys of the request, for this server."""

    def refuse_endpoint(self, *, but: Sequence[str], who: str, instead: str) -> None:
        """Refuse settings of an endpoint where another model speaks.

        Raises:
            ConfigError: one is set.
        """
        for name in PartnerSettings.model_fields:
            if name in self.model_fields_set and name not in (*but, *SAMPLED_WITH) and getattr(self, name) is not None:
                raise ConfigError(f"{who}: {name} is for a model at an endpoint, and {instead}; drop one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartnerReply:
    """One answer."""

    text: str
    """Without reasoning."""
    is_cut: bool = False
    """Whether it ran into `max_tokens`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cached: bool = False
    """Whether it came from the cache."""
    version: int | None = None
    """Of a policy of the run: the version of its weights."""


class Partner:
    """A model that gives one answer at a time."""

    def __init__(self) -> None:
        self.num_asked = 0
        """Answers that the model gave; those of a cache do not count."""

    def require(self) -> None:
        """Refuse a model that cannot be reached.

        Raises:
            ConfigError: it cannot.
        """

    def in_use(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep connections open between answers."""
        return contextlib.nullcontext()

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> PartnerReply:
        """Return the answer to `messages`; a session is the id of a conversation that goes on.

        Raises:
            EngineError: there is no answer.
            ConfigError: an endpoint would refuse every request.
        """
        raise NotImplementedError

    async def end(self, session: str) -> None:
        """Forget a conversation."""


def partner_of(
    settings: PartnerSettings, *, who: str, base: Path | None = None, policies: Policies | None = None
) -> EndpointPartner | PolicyPartner:
    """Return the partner that settings describe.

    Raises:
        UnknownNameError: the run has no such policy.
        ConfigError: a setting is missing, or cannot work.
    """
    if settings.policy is not None:
        policy = policy_named(settings.policy, policies or {}, who=who)
        settings.refuse_endpoint(but=("policy",), who=who, instead=f"policy is {policy.name!r}")
        return PolicyPartner(policy, sampling=sampled_with(policy, settings.model_dump(include={*SAMPLED_WITH}), who=who))
    for name, example in (("base_url", "http://127.0.0.1:8000/v1"), ("model", "the model's name at the endpoint")):
        if getattr(settings, name) is None:
            raise ConfigError(f"{who}: {name} is None; give {example!r}, or the like")
    return EndpointPartner(settings, who=who, base=base)


class EndpointPartner(Partner):
    """A model behind an endpoint."""

    def __init__(self, settings: PartnerSettings, *, who: str, base: Path | None = None) -> None:
        """Take the settings; nothing is connected yet.

        Raises:
            ConfigError: the address is none, the key's variable is not set, or the cache cannot be used.
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
        """Refuse an endpoint that does not answer, unless its cache holds answers.

        Raises:
            ConfigError: it does not, and nothing is cached.
        """
        try:
            check_reachable(self._endpoint)
        except ConfigError as problem:
            if self._cache is None or not self._cache.num_answers:
                raise ConfigError(f"{self._who}: {problem}") from problem
            logger.warning("%s: %s; %d answers of its cache are used", self._who, problem, self._cache.num_answers)

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keep the connections open between answers."""
        async with self._client.in_use():
            yield

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> PartnerReply:
        """Return the model's answer, which with a cache is the same for the same seed."""
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
            async with asyncio.timeout(settings.deadline_s), self._client.in_use():
                reply = _read(await self._client.ask(body), url=endpoint.url)
        except TimeoutError as problem:
            raise EngineError(
                f"{endpoint.url} gave no answer within {settings.deadline_s:g} s; raise deadline_s, or serve it faster"
            ) from problem
        self.num_asked += 1
        if self._cache is None:
            return reply
        return PartnerReply(**{**await self._cache.put(request, asdict(reply)), "is_cached": False})


class PolicyPartner(Partner):
    """A further policy of the run."""

    def __init__(self, policy: FrozenPolicy, *, sampling: SamplingParams) -> None:
        super().__init__()
        self.policy = policy
        self._sampling = sampling

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> PartnerReply:
        """Return the policy's answer."""
        self.num_asked += 1
        reply = await self.policy.say(messages, seed=seed, session=session, sampling=self._sampling)
        return PartnerReply(
            text=without_thoughts(reply.message.text),
            is_cut=reply.is_cut,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            version=reply.version,
        )

    async def end(self, session: str) -> None:
        """Let its engine forget a conversation."""
        await self.policy.end(session)


def without_thoughts(text: str) -> str:
    """Return a text without its reasoning, also if the template opened it or a limit cut it."""
    return _OPENED.sub("", _THOUGHTS.sub("", text)).strip()


def _read(answer: Any, *, url: str) -> PartnerReply:
    try:
        choice = answer["choices"][0]
        text, usage = choice["message"].get("content") or "", answer.get("usage") or {}
        return PartnerReply(
            text=without_thoughts(str(text)),
            is_cut=choice.get("finish_reason") == "length",
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as problem:
        raise EngineError(f"{url} answered no chat completion ({one_line(problem)}): {answer!r:.300}") from None
