"""Build the parts of the section `algorithm`: advantage estimator, KL penalty, critic, loss, frozen models, teachers.

The teacher of `loss.distill` is a frozen model; those of `self_distill` and `served_teachers` change advantages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polyturn.algorithms.options import CorrectionSettings, SelfDistillOptions
from polyturn.build.model import load_frozen
from polyturn.build.parts import Parts
from polyturn.config.config_source import ConfigSource, folder_or_name
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError
from polyturn.core.task import Task
from polyturn.data.options import MixOptions
from polyturn.infra.live import names_code
from polyturn.infra.plugin_shape import CallShape, check_function, required
from polyturn.infra.plugins import import_attr
from polyturn.infra.stand_in import as_ours

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.algorithms.teacher_advantage import AdvantageTeacher
    from polyturn.training.critic import Critic
    from polyturn.training.loss_terms import LossSettings
    from polyturn.training.reward_kl import RewardKl
    from polyturn.training.self_distill import Privileged

OF_GROUP = CallShape(num=2, write="def estimate(rewards_G, samples_G, **options)")
OF_BATCH = CallShape(num=1, write="def estimate(batch, **options)")
LOSS = CallShape(num=3, write="def loss(logprobs_T, old_logprobs_T, advantages_T, *, clip_low, clip_high)")
PRIVILEGED = CallShape(num=2, write="def privileged(trajectory, group)")


def build_estimator(source: ConfigSource) -> Any:
    """Return the advantage estimator with its options bound.

    Raises:
        ConfigError: there is no such estimator, it has no such option, or cannot work in this run.
    """
    from polyturn.algorithms.advantages import advantages, bind_estimator, check_estimator, traits_of
    from polyturn.rewards.options import DEFAULT_WEIGHTS

    config = source.config
    algorithm = config.algorithm
    name, arguments = algorithm.advantage.name, arguments_of(algorithm.advantage)
    estimator: Any = advantages.resolve(name, base=source.base, key="algorithm.advantage")
    where = f"algorithm.advantage {name!r}"
    if isinstance(estimator, type) or not callable(estimator):
        check_function(estimator, OF_GROUP, where=where)
    estimator = as_ours("estimator", estimator)
    has_penalties = algorithm.kl_in("reward").coef > 0
    traits = traits_of(estimator)
    check_estimator(
        estimator,
        name=str(name),
        # Without the need for rewards no advantage is read, so a group may be too small for the estimator.
        group_size=max(config.train.group_size, 1 if algorithm.needs_rewards else traits.min_group),
        kwargs=arguments,
        has_penalties=has_penalties,
    )
    weights = DEFAULT_WEIGHTS if config.reward.weights is None else config.reward.weights
    offered = {"weights": {**weights, **({"overlong": 1.0} if config.reward.overlong.buffer else {})}}
    bound = bind_estimator(estimator, offered=offered, kwargs=arguments)
    shape = OF_BATCH if traits.scope == "batch" else OF_GROUP
    if traits.keeps_state:
        shape = dataclasses.replace(shape, names=("state",), write=shape.write.replace("**options", "*, state, **options"))
    check_function(bound, shape, where=where)
    return bound


def check_further_models(source: ConfigSource, estimator: Any, *, like: PreTrainedModel) -> None:
    """Check that further models (critic, reference, teacher) exist and have the same vocabulary.

    For a plan, small models are loaded too, to test loading.
    """
    from polyturn.training import hf
    from polyturn.training.reference import require_same_vocabulary

    load = hf.load_plan if source.is_plan else hf.load_outline
    named = {
        "algorithm.critic.path": critic_path(source, estimator),
        "algorithm.loss.distill.teacher": teacher_path(source),
        "model.reference": reference_path(source),
    }
    for key, path in named.items():
        if path is None:
            continue
        try:
            model = load(folder_or_name(path, source.base), needs_head=key != "algorithm.critic.path")
        except ConfigError as problem:
            raise ConfigError(f"{key} is {path!r}: {problem}") from problem
        require_same_vocabulary(like, model, name=f"model of {key}")


def check_algorithm(source: ConfigSource) -> None:
    """Check estimator, loss and penalty as far as the configuration alone allows."""
    build_estimator(source)
    build_loss(source)
    build_correction(source)
    build_reward_kl(source)
    check_teacher(source)


def require_scores(parts: Parts, estimator: Any) -> None:
    """Raise for an estimator of turn scores if no part of the run can score a turn.

    If a part may score turns, missing scores are found in the first step.

    Raises:
        ConfigError: there are no tools and no interactions, and the scheduler declares `scores_turns = False`.
    """
    from polyturn.algorithms.advantages import traits_of

    context = parts.context
    if not traits_of(estimator).needs_turn_scores or context.tools.tools or context.interactions:
        return
    if context.scheduler.scores_turns is False:
        config = parts.source.config
        raise ConfigError(
            f"the estimator {config.algorithm.advantage.name!r} needs scores of turns, and this run has neither tools nor "
            f"interactions, and the scheduler {config.rollout.scheduler!r} scores none; set rollout.interactions or "
            "rollout.tools, use a scheduler that scores turns such as gym, or an estimator of outcomes such as grpo"
        )


def refuse_without_rewards(source: ConfigSource, estimator: Any, *, task: Task) -> None:
    """Raise for a part that reads rewards, in a run in which nothing scores `task`.

    Raises:
        ConfigError: the run resamples or drops groups by their rewards, subtracts a KL from rewards, chooses tasks by
            success, or has an estimator that needs more than rewards.
    """
    from polyturn.algorithms.advantages import traits_of

    config, traits = source.config, traits_of(estimator)
    name, sampler = config.algorithm.advantage.name, config.data.sampler
    readers = {
        "train.dynamic_sampling": config.train.dynamic_sampling > 0,
        "algorithm.drop_zero_variance": drops_zero_variance(source, estimator),
        "algorithm.kl, of which one has place reward,": config.algorithm.kl_in("reward").coef > 0,
        "data.sampler.by_success": isinstance(sampler, MixOptions) and sampler.by_success > 0,
        f"algorithm.advantage {name!r}": traits.needs_values or traits.needs_greedy or traits.needs_turn_scores,
    }
    if reader := next((key for key, is_set in readers.items() if is_set), None):
        raise ConfigError(
            f"{reader} needs rewards, and nothing scores task {task.id!r} (data_source {task.data_source!r}); remove the "
            "setting, or set reward.function or a route for the data_source"
        )


def drops_zero_variance(source: ConfigSource, estimator: Any) -> bool:
    """Return whether groups of equal rewards are dropped: as configured, or by default if they would train nothing."""
    from polyturn.algorithms.advantages import traits_of

    algorithm, group_size = source.config.algorithm, source.config.train.group_size
    if group_size == 1 or algorithm.loss.distill is not None:  # a teacher trains every trajectory
        return False
    if algorithm.drop_zero_variance is not None:
        return algorithm.drop_zero_variance
    # A penalty on the reward, a teacher, and an observation loss train even if rewards are equal.
    only_rewards = not algorithm.kl_in("reward").coef and not algorithm.learns_without_rewards
    return traits_of(estimator).only_compares and only_rewards


def build_reward_kl(source: ConfigSource) -> RewardKl | None:
    """Return the KL penalty of the rewards; None without one."""
    from polyturn.training.reward_kl import RewardKl

    kl = source.config.algorithm.kl_in("reward")
    return RewardKl(kl) if kl.coef else None


def build_critic(parts: Parts, estimator: Any) -> Critic | None:
    """Return the critic that the estimator needs; None if it needs none."""
    from polyturn.algorithms.advantages import traits_of
    from polyturn.training.critic import Critic, local_critic
    from polyturn.training.ranked import RankedBackend

    source, path = parts.source, critic_path(parts.source, estimator)
    if not traits_of(estimator).needs_values:
        return None
    options = critic_options(source)
    if parts.rank_group is not None:
        backend = RankedBackend(parts.rank_group, "critic", layout=options["layout"])
        return Critic(backend, settings=options["settings"])
    model = parts.model if path is None else critic_model(source, like=parts.model)
    return local_critic(model, media=parts.context.media, **options)


def critic_path(source: ConfigSource, estimator: Any) -> str | None:
    """Return the name of the model whose backbone the critic starts from; None starts from the policy.

    Raises:
        ConfigError: a critic is configured, and the estimator uses none.
    """
    from polyturn.algorithms.advantages import traits_of

    config = source.config
    critic = config.algorithm.critic
    if (critic.warmup or critic.path is not None) and not traits_of(estimator).needs_values:
        raise ConfigError(
            f"algorithm.critic is set and the estimator {config.algorithm.advantage.name!r} uses no critic; set "
            "algorithm.advantage to gae, turn_gae or bilevel_gae, or remove algorithm.critic"
        )
    return critic.path


def critic_model(source: ConfigSource, *, like: PreTrainedModel) -> PreTrainedModel:
    """Load the model `algorithm.critic.path`, which must have the tokenizer of `like`."""
    path = source.config.algorithm.critic.path
    assert path is not None
    critic = load_frozen(source, path, like=like, dtype=None, needs_head=False)
    own_size, critic_size = (model.config.get_text_config().vocab_size for model in (like, critic))
    if own_size != critic_size:
        raise ConfigError(
            f"algorithm.critic.path is {path!r}, whose vocabulary has {critic_size} tokens, and the model's has {own_size}; "
            "a critic reads the model's ids, so name a model with the same tokenizer"
        )
    return critic.requires_grad_(True)


def critic_options(source: ConfigSource) -> dict[str, Any]:
    """Return the options of a critic, in this process or on a rank."""
    from polyturn.batching.layout import LayoutSettings

    config = source.config
    critic = config.algorithm.critic
    return {
        "optim": critic.optim.over(config.train.steps, updates=config.train.updates_per_step),
        "settings": critic,
        "layout": LayoutSettings(
            max_tokens_per_batch=config.train.max_tokens_per_batch, packed=config.train.distributed.context_parallel > 1
        ),
    }


def build_loss(source: ConfigSource) -> LossSettings:
    """Return the configured loss."""
    from polyturn.algorithms.losses import policy_losses
    from polyturn.training.loss_terms import LossSettings

    algorithm = source.config.algorithm
    name = algorithm.loss.name
    loss = policy_losses.resolve(name, base=source.base, key="algorithm.loss")
    if (policy_loss := as_ours("loss", loss)) is loss:
        check_function(loss, dataclasses.replace(LOSS, names=required(loss)[LOSS.num :]), where=f"algorithm.loss {name!r}")
    return LossSettings(
        policy_loss=policy_loss,
        policy_loss_kwargs=arguments_of(algorithm.loss, but=("correction", "distill")),
        distill=algorithm.loss.distill,
        algorithm=algorithm,
    )


def reference_path(source: ConfigSource) -> str | None:
    """Return the path of the reference model; None if `model.reference` is not set.

    Raises:
        ConfigError: there is no KL term.
    """
    path = source.config.model.reference
    if path is not None and not source.config.algorithm.has_kl:
        raise ConfigError(f"model.reference is {path!r} and there is no KL term; set algorithm.kl.coef")
    return path


def teacher_path(source: ConfigSource) -> str | None:
    """Return the path of the teacher to distil from; None without one.

    Raises:
        ConfigError: the loss is `none`, and nothing replaces it.
    """
    loss = source.config.algorithm.loss
    if loss.distill is None and loss.name == "none" and not source.config.algorithm.observation_coef:
        raise ConfigError(
            "algorithm.loss is none, which needs another term that trains on tokens; set algorithm.loss.distill or "
            "algorithm.observation_coef"
        )
    return None if loss.distill is None else loss.distill.teacher


def build_reference(source: ConfigSource, model: PreTrainedModel) -> bool | PreTrainedModel:
    """Return the model of `model.reference`; without one, whether the starting policy is the reference."""
    path = reference_path(source)
    return source.config.algorithm.has_kl if path is None else load_frozen(source, path, like=model, dtype=None)


def build_distilled(source: ConfigSource, model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the model to distil from; None without one."""
    path, distill = teacher_path(source), source.config.algorithm.loss.distill
    return None if path is None or distill is None else load_frozen(source, path, like=model, dtype=distill.dtype)


