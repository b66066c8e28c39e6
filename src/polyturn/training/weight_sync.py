"""WeightSync: push weights to an engine in another process, and verify that the engine serves them.

A server's "200 OK" proves nothing: a server that keeps old weights in a tied head, a packed copy or a cache returns it too.
One optimizer step changes logprobs by less than bfloat16 rounds, so comparing logprobs after a step proves nothing either.
So the transport is tested once, before training:

    noise     push the true weights, sample, compare logprobs with the trainer's: the usual difference
    canary    change every group of parameters such that a missing group differs by 20 times the noise; push; compare
              (servers on the trainer's GPUs fall asleep first, and wake with the changed weights)
    then      push the true weights again, compare

After every later push a probe checks version tags, and that logprobs differ by at most 3 times the noise. At the start, and
when a server comes back, checksums verify each tensor (`checked_weights.py`). A group contains the parameters of the same
name in all layers (`model.layers.*.mlp.up_proj.weight`).

Every server of a pool is checked separately. A wrong server at the start ends the run. Later, a wrong server is left out and
updated (`engines/recovery.py`), and the run ends only if all are wrong.
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

from polyturn.core.arrays import Floats
from polyturn.core.errors import EngineError, EngineLostError, one_line
from polyturn.core.protocols import Engine
from polyturn.core.sample import TrainSample
from polyturn.engines.pool import EnginePool
from polyturn.engines.recovery import Sleeper
from polyturn.engines.replica import Replica
from polyturn.engines.served import require_one_version
from polyturn.infra.aio import OneThread, first_error
from polyturn.training.checked_weights import WeightChecksums
from polyturn.training.policy import ModelPolicy
from polyturn.training.weight_probe import ProbeRecord, WeightProbe

logger = logging.getLogger(__name__)

NOISE_FLOOR = 1e-6
"""Smallest assumed noise, in nats: closer agreement of two float32 implementations may be chance."""
CANARY_FACTOR = 20.0
"""A missing group must change logprobs by at least this many times the noise."""
PROBE_FACTOR = 3.0
"""A sync passes if logprobs differ by at most this many times the noise."""
_FIRST_SCALE, _GROWTH, _MAX_GROWTHS = 1e-3, 4.0, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The measurements of the test at the start, in nats."""

    noise: float
    """Largest difference of a sampled token's logprob between engine and trainer, on the same weights."""
    canary: float
    """The same on the changed weights."""
    smallest_effect: float
    """The difference that the least visible group would cause if it were missing."""
    num_groups: int


class SharedWeights:
    """The channel to an engine that samples from a model of the trainer's process: it only sends the version."""

    def __init__(self, engine: Engine, *, gather: Callable[[], object] | None = None) -> None:
        """Send versions to `engine`. If other processes train, `gather` first copies their weights into the model.

        It blocks the event loop, on which the engine samples, so that no token comes from half of the weights.
        """
        self._engine = engine
        self._gather = gather

    async def start(self, version: int) -> None:
        """Tag completions with `version`."""
        await self.publish(version)

    async def publish(self, version: int) -> None:
        """Tag completions with `version` from now on."""
        if self._gather is not None:
            self._gather()
        await self._engine.update_weights(version)


