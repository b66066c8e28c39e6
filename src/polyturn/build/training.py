"""Build the policy, the training loop and the records, from the sections `train`, `algorithm` and `warm_start`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.build.algorithm import (
    build_correction,
    build_critic,
    build_estimator,
    build_reward_kl,
    build_teacher,
    drops_zero_variance,
)
from polyturn.build.engine import sends_adapter
from polyturn.build.parts import Parts, rollout_pool
from polyturn.build.ranks import PolicySpec, policy_options
from polyturn.build.tasks import RunTasks, build_sampler
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import TrackerConfig
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.sample import TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.data.conversations import generate_conversations, read_conversations
from polyturn.engines.options import is_deterministic
from polyturn.engines.recovery import Sleeper
from polyturn.engines.update_gate import UpdateGate
from polyturn.evaluation.evaluate import EvalSet
from polyturn.infra.aio import OneThread
from polyturn.infra.live import LiveObject, names_code
from polyturn.infra.stand_in import stand_ins
from polyturn.store.stored_run import open_store
from polyturn.tracking.console import Progress
from polyturn.training.options import OptimSettings

if TYPE_CHECKING:
    from polyturn.tracking.manager import TrackerSpec
    from polyturn.training.loop import Trainer
    from polyturn.training.observer import AlsoRecord
    from polyturn.training.observer_base import Observer
    from polyturn.training.policy import ModelPolicy
    from polyturn.training.state import WeightChannel
    from polyturn.training.update import Update


def build_policy(parts: Parts, optim: OptimSettings, *, max_tokens_per_batch: int) -> ModelPolicy:
    """Make the policy, over the parameters of this process or over all ranks."""
    from polyturn.training.policy import ModelPolicy, policy_backend
    from polyturn.training.ranked import RankedBackend

    spec = PolicySpec(optim=optim, max_tokens_per_batch=max_tokens_per_batch)
    # Ranks load a reference or a teacher themselves.
    options = policy_options(parts.source, spec, parts.model, parts.context.media, has_frozen=parts.rank_group is None)
    if parts.rank_group is None:
        return ModelPolicy(policy_backend(parts.model, **options), loss=options["loss"])
    is_object = isinstance(parts.source.config.model.path, LiveObject)
    # An embedded engine in this process samples from this process's model, so the model must follow the ranks.
    samples_here = parts.source.config.cluster.address is None and parts.engine.capabilities.shares_weights
    mirror = parts.model if is_object or samples_here else None
    backend = RankedBackend(parts.rank_group, "policy", spec, layout=options["layout"], mirror=mirror)
    return ModelPolicy(backend, loss=options["loss"])


def build_trainer(parts: Parts, tasks: RunTasks, *, folder: Path, observer: Observer) -> Trainer:
    """Make the training loop. Call it after a warm start, because the reference copies the current weights."""
    from polyturn.training.checkpoint import WARM_START, Checkpoints
    from polyturn.training.journal_file import FOLDER, JournalFile
    from polyturn.training.loop import Trainer
    from polyturn.training.policy_snapshots import PolicySnapshots
    from polyturn.training.state import Data, EngineLink, LoopSettings, Saving

    source, config = parts.source, parts.source.config
    train = config.train
    # The policy is not trained while the critic warms up, so its schedule has fewer steps.
    optim = train.optim.over(max(1, train.steps - config.algorithm.critic.warmup), updates=train.updates_per_step)
    policy = build_policy(parts, optim, max_tokens_per_batch=train.max_tokens_per_batch)
    update = build_update(parts, policy)
    thread = _thread_of_updates(parts, policy)
    channel, gate, sleeper = _channel(parts, policy, thread), parts.context.engine, _sleeper(parts)
    restarts = "engine.deterministic restarts every conversation" if is_deterministic(config.engine) else None
    journal = JournalFile(folder / FOLDER, why_not=restarts)
    if parts.pool is not None:
        parts.pool.keep_in(journal)
    observer.watch(parts.context.running)
    pool = parts.pool or rollout_pool(source, dataclasses.replace(parts.context, journal=journal))
    return Trainer(
        LoopSettings(train=train, evaluation=config.evaluation, seed=config.seed),
        update=update,
        pool=pool,
        data=Data(tasks.train, tasks.eval_sets, build_sampler(source, tasks.train)),
        engine=EngineLink(
            channel=channel,
            closed=(parts.pool or gate).closed if isinstance(gate, UpdateGate) else contextlib.nullcontext,
            busy_s=lambda: parts.busy_s,
            metrics=lambda: {**parts.engine.read_metrics(), **parts.policies.read_metrics(), **pool.read_metrics()},
            snapshots=PolicySnapshots(parts.policies.snapshots, weights=policy.weights),
            sleep=None if sleeper is None else sleeper.sleep,
            thread=thread,
        ),
        saving=Saving(
            checkpoints=Checkpoints(
                folder / "checkpoints",
                keep=train.keep_checkpoints,
                keep_every=train.keep_checkpoint_every,
                former=folder / WARM_START,
            ),
            export=stored_exporter(parts),
            journal=journal,
            fingerprint=parts.context.codec.fingerprint,
        ),
        observer=observer,
    )


def _thread_of_updates(parts: Parts, policy: ModelPolicy) -> OneThread | None:
    """Return a thread for updates, or None to compute them on the event loop, in turns with the engine.

    An engine that samples from the trained parameters must not see half an update. In an asynchronous run the embedded
    engine therefore waits while they change; another engine that computes on the event loop takes turns with the trainer.
    """
    from polyturn.engines.embedded import EmbeddedEngine
    from polyturn.training.model_backend import ModelBackend

    backend, engine = policy.backend, parts.engine
    if engine.capabilities.shares_loop and isinstance(backend, ModelBackend):  # ranks train other weights than the engine's
        if parts.source.config.train.max_staleness == 0 or not isinstance(engine, EmbeddedEngine):
            return None
        thread, gate = OneThread("polyturn-update"), parts.context.engine

        def pause() -> None:
            if isinstance(gate, UpdateGate):  # now, because the frozen engine ends no completion
                thread.await_in_loop(gate.pause)
            engine.freeze()

        backend.optimizer.before_step(pause)
        return thread
    return OneThread("polyturn-update")


def build_update(parts: Parts, policy: ModelPolicy) -> Update:
    """Make the update, which trains on the groups of a step."""
    from polyturn.algorithms.advantages import members_needed
    from polyturn.batching.loss_scale import build_loss_scale
    from polyturn.training.update import Update, UpdateSettings

    source, config = parts.source, parts.source.config
    train, algorithm, codec = config.train, config.algorithm, parts.context.codec
    estimator = build_estimator(source)
    return Update(
        policy,
        estimator=estimator,
        settings=UpdateSettings(
            train=train,
            algorithm=algorithm,
            temperature=config.rollout.sampling.temperature,
            loss_scale=build_loss_scale(
                algorithm.loss_scale, decode=codec.decode, stop_token_ids=codec.stop_token_ids, base=source.base
            ),
            min_members=members_needed(estimator, group_size=train.group_size),
            # A teacher and an observation loss train every trajectory.
            drop_small_groups=algorithm.loss.distill is None and not algorithm.learns_without_rewards,
            drop_zero_variance=drops_zero_variance(source, estimator),
            correction=build_correction(source),
            needs_rewards=algorithm.needs_rewards,
        ),
        kl=policy.kl if algorithm.kl_in("loss").target is not None else None,
        entropy=policy.entropy if algorithm.entropy_target is not None else None,
        critic=build_critic(parts, estimator),
        reward_kl=build_reward_kl(source),
        teacher=build_teacher(parts),
    )


def _channel(parts: Parts, policy: ModelPolicy, thread: OneThread | None) -> WeightChannel:
    """Return the channel of new weights to the engine; `thread` is the thread of the update, if it has its own."""
    from polyturn.training import hf
    from polyturn.training.lora import as_peft
    from polyturn.training.ranked import RankedBackend
    from polyturn.training.weight_probe import WeightProbe
    from polyturn.training.weight_sync import SharedWeights, WeightSync

    backend = policy.backend
    config = parts.source.config
    if isinstance(backend, RankedBackend) and config.cluster.address is not None and config.engine.kind == "embedded":
        from polyturn.cluster.clients import PushedWeights

        return PushedWeights(parts.engine, backend.trained)
    if parts.engine.capabilities.shares_weights:
        return SharedWeights(parts.engine, gather=backend.gather if isinstance(backend, RankedBackend) else None)
    vocab_size = int(parts.model.config.get_text_config().vocab_size)
    alone = sends_adapter(parts.source, parts.model)
    return WeightSync(
        parts.engine,
        policy,
        WeightProbe(vocab_size=vocab_size, media=parts.context.media),
        to_checkpoint=as_peft if alone else functools.partial(hf.as_checkpoint, parts.model),
        adapter_only=alone,
        thread=thread,
        sleeper=_sleeper(parts),
    )


def _sleeper(parts: Parts) -> Sleeper | None:
    """Return the engine if its servers sleep on the trainer's GPUs during an update."""
    if parts.source.config.engine.update != "sleep":
        return None
    assert isinstance(parts.engine, Sleeper)  # as every pool of servers is
    return parts.engine


