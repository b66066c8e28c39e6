"""WeightSync: new weights for an engine in another process, and the proof that it serves them.

A server's "200 OK" proves nothing: one that keeps a tied head, a packed copy or a cache on old weights says the same. And
one optimizer step changes logprobs by less than bfloat16 rounds, so a look at them after it proves nothing either.
So the way itself is proved once, before training:

    noise     push the true weights, sample, compare logprobs with the trainer's: how far the two differ when all is well
    canary    change every group of parameters so that a group which did not arrive shows 20 times the noise; push; compare
    then      push the true weights again, compare

and after every later push a probe looks at the version tags and holds the logprobs to 3 times the noise. At the start, and
when a server comes back, checksums say that each tensor is the one that was sent (`checked_weights.py`). A group is the
parameters of one name in all layers (`model.layers.*.mlp.up_proj.weight`).

Of a pool every server is looked at by itself. One that is wrong at the start ends the run; one that is wrong later is left
out and brought up to date (`engines/recovery.py`), and only if none is right does the run end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from polyturn.core.aio import OneThread, first_error
from polyturn.core.arrays import Floats
from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.core.protocols import Engine
from polyturn.core.sample import TrainSample
from polyturn.engines.recovery import PooledServer, Refilled, ServerPool, Sleeper
from polyturn.engines.update_gate import WeightChannel
from polyturn.training.backend import Backend
from polyturn.training.checked_weights import WeightChecksums
from polyturn.training.policy import ModelPolicy
from polyturn.training.weight_probe import ProbeRecord, WeightProbe

logger = logging.getLogger(__name__)

NOISE_FLOOR = 1e-6
"""Smallest noise assumed: closer agreement of two float32 implementations may be luck."""
CANARY_FACTOR = 20.0
"""A group that did not arrive must show at least so many times the noise."""
PROBE_FACTOR = 3.0
"""A sync passes while logprobs differ by at most so many times the noise."""
_FIRST_SCALE, _GROWTH, _MAX_GROWTHS = 1e-3, 4.0, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The measurements of the start-up proof."""

    noise: float
    """Largest difference of a sampled token's logprob between engine and trainer, on the same weights."""
    canary: float
    """The same on the changed weights, once all of them had arrived."""
    smallest_effect: float
    """The difference that the least visible group would have made, had it not arrived."""
    num_groups: int