def build_correction(source: ConfigSource) -> CorrectionSettings | None:
    """Return the off-policy correction; None without one.

    Raises:
        ConfigError: the correction would compare the engine's log-probabilities with themselves.
    """
    algorithm = source.config.algorithm
    correction = algorithm.loss.correction
    if correction is not None and algorithm.old_logprobs == "engine":
        raise ConfigError(
            "algorithm.loss.correction compares the trainer's log-probabilities with the engine's, and "
            "algorithm.old_logprobs is 'engine', which makes them equal; set old_logprobs to 'trainer', or remove the "
            "correction"
        )
    return correction


def build_teacher(parts: Parts) -> AdvantageTeacher | None:
    """Return the teacher that changes advantages; None without one."""
    from polyturn.training.self_distill import SelfDistillation
    from polyturn.training.served_teachers import ServedTeachers

    algorithm, context = parts.source.config.algorithm, parts.context
    if algorithm.self_distill is not None:
        return SelfDistillation(
            algorithm.self_distill,
            privileged=build_privileged(algorithm.self_distill, parts.source),
            encode=lambda task: context.encoder_for(task).start(task.prompt),
            max_positions=int(parts.model.config.get_text_config().max_position_embeddings),
        )
    if algorithm.served_teachers is not None:
        return ServedTeachers(algorithm.served_teachers)
    return None