def exporter(parts: Parts) -> Callable[..., Path]:
    """Return a function that saves the current model, merged with its adapter, with tokenizer and processor, in Hugging Face
    format."""
    from polyturn.training import hf

    media = parts.context.media
    processor = None if media is None else media.processor
    return functools.partial(hf.save_model, parts.model, tokenizer=parts.tokenizer, processor=processor)


def stored_exporter(parts: Parts) -> Callable[[Path], object]:
    """Return a function that saves a checkpoint's model in Hugging Face format from the policy's shards next to the folder;
    with LoRA, only the adapter."""
    from polyturn.training.shards import stored_tensors

    export = exporter(parts)
    return lambda folder: export(folder, tensors=stored_tensors(folder.parent / "policy", prefix="model/"))


def warm_start_samples(parts: Parts) -> list[TrainSample]:
    """Return the samples of `warm_start.conversations`: a jsonl file, a function, or the folder of a run."""
    from polyturn.training.sft import encode_conversation, trajectory_samples

    source, sft = parts.source, parts.source.config.warm_start
    if sft.conversations is None:
        raise ConfigError("warm_start.conversations is not set; name a jsonl file, a function or a run's folder")
    if names_code(sft.conversations):
        conversations = generate_conversations(sft.conversations, base=source.base, **sft.kwargs)
    elif os.path.isdir(source.base / str(sft.conversations)):
        return trajectory_samples(open_store(source.base / str(sft.conversations)).trajectories(), min_reward=sft.min_reward)
    else:
        conversations = read_conversations(source.base / str(sft.conversations))
    context = parts.context
    samples = []
    with Progress("encode conversations", len(conversations)) as bar:
        for i, c in enumerate(conversations):
            sample = encode_conversation(c, context.encoder_for(Task(id="", prompt=(), tools=c.tools)), id=str(i))
            if len(sample) > parts.max_context:
                raise DataError(
                    f"warm_start.conversations: conversation {i} has {len(sample)} tokens and the context "
                    f"{parts.max_context}; raise rollout.limits.max_context, or remove the conversation"
                )
            samples.append(sample)
            bar.advance()
    return samples


