"""The composition root: the one file where config meets classes. A `RunConfig` goes in, live objects come out.

    RunConfig  ->  tokenizer, model  ->  Codec, EmbeddedEngine, LocalPolicy  ->  RolloutContext  ->  Trainer

Everything that can be wrong with a configuration is found here, before any training time is spent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.config.models import (
    LimitsConfig,
    OptimConfig,
    OverlongConfig,
    RewardFunctionConfig,
    RewardRateConfig,
    RunConfig,
    SamplingConfig,
    TaskSourceConfig,
)
from polyturn.core.errors import ConfigError, DataError, TemplateError
from polyturn.core.generation import SamplingParams
from polyturn.core.registry import import_attr
from polyturn.core.sample import TrainSample
from polyturn.core.signature import has_parameter
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.data.conversations import generate_conversations, read_conversations
from polyturn.data.dataset import DatasetSummary, Subset, TaskDataset, check_tasks, generate_tasks
from polyturn.data.sampler import Curriculum, TaskSampler
from polyturn.evaluation.evaluate import EvalSet
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.rewards.calls import CallOptions, RateLimit
from polyturn.rewards.code import Sandbox
from polyturn.rewards.overlong import Overlong
from polyturn.rewards.router import RewardRef, RewardRouter
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.rollout.pool import RolloutPool
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.store.parquet_store import open_store
from polyturn.tokens.certificate import TemplateReport, certify
from polyturn.tokens.codec import Codec, load_codec
from polyturn.tokens.multimodal import MediaProcessor, load_processor
from polyturn.tokens.parsers import build_parser
from polyturn.tokens.train import train_tokenizer
from polyturn.tools.base import BaseTool
from polyturn.tools.executor import ToolBox
from polyturn.tools.registry import initialize_tools_from_config, load_function_tools
from polyturn.tracking.console import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from polyturn.engines.embedded import EmbeddedEngine
    from polyturn.training.local import LocalPolicy
    from polyturn.training.loop import Trainer, TrainObserver
    from polyturn.training.observer import AlsoRecord

logger = logging.getLogger(__name__)

MEASURED_MEDIA_TASKS = 64
"""Of tasks that show media, so many are encoded before a run; the others are checked for files and kinds, which is quick."""

_NUM_TRIALS = 9
"""Random dialogues that a run tries its template with, besides the canned ones; `polyturn check` tries more."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A configuration, and where its relative paths start."""

    config: RunConfig
    base: Path


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What rollout needs, live: the same for training, evaluation and `polyturn rollout`."""

    place: Place
    tokenizer: PreTrainedTokenizerFast
    model: PreTrainedModel
    engine: EmbeddedEngine
    context: RolloutContext
    template: TemplateReport
    max_context: int


def build_parts(place: Place, *, checkpoint: Path | None = None) -> Parts:
    """Make the model, the engine and the rollout context.

    Args:
        place: The configuration.
        checkpoint: A folder with a Hugging Face model that replaces the configured weights and tokenizer.

    Raises:
        ConfigError, TemplateError: something in the configuration cannot work.
    """
    import torch

    from polyturn.engines.embedded import EmbeddedEngine

    config = place.config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    codec = build_codec(place, checkpoint=checkpoint)
    tokenizer = codec.tokenizer
    model = build_model(place, tokenizer, checkpoint=checkpoint)
    max_context = _max_context(config.rollout.limits, model)
    tools = build_tools(place)
    template = certify(codec, tools=tuple(tools.schemas.values()), num_random=_NUM_TRIALS)
    template.require()
    media = build_media(place, codec, model)
    engine = EmbeddedEngine(
        model,
        media=media,
        num_slots=config.engine.num_slots,
        max_context=max_context,
        prefill_chunk=config.engine.prefill_chunk,
        deterministic=config.engine.deterministic,
    )
    context = RolloutContext(
        engine=engine,
        codec=codec,
        media=media,
        parser=build_parser(
            codec,
            config.rollout.parser,
            reasoning=config.rollout.reasoning_parser,
            calls_in_reasoning=config.rollout.calls_in_reasoning,
            needs_calls=bool(tools.tools),
            base=place.base,
        ),
        tools=tools,
        interactions=build_interactions(place),
        rewarder=build_rewarder(place),
        scheduler=build_scheduler(place),
        limits=_limits(config.rollout.limits, max_context),
        sampling=_sampling(config.rollout.sampling, config.rollout.limits),
        interaction_timeout_s=config.rollout.interaction_timeout_s,
        require_interaction_name=config.compat.require_interaction_name,
        renders_history=config.rollout.use_inference_chat_template or template.strategy == "segment",
        scheduler_timeout_s=config.rollout.scheduler_timeout_s,
        sanity_mode=config.rollout.tokenization_sanity_check_mode,
        sanity_every=config.rollout.sanity_every,
        escape_prompts=config.rollout.escape_prompts,
        escape_observations=config.rollout.escape_observations,
    )
    return Parts(
        place=place,
        tokenizer=tokenizer,
        model=model,
        engine=engine,
        context=context,
        template=template,
        max_context=max_context,
    )


def build_codec(place: Place, *, checkpoint: Path | None = None) -> Codec:
    """Load the tokenizer, or train the one that `model.train_tokenizer` describes; set the chat template."""
    model = place.config.model
    template = None
    if model.chat_template is not None:
        file = place.base / model.chat_template
        if not file.is_file():
            raise ConfigError(f"there is no file {str(file)!r}; model.chat_template names a Jinja file")
        template = file.read_text(encoding="utf-8")
    kwargs = model.template_kwargs
    source = model.tokenizer or model.path
    if checkpoint is not None:
        codec = load_codec(str(checkpoint), chat_template=template, template_kwargs=kwargs)
    elif model.train_tokenizer is not None:
        texts = import_attr(model.train_tokenizer.corpus, base=place.base)()
        trained = train_tokenizer(texts, vocab_size=model.train_tokenizer.vocab_size, chat_template=template)
        codec = Codec(trained, template_kwargs=kwargs)
    elif source is not None:
        codec = load_codec(
            _folder_or_name(source, place.base), revision=model.revision, chat_template=template, template_kwargs=kwargs
        )
    else:
        raise ConfigError("set model.tokenizer or model.path: the run has no tokenizer")
    codec.tokenizer.chat_template = codec.chat_template  # so that an exported model carries the template it was trained with
    return codec


def build_model(place: Place, tokenizer: PreTrainedTokenizerFast, *, checkpoint: Path | None = None) -> PreTrainedModel:
    """Load the model's weights, or make random ones from `model.init`."""
    import torch

    from polyturn.training import hf

    model = place.config.model
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    if checkpoint is not None:
        return hf.load_model(checkpoint, dtype=dtype)
    if model.init is not None:
        fields = {
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            **model.init,
        }
        return hf.build_model(fields, seed=place.config.seed, dtype=dtype)
    assert model.path is not None  # the config model requires one of the two
    return hf.load_model(_folder_or_name(model.path, place.base), dtype=dtype)


