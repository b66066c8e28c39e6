"""Build the teacher that changes advantages, from `algorithm.self_distill` and `algorithm.served_teachers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from polyturn.algorithms.options import SelfDistillOptions
from polyturn.build.parts import Parts
from polyturn.config.config_source import ConfigSource, folder_or_name
from polyturn.core.errors import ConfigError
from polyturn.core.task import Task
from polyturn.infra.live import names_code
from polyturn.infra.plugin_shape import CallShape, check_function
from polyturn.infra.plugins import import_attr

if TYPE_CHECKING:
    from polyturn.algorithms.teacher_advantage import AdvantageTeacher
    from polyturn.training.self_distill import Privileged

_PRIVILEGED = CallShape(num=2, write="def privileged(trajectory, group)")


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
    """Return the function from a trajectory and its group to the privileged text; None if the text is a column of the row.

    Raises:
        ConfigError: the function cannot be imported or called.
    """
    if not names_code(options.privileged):
        return None
    key = "algorithm.self_distill.privileged"
    function: Privileged = import_attr(options.privileged, base=source.base, key=key)
    check_function(function, _PRIVILEGED, where=f"{key} {options.privileged!r}")
    return function
