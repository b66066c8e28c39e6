"""From the `train`, `algorithm` and `warm_start` sections to a policy and the loop around it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.build.loss import build_correction, build_kl, build_policy_loss, build_reference, build_teacher
from polyturn.build.parts import Parts
from polyturn.build.place import Place
from polyturn.build.tasks import RunTasks, build_sampler
from polyturn.config.models import (
    OptimConfig,
)
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.sample import TrainSample
from polyturn.core.signature import has_parameter
from polyturn.core.task import Task
from polyturn.data.conversations import generate_conversations, read_conversations
from polyturn.rollout.pool import RolloutPool
from polyturn.store.stored_run import open_store
from polyturn.tracking.console import Progress

if TYPE_CHECKING:
    from polyturn.training.local import LocalPolicy
    from polyturn.training.loop import Trainer, TrainObserver, WeightChannel
    from polyturn.training.update import Update


def build_policy(parts: Parts, optim: OptimConfig, *, steps: int, max_tokens_per_batch: int) -> LocalPolicy:
    """Make the trainer's side of the model, over the same parameters."""
    from polyturn.batching.layout import LayoutSettings
    from polyturn.training.local import LocalPolicy
    from polyturn.training.loss_terms import LossSettings
    from polyturn.training.optim import OptimSettings

    algorithm = parts.place.config.algorithm
    warmup = optim.warmup_steps or int(optim.warmup_ratio * steps)
    return LocalPolicy(
        parts.model,
        optim=OptimSettings(
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            max_grad_norm=optim.max_grad_norm,
            max_skipped=optim.max_skipped,
            warmup_steps=warmup,
            schedule=optim.schedule,
            total_steps=max(steps, warmup + 1),
            min_lr_ratio=optim.min_lr_ratio,
        ),
        loss=LossSettings(
            policy_loss=build_policy_loss(parts.place),
            policy_loss_kwargs=algorithm.loss_kwargs,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.clip_dual,
            aggregation=algorithm.aggregate,
            segment_weight=algorithm.segment_weight,
            norm_length=algorithm.norm_length,
            kl_coef=algorithm.kl_coef,
            kl_estimator=algorithm.kl_estimator,
            entropy_coef=algorithm.entropy_coef,
            distill_coef=0.0 if algorithm.distill is None else algorithm.distill.coef,
            distill_estimator="k1+" if algorithm.distill is None else algorithm.distill.estimator,
        ),
        layout=LayoutSettings(max_tokens_per_batch=max_tokens_per_batch),
        media=parts.context.media,
        reference=build_reference(parts),
        teacher=build_teacher(parts),
        kl=build_kl(parts.place),
    )


def build_trainer(parts: Parts, tasks: RunTasks, *, folder: Path, observer: TrainObserver) -> Trainer:
    """Make the training loop; call it after a warm start, because a reference policy is a copy of the weights now."""
    from polyturn.engines.embedded import EmbeddedEngine
    from polyturn.training.checkpoint import Checkpoints
    from polyturn.training.loop import LoopSettings, Trainer

    place, config = parts.place, parts.place.config
    train, evaluation = config.train, config.evaluation
    policy = build_policy(parts, train.optim, steps=train.steps, max_tokens_per_batch=train.max_tokens_per_batch)
    return Trainer(
        LoopSettings(
            steps=train.steps,
            groups_per_step=train.groups_per_step,
            group_size=train.group_size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            max_staleness=train.max_staleness,
            extra_groups=math.ceil(train.oversample * train.groups_per_step),
            carries_over=train.leftover == "carry",
            max_attempts=train.dynamic_sampling,
            replayed_groups=math.ceil(train.replay * train.groups_per_step),
            eval_before=evaluation.before,
            eval_every=evaluation.every,
            eval_limit_during=evaluation.limit_during,
            stop_at=evaluation.stop_at,
            patience=evaluation.patience,
            checkpoint_every=train.checkpoint_every,
        ),
        update=build_update(parts, policy),
        pool=RolloutPool(
            parts.context,
            max_concurrent=config.rollout.max_concurrent,
            max_failed_share=config.rollout.max_failed_share,
        ),
        tasks=tasks.train,
        eval_sets=tasks.eval_sets,
        checkpoints=Checkpoints(folder / "checkpoints", keep=train.keep_checkpoints),
        export=exporter(parts, adapter_only=True),
        observer=observer,
        engine_busy_s=lambda: parts.engine.busy_s,
        engine_metrics=_engine_metrics(parts),
        channel=_channel(parts, policy),
        fingerprint=parts.context.codec.fingerprint,
        sampler=build_sampler(place, tasks.train),
        trains_in_thread=not isinstance(parts.engine, EmbeddedEngine),
    )


