"""WeightProbe: test an engine's weights by the logprobs of tokens that it samples.

Two ways to compare an engine's weights with the trainer's:

    samples    completions of random prompts; the trainer scores the same tokens with its current weights
    record     greedy answers of a verified server, with the trainer's logprobs; a server that comes back later is
               compared with these, even if the trainer's weights have changed

A prompt for a vision model starts with a picture of noise, to test the vision encoder too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polyturn.core.arrays import Floats, Ids
from polyturn.core.errors import EngineError
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.media import Media, to_source
from polyturn.core.messages import Message
from polyturn.core.protocols import Engine
from polyturn.core.sample import SampleId, TrainSample
from polyturn.infra.aio import first_error
from polyturn.tokens.multimodal import MediaProcessor

_PROMPT_LENGTH = 16
_NOISE_SIZE = 112
"""Width and height of a picture, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prompt:
    ids: Ids
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeRecord:
    """Greedy answers by verified weights of one version, and the trainer's log-probabilities."""

    version: int
    prompts: tuple[_Prompt, ...]
    answers: tuple[Ids, ...]
    """[num_tokens] each: the greedy tokens."""
    logprobs: tuple[Floats, ...]
    """[num_tokens] each: the trainer's log-probabilities."""


class WeightProbe:
    """Checks an engine's weights by sampling completions."""

    def __init__(
        self,
        *,
        vocab_size: int,
        num_prompts: int = 4,
        num_tokens: int = 32,
        seed: int = 0,
        media: MediaProcessor | None = None,
    ) -> None:
        """Sample completions of `num_tokens` tokens to `num_prompts` random prompts.

        `media` is the processor of a vision model, whose prompts contain pictures.
        """
        self._rng = np.random.default_rng(seed)
        self._media = media
        self._not_text = () if media is None else media.token_ids
        """Ids that random prompts and answers must not contain."""
        self._ids = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), np.array(self._not_text, np.int32))
        self._num_prompts = num_prompts
        self._num_tokens = num_tokens
        self._num_requests = 0

    async def sample(self, engine: Engine, version: int, *, temperature: float = 1.0) -> list[TrainSample]:
        """Sample completions, and return them with the engine's log-probabilities.

        Raises:
            EngineError: the engine fails, or reports another weight version.
        """
        # New prompts each time: for old ones, an engine with a prefix cache would use keys and values of old weights.
        prompts = [self._prompt() for _ in range(self._num_prompts)]
        with first_error():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(engine, p, version, temperature=temperature)) for p in prompts]
        return [self._as_sample(p, task.result()) for p, task in zip(prompts, tasks, strict=True)]

    async def record(
        self, engine: Engine, version: int, score: Callable[[Sequence[TrainSample]], Awaitable[list[Floats]]]
    ) -> ProbeRecord:
        """Record the greedy answers of a verified engine."""
        samples = await self.sample(engine, version, temperature=0.0)
        starts = [int(np.argmax(s.turn_ids >= 0)) if (s.turn_ids >= 0).any() else len(s.token_ids) for s in samples]
        return ProbeRecord(
            version=version,
            prompts=tuple(_Prompt(ids=s.token_ids[:at], media=s.media) for s, at in zip(samples, starts, strict=True)),
            answers=tuple(s.token_ids[at:] for s, at in zip(samples, starts, strict=True)),
            logprobs=tuple(logprobs[at:] for logprobs, at in zip(await score(samples), starts, strict=True)),
        )

    async def check(self, engine: Engine, record: ProbeRecord, *, limit: float) -> None:
        """Compare an engine with `record`: for equal tokens, logprobs may differ by at most `limit`.

        Raises:
            EngineError: the engine does not serve those weights.
        """
        with first_error():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(engine, p, record.version, temperature=0.0)) for p in record.prompts]
        num_same, largest = 0, 0.0
        for task, answer, logprobs in zip(tasks, record.answers, record.logprobs, strict=True):
            completion = task.result()
            length = min(len(answer), len(completion.token_ids))
            differs = np.flatnonzero(completion.token_ids[:length] != answer[:length])
            same = int(differs[0]) if len(differs) else length  # at the first difference, two tokens were equally likely
            num_same += same
            if completion.logprobs is not None and same:
                largest = max(largest, float(np.abs(completion.logprobs[:same] - logprobs[:same]).max()))
        if not num_same or largest > limit:
            raise EngineError(
                f"the engine serves other weights: {num_same} of {sum(map(len, record.answers))} tokens equal those of "
                f"policy version {record.version}, and their logprobs differ by up to {largest:.2e} ({limit:.2e} is allowed)"
            )

    def _prompt(self) -> _Prompt:
        text = self._rng.choice(self._ids, _PROMPT_LENGTH)
        if self._media is None or "image" not in self._media.placeholders:
            return _Prompt(ids=text)
        noise = self._rng.integers(0, 256, (_NOISE_SIZE, _NOISE_SIZE, 3)).astype(np.uint8)
        message = Message(role="user", content=({"type": "image", "image": to_source("image", noise)},))
        codec = self._media.codec
        ids = self._media.expand(codec.encode(codec.template.render([message], add_generation_prompt=True)), [message])
        return _Prompt(ids=np.concatenate([ids, text]), media=message.media)

    async def _ask(self, engine: Engine, prompt: _Prompt, version: int, *, temperature: float) -> Completion:
        self._num_requests += 1
        name, seed = f"weight-sync-{self._num_requests}", self._num_requests
        banned = self._not_text if temperature else ()  # greedy decoding cannot replace a banned token
        completion = await engine.generate(
            GenerateRequest(
                request_id=name,
                session_id=name,
                prompt_ids=prompt.ids,
                media=prompt.media,
                sampling=SamplingParams(
                    max_tokens=self._num_tokens, seed=seed, temperature=temperature, banned_token_ids=banned
                ),
            )
        )
        await engine.end_session(name)
        versions = {number for _, number in completion.policy_versions}
        if versions != {version}:
            raise EngineError(f"policy version {version} was sent, and the engine reports {sorted(versions)}")
        return completion

    def _as_sample(self, prompt: _Prompt, completion: Completion) -> TrainSample:
        if completion.logprobs is None:
            raise EngineError("this engine returns no logprobs, so its weights cannot be verified")
        # A greedy answer may contain an image token, for which the trainer would expect a picture; cut the answer before it.
        odd = np.flatnonzero(np.isin(completion.token_ids, self._not_text))
        before, length = len(prompt.ids), int(odd[0]) if len(odd) else len(completion.token_ids)
        blank = np.zeros(before, np.float32)
        return TrainSample(
            id=SampleId("weight-sync", "probe", 0),
            token_ids=np.concatenate([prompt.ids, completion.token_ids[:length]]),
            loss_weights=np.concatenate([blank, np.ones(length, np.float32)]),
            turn_ids=np.concatenate([np.full(before, -1), np.zeros(length)]),
            rollout_logprobs=np.concatenate([blank, completion.logprobs[:length]]),
            media=prompt.media,
        )
