"""FrozenPolicy: a further policy of a run, which speaks and is not trained: an opponent, a simulated user, a judge.

    said = await policies["opponent"].say([{"role": "user", "content": "Your move."}], seed=7, session="g0/1:seat 1")
    said.message.text, said.version          ->  "[4]", 12

It has an engine, a tokenizer and a template of its own, so what goes between it and the policy that is trained is text: what
it says is an observation there, and none of its tokens are in a training sample. It is asked with whole conversations and
remembers none; a session only lets its engine keep what it has computed of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from polyturn.core.errors import ConfigError, EngineError, UnknownNameError, did_you_mean
from polyturn.core.generation import FinishReason, GenerateRequest, SamplingParams
from polyturn.core.messages import Message, Origin
from polyturn.core.protocols import Engine
from polyturn.engines.chat_partner import (
    ChatPartnerSettings,
    ChatReply,
    check_positive,
    check_within,
    names_of,
    without_thoughts,
)
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import ToolCallParser

SAMPLED_WITH = ("temperature", "top_p", "max_tokens")
"""Settings of the caller that lets it speak."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReply:
    """One thing that a policy said."""

    text: str
    """All of it, reasoning included."""
    message: Message
    """The same, read by its parser."""
    version: int
    """The version of its weights that said the end of it."""
    is_cut: bool
    """Whether it ran into a limit."""
    prompt_tokens: int
    completion_tokens: int


class FrozenPolicy:
    """A policy that is asked for one message at a time."""

    def __init__(
        self,
        name: str,
        *,
        engine: Engine,
        encoder: DeltaEncoder,
        parser: ToolCallParser,
        sampling: SamplingParams,
        max_context: int,
    ) -> None:
        """Take a policy of the run.

        Args:
            name: What the configuration calls it.
            engine: What it is sampled from; its own.
            encoder: Of its tokenizer and template.
            parser: Reads what it writes.
            sampling: How it is sampled by default.
            max_context: The longest prompt plus completion.
        """
        self.name = name
        self.engine = engine
        self.sampling = sampling
        self._encoder = encoder
        self._parser = parser
        self.is_named = False
        """Whether a setting names it."""
        self.max_context = max_context
        """The longest prompt plus completion."""
        self._numbers = itertools.count()
        self._num_tokens = 0

    @property
    def codec(self) -> Codec:
        """The codec of its tokenizer and template."""
        return self._encoder.codec

    async def say(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        seed: int,
        session: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> PolicyReply:
        """Return its next reply.

        Args:
            messages: The conversation as it sees it, its own words under the role "assistant".
            seed: Of the sampling.
            session: The conversation's id, where more will follow; `end` it then. None keeps nothing.
            sampling: How it is sampled; None samples as it usually is.

        Raises:
            EngineError: the conversation does not fit, or the engine is lost.
            TemplateError: its template cannot render the conversation.
        """
        codec = self._encoder.codec
        ids = self._encoder.start([Message.from_openai(m) for m in messages])
        if len(ids) >= self.max_context:
            raise EngineError(
                f"the policy {self.name!r} was shown {len(ids)} tokens and its context has {self.max_context}; raise "
                f"policies.{self.name}.max_context, or shorten the conversation"
            )
        number = next(self._numbers)
        request = GenerateRequest(
            request_id=f"{self.name}/{number}",
            session_id=session or f"{self.name}/{number}",
            prompt_ids=ids,
            sampling=dataclasses.replace(sampling or self.sampling, seed=seed, stop_token_ids=codec.stop_token_ids),
        )
        try:
            completion = await self.engine.generate(request)
        finally:
            if session is None:
                await self.engine.end_session(request.session_id)
        self._num_tokens += len(completion.token_ids)
        text = codec.decode_turn(completion.token_ids)
        read = self._parser.parse(text)
        return PolicyReply(
            text=text,
            message=Message(role="assistant", content=read.content, reasoning=read.reasoning, origin=Origin.MODEL),
            version=completion.policy_versions[-1][1],
            is_cut=completion.finish_reason is not FinishReason.STOP,
            prompt_tokens=len(ids),
            completion_tokens=len(completion.token_ids),
        )

    async def end(self, session: str) -> None:
        """Forget a conversation. Unknown ids are fine."""
        await self.engine.end_session(session)

    async def close(self) -> None:
        """Free its engine."""
        await self.engine.close()

    def read_tokens(self) -> int:
        """Return the number of tokens that it sampled since the last call."""
        num, self._num_tokens = self._num_tokens, 0
        return num


Policies = Mapping[str, FrozenPolicy]
"""The further policies of a run, by name."""


def policy_named(name: Any, policies: Policies, *, who: str) -> FrozenPolicy:
    """Return the policy that a setting names.

    Raises:
        UnknownNameError: the run has none of that name.
    """
    if not isinstance(name, str) or name not in policies:
        hint = did_you_mean(str(name), policies) if policies else " It has none; name its model in the section `policies`."
        raise UnknownNameError(f"{who}: the run has no policy {name!r} beside the one that it trains.{hint}")
    policies[name].is_named = True
    return policies[name]


def sampled_with(policy: FrozenPolicy, options: Mapping[str, Any], *, who: str) -> SamplingParams:
    """Return a policy's sampling parameters, of which `options` may set temperature, top_p and max_tokens.

    Raises:
        ConfigError: one of them cannot be.
    """
    settings = {name: options[name] for name in SAMPLED_WITH if options.get(name) is not None}
    check_within(settings.get("temperature", 1.0), 0.0, float("inf"), name="temperature", who=who)
    check_within(settings.get("top_p", 1.0), 0.0, 1.0, name="top_p", who=who)
    check_positive(settings.get("max_tokens", 1), name="max_tokens", who=who, is_whole=True)
    try:
        return dataclasses.replace(policy.sampling, **settings)
    except ConfigError as problem:
        raise ConfigError(f"{who}: {problem}") from problem


class PolicyPartner:
    """A policy of the run that says one thing at a time, as `ChatPartner` lets a model behind an endpoint do."""

    def __init__(self, policy: FrozenPolicy, *, sampling: SamplingParams) -> None:
        self.policy = policy
        self._sampling = sampling
        self.num_asked = 0
        """Answers that it gave."""

    @classmethod
    def read(cls, config: Mapping[str, Any], policies: Policies, *, who: str) -> PolicyPartner:
        """Make the voice that a config names under `policy`.

        Raises:
            UnknownNameError: the run has no such policy.
            ConfigError: a setting is for a model at an endpoint, or cannot be.
        """
        policy = policy_named(config["policy"], policies, who=who)
        for name in names_of(ChatPartnerSettings):
            if name not in SAMPLED_WITH and config.get(name) is not None:
                raise ConfigError(
                    f"{who}: {name} is for a model at an endpoint, and policy is {policy.name!r}; drop one of them"
                )
        return cls(policy, sampling=sampled_with(policy, config, who=who))

    def require(self) -> None:
        """Refuse nothing: it is here."""

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keep nothing open: its engine lives as long as the run."""
        yield

    async def say(self, messages: Sequence[Mapping[str, Any]], *, seed: int, session: str | None = None) -> ChatReply:
        """Answer messages.

        Raises:
            EngineError: they do not fit, or the engine is lost.
        """
        self.num_asked += 1
        reply = await self.policy.say(messages, seed=seed, session=session, sampling=self._sampling)
        return ChatReply(
            text=without_thoughts(reply.message.text),
            is_cut=reply.is_cut,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            version=reply.version,
        )

    async def end(self, session: str) -> None:
        """Forget a conversation."""
        await self.policy.end(session)