def check_teacher(source: ConfigSource) -> None:
    """Check a teacher of advantages as far as the configuration allows.

    Raises:
        ConfigError: the loss does not read advantages, the privileged text is unavailable, or served teachers do not support
            the run's temperature.
    """
    algorithm = source.config.algorithm
    if algorithm.teacher is not None and algorithm.loss.name == "none":
        key = "self_distill" if algorithm.self_distill is not None else "served_teachers"
        raise ConfigError(
            f"algorithm.{key} changes advantages, and algorithm.loss is none, which ignores them; set algorithm.loss to "
            "policy_gradient or ppo_clip"
        )
    if algorithm.self_distill is not None:
        build_privileged(algorithm.self_distill, source)
    temperature = source.config.rollout.sampling.temperature
    if algorithm.served_teachers is not None and temperature not in (0, 1):
        raise ConfigError(
            "algorithm.served_teachers returns log-probabilities at temperature 1, and rollout.sampling.temperature is "
            f"{temperature:g}; set it to 1, or use algorithm.loss.distill, which supports any temperature"
        )


def check_teacher_servers(parts: Parts) -> None:
    """Check that the served teachers of a run can be used.

    Raises:
        ConfigError: a teacher cannot be reached, returns no log-probabilities, or has another vocabulary.
    """
    from polyturn.tokens.codec import load_codec
    from polyturn.training.served_teachers import ServedTeachers, check_served_teachers

    source = parts.source
    options = source.config.algorithm.served_teachers
    if options is not None and not source.is_plan:
        check_served_teachers(
            ServedTeachers(options),
            parts.context.codec.tokenizer,
            load_tokenizer=lambda name: load_codec(folder_or_name(name, source.base)).tokenizer,
            max_context=parts.max_context,
        )


def task_check(source: ConfigSource) -> Callable[[Task], object] | None:
    """Return a function that raises for a task that the teacher cannot score; None if all tasks are fine."""
    from polyturn.training.self_distill import text_of_row
    from polyturn.training.served_teachers import teacher_of

    algorithm = source.config.algorithm
    if (served := algorithm.served_teachers) is not None:
        return lambda task: teacher_of(task, served)
    if (own := algorithm.self_distill) is not None and not names_code(own.privileged):
        return lambda task: text_of_row(task, own)
    return None


def build_privileged(options: SelfDistillOptions, source: ConfigSource) -> Privileged | None:
    """Return the function of a trajectory and its group that writes the privileged text; None if it is a column of rows."""
    if not names_code(options.privileged):
        return None
    key = "algorithm.self_distill.privileged"
    function: Privileged = import_attr(options.privileged, base=source.base, key=key)
    check_function(function, PRIVILEGED, where=f"{key} {options.privileged!r}")
    return function