class WeightSync:
    """Pushes the trainer's weights to an engine, or to all engines of a pool, and verifies that they serve them.

    Servers on the trainer's GPUs sleep while the trainer computes, and every push wakes them:

    rollout -> sleep -> score, update -> wake with the weights, then with the KV cache -> rollout
    """

    def __init__(
        self,
        engine: Engine,
        source: ModelPolicy,
        probe: WeightProbe,
        *,
        to_checkpoint: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
        adapter_only: bool = False,
        thread: OneThread | None = None,
        sleeper: Sleeper | None = None,
    ) -> None:
        """Check engines with completions that `probe` samples.

        `source` has the live weights and computes logprobs. `to_checkpoint` converts weights to the names and shapes of a
        checkpoint, as servers read them; see `hf.as_checkpoint`. With `adapter_only` only the trained tensors are sent.
        After the start, weights are read in `thread`, the trainer's thread, while episodes continue. `sleeper` is the engine
        if it is on the trainer's GPUs.
        """
        self._engine = engine
        self._pool = engine if isinstance(engine, EnginePool) else None
        self._source = source
        self._probe = probe
        self._to_checkpoint = to_checkpoint
        self._adapter_only = adapter_only
        self._thread = thread or OneThread("polyturn-weight-sync")
        self._sleeper = sleeper
        self._held = WeightChecksums(self._thread)
        self._record: ProbeRecord | None = None
        self._pushed = -1
        self._sent = -1, -1
        """The last pushed version, and the number of optimizer steps at that time."""
        self.noise: float | None = None
        """Difference of logprobs between engine and trainer on the same weights, measured by `start`."""

    async def start(self, version: int) -> SyncReport:
        """Verify that weights arrive at every engine, and leave all with the true weights as `version`.

        Servers on the trainer's GPUs sleep before the canary is pushed, and again before the true weights. So the canary
        also shows whether a server loses an update that arrives while it sleeps, or wakes with old weights.

        Raises:
            EngineError: a group of parameters does not arrive; the message names the group.
        """
        await self._push(version)
        if self._pool is not None:
            require_one_version(self._pool)
        # Twice: the noise is the largest difference, which too few tokens would underestimate.
        samples = await self._sample(version)
        for name, more in (await self._sample(version)).items():
            samples.setdefault(name, []).extend(more)
        self.noise = max(*(await self._differences(samples)).values(), NOISE_FLOOR)
        if self._pool is not None:  # not before, because verification needs the noise
            self._pool.verify = self.verify
        with self._changed([s for own in samples.values() for s in own]) as changes:
            if self._sleeper is not None:
                await self._sleeper.sleep()
            sent = await self._push(version)
            seen = await self._sample(version)
            canaries = await self._differences(seen)
            effects = {name: self._effects(changes, own) for name, own in seen.items()}
            for name, canary in canaries.items():
                # If a group is missing, logprobs differ by that group's effect; otherwise only by the noise.
                if canary > min(effects[name].values()) / 4:
                    advice = "use another engine.weights" + (" or engine.update" if self._sleeper is not None else "")
                    raise EngineError(f"{self._verdict(name, changes, seen[name], canary)}; {advice}")
            # Learn checksums on the changed weights: true tensors may be equal, such as norms that are all ones, and the
            # change makes them distinguishable.
            if not self._adapter_only:  # servers compute no checksums of adapters
                await self._held.learn(self._engines(), sent)
        if self._sleeper is not None:
            await self._sleeper.sleep()
        await self.publish(version)
        # Not before, because the canary's weights have the same version as the true ones.
        if self._pool is not None:
            self._pool.current = self._current
        report = SyncReport(
            noise=self.noise,
            canary=max(canaries.values()),
            smallest_effect=min(effect for own in effects.values() for effect in own.values()),
            num_groups=len(changes),
        )
        logger.info(
            "the weights arrive%s: logprobs of engine and trainer differ by %.1e, and by %.1e after a test change of "
            "all weights; a missing part would cause at least %.1e",
            f" at {len(seen)} servers" if len(seen) > 1 else "",
            report.noise,
            report.canary,
            report.smallest_effect,
        )
        return report

    async def publish(self, version: int) -> float:
        """Push the weights as `version`, and return the largest difference of logprobs between engine and trainer.

        Raises:
            EngineError: no engine serves the weights, or `start` was not called. If only some engines of a pool serve other
                weights, the pool leaves them out and updates them.
        """
        sent = await self._push(version)
        if self.noise is None:
            raise EngineError("this engine's noise has not been measured; call `start` before `publish`")
        with first_error():
            async with asyncio.TaskGroup() as tasks:  # concurrently, because training waits
                check = tasks.create_task(self._held.problems(version, sent, self._engines()))
                sampled = tasks.create_task(self._sample(version))
                recorded = tasks.create_task(self._take_record(version))
        differences = await self._differences(sampled.result())
        # The largest of a few hundred differences may be an outlier, so measure again.
        if max(differences.values()) > self._limit:
            again = await self._differences(await self._sample(version))
            differences = {name: min(value, again[name]) for name, value in differences.items() if name in again}
        wrong = {
            name: self._outlier(version, value) for name, value in differences.items() if value > self._limit
        } | check.result()
        for name, problem in wrong.items():
            if self._pool is None or set(differences) <= set(wrong):
                raise EngineError(f"{name}: {problem}") from problem
            self._exclude(name, problem)
        if recorded.result() in wrong:  # the record is of wrong weights
            await self._take_record(version)
        return max(value for name, value in differences.items() if name not in wrong)

    def _outlier(self, version: int, value: float) -> EngineError:
        return EngineError(
            f"the engine does not serve the weights sent as version {version}: its logprobs differ from the trainer's "
            f"by {value:.2e}; before training they differed by {self.noise:.2e}"
        )

    async def verify(self, engine: Engine, version: int) -> None:
        """Check an engine that came back against the record of `version` or, during a sync, against the trainer.

        Raises:
            EngineError: the engine serves other weights, or there is no record of that version.
        """
        self._held.forget(engine)
        await self._held.check(engine, version)
        if self._record is not None and self._record.version == version:
            await self._probe.check(engine, self._record, limit=self._limit)
            return
        if self._pushed != version:
            raise EngineError(f"there is no record of version {version} yet")
        (difference,) = (await self._differences({"it": await self._probe.sample(engine, version)})).values()
        if difference > self._limit:
            raise EngineError(f"its logprobs differ from the trainer's by {difference:.2e}; {self._limit:.2e} is allowed")

    @property
    def _limit(self) -> float:
        return PROBE_FACTOR * (self.noise or 0.0)

    def _replicas(self) -> dict[str, Replica]:
        return {} if self._pool is None else {replica.name: replica for replica in self._pool.replicas if replica.is_live}

    def _engines(self) -> dict[str, Engine]:
        """Return name -> engine for all engines to sample from."""
        if self._pool is None:
            return {"the engine": self._engine}
        return {name: replica.engine for name, replica in self._replicas().items()}

    def _exclude(self, name: str, problem: EngineError) -> None:
        if self._pool is not None and (replica := self._replicas().get(name)) is not None:
            self._pool.exclude(replica, problem)

    async def _push(self, version: int) -> Mapping[str, Tensor]:
        if self._sleeper is not None:  # the servers' memory must fit beside the trainer's
            self._source.backend.free_cache()
        # During a push there is no record. A server that returns now is compared with the trainer, which does not train
        # meanwhile.
        self._record, self._pushed = None, version
        self._sent = version, self._source.step_count
        try:
            weights = await self._thread.run(self._weights)
            self._held.keep(self._engines().values())
            await self._engine.update_weights(version, weights=weights)
            return weights
        finally:
            self._pushed = -1  # from here on the trainer's weights may change

    @asynccontextmanager
    async def _current(self, version: int) -> AsyncIterator[Mapping[str, Tensor]]:
        """Yield the trainer's weights (see `CurrentWeights`); the trainer's next step waits until the block ends."""
        async with self._thread.held():
            if (version, self._source.step_count) != self._sent:
                raise EngineError(f"the trainer has moved past policy version {version}; the server gets the next one")
            yield await asyncio.to_thread(self._weights)

    def _weights(self) -> Mapping[str, Tensor]:
        return self._to_checkpoint(self._source.backend.trained() if self._adapter_only else self._source.weights())

    async def _score(self, samples: Sequence[TrainSample]) -> list[Floats]:
        return await self._thread.run(partial(self._source.score, samples))

    async def _take_record(self, version: int) -> str | None:
        """Record the answers of one engine, with which servers that come back later are compared; return the engine's name,
        or None if no engine answers."""
        for name, replica in self._replicas().items():
            try:
                self._record = await self._probe.record(replica.engine, version, self._score)
                return name
            except EngineError as problem:
                self._exclude(name, problem)
        return None

    async def _sample(self, version: int) -> dict[str, list[TrainSample]]:
        """Return engine -> samples. Lost engines of a pool are left out, and at a later sync also wrong ones.

        Raises:
            EngineError: no engine could sample, or one reported another version.
        """
        if self._pool is None:
            return {"the engine": await self._probe.sample(self._engine, version)}
        samples: dict[str, list[TrainSample]] = {}
        problems: list[EngineError] = []

        async def sample(name: str, replica: Replica) -> None:
            try:
                samples[name] = await self._probe.sample(replica.engine, version)
            except EngineError as problem:
                if self.noise is None and not isinstance(problem, EngineLostError):
                    raise  # at the start a wrong server ends the run, because the transport does not work
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
        """Return engine -> largest difference between its logprobs and the trainer's."""
        scores = iter(await self._score([s for own in samples.values() for s in own]))
        return {name: _largest([_logprobs(s) for s in own], [next(scores) for _ in own]) for name, own in samples.items()}

    @contextmanager
    def _changed(self, samples: Sequence[TrainSample]) -> Iterator[dict[str, float]]:
        """Shift every group of the trainer's parameters far enough to be visible; yield group -> scale; restore all at the
        end."""
        changes: dict[str, float] = {}
        try:
            # LoRA's B matrices first: they start at zero, which would hide changes of A.
            groups = self._source.backend.weight_groups(is_merged=not self._adapter_only)
            for group in sorted(groups, key=lambda name: ".lora_A." in name):
                changes[group] = 0.0
                self._grow(group, changes, samples)
            yield changes
        finally:
            for group in changes:
                self._source.backend.shift_weights(group, 0.0)

    def _grow(self, group: str, changes: dict[str, float], samples: Sequence[TrainSample]) -> None:
        """Shift a group further and further until it is clearly visible."""
        assert self.noise is not None
        before = self._source.score(samples)
        # Start small: a change that breaks the model would hide whether later groups arrive.
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
        """Return group -> difference of logprobs if only that group kept its old values."""
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
        """Describe which group explains the engine's answers."""
        engine = [_logprobs(s) for s in seen]
        assert self.noise is not None
        left = {name: _largest(engine, self._without(name, changes, seen)) for name in changes}
        name = min(left, key=left.__getitem__)
        if left[name] <= canary / 4:
            return (
                f"{who} reports that it loaded the new weights, but still has the old {name} (with the old one "
                f"logprobs differ by {left[name]:.1e}, with the new one by {canary:.1e})"
            )
        return (
            f"{who} reports that it loaded the new weights, but its logprobs differ from the trainer's by {canary:.1e} (its "
            f"noise is {self.noise:.1e}), so several groups of parameters did not arrive"
        )


def _logprobs(sample: TrainSample) -> Floats:
    assert sample.rollout_logprobs is not None
    return sample.rollout_logprobs


def _largest(a: Sequence[Floats], b: Sequence[Floats]) -> float:
    return max(float(np.abs(x - y).max(initial=0.0)) for x, y in zip(a, b, strict=True))