def build_trackers(source: ConfigSource) -> tuple[TrackerSpec, ...]:
    """Find the trackers of a run and check their keys, before any time is spent."""
    from polyturn.tracking.manager import tracker_spec

    wanted = [t if isinstance(t, TrackerConfig) else TrackerConfig(name=t) for t in source.config.tracking]
    return tuple(tracker_spec(t.name, samples=t.samples, base=source.base, **(t.model_extra or {})) for t in wanted)


def build_records(parts: Parts, eval_sets: Sequence[EvalSet], *, environ: Mapping[str, str] | None = None) -> AlsoRecord:
    """Make a run's records other than metrics and trajectories; trackers read their settings from `environ`."""
    from polyturn.tracking.dump import TrajectoryDump
    from polyturn.training.observer import AlsoRecord

    config = parts.source.config

    def dump(folder: str | None) -> TrajectoryDump | None:
        return None if folder is None else TrajectoryDump(Path(os.path.expanduser(folder)), decode)

    def decode(ids: Sequence[int]) -> str:
        return str(parts.tokenizer.decode(list(ids), skip_special_tokens=True))

    def their_metrics(name: str, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        if name != eval_sets[0].name:  # their names do not contain the set's name, so only one set can have them
            return {}
        return {k: v for one in stand_ins() if one.eval_metrics is not None for k, v in one.eval_metrics(groups).items()}

    also: dict[str, Any] = {"eval_metrics": their_metrics} if config.compat.validation_metrics else {}
    return AlsoRecord(
        train_dump=dump(config.dump.train),
        eval_dump=dump(config.dump.evaluation),
        has_many_sets=len(eval_sets) > 1,
        store=config.store,
        trackers=build_trackers(parts.source),
        environ=environ or {},
        success_at=config.evaluation.success_at,
        **also,
    )