def build_media(place: Place, codec: Codec, model: PreTrainedModel) -> MediaProcessor | None:
    """Make the processor of a model that takes more than text; None for text.

    Raises:
        ConfigError: `model.processor` leads to none, or to one that does not fit the tokenizer.
    """
    from polyturn.training import hf

    config = place.config.model
    name = config.processor
    if name == "none" or (name is None and (config.path is None or not hf.takes_media(model))):
        return None
    if name is not None and ":" in name:
        return MediaProcessor(import_attr(name, base=place.base)(codec.tokenizer), codec)
    try:
        source = _folder_or_name(name or str(config.path), place.base)
        return MediaProcessor(load_processor(source, revision=config.revision if name is None else None), codec)
    except ConfigError as problem:
        if name is not None:
            raise
        logger.warning("The run shows the model no images, videos or sounds: %s", problem)
        return None


def build_tools(place: Place) -> ToolBox:
    """Make the tools of the file and of the named functions."""
    tools = place.config.rollout.tools
    found: list[BaseTool] = []
    if tools.file is not None:
        found += initialize_tools_from_config(place.base / tools.file)
    for name in tools.functions:
        if name.endswith(".py"):
            found += load_function_tools(place.base / name)
            continue
        function = import_attr(name, base=place.base)
        if not isinstance(function, BaseTool):
            raise ConfigError(
                f"rollout.tools.functions names {name!r}, which is a {type(function).__name__}; "
                "decorate the function with @polyturn.tool"
            )
        found.append(function)
    return ToolBox(
        found,
        timeout_s=tools.timeout_s,
        max_parallel_calls=tools.max_parallel_calls,
        max_result_chars=tools.max_result_chars,
        truncate_side=tools.truncate_side,
    )


