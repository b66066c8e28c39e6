"""From the `algorithm` section to what a loss is made of: its terms, its frozen models, its off-policy correction."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from polyturn.algorithms.options import CorrectionSettings
from polyturn.build.model import load_frozen
from polyturn.config.config_source import ConfigSource
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError
from polyturn.core.plugin_shape import CallShape, check_function, required
from polyturn.core.stand_in import as_ours

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.algorithms.losses import PolicyLoss
    from polyturn.training.loss_terms import LossSettings

_LOSS = CallShape(num=3, write="def loss(logprobs_T, old_logprobs_T, advantages_T, *, clip_low, clip_high)")


def build_policy_loss(source: ConfigSource) -> PolicyLoss:
    """Return the policy loss that the configuration names."""
    from polyturn.algorithms.losses import policy_losses

    name = source.config.algorithm.loss.name
    loss = policy_losses.resolve(name, base=source.base, key="algorithm.loss")
    if (adapted := as_ours("loss", loss)) is not loss:
        return adapted  # type: ignore[no-any-return]
    check_function(loss, dataclasses.replace(_LOSS, names=required(loss)[_LOSS.num :]), where=f"algorithm.loss {name!r}")
    return loss


def build_loss(source: ConfigSource) -> LossSettings:
    """Return the loss that the configuration describes.

    Raises:
        ConfigError: its terms have no such names, or their numbers mean nothing.
    """
    from polyturn.training.loss_terms import LossSettings

    algorithm = source.config.algorithm
    return LossSettings(
        policy_loss=build_policy_loss(source),
        policy_loss_kwargs=arguments_of(algorithm.loss, but=("correction", "distill")),
        distill=algorithm.loss.distill,
        algorithm=algorithm,
    )


def reference_path(source: ConfigSource) -> str | None:
    """Return the path of the reference model; None where `model.reference` names none.

    Raises:
        ConfigError: nothing reads it.
    """
    path = source.config.model.reference
    if path is not None and not source.config.algorithm.has_kl:
        raise ConfigError(f"model.reference is {path!r} and no KL term reads it; set algorithm.kl.coef")
    return path


def teacher_path(source: ConfigSource) -> str | None:
    """Return the model to distil from; None where there is none.

    Raises:
        ConfigError: there is nothing to learn from.
    """
    loss = source.config.algorithm.loss
    if loss.distill is None and loss.name == "none" and not source.config.algorithm.observation_coef:
        raise ConfigError(
            "algorithm.loss is none and neither algorithm.loss.distill nor algorithm.observation_coef is set: there is "
            "nothing to learn from"
        )
    return None if loss.distill is None else loss.distill.teacher


def build_reference(source: ConfigSource, model: PreTrainedModel) -> bool | PreTrainedModel:
    """Return whether there is a reference, or the one that `model.reference` names."""
    path = reference_path(source)
    return source.config.algorithm.has_kl if path is None else load_frozen(source, path, like=model, dtype=None)


def build_teacher(source: ConfigSource, model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the model to distil from; None where there is none.

    Raises:
        ConfigError: it cannot be loaded, or there is nothing to learn from at all.
    """
    path, distill = teacher_path(source), source.config.algorithm.loss.distill
    return None if path is None or distill is None else load_frozen(source, path, like=model, dtype=distill.dtype)


def build_correction(source: ConfigSource) -> CorrectionSettings | None:
    """Return the off-policy correction; None where there is none.

    Raises:
        ConfigError: it would compare the engine with itself, or its bounds cannot be.
    """
    algorithm = source.config.algorithm
    correction = algorithm.loss.correction
    if correction is not None and algorithm.old_logprobs == "engine":
        raise ConfigError(
            "algorithm.loss.correction compares the trainer's log-probabilities with the engine's, and "
            "algorithm.old_logprobs is 'engine', which takes these for those; set old_logprobs to 'trainer', or drop the "
            "correction"
        )
    return correction
