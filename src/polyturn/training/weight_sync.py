"""WeightSync: new weights for an engine in another process, and the proof that it serves them.

A server's "200 OK" proves nothing: one that keeps a tied head, a packed copy or a cache on old weights says the same. And
one optimizer step changes logprobs by less than bfloat16 rounds, so a look at them after it proves nothing either.
So the way itself is proved once, before training:

    noise     push the true weights, sample, compare logprobs with the trainer's: how far the two differ when all is well
    canary    change every group of parameters so that a group which did not arrive shows 20 times the noise; push; compare
    then      push the true weights again, compare

and after every later push a probe looks at the version tags and holds the logprobs to 3 times the noise. A group is the
parameters of one name in all layers (`model.layers.*.mlp.up_proj.weight`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from polyturn.core.aio import first_error
from polyturn.core.arrays import Floats
from polyturn.core.errors import EngineError
from polyturn.core.generation import Completion, GenerateRequest, SamplingParams
from polyturn.core.protocols import Engine
from polyturn.core.sample import SampleId, TrainSample

logger = logging.getLogger(__name__)

NOISE_FLOOR = 1e-6
"""Two float32 implementations that agree this well may do so by luck."""
CANARY_FACTOR = 20.0
"""A group that did not arrive must show at least so many times the noise."""
PROBE_FACTOR = 3.0
"""A sync passes while logprobs differ by at most so many times the noise."""
_FIRST_SCALE, _GROWTH, _MAX_GROWTHS = 1e-3, 4.0, 8
_PROMPT_LENGTH = 16


class WeightSource(Protocol):
    """The trainer's side: the live parameters, and what they make of tokens."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return name -> live tensor."""
        ...

    def score(self, samples: Sequence[TrainSample]) -> list[Floats]:
        """Return for each sample [T] the log-probability of each weighted token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What the start-up proof measured."""

    noise: float
    """Largest difference of a sampled token's logprob between engine and trainer, on the same weights."""
    canary: float
    """The same on the changed weights, once all of them had arrived."""
    smallest_effect: float
    """The difference that the least visible group would have made, had it not arrived."""
    num_groups: int