def build_interactions(place: Place) -> Mapping[str, Any]:
    """Make the interactions of the file or the list."""
    source = place.config.rollout.interactions
    if source is None:
        return {}
    if isinstance(source, str):
        return initialize_interactions_from_config(place.base / source)
    return initialize_interactions_from_config({"interaction": source}, base=place.base)


def build_rewarder(place: Place) -> RewardRouter:
    """Make what scores finished trajectories."""
    reward = place.config.reward
    return RewardRouter(
        {source: _reward_ref(target) for source, target in reward.routes.items()},
        function=None if reward.function is None else _reward_ref(reward.function),
        weights=reward.weights,
        interaction_aggregate=reward.interaction,
        calls=CallOptions(
            timeout_s=reward.timeout_s,
            text=reward.text,
            rate=_rate_limit(reward.rate),
            batch_size=reward.batch_size,
            batch_wait_s=reward.batch_wait_s,
        ),
        overlong=_overlong(reward.overlong, place.config.rollout.limits),
        sandbox=Sandbox(
            url=reward.sandbox.url,
            memory_limit_mb=reward.sandbox.memory_limit_mb,
            timeout_s=reward.sandbox.timeout_s,
            slots=threading.Semaphore(reward.sandbox.max_concurrent),
        ),
        base=place.base,
    )


def _reward_ref(named: str | RewardFunctionConfig) -> RewardRef:
    return RewardRef(target=named) if isinstance(named, str) else RewardRef(target=named.name, kwargs=named.kwargs)


def _rate_limit(rate: RewardRateConfig) -> RateLimit | None:
    of_tokens = None if rate.tokens_per_minute is None else rate.tokens_per_minute / rate.tokens_per_call
    per_minute = min((r for r in (rate.calls_per_minute, of_tokens) if r is not None), default=None)
    if rate.max_concurrent is None and per_minute is None:
        return None
    return RateLimit(max_concurrent=rate.max_concurrent, calls_per_minute=per_minute)


def _overlong(config: OverlongConfig, limits: LimitsConfig) -> Overlong | None:
    if config.buffer == 0:
        return None
    limit = config.max_tokens or limits.max_tokens
    if limit is None:
        raise ConfigError("reward.overlong has a buffer and no limit to be near to; set reward.overlong.max_tokens")
    return Overlong(max_tokens=limit, buffer=config.buffer, penalty=config.penalty)


def build_scheduler(place: Place) -> MultiTurnScheduler:
    """Make the scheduler."""
    name = place.config.rollout.scheduler
    if name is None:
        return MultiTurnScheduler()
    found = import_attr(name, base=place.base)
    if isinstance(found, type) and any(c.__module__ == "polyturn.compat.verl.agent_loop" for c in found.__mro__):
        from polyturn.compat.verl.agent_scheduler import AgentLoopScheduler

        return AgentLoopScheduler(found)
    scheduler = found()
    if not isinstance(scheduler, MultiTurnScheduler):
        raise ConfigError(f"rollout.scheduler names {name!r}, which makes no MultiTurnScheduler; inherit that class")
    return scheduler


def build_tasks(source: TaskSourceConfig, *, base: Path, split: str) -> Sequence[Task]:
    """Open the files, or call the generator, that `source` names."""
    if source.files is not None:
        tasks: Sequence[Task] = TaskDataset.open(source.files, split=split, base=base)
    else:
        assert source.generator is not None  # the config model requires one of the two
        tasks = generate_tasks(source.generator, base=base, **source.kwargs)
    return tasks if source.limit is None else tasks[: source.limit]


@dataclass(frozen=True, kw_only=True)
class RunTasks:
    """What a run trains on and is judged by."""

    train: Sequence[Task]
    eval_sets: Sequence[EvalSet]


def build_run_tasks(place: Place) -> RunTasks:
    """Open the tasks of a training run.

    Raises:
        ConfigError, DataError: there are none, or they cannot be read.
    """
    source = place.config.data.train
    if source is None:
        raise ConfigError("data.train is not set; name the tasks to train on, as files or as a generator")
    return RunTasks(train=build_tasks(source, base=place.base, split="train"), eval_sets=build_eval_sets(place))


