"""FrozenPolicy: an untrained second model in a run, which plays an opponent, a simulated user or a judge.

    reply = await policies["opponent"].say([{"role": "user", "content": "Your move."}], seed=7, session="g0/1:seat 1")
    reply.message.text, reply.version          ->  "[4]", 12

The policy has its own engine, tokenizer and template, and exchanges only text with the trained policy. Its text is an
observation for the trained policy, and its tokens are never in a training sample. Every request contains the whole
conversation; a session only lets the engine keep the conversation's KV cache.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from polyturn.core.errors import ConfigError, EngineError, UnknownNameError, did_you_mean
from polyturn.core.generation import FinishReason, GenerateRequest, SamplingParams
from polyturn.core.messages import Message, Origin
from polyturn.core.protocols import Engine
from polyturn.infra.settings import AtLeastOne, Settings
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import ToolCallParser


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReply:
    """One reply of a policy."""

    text: str
    """The whole reply, including reasoning."""
    message: Message
    """The reply, parsed as a message."""
    version: int
    """Version of the weights that sampled the last token."""
    is_cut: bool
    """Whether a limit or an abort cut the reply."""
    prompt_tokens: int
    completion_tokens: int


class FrozenPolicy:
    """A policy that writes one message at a time and is not trained."""

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
        """Create a policy from its name in the configuration and its parts."""
        self.name = name
        self.engine = engine
        self.sampling = sampling
        """The default sampling parameters."""
        self.max_context = max_context
        """Largest number of tokens of prompt plus completion."""
        self.is_named = False
        """Whether a setting refers to this policy."""
        self._encoder = encoder
        self._parser = parser
        self._numbers = itertools.count()
        self._num_tokens = 0

    @property
    def codec(self) -> Codec:
        """The codec of the policy's tokenizer and template."""
        return self._encoder.codec

    async def say(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        seed: int,
        session: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> PolicyReply:
        """Return the policy's next message.

        Args:
            messages: The conversation; the policy's own messages have the role "assistant".
            seed: The seed of the sampling.
            session: The conversation's id, under which the engine keeps its cache until `end`; None for a single request.
            sampling: Replaces the default sampling.

        Raises:
            EngineError: the conversation does not fit the context, or the engine is lost.
            TemplateError: the policy's template cannot render the conversation.
        """
        codec = self.codec
        ids = self._encoder.start([Message.from_openai(m) for m in messages])
        if len(ids) >= self.max_context:
            raise EngineError(
                f"the policy {self.name!r} got a prompt of {len(ids)} tokens, but its context has {self.max_context}; raise "
                f"policies.{self.name}.max_context, or shorten the conversation"
            )
        request_id = f"{self.name}/{next(self._numbers)}"
        request = GenerateRequest(
            request_id=request_id,
            session_id=session or request_id,
            prompt_ids=ids,
            sampling=dataclasses.replace(sampling or self.sampling, seed=seed, stop_token_ids=codec.stop_token_ids),
        )
        try:
            completion = await self.engine.generate(request)
        finally:
            if session is None:
                await self.engine.end_session(request_id)
        self._num_tokens += len(completion.token_ids)
        text = codec.decode_turn(completion.token_ids)
        parsed = self._parser.parse(text)
        return PolicyReply(
            text=text,
            message=Message(role="assistant", content=parsed.content, reasoning=parsed.reasoning, origin=Origin.MODEL),
            version=completion.policy_versions[-1][1],
            is_cut=completion.finish_reason is not FinishReason.STOP,
            prompt_tokens=len(ids),
            completion_tokens=len(completion.token_ids),
        )

    async def end(self, session: str) -> None:
        """Release a conversation; unknown ids are ignored."""
        await self.engine.end_session(session)

    async def close(self) -> None:
        """Free the policy's engine."""
        await self.engine.close()

    def read_tokens(self) -> int:
        """Return the number of tokens sampled since the last call."""
        num, self._num_tokens = self._num_tokens, 0
        return num


Policies = Mapping[str, FrozenPolicy]
"""The further policies of a run, by name."""


def policy_named(name: Any, policies: Policies, *, who: str) -> FrozenPolicy:
    """Return the policy that a setting names.

    Raises:
        UnknownNameError: the run has no policy of that name.
    """
    if not isinstance(name, str) or name not in policies:
        hint = did_you_mean(str(name), policies) if policies else " Add its model there."
        raise UnknownNameError(f"{who}: the section `policies` has no {name!r}.{hint}")
    policies[name].is_named = True
    return policies[name]


class SpeakerSampling(Settings):
    """Sampling settings of a partner; null uses the model's default."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: AtLeastOne | None = None
    """Largest number of tokens of a reply."""


SAMPLED_WITH = tuple(SpeakerSampling.model_fields)


def sampled_with(policy: FrozenPolicy, config: Mapping[str, Any], *, who: str) -> SamplingParams:
    """Return a policy's sampling parameters, overridden by the keys of `SpeakerSampling` in `config`.

    Raises:
        ConfigError: a value is out of range.
    """
    read = SpeakerSampling.read({name: config[name] for name in SAMPLED_WITH if name in config}, who=who)
    try:
        sampling = dataclasses.replace(policy.sampling, **read.model_dump(exclude_none=True))
        policy.engine.capabilities.check_temperature(sampling.temperature, key="temperature")
        return sampling
    except ConfigError as problem:
        raise ConfigError(f"{who}: {problem}") from problem