class SharedWeights:
    """The channel of an engine that samples from the trainer's own tensors: only the version is news."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self, version: int) -> None:
        """Let completions carry `version`."""
        await self.publish(version)

    async def publish(self, version: int) -> None:
        """Let completions carry `version` from now on."""
        await self._engine.update_weights(version)


class WeightSync:
    """Pushes the trainer's weights to an engine and holds it to them."""

    def __init__(
        self,
        engine: Engine,
        source: WeightSource,
        *,
        vocab_size: int,
        num_prompts: int = 4,
        num_tokens: int = 32,
        seed: int = 0,
    ) -> None:
        """Look at the engine through completions of `num_tokens` tokens to `num_prompts` random prompts."""
        self._engine = engine
        self._source = source
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._num_prompts = num_prompts
        self._num_tokens = num_tokens
        self._num_asked = 0
        self.noise: float | None = None

    async def start(self, version: int) -> SyncReport:
        """Prove that weights arrive, and leave the engine with the true ones as `version`.

        Raises:
            EngineError: some group of parameters does not arrive; the message names it.
        """
        await self._push(version)
        samples = [*await self._sample(version), *await self._sample(version)]
        self.noise = max(self._difference(samples), NOISE_FLOOR)
        with self._changed(samples) as changes:
            await self._push(version)
            seen = await self._sample(version)
            effects = self._effects(changes, seen)
            canary = self._difference(seen)
            if canary > min(effects.values()) / 4:
                raise EngineError(self._verdict(changes, seen, canary))
        await self.publish(version)
        report = SyncReport(noise=self.noise, canary=canary, smallest_effect=min(effects.values()), num_groups=len(changes))
        logger.info(
            "the weights arrive: engine and trainer differ by %.1e, on changed weights by %.1e, and a missing group would "
            "show %.1e at least",
            report.noise,
            report.canary,
            report.smallest_effect,
        )
        return report

    async def publish(self, version: int) -> float:
        """Push the weights as `version` and return how far engine and trainer then differ.

        Raises:
            EngineError: the engine serves another version, or other weights.
        """
        await self._push(version)
        if self.noise is None:
            raise EngineError("nothing is known yet about this engine's noise; call `start` before `publish`")
        limit = PROBE_FACTOR * self.noise
        found = self._difference(await self._sample(version))
        if found > limit:  # the largest of a few hundred differences may be a rare one
            found = min(found, self._difference(await self._sample(version)))
        if found > limit:
            raise EngineError(
                f"after the sync of version {version} the engine's logprobs differ from the trainer's by {found:.2e}, and "
                f"before training they differed by {self.noise:.2e}; it does not serve the weights that were sent"
            )
        return found

    async def _push(self, version: int) -> None:
        await self._engine.update_weights(version, weights=self._source.weights())

    async def _sample(self, version: int) -> list[TrainSample]:
        """Let the engine speak, and return what it said with its logprobs.

        Raises:
            EngineError: it cannot, or says that other weights spoke.
        """
        with first_error():
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._ask(version)) for _ in range(self._num_prompts)]
        return [task.result() for task in asked]

    async def _ask(self, version: int) -> TrainSample:
        self._num_asked += 1
        name, seed = f"weight-sync-{self._num_asked}", self._num_asked
        prompt = self._rng.integers(0, self._vocab_size, _PROMPT_LENGTH).astype(np.int32)
        completion = await self._engine.generate(
            GenerateRequest(
                request_id=name,
                session_id=name,
                prompt_ids=prompt,
                sampling=SamplingParams(max_tokens=self._num_tokens, seed=seed),
            )
        )
        await self._engine.end_session(name)
        spoke = {tag for _, tag in completion.policy_versions}
        if spoke != {version}:
            raise EngineError(f"version {version} was sent, and the engine answers as version {sorted(spoke)}")
        return _as_sample(name, prompt, completion)

    def _difference(self, samples: Sequence[TrainSample]) -> float:
        """Return the largest difference between the engine's logprobs and those of the trainer's weights now."""
        return _largest([s.rollout_logprobs for s in samples if s.rollout_logprobs is not None], self._source.score(samples))

    @contextmanager
    def _changed(self, samples: Sequence[TrainSample]) -> Iterator[dict[str, list[_Change]]]:
        """Change every group of the trainer's parameters, each by enough to show; put everything back at the end."""
        groups = _groups(self._source.weights())
        saved = {name: [tensor.clone() for tensor in tensors] for name, tensors in groups.items()}
        generator = torch.Generator().manual_seed(0)
        changes = {
            name: [_Change(tensor, _direction(tensor, generator)) for tensor in tensors] for name, tensors in groups.items()
        }
        try:
            for name, group in changes.items():
                self._grow(name, group, samples)
            yield changes
        finally:
            for name, tensors in groups.items():
                for tensor, old in zip(tensors, saved[name], strict=True):
                    tensor.copy_(old)

    def _grow(self, name: str, group: Sequence[_Change], samples: Sequence[TrainSample]) -> None:
        """Change a group, each time more, until it shows well."""
        assert self.noise is not None
        before = self._source.score(samples)
        scale = 0.0
        for growth in range(_MAX_GROWTHS):
            larger = _FIRST_SCALE * _GROWTH**growth
            _move(group, larger - scale)
            scale = larger
            for change in group:
                change.scale = scale
            if _largest(before, self._source.score(samples)) >= 2 * CANARY_FACTOR * self.noise:
                return
        raise EngineError(
            f"no change of {name} shows in logprobs by {CANARY_FACTOR:.0f} times the engine's noise ({self.noise:.1e}), so "
            "a sync could not be verified; is the parameter used at all?"
        )

    def _effects(self, changes: Mapping[str, list[_Change]], samples: Sequence[TrainSample]) -> dict[str, float]:
        """Return for each group how much logprobs would differ if just that group had kept its old values."""
        now = self._source.score(samples)
        return {name: _largest(now, self._without(changes[name], samples)) for name in changes}

    def _without(self, group: list[_Change], samples: Sequence[TrainSample]) -> list[Floats]:
        """Return the trainer's logprobs with one group at its old values."""
        scale = group[0].scale
        _move(group, -scale)
        try:
            return self._source.score(samples)
        finally:
            _move(group, scale)

    def _verdict(self, changes: Mapping[str, list[_Change]], seen: Sequence[TrainSample], canary: float) -> str:
        """Say which group explains what the engine answered."""
        engine = [s.rollout_logprobs for s in seen if s.rollout_logprobs is not None]
        assert self.noise is not None
        left = {name: _largest(engine, self._without(group, seen)) for name, group in changes.items()}
        name = min(left, key=left.__getitem__)
        if left[name] <= canary / 4:
            return (
                f"the engine says that it took the new weights, and {name} is still the old one there (with the old one "
                f"logprobs differ by {left[name]:.1e}, with the new by {canary:.1e}); use another way to sync weights"
            )
        return (
            f"the engine says that it took the new weights, and its logprobs differ from theirs by {canary:.1e} where "
            f"{self.noise:.1e} is its noise; several groups of parameters did not arrive; use another way to sync weights"
        )


@dataclass(slots=True)
class _Change:
    """A parameter, the direction it is moved in, and how far it was."""

    tensor: Tensor
    direction: Tensor
    scale: float = 0.0


def _move(group: Sequence[_Change], by: float) -> None:
    for change in group:
        change.tensor.add_(change.direction, alpha=by)


def _groups(weights: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return name with layer numbers as `*` -> tensors; a tied tensor counts under its first name."""
    groups: dict[str, list[Tensor]] = {}
    seen: set[int] = set()
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            groups.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(tensor)
    return groups


def _direction(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise of the size of the parameter's own values; of size one where they are all zero, as biases are."""
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
    size = tensor.float().square().mean().sqrt().item()
    return noise * (size or 1.0)


def _as_sample(name: str, prompt: np.ndarray, completion: Completion) -> TrainSample:
    if completion.logprobs is None:
        raise EngineError("this engine gives no logprobs, so nothing about its weights can be verified")
    before, said = len(prompt), len(completion.token_ids)
    blank = np.zeros(before, np.float32)
    return TrainSample(
        id=SampleId("weight-sync", name, 0),
        token_ids=np.concatenate([prompt, completion.token_ids]),
        loss_weights=np.concatenate([blank, np.ones(said, np.float32)]),
        turn_ids=np.concatenate([np.full(before, -1), np.zeros(said)]),
        rollout_logprobs=np.concatenate([blank, completion.logprobs]),
    )


def _largest(a: Sequence[Floats], b: Sequence[Floats]) -> float:
    return max(float(np.abs(x - y).max(initial=0.0)) for x, y in zip(a, b, strict=True))