def check_training(parts: Parts, tasks: RunTasks) -> None:
    """Refuse a training run whose tasks cannot run, before any time is spent on training.

    Raises:
        DataError, ConfigError, TemplateError: the first problem found.
    """
    found = {"data.train": _read_tasks(parts, tasks.train, name="data.train")}
    if tasks.eval_sets:
        found["evaluation.data"] = _read_tasks(parts, tasks.eval_sets[0].tasks, name="evaluation.data")
    _check_use(parts.context, found)


def check_run(parts: Parts, tasks: Sequence[Task], *, name: str) -> None:
    """Refuse tasks that cannot run: unknown tools or interactions, no reward, a prompt that is too long.

    Raises:
        DataError, ConfigError, TemplateError: the first problem found.
    """
    _check_use(parts.context, {name: _read_tasks(parts, tasks, name=name)})


def fitting(parts: Parts, tasks: Sequence[Task], *, name: str) -> Sequence[Task]:
    """Return the tasks whose prompts fit, where `data.drop_long_prompts` asks for that; else all of them.

    Raises:
        DataError: not one fits.
    """
    if not parts.place.config.data.drop_long_prompts:
        return tasks
    with Progress(f"measure {name}", len(tasks)) as bar:
        kept = []
        for index, task in enumerate(tasks):
            if _too_long(parts, task, name=name) is None:
                kept.append(index)
            bar.advance()
    if not kept:
        raise DataError(
            f"{name}: data.drop_long_prompts leaves none of its {len(tasks)} tasks; their prompts have more than "
            f"{_prompt_limit(parts)} tokens, so raise rollout.limits.max_prompt_tokens"
        )
    if len(kept) < len(tasks):
        logger.info("%s: left out %d of %d tasks with long prompts", name, len(tasks) - len(kept), len(tasks))
    return Subset(tasks, kept)