def build_update(parts: Parts, policy: LocalPolicy) -> Update:
    """Make what turns the groups of a step into new parameters."""
    from polyturn.batching.loss_scale import build_loss_scale
    from polyturn.training.update import Update, UpdateSettings

    place, config = parts.place, parts.place.config
    train, algorithm = config.train, config.algorithm
    return Update(
        policy,
        estimator=build_estimator(place),
        settings=UpdateSettings(
            minibatches=train.minibatches,
            temperature=config.rollout.sampling.temperature,
            loss_scale=build_loss_scale(algorithm.loss_scale, decode=parts.context.codec.decode, base=place.base),
            # A teacher has something to say about every trajectory.
            drop_zero_variance=algorithm.drop_zero_variance and train.group_size > 1 and algorithm.distill is None,
            is_stale=train.max_staleness > 0,
            needs_reference=algorithm.kl_coef > 0,
            uses_engine_logprobs=algorithm.old_logprobs == "engine",
            correction=build_correction(place),
        ),
        kl=policy.kl if algorithm.kl_target is not None else None,
    )


def _channel(parts: Parts, policy: LocalPolicy) -> WeightChannel:
    """Return the way of new weights to the engine."""
    from polyturn.engines.pool import EnginePool
    from polyturn.training.weight_sync import SharedWeights, WeightSync

    if not isinstance(parts.engine, EnginePool):
        return SharedWeights(parts.engine)
    return WeightSync(parts.engine, policy, vocab_size=int(parts.model.config.get_text_config().vocab_size))


def _engine_metrics(parts: Parts) -> Callable[[], Mapping[str, float]]:
    """Return what tells how the engine's servers fared since it was last asked."""
    from polyturn.engines.pool import EnginePool

    return parts.engine.read_metrics if isinstance(parts.engine, EnginePool) else dict


def exporter(parts: Parts, *, adapter_only: bool = False) -> Callable[[Path], Path]:
    """Return what saves the model as it is, with all that others need to load it, in the Hugging Face format.

    With LoRA that is the merged model, or with `adapter_only` the adapter alone.
    """
    from polyturn.training import hf

    media = parts.context.media
    processor = None if media is None else media.processor
    return functools.partial(
        hf.save_model, parts.model, tokenizer=parts.tokenizer, processor=processor, adapter_only=adapter_only
    )


def build_estimator(place: Place) -> Any:
    """Return the advantage estimator with its options bound."""
    from polyturn.algorithms.advantages import advantages

    algorithm = place.config.algorithm
    estimator: Any = advantages.resolve(algorithm.advantage, base=place.base)
    if has_parameter(estimator, "token_level_rewards"):  # an estimator that was written for verl
        from polyturn.compat.verl.core_algos import as_estimator

        estimator = as_estimator(estimator)
    if algorithm.advantage == "grpo":
        return functools.partial(estimator, norm_by_std=algorithm.norm_by_std)
    return estimator


def warm_start_samples(parts: Parts) -> list[TrainSample]:
    """Return the samples of `warm_start.conversations`: a jsonl file, a function, or the folder of a run.

    Raises:
        ConfigError, DataError: there are none, or they cannot be read.
    """
    from polyturn.training.sft import encode_conversation, trajectory_samples

    place, sft = parts.place, parts.place.config.warm_start
    if sft.conversations is None:
        raise ConfigError("warm_start.conversations is not set; name a jsonl file, a function or a run's folder")
    if ":" in sft.conversations:
        conversations = generate_conversations(sft.conversations, base=place.base, **sft.kwargs)
    elif (place.base / sft.conversations).is_dir():
        return trajectory_samples(open_store(place.base / sft.conversations).trajectories(), min_reward=sft.min_reward)
    else:
        conversations = read_conversations(place.base / sft.conversations)
    context = parts.context
    samples = []
    with Progress("encode conversations", len(conversations)) as bar:
        for i, c in enumerate(conversations):
            sample = encode_conversation(c, context.encoder_for(Task(id="", prompt=(), tools=c.tools)), id=str(i))
            if len(sample) > parts.max_context:
                raise DataError(
                    f"warm_start.conversations: conversation {i} has {len(sample)} tokens and the context holds "
                    f"{parts.max_context}; raise rollout.limits.max_context, or leave it out"
                )
            samples.append(sample)
            bar.advance()
    return samples