class SharedWeights:
    """The channel of an engine that samples from the trainer's own tensors: only the version has to be sent."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self, version: int) -> None:
        """Let completions carry `version`."""
        await self.publish(version)

    async def publish(self, version: int) -> None:
        """Let completions carry `version` from now on."""
        await self._engine.update_weights(version)


class SharedGpus:
    """The channel to servers on the trainer's own GPUs, which sleep while it computes.

    rollout -> sleep -> score, update -> wake with the weights, then with the KV cache -> rollout
    """

    def __init__(self, channel: WeightChannel, engine: Sleeper, backend: Backend) -> None:
        """Let `engine` sleep; weights go through `channel` once `backend` has given back what it needs no more."""
        self._channel = channel
        self._engine = engine
        self._backend = backend

    async def sleep(self) -> None:
        """Free the GPUs of the servers until weights are published.

        Raises:
            EngineError: one does not sleep.
        """
        await self._engine.sleep()

    async def start(self, version: int) -> object:
        """Bring the first weights there, as `version`."""
        self._backend.free_cache()
        return await self._channel.start(version)

    async def publish(self, version: int) -> object:
        """Wake the servers with the weights as they are now, as `version`."""
        self._backend.free_cache()
        return await self._channel.publish(version)


class WeightSync:
    """Pushes the trainer's weights to an engine, or to every engine of a pool, and checks that it serves them."""

    def __init__(
        self,
        engine: Engine,
        source: ModelPolicy,
        probe: WeightProbe,
        *,
        to_checkpoint: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
        adapter_only: bool = False,
        thread: OneThread | None = None,
    ) -> None:
        """Check each engine by the completions that `probe` samples from it.

        `source` has the live weights, and computes their logprobs of given tokens. `to_checkpoint` gives weights the names
        and shapes that a server reads in a checkpoint, where the trainer's model has others; see `hf.as_checkpoint`.
        `adapter_only` sends what training changes, and the engine has the rest. After the start the trainer's weights are
        read in `thread`, the trainer's own, while episodes go on.
        """
        self._engine = engine
        self._pool = engine if isinstance(engine, ServerPool) else None
        self._source = source
        self._probe = probe
        self._to_checkpoint = to_checkpoint
        self._adapter_only = adapter_only
        self._thread = thread or OneThread("polyturn-weight-sync")
        self._held = WeightChecksums(self._thread)
        self._record: ProbeRecord | None = None
        self._pushed = -1
        self._sent = -1, -1
        """The version that was pushed last, and how many optimizer steps were taken then."""
        self.noise: float | None = None

    async def start(self, version: int) -> SyncReport:
        """Prove that weights arrive at every engine, and leave all with the true ones as `version`.

        Raises:
            EngineError: some group of parameters does not arrive; the message names it.
        """
        await self._push(version)
        # Twice: the noise is the largest difference seen, and too few tokens would underestimate it.
        samples = await self._sample(version)
        for name, more in (await self._sample(version)).items():
            samples.setdefault(name, []).extend(more)
        self.noise = max(*(await self._differences(samples)).values(), NOISE_FLOOR)
        if self._pool is not None:  # not before: without the noise nothing can be verified
            self._pool.verify = self.verify
        with self._changed([s for own in samples.values() for s in own]) as changes:
            sent = await self._push(version)
            seen = await self._sample(version)
            canaries = await self._differences(seen)
            effects = {name: self._effects(changes, own) for name, own in seen.items()}
            for name, canary in canaries.items():
                # If a group is missing, logprobs differ by that group's effect; otherwise by the noise alone.
                if canary > min(effects[name].values()) / 4:
                    raise EngineError(self._verdict(name, changes, seen[name], canary))
            # Now, because the change tells apart tensors that were equal, such as norms that are all ones.
            if not self._adapter_only:  # of which servers tell no checksums
                await self._held.learn(self._engines(), sent)
        await self.publish(version)
        if isinstance(self._pool, Refilled):  # not before: the canary's weights have the version of the true ones
            self._pool.current = self._current
        report = SyncReport(
            noise=self.noise,
            canary=max(canaries.values()),
            smallest_effect=min(effect for own in effects.values() for effect in own.values()),
            num_groups=len(changes),
        )
        logger.info(
            "the weights arrive%s: logprobs of engine and trainer differ by %.1e, and by %.1e after a test change of all "
            "weights; had a part of them not arrived, by %.1e or more",
            f" at {len(seen)} servers" if len(seen) > 1 else "",
            report.noise,
            report.canary,
            report.smallest_effect,
        )
        return report

    async def publish(self, version: int) -> float:
        """Push the weights as `version` and return how far engine and trainer then differ.

        Raises:
            EngineError: no engine serves them; with several, those that do not are left out and brought up to date.
        """
        sent = await self._push(version)
        if self.noise is None:
            raise EngineError("nothing is known yet about this engine's noise; call `start` before `publish`")
        with first_error():
            async with asyncio.TaskGroup() as tasks:  # all at once, because training waits meanwhile
                check = tasks.create_task(self._held.problems(version, sent, self._engines()))
                sampled = tasks.create_task(self._sample(version))
                recorded = tasks.create_task(self._take_record(version))
        differences = await self._differences(sampled.result())
        if max(differences.values()) > self._limit:  # the largest of a few hundred differences may be a rare one
            again = await self._differences(await self._sample(version))
            differences = {name: min(value, again[name]) for name, value in differences.items() if name in again}
        wrong = {
            name: self._outlier(version, value) for name, value in differences.items() if value > self._limit
        } | check.result()
        for name, problem in wrong.items():
            if self._pool is None or set(differences) <= set(wrong):
                raise EngineError(f"{name}: {problem}") from problem
            self._exclude(name, problem)
        if recorded.result() in wrong:  # its answers are not a record of the right weights
            await self._take_record(version)
        return max(value for name, value in differences.items() if name not in wrong)

    def _outlier(self, version: int, value: float) -> EngineError:
        return EngineError(
            f"after the sync of version {version} the engine's logprobs differ from the trainer's by {value:.2e}, and "
            f"before training they differed by {self.noise:.2e}; it does not serve the weights that were sent"
        )

    async def verify(self, engine: Engine, version: int) -> None:
        """Hold an engine that came back to what the right weights of `version` say, or, in the middle of a sync, to the
        trainer's own.

        Raises:
            EngineError: it serves others, or nothing is known of that version.
        """
        self._held.forget(engine)
        await self._held.check(engine, version)
        if self._record is not None and self._record.version == version:
            await self._probe.check(engine, self._record, limit=self._limit)
            return
        if self._pushed != version:
            raise EngineError(f"nothing is known yet about version {version}")
        (difference,) = (await self._differences({"it": await self._probe.sample(engine, version)})).values()
        if difference > self._limit:
            raise EngineError(
                f"its logprobs differ from the trainer's by {difference:.2e} where {self._limit:.2e} is allowed"
            )

    @property
    def _limit(self) -> float:
        return PROBE_FACTOR * (self.noise or 0.0)

    def _replicas(self) -> dict[str, PooledServer]:
        return {} if self._pool is None else {replica.name: replica for replica in self._pool.replicas if replica.is_live}

    def _engines(self) -> dict[str, Engine]:
        """Return name -> each engine, as `_sample` calls them."""
        if self._pool is None:
            return {"the engine": self._engine}
        return {name: replica.engine for name, replica in self._replicas().items()}

    def _exclude(self, name: str, problem: EngineError) -> None:
        if self._pool is not None and (replica := self._replicas().get(name)) is not None:
            self._pool.exclude(replica, problem)

    async def _push(self, version: int) -> Mapping[str, Tensor]:
        # During a push there is no record. A returning server is compared with the trainer, which waits here.
        self._record, self._pushed = None, version
        self._sent = version, self._source.step_count
        try:
            weights = await self._thread.run(self._weights)
            self._held.keep(self._engines().values())
            await self._engine.update_weights(version, weights=weights)
            return weights
        finally:
            self._pushed = -1  # from here on the trainer's weights may be others

    @asynccontextmanager
    async def _current(self, version: int) -> AsyncIterator[Mapping[str, Tensor]]:
        """Yield the trainer's weights, as `CurrentWeights` says; its next step waits until the block ends."""
        async with self._thread.held():
            if (version, self._source.step_count) != self._sent:
                raise EngineError(f"the trainer has gone on from policy version {version}; the server gets the next one")
            yield await asyncio.to_thread(self._weights)

    def _weights(self) -> Mapping[str, Tensor]:
        return self._to_checkpoint(self._source.backend.trained() if self._adapter_only else self._source.weights())

    async def _score(self, samples: Sequence[TrainSample]) -> list[Floats]:
        return await self._thread.run(partial(self._source.score, samples))

    async def _take_record(self, version: int) -> str | None:
        """Note what the right weights say, for a server that comes back later; return who said it."""
        for name, replica in self._replicas().items():
            try:
                self._record = await self._probe.record(replica.engine, version, self._score)
                return name
            except EngineError as problem:
                self._exclude(name, problem)
        return None

    async def _sample(self, version: int) -> dict[str, list[TrainSample]]:
        """Return the samples of each engine; of a pool lost ones are left out, and at a later sync the wrong ones.

        Raises:
            EngineError: no engine could sample, or one reported another version.
        """
        if self._pool is None:
            return {"the engine": await self._probe.sample(self._engine, version)}
        samples: dict[str, list[TrainSample]] = {}
        problems: list[EngineError] = []

        async def sample(name: str, replica: PooledServer) -> None:
            try:
                samples[name] = await self._probe.sample(replica.engine, version)
            except EngineError as problem:
                if self.noise is None and not isinstance(problem, EngineLostError):
                    raise  # at the start a wrong server ends the run: the way of its weights does not work
                problems.append(problem)
                self._exclude(name, problem)

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                for name, replica in self._replicas().items():
                    tasks.create_task(sample(name, replica))
        if not samples:
            raise EngineError(f"no server is left: {'; '.join(map(one_line, problems)) or 'all are lost'}")
        return {name: samples[name] for name in sorted(samples)}

    async def _differences(self, samples: Mapping[str, Sequence[TrainSample]]) -> dict[str, float]:
        """Return for each engine the largest difference between its logprobs and those of the trainer's weights now."""
        scores = iter(await self._score([s for own in samples.values() for s in own]))
        return {name: _largest([_logprobs(s) for s in own], [next(scores) for _ in own]) for name, own in samples.items()}

    @contextmanager
    def _changed(self, samples: Sequence[TrainSample]) -> Iterator[dict[str, float]]:
        """Move every group of the trainer's parameters by enough to show, say how far, and put all back at the end."""
        changes: dict[str, float] = {}
        try:
            # LoRA's B matrices first: they start at zero, which hides any change of A.
            groups = self._source.backend.weight_groups(is_merged=not self._adapter_only)
            for group in sorted(groups, key=lambda name: ".lora_A." in name):
                changes[group] = 0.0
                self._grow(group, changes, samples)
            yield changes
        finally:
            for group in changes:
                self._source.backend.shift_weights(group, 0.0)

    def _grow(self, group: str, changes: dict[str, float], samples: Sequence[TrainSample]) -> None:
        """Move a group, each time further, until it shows well."""
        assert self.noise is not None
        before = self._source.score(samples)
        # Grown from a small start: a change that breaks the model would hide whether groups tested later arrive.
        for growth in range(_MAX_GROWTHS):
            changes[group] = _FIRST_SCALE * _GROWTH**growth
            self._source.backend.shift_weights(group, changes[group])
            if _largest(before, self._source.score(samples)) >= 2 * CANARY_FACTOR * self.noise:
                return
        raise EngineError(
            f"no change of {group} shows in logprobs by {CANARY_FACTOR:.0f} times the engine's noise ({self.noise:.1e}), so "
            "a sync could not be verified; is the parameter used at all?"
        )

    def _effects(self, changes: Mapping[str, float], samples: Sequence[TrainSample]) -> dict[str, float]:
        """Return for each group how much logprobs would differ if just that group had kept its old values."""
        now = self._source.score(samples)
        return {group: _largest(now, self._without(group, changes, samples)) for group in changes}

    def _without(self, group: str, changes: Mapping[str, float], samples: Sequence[TrainSample]) -> list[Floats]:
        """Return the trainer's logprobs with one group at its old values."""
        self._source.backend.shift_weights(group, 0.0)
        try:
            return self._source.score(samples)
        finally:
            self._source.backend.shift_weights(group, changes[group])

    def _verdict(self, who: str, changes: Mapping[str, float], seen: Sequence[TrainSample], canary: float) -> str:
        """Say which group explains what the engine answered."""
        engine = [_logprobs(s) for s in seen]
        assert self.noise is not None
        left = {name: _largest(engine, self._without(name, changes, seen)) for name in changes}
        name = min(left, key=left.__getitem__)
        if left[name] <= canary / 4:
            return (
                f"{who} says that it took the new weights, and {name} is still the old one there (with the old one "
                f"logprobs differ by {left[name]:.1e}, with the new by {canary:.1e}); use another way to sync weights"
            )
        return (
            f"{who} says that it took the new weights, and its logprobs differ from theirs by {canary:.1e} where "
            f"{self.noise:.1e} is its noise; several groups of parameters did not arrive; use another way to sync weights"
        )


def _logprobs(sample: TrainSample) -> Floats:
    assert sample.rollout_logprobs is not None
    return sample.rollout_logprobs


def _largest(a: Sequence[Floats], b: Sequence[Floats]) -> float:
    return max(float(np.abs(x - y).max(initial=0.0)) for x, y in zip(a, b, strict=True))
