"""Build the advantage estimator, the KL penalty and the critic, from the section `algorithm`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from polyturn.build.loss import build_correction, build_loss, reference_path, teacher_path
from polyturn.build.model import load_frozen
from polyturn.build.parts import Parts
from polyturn.build.teachers import check_teacher
from polyturn.config.config_source import ConfigSource, folder_or_name
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError
from polyturn.infra.plugin_shape import CallShape, check_function
from polyturn.infra.stand_in import as_ours

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.training.critic import Critic
    from polyturn.training.reward_kl import RewardKl

OF_GROUP = CallShape(num=2, write="def estimate(rewards_G, samples_G, **options)")
OF_BATCH = CallShape(num=1, write="def estimate(batch, **options)")


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
    check_estimator(
        estimator,
        name=str(name),
        group_size=config.train.group_size,
        kwargs=arguments,
        has_penalties=has_penalties,
    )
    weights = DEFAULT_WEIGHTS if config.reward.weights is None else config.reward.weights
    offered = {"weights": {**weights, **({"overlong": 1.0} if config.reward.overlong.buffer else {})}}
    bound = bind_estimator(estimator, offered=offered, kwargs=arguments)
    traits = traits_of(estimator)
    shape = OF_BATCH if traits.scope == "batch" else OF_GROUP
    if traits.keeps_state:
        shape = dataclasses.replace(shape, names=("state",), write=shape.write.replace("**options", "*, state, **options"))
    check_function(bound, shape, where=where)
    return bound


def check_further_models(source: ConfigSource, estimator: Any, *, like: PreTrainedModel) -> None:
    """Check that further models (critic, reference, teacher) exist and have the same vocabulary.

    For a plan, small models are loaded too, to test loading.

    Raises:
        ConfigError: the first problem.
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
    """Check estimator, loss and penalty as far as the configuration alone allows.

    Raises:
        ConfigError: the first problem.
    """
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
    """Return the critic that the estimator needs; None if it needs none.

    Raises:
        ConfigError: the critic's model cannot be loaded, or has another vocabulary.
    """
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
    """Load the model `algorithm.critic.path`, which must have the tokenizer of `like`.

    Raises:
        ConfigError: the model cannot be loaded, or has another vocabulary.
    """
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
