"""From `algorithm.critic` to a critic: in this process, or over the ranks of the team."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyturn.build.model import load_frozen
from polyturn.config.config_source import ConfigSource
from polyturn.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.build.parts import Parts
    from polyturn.training.critic import Critic


def build_critic(parts: Parts, estimator: Any) -> Critic | None:
    """Return the critic that the estimator needs; None where it needs none.

    Raises:
        ConfigError: its model cannot be loaded, or has another vocabulary.
    """
    from polyturn.algorithms.advantages import traits_of
    from polyturn.training.critic import Critic, local_critic
    from polyturn.training.ranked import RankedBackend

    place, path = parts.place, critic_path(parts.place, estimator)
    if not traits_of(estimator).needs_values:
        return None
    options = critic_options(place)
    if parts.team is not None:
        backend = RankedBackend(parts.team, "critic", layout=options["layout"])
        return Critic(backend, settings=options["settings"])
    model = parts.model if path is None else critic_model(place, like=parts.model)
    return local_critic(model, media=parts.context.media, **options)


def critic_path(place: ConfigSource, estimator: Any) -> str | None:
    """Return the model whose backbone the critic starts from; None for the policy's.

    Raises:
        ConfigError: the estimator uses no critic, and there is one.
    """
    from polyturn.algorithms.advantages import traits_of

    config = place.config
    critic = config.algorithm.critic
    if (critic.warmup or critic.path is not None) and not traits_of(estimator).needs_values:
        raise ConfigError(
            f"algorithm.critic is set and the estimator {config.algorithm.advantage.name!r} uses no critic; set "
            "algorithm.advantage to gae, turn_gae or bilevel_gae, or drop the critic"
        )
    return critic.path


def critic_model(place: ConfigSource, *, like: PreTrainedModel) -> PreTrainedModel:
    """Load the model that `algorithm.critic.path` names, whose tokenizer must be that of `like`.

    Raises:
        ConfigError: it cannot be loaded, or has another vocabulary.
    """
    path = place.config.algorithm.critic.path
    assert path is not None
    found = load_frozen(place, path, like=like, dtype=None)
    own, its = (model.config.get_text_config().vocab_size for model in (like, found))
    if own != its:
        raise ConfigError(
            f"algorithm.critic.path is {path!r}, whose vocabulary has {its} tokens, and the model's has {own}; a critic "
            "reads the ids that the model writes, so name a model of the same tokenizer"
        )
    return found.requires_grad_(True)


def critic_options(place: ConfigSource) -> dict[str, Any]:
    """Return the options of a critic, in this process or on a rank."""
    from polyturn.batching.layout import LayoutSettings

    config = place.config
    critic = config.algorithm.critic
    return {
        "optim": critic.optim.over(config.train.steps),
        "settings": critic,
        "layout": LayoutSettings(max_tokens_per_batch=config.train.max_tokens_per_batch),
    }