def settle(parts: Parts, tasks: RunTasks) -> tuple[Parts, RunTasks]:
    """Decide what depends on the tasks: those that are left out, and the number of steps of a run that counts epochs.

    Raises:
        DataError: no task is left, or they do not fill one step.
    """
    eval_sets = tasks.eval_sets
    if eval_sets:
        held_out = fitting(parts, eval_sets[0].tasks, name="evaluation.data")
        eval_sets = [dataclasses.replace(one, tasks=held_out) for one in eval_sets]
    tasks = RunTasks(train=fitting(parts, tasks.train, name="data.train"), eval_sets=eval_sets)
    config = parts.place.config
    train = config.train
    if train.epochs is None:
        return parts, tasks
    visits = build_sampler(parts.place, tasks.train)().visits(train.epochs)
    if visits < train.groups_per_step:
        raise DataError(
            f"train.epochs is {train.epochs} and data.train has {len(tasks.train)} tasks, which do not fill one step of "
            f"train.groups_per_step = {train.groups_per_step}; lower it, or give more tasks"
        )
    train = train.model_copy(update={"steps": visits // train.groups_per_step, "epochs": None})
    place = Place(config=config.model_copy(update={"train": train}), base=parts.place.base)
    return dataclasses.replace(parts, place=place), tasks


def build_sampler(place: Place, tasks: Sequence[Task]) -> Callable[[], TaskSampler]:
    """Return what makes the order of tasks anew, from the start.

    Raises:
        ConfigError: `data.sampler` names no Curriculum.
    """
    data, seed = place.config.data, place.config.seed
    if data.sampler is None:
        return functools.partial(TaskSampler, len(tasks), seed=seed, shuffle=data.shuffle)
    found = import_attr(data.sampler, base=place.base)
    if not isinstance(found, type) or not issubclass(found, Curriculum):
        raise ConfigError(
            f"data.sampler names {data.sampler!r}, which is no Curriculum; inherit polyturn.data.sampler.Curriculum"
        )
    return functools.partial(found, tasks, seed=seed, shuffle=data.shuffle)


def _prompt_limit(parts: Parts) -> int:
    longest = parts.place.config.rollout.limits.max_prompt_tokens
    return parts.max_context - 1 if longest is None else min(longest, parts.max_context - 1)


def _too_long(parts: Parts, task: Task, *, name: str) -> int | None:
    """Return the length of a prompt that is too long, in tokens; None for the others."""
    context, limit = parts.context, _prompt_limit(parts)
    if any(message.media for message in task.prompt):
        try:
            length = len(context.encoder_for(task).start(task.prompt))
        except (TemplateError, DataError, ConfigError) as problem:
            raise type(problem)(f"{name}, task {task.id!r}: {problem}") from problem
        return length if length > limit else None
    try:
        text = context.codec.render(task.prompt, tools=context.encoder_for(task).tools, add_generation_prompt=True)
    except TemplateError as problem:
        raise TemplateError(f"{name}, task {task.id!r}: {problem}") from problem
    # A token is at least a byte, so only a text with more bytes than the limit has tokens needs to be encoded.
    if len(text.encode()) <= limit:
        return None
    length = len(context.codec.encode(text))
    return length if length > limit else None


def _check_use(context: RolloutContext, found: Mapping[str, DatasetSummary]) -> None:
    """Refuse a run whose interactions, or whose tools, not one task uses: it would be single-turn without a word."""
    which = f"not one of the {sum(s.num_tasks for s in found.values())} tasks of {' and '.join(found)}"
    if context.interactions and not any(set(s.interactions) - {None} for s in found.values()):
        raise ConfigError(
            f"rollout.interactions is set and {which} names an interaction; add `interaction` to the rows "
            "(extra_info.interaction_kwargs in verl's format), or drop rollout.interactions"
        )
    if context.tools.tools and not any(s.num_with_tools for s in found.values()):
        raise ConfigError(
            f"rollout.tools is set and {which} may call a tool of it, which has {sorted(context.tools.tools)}; name them in "
            "`tools` of the rows (extra_info.tools_kwargs in verl's format), leave that column out, or drop rollout.tools"
        )


def _read_tasks(parts: Parts, tasks: Sequence[Task], *, name: str) -> DatasetSummary:
    """Read every task and refuse those that cannot run; return what they use."""
    context = parts.context
    longest = parts.place.config.rollout.limits.max_prompt_tokens

    seen = itertools.count()

    def check(task: Task) -> None:
        context.rewarder.check([task], tools=context.tools.tools)
        media = [medium for message in task.prompt for medium in message.media]
        if media and context.media is not None and next(seen) >= MEASURED_MEDIA_TASKS:
            context.media.check(media, where=f"{name}, task {task.id!r}")
            bar.advance()
            return
        if (length := _too_long(parts, task, name=name)) is not None:
            limit = _prompt_limit(parts)
            which = "rollout.limits.max_prompt_tokens" if limit == longest else "the model's context"
            raise DataError(
                f"{name}, task {task.id!r}: its prompt has {length} tokens and {which} allows {limit}; "
                "raise the limit, or leave the task out (data.drop_long_prompts leaves out all such tasks)"
            )
        bar.advance()

    with Progress(f"check {name}", len(tasks)) as bar:
        return check_tasks(
            tasks,
            tools=context.tools.tools,
            interactions=context.interactions,
            name=name,
            require_interaction_name=context.require_interaction_name,
            also=check,
        )


def build_eval_sets(place: Place) -> list[EvalSet]:
    """Make the evaluation sets; none when `evaluation.data` is not set."""
    config = place.config
    if config.evaluation.data is None:
        return []
    tasks = build_tasks(config.evaluation.data, base=place.base, split="eval")
    return [
        EvalSet(
            name=name,
            tasks=tasks,
            sampling=_sampling(one.sampling, config.rollout.limits),
            max_turns=one.max_turns,
            num_samples=one.samples,
            is_periodic=one.every,
            success_at=config.evaluation.success_at,
        )
        for name, one in config.evaluation.sets.items()
    ]


def build_records(parts: Parts, eval_sets: Sequence[EvalSet]) -> AlsoRecord:
    """Make what a run records beside its metrics and trajectories."""
    from polyturn.tracking.dump import TrajectoryDump
    from polyturn.training.observer import AlsoRecord

    config = parts.place.config

    def dump(folder: str | None) -> TrajectoryDump | None:
        return None if folder is None else TrajectoryDump(Path(folder).expanduser(), decode)

    def decode(ids: Sequence[int]) -> str:
        return str(parts.tokenizer.decode(list(ids), skip_special_tokens=True))

    def verl_metrics(name: str, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        from polyturn.compat.verl.validation import validation_metrics

        # Their names have no place for the name of a set, so only one set can have them.
        return validation_metrics(groups) if name == eval_sets[0].name else {}

    return AlsoRecord(
        train_dump=dump(config.dump.train),
        eval_dump=dump(config.dump.evaluation),
        has_many_sets=len(eval_sets) > 1,
        **({"eval_metrics": verl_metrics} if config.compat.validation_metrics else {}),
    )


def build_policy(parts: Parts, optim: OptimConfig, *, steps: int, max_tokens_per_batch: int) -> LocalPolicy:
    """Make the trainer's side of the model, over the same parameters."""
    from polyturn.batching.layout import LayoutSettings
    from polyturn.training.local import LocalPolicy, LossSettings
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
            warmup_steps=warmup,
            schedule=optim.schedule,
            total_steps=max(steps, warmup + 1),
            min_lr_ratio=optim.min_lr_ratio,
        ),
        loss=LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.clip_dual,
            aggregation=algorithm.aggregate,
            segment_weight=algorithm.segment_weight,
            kl_coef=algorithm.kl_coef,
            kl_estimator=algorithm.kl_estimator,
            entropy_coef=algorithm.entropy_coef,
        ),
        layout=LayoutSettings(max_tokens_per_batch=max_tokens_per_batch),
        media=parts.context.media,
        reference=algorithm.kl_coef > 0,
    )


