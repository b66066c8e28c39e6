"""From `algorithm.advantage` and what belongs to it to an estimator and a KL penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyturn.build.critic import critic_path
from polyturn.build.loss import build_correction, build_loss, reference_path, teacher_path
from polyturn.build.parts import Parts
from polyturn.config.config_source import ConfigSource, folder_or_name
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError
from polyturn.core.plugin_class import CallShape, check_function
from polyturn.core.stand_in import as_ours

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.training.reward_kl import RewardKl

OF_GROUP = CallShape(num=2, write="def estimate(rewards_G, samples_G, **options)")
OF_BATCH = CallShape(num=1, write="def estimate(batch, **options)")


def build_estimator(place: ConfigSource) -> Any:
    """Return the advantage estimator with its options bound.

    Raises:
        ConfigError: there is none of the name, it takes no such option, or cannot work in this run.
    """
    from polyturn.algorithms.advantages import advantages, bind_estimator, check_estimator, traits_of
    from polyturn.rewards.router import DEFAULT_WEIGHTS

    config = place.config
    algorithm = config.algorithm
    name, arguments = algorithm.advantage.name, arguments_of(algorithm.advantage)
    estimator: Any = advantages.resolve(name, base=place.base, key="algorithm.advantage")
    where = f"algorithm.advantage {name!r}"
    if isinstance(estimator, type) or not callable(estimator):
        check_function(estimator, OF_GROUP, where=where)
    estimator = as_ours("estimator", estimator)
    has_penalties = algorithm.kl_in("reward").coef > 0
    check_estimator(
        estimator,
        name=name,
        group_size=config.train.group_size,
        kwargs=arguments,
        has_penalties=has_penalties,
    )
    weights = DEFAULT_WEIGHTS if config.reward.weights is None else config.reward.weights
    offered = {"weights": {**weights, **({"overlong": 1.0} if config.reward.overlong.buffer else {})}}
    bound = bind_estimator(estimator, offered=offered, kwargs=arguments)
    check_function(bound, OF_BATCH if traits_of(estimator).scope == "batch" else OF_GROUP, where=where)
    return bound


def check_credit(parts: Parts) -> None:
    """Refuse an estimator, a loss or a penalty that cannot be had, before anything is written or trained.

    Raises:
        ConfigError: the first problem found.
    """
    place, estimator = parts.place, build_estimator(parts.place)
    require_scores(parts, estimator)
    check_algorithm(place)
    check_further_models(place, estimator, like=parts.model)


def check_further_models(place: ConfigSource, estimator: Any, *, like: PreTrainedModel) -> None:
    """Refuse the name of a further model that leads to none, or to one of another vocabulary.

    Of a plan a small one is loaded, so that it is whole; of a run it will be.

    Raises:
        ConfigError: the first problem found.
    """
    from polyturn.training import hf
    from polyturn.training.reference import require_same_vocabulary

    load = hf.load_plan if place.is_plan else hf.load_outline
    named = {
        "algorithm.critic.path": critic_path(place, estimator),
        "algorithm.loss.distill.teacher": teacher_path(place),
        "model.reference": reference_path(place),
    }
    for key, path in named.items():
        if path is None:
            continue
        try:
            found = load(folder_or_name(path, place.base))
        except ConfigError as problem:
            raise ConfigError(f"{key} is {path!r}: {problem}") from problem
        require_same_vocabulary(like, found, name=f"model of {key}")


def check_algorithm(place: ConfigSource) -> None:
    """Refuse an estimator, a loss or a penalty that cannot be had by what the configuration alone says.

    Raises:
        ConfigError: the first problem found.
    """
    build_estimator(place)
    build_loss(place)
    build_correction(place)
    build_reward_kl(place)


def require_scores(parts: Parts, estimator: Any) -> None:
    """Refuse an estimator of turn scores where nothing in the run can score one; where something may, the first step tells.

    Raises:
        ConfigError: there is no tool, no interaction, and a scheduler of ours that scores none.
    """
    from polyturn.algorithms.advantages import traits_of
    from polyturn.rollout.scheduler import MultiTurnScheduler
    from polyturn.rollout.schedulers import Compaction, ImageTools, MathTips, React, SingleTurn, ThinkingTips

    context = parts.context
    scores_none = (MultiTurnScheduler, Compaction, ImageTools, MathTips, React, SingleTurn, ThinkingTips)
    if not traits_of(estimator).needs_turn_scores or context.tools.tools or context.interactions:
        return
    if type(context.scheduler) in scores_none:
        config = parts.place.config
        raise ConfigError(
            f"the estimator {config.algorithm.advantage.name!r} needs scores of turns, and this run has neither tools nor "
            f"interactions, and the scheduler {config.rollout.scheduler!r} scores none; set rollout.interactions or "
            "rollout.tools, take a scheduler that scores turns such as gym, or an estimator of outcomes such as grpo"
        )


def drops_zero_variance(place: ConfigSource, estimator: Any) -> bool:
    """Return whether groups of equal rewards leave the loss: what the configuration says, else where nothing is lost."""
    from polyturn.algorithms.advantages import traits_of

    algorithm, group_size = place.config.algorithm, place.config.train.group_size
    if group_size == 1 or algorithm.loss.distill is not None:  # a teacher has something to say about every trajectory
        return False
    if algorithm.drop_zero_variance is not None:
        return algorithm.drop_zero_variance
    return traits_of(estimator).only_compares and not algorithm.kl_in("reward").coef


def build_reward_kl(place: ConfigSource) -> RewardKl | None:
    """Return the KL penalty of the rewards; None without one."""
    from polyturn.training.reward_kl import RewardKl

    kl = place.config.algorithm.kl_in("reward")
    return RewardKl(kl) if kl.coef else None
