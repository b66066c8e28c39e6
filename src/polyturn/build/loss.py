"""Build the loss, its frozen models (reference, teacher) and the off-policy correction."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from polyturn.algorithms.options import CorrectionSettings
from polyturn.build.model import load_frozen
from polyturn.config.config_source import ConfigSource
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError
from polyturn.infra.plugin_shape import CallShape, check_function, required
from polyturn.infra.stand_in import as_ours

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.algorithms.losses import PolicyLoss
    from polyturn.training.loss_terms import LossSettings

_LOSS = CallShape(num=3, write="def loss(logprobs_T, old_logprobs_T, advantages_T, *, clip_low, clip_high)")


def build_policy_loss(source: ConfigSource) -> PolicyLoss:
    """Return the configured policy loss."""
    from polyturn.algorithms.losses import policy_losses

    name = source.config.algorithm.loss.name
    loss = policy_losses.resolve(name, base=source.base, key="algorithm.loss")
    if (adapted := as_ours("loss", loss)) is not loss:
        return adapted  # type: ignore[no-any-return]
    check_function(loss, dataclasses.replace(_LOSS, names=required(loss)[_LOSS.num :]), where=f"algorithm.loss {name!r}")
    return loss


def build_loss(source: ConfigSource) -> LossSettings:
    """Return the configured loss.

    Raises:
        ConfigError: a term does not exist, or an option is invalid.
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


def build_teacher(source: ConfigSource, model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the model to distil from; None without one.

    Raises:
        ConfigError: the model cannot be loaded, or the loss is `none` and nothing replaces it.
    """
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