def build_trainer(parts: Parts, tasks: RunTasks, *, folder: Path, observer: TrainObserver) -> Trainer:
    """Make the training loop; call it after a warm start, because a reference policy is a copy of the weights now."""
    from polyturn.training.checkpoint import Checkpoints
    from polyturn.training.loop import LoopSettings, Trainer

    place, config = parts.place, parts.place.config
    train, evaluation, algorithm = config.train, config.evaluation, config.algorithm
    policy = build_policy(parts, train.optim, steps=train.steps, max_tokens_per_batch=train.max_tokens_per_batch)
    return Trainer(
        LoopSettings(
            steps=train.steps,
            groups_per_step=train.groups_per_step,
            group_size=train.group_size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            minibatches=train.minibatches,
            max_staleness=train.max_staleness,
            temperature=config.rollout.sampling.temperature,
            drop_zero_variance=algorithm.drop_zero_variance and train.group_size > 1,
            needs_reference=algorithm.kl_coef > 0,
            uses_engine_logprobs=algorithm.old_logprobs == "engine",
            eval_every=evaluation.every,
            eval_limit_during=evaluation.limit_during,
            stop_at=evaluation.stop_at,
            patience=evaluation.patience,
            checkpoint_every=train.checkpoint_every,
        ),
        policy=policy,
        engine=parts.engine,
        pool=RolloutPool(
            parts.context,
            max_concurrent=config.rollout.max_concurrent,
            max_failed_share=config.rollout.max_failed_share,
        ),
        tasks=tasks.train,
        estimator=build_estimator(place),
        eval_sets=tasks.eval_sets,
        checkpoints=Checkpoints(folder / "checkpoints", keep=train.keep_checkpoints),
        export=exporter(parts),
        observer=observer,
        engine_busy_s=lambda: parts.engine.stats.busy_s,
        fingerprint=parts.context.codec.fingerprint,
        sampler=build_sampler(place, tasks.train),
    )


def exporter(parts: Parts) -> Callable[[Path], Path]:
    """Return what saves the model as it is, with all that others need to load it, in the Hugging Face format."""
    from polyturn.training import hf

    media = parts.context.media
    processor = None if media is None else media.processor
    return functools.partial(hf.save_model, parts.model, tokenizer=parts.tokenizer, processor=processor)


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


def _limits(limits: LimitsConfig, max_context: int) -> Limits:
    return Limits(
        max_turns=limits.max_turns,
        max_user_turns=limits.max_user_turns,
        max_tokens_per_turn=limits.max_tokens_per_turn,
        max_tokens=limits.max_tokens,
        max_context=max_context,
        timeout_s=limits.timeout_s,
        context_policy=ContextPolicy(limits.context_policy),
    )


def _sampling(sampling: SamplingConfig, limits: LimitsConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=limits.max_tokens_per_turn or 1 << 20,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def _max_context(limits: LimitsConfig, model: PreTrainedModel) -> int:
    own = int(model.config.get_text_config().max_position_embeddings)
    wanted = limits.max_context or min(own, 4096)
    if wanted > own:
        raise ConfigError(f"rollout.limits.max_context is {wanted} and the model has {own} positions; lower it")
    return wanted


def _folder_or_name(source: str, base: Path) -> str:
    """Return a folder relative to the config where there is one, else the name of a model on the hub."""
    local = base / source
    return str(local) if local.is_dir() else source
