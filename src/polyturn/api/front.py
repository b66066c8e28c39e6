"""`polyturn.train`, `polyturn.evaluate`, `polyturn.rollout`: runs from Python, with objects in place of names.

    run = polyturn.train(model="Qwen/Qwen3-0.6B", tasks=rows, tools=[price], reward=right, steps=100, max_turns=4)

The arguments become the same configuration as a YAML file (`run.config`), and the same run as on the command line. Heavy
modules are imported only when a function is called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from polyturn.core.errors import ConfigError, PolyturnError, raised_by_author

if TYPE_CHECKING:
    from polyturn.api.dry_run import DryRunReport
    from polyturn.api.given import GivenArguments
    from polyturn.api.run import Run
    from polyturn.api.stepping import Steps
    from polyturn.config.config_source import ConfigSource
    from polyturn.config.schema import KeyPath

logger = logging.getLogger(__name__)

OnStep = Callable[[int, Mapping[str, float]], object]
P = ParamSpec("P")
R = TypeVar("R")
_OF_TRAINING = ("train", "algorithm", "warm_start")
"""Sections that only training reads."""


def _in_a_sentence(function: Callable[P, R]) -> Callable[P, R]:
    """Shorten the traceback of a polyturn error to the caller's line and the caller's own code.

    The whole traceback is logged at DEBUG.
    """

    @functools.wraps(function)
    def shortly(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 2:
            raise ConfigError(
                f"polyturn.{function.__name__} takes only the model and the tasks by position, and got {len(args)} "
                "arguments; name the others: reward=right, tools=[price]"
            )
        try:
            return function(*args, **kwargs)
        except PolyturnError as problem:
            logger.debug("%s", problem, exc_info=True)
            _, behind, calls = raised_by_author(problem) or (None, None, None)
            if behind is problem:
                raise problem.with_traceback(calls) from problem.__cause__
            raise problem.with_traceback(None) from behind and behind.with_traceback(calls)

    return shortly


@overload
def train(
    model: Any = None, tasks: Any = None, *, dry_run: Literal[False] = False, on_step: OnStep | None = None, **arguments: Any
) -> Run: ...
@overload
def train(model: Any = None, tasks: Any = None, *, dry_run: Literal[True], **arguments: Any) -> DryRunReport: ...
@_in_a_sentence
def train(
    model: Any = None,
    tasks: Any = None,
    *,
    tools: Any = None,
    interaction: Any = None,
    reward: Any = None,
    eval_tasks: Any = None,
    config: Any = None,
    resume: bool | Literal["auto"] = False,
    on_step: OnStep | None = None,
    dry_run: bool = False,
    **overrides: Any,
) -> Run | DryRunReport:
    """Train a model, and return the run with its metrics, trajectories and model.

        run = polyturn.train(model="Qwen/Qwen3-0.6B", tasks=rows, tools=[price], reward=right, steps=100, group_size=8)

    Without a CUDA GPU the defaults are smaller: 4 groups per step instead of 32 (`groups_per_step`), and 128 tokens per turn
    instead of 512 (`max_tokens_per_turn`).

    This works in scripts, in notebooks and on a Ray cluster. Inside a running event loop, as in a notebook, training runs
    in another thread. An interrupt always leaves a checkpoint.

    Args:
        model: A name on the hub, a folder, a run or its folder (its newest checkpoint), the section `model` as a dict, or a
            causal language model of transformers, which is trained in place. A YAML file is taken as `config`.
        tasks: The tasks to train on: a list of rows (dicts with a `prompt`), of texts or of `polyturn.Task`; a Hugging Face
            dataset; the path of a jsonl or Parquet file, or several; a function that returns one of these.
        tools: The tools for the model: functions with annotations and a docstring, or tool objects; or the path of a tools
            file.
        interaction: Answers turns without a tool call: a subclass or instance of `polyturn.BaseInteraction`, or several by
            name. If there is only one, it also answers tasks that name no interaction.
        reward: A function of the trajectory, or of (data_source, solution_str, ground_truth).
        eval_tasks: Tasks to evaluate on before and after training, in the forms of `tasks`.
        config: A YAML file, or the same as a dict; all other arguments override it.
        resume: Resume from the newest checkpoint of the run of this name; "auto": if there is one.
        on_step: Called as `on_step(step, metrics)` after each step is recorded; an exception ends the run.
        dry_run: Check everything without training, print the report like `polyturn train --dry-run`, and return it in place
            of a run.
        overrides: Further keys of the configuration: a whole section (`train={"steps": 100}`), the last part of a key
            (`steps=100`, `lr=1e-5`, `max_turns=4`, `temperature=0.8`, `name="mine"`), or a whole key
            (`**{"rollout.tools.timeout_s": 5}`). Functions, classes and objects may replace import paths, and texts may
            replace numbers (`steps=os.environ["STEPS"]`). Among these, `scheduler` is a subclass or instance of
            `polyturn.MultiTurnScheduler`, or a name; `engine` is "embedded" (the default), "vllm" or "sglang", or the
            section `engine` as a dict; `tokenizer` is a transformers tokenizer, its folder or its name, by default the
            model's; and `ray` is the address of a Ray cluster, or "auto".

    Raises:
        PolyturnError: the run cannot work; the message is one sentence with the problem and the correction.
    """
    from polyturn.api.given import GivenArguments

    own = {"model": model, "tasks": tasks, "tools": tools, "interaction": interaction, "reward": reward}
    arguments = GivenArguments.of(overrides, **own, eval_tasks=eval_tasks, config=config)
    if dry_run:
        _called_each_step(on_step)  # raises if the callback could not be called
        return _show_plan(arguments, resume=resume)
    return _train(arguments, resume=resume, on_step=on_step)


@_in_a_sentence
def evaluate(
    model: Any = None,
    tasks: Any = None,
    *,
    tools: Any = None,
    interaction: Any = None,
    reward: Any = None,
    config: Any = None,
    **overrides: Any,
) -> Run:
    """Evaluate a model on tasks, and return the run with `run.reports` and `run.trajectories`.

        run = polyturn.evaluate(model="runs/mine/checkpoints/step-100/model", tasks="held_out.jsonl", reward=right)

    Args:
        model: As in `train`.
        tasks: The tasks to evaluate on; by default `evaluation.data` of the configuration.
        tools, interaction, reward, config: As in `train`.
        overrides: As in `train`. Evaluation sets have their own sampling, by default greedy:
            `sets={"eight": {"sampling": {"temperature": 1.0}, "samples": 8}}`.

    Raises:
        PolyturnError: the run cannot work; the message is one sentence with the problem and the correction.
    """
    from polyturn.api.given import GivenArguments

    own = {"model": model, "tools": tools, "interaction": interaction, "reward": reward}
    arguments = GivenArguments.of(overrides, **own, eval_tasks=tasks, config=config, tasks=None, ray=None, evaluates=True)
    with _begun(arguments) as (source, resolved):
        from polyturn.api import evaluating
        from polyturn.api.run import Run
        from polyturn.api.signals import run_beside

        folder, evaluation = run_beside(lambda signals: evaluating.evaluate_sets(source, resolved, signals=signals))
    return Run(folder, reports=evaluation)


@_in_a_sentence
def rollout(
    model: Any = None,
    tasks: Any = None,
    *,
    tools: Any = None,
    interaction: Any = None,
    reward: Any = None,
    config: Any = None,
    num_tasks: int | None = None,
    group_size: int = 1,
    **overrides: Any,
) -> Run:
    """Run episodes without training, and return the run with their trajectories.

        for trajectory in polyturn.rollout(model="Qwen/Qwen3-0.6B", tasks=rows, reward=right).trajectories: …

    Args:
        model, tasks, tools, interaction, reward, config, overrides: As in `train`.
        num_tasks: Number of tasks to run; None runs all.
        group_size: Number of episodes per task.

    Raises:
        PolyturnError: the run cannot work; the message is one sentence with the problem and the correction.
    """
    from polyturn.api.given import GivenArguments

    own = {"model": model, "tasks": tasks, "tools": tools, "interaction": interaction, "reward": reward}
    arguments = GivenArguments.of(overrides, **own, config=config, eval_tasks=None, ray=None)
    arguments = replace(arguments, former=({"group_size": group_size},))
    with _begun(arguments, reads=("train.group_size",)) as (source, resolved):
        from polyturn.api import rolling
        from polyturn.api.run import Run
        from polyturn.api.signals import run_beside

        folder, _ = run_beside(lambda signals: rolling.roll_out(source, resolved, num_tasks=num_tasks, signals=signals))
    return Run(folder)


@_in_a_sentence
def steps(
    model: Any = None,
    tasks: Any = None,
    *,
    tools: Any = None,
    interaction: Any = None,
    reward: Any = None,
    eval_tasks: Any = None,
    config: Any = None,
    resume: bool | Literal["auto"] = False,
    **overrides: Any,
) -> Steps:
    """Train step by step, with access to the groups, samples, advantages and metrics of each step before its update.

        for step in polyturn.steps("config.yaml", steps=100):
            step.advantages = [a.clip(-2, 2) for a in step.advantages]
            print(step.number, len(step.trajectories), step.update()["loss/total"])

    The loop body may replace `step.groups` (advantages are then computed again), `step.samples` or `step.advantages`. The
    update runs in `step.update()`, or when the loop continues. Leaving the loop ends the run with a checkpoint.

    Args:
        model, tasks, tools, interaction, reward, eval_tasks, config, resume, overrides: As in `train`.

    Raises:
        PolyturnError: the run cannot work; the message is one sentence with the problem and the correction.
    """
    from polyturn.api.given import GivenArguments, read

    own = {"model": model, "tasks": tasks, "tools": tools, "interaction": interaction, "reward": reward}
    arguments = GivenArguments.of(overrides, **own, eval_tasks=eval_tasks, config=config)
    with _logs_shown():
        source, resolved = read(arguments, resume=resume)
    from polyturn.api.stepping import Steps

    @_in_a_sentence
    def work(hooks: Any) -> Run:
        with _logs_shown():
            _announce(source)
            from polyturn.api.training import RunOptions, run_training

            options = RunOptions(
                again=_again, resume=resume, signals=hooks.signals, revise=hooks.revise, on_step=hooks.on_step
            )
            return _run_of(run_training(source, resolved, options), arguments, source)

    return Steps(work)


def _again(name: str) -> str:
    return f"polyturn.train(…, name={name!r}, resume=True)"


def _train(arguments: GivenArguments, *, resume: bool | Literal["auto"], on_step: OnStep | None) -> Run:
    called = _called_each_step(on_step)
    with _begun(arguments, resume=resume) as (source, resolved):
        from polyturn.api.signals import run_beside
        from polyturn.api.training import RunOptions, run_training

        options = RunOptions(again=_again, resume=resume, on_step=called)
        finished = run_beside(lambda signals: run_training(source, resolved, replace(options, signals=signals)))
        run = _run_of(finished, arguments, source, on_step=on_step)
        logger.info("view the run: run.show(), or in a shell: polyturn view %s", shlex.quote(str(run.folder)))
    return run


def _show_plan(arguments: GivenArguments, *, resume: bool | Literal["auto"]) -> DryRunReport:
    """Make the report of a dry run, print it, and return it.

    Raises:
        ConfigError: the run would not start on this machine; raised after printing the report.
    """
    with _begun(arguments, resume=resume) as (source, resolved):
        from polyturn.api.dry_run import report_of
        from polyturn.api.signals import run_beside
        from polyturn.api.training import RunOptions, run_training
        from polyturn.infra.console import make_console

        reports: list[DryRunReport] = []
        options = RunOptions(
            again=_again, resume=resume, dry_run=lambda parts, tasks: reports.append(report_of(parts, tasks, resolved))
        )
        run_beside(lambda signals: run_training(source, resolved, replace(options, signals=signals)))
    make_console().print(str(reports[0]), soft_wrap=True)
    reports[0].require_start()
    return reports[0]


def _called_each_step(on_step: OnStep | None) -> OnStep:
    """Return `on_step`, wrapped so that its errors become a `TrainingError` of one sentence.

    Raises:
        ConfigError: `on_step` is async, or cannot be called with a step and its metrics.
    """
    from polyturn.core.errors import TrainingError, plugin_errors_as
    from polyturn.infra.plugin_shape import CallShape, check_function

    if on_step is None:
        return lambda step, metrics: None
    if inspect.iscoroutinefunction(on_step):
        raise ConfigError("on_step must not be async; write it as `def on_step(step, metrics)`")
    check_function(on_step, CallShape(num=2, write="def on_step(step, metrics)"), where="on_step")

    def call(step: int, metrics: Mapping[str, float]) -> None:
        with plugin_errors_as(f"on_step, called after step {step},", TrainingError):
            on_step(step, dict(metrics))

    return call


def _run_of(finished: Any, arguments: Any, source: Any, *, on_step: OnStep | None = None) -> Run:
    """Return the run for the result of `run_training`."""
    from polyturn.api.folders import name_of
    from polyturn.api.run import Run

    @_in_a_sentence
    def again(changes: Mapping[str, Any]) -> Run:
        name = name_of(finished.folder, source.config.out)
        changed = arguments.changed({key: value for key, value in changes.items() if key != "on_step"}, name=name)
        return _train(changed, resume=True, on_step=changes.get("on_step", on_step))

    return Run(finished.folder, model=finished.model, again=again)


@contextlib.contextmanager
def _begun(
    arguments: GivenArguments, *, reads: Collection[str] = (), resume: bool | Literal["auto"] | None = None
) -> Iterator[tuple[ConfigSource, dict[str, Any]]]:
    """Load the configuration from `arguments`, and show the run's log lines within the context.

    `reads` has keys of training that a run without training reads too. `resume` is whether training resumes; None for runs
    without training.
    """
    from polyturn.api.given import read
    from polyturn.api.keywords import path_of
    from polyturn.config.schema import dotted
    from polyturn.config.sources import leaves

    with _logs_shown():
        source, resolved = read(arguments, resume=resume)
        _announce(source)
        keywords = arguments.overrides if resume is None else {}
        values = [(n, path, value) for n in keywords for path, value in leaves(keywords[n], tuple(path_of(n)))]
        idle = dict.fromkeys(
            dotted(path) if isinstance(keywords[n], Mapping) else n
            for n, path, _ in values
            if path[0] in _OF_TRAINING and dotted(path) not in reads
        )
        if idle:
            instead = "; to sample a task several times: sets={'greedy': {'samples': 8}}" if "group_size" in idle else ""
            logger.warning("this run does not train, so %s has no effect%s", ", ".join(idle), instead)
        if arguments.evaluates:
            _warn_of_sampling(values, set_name=next(iter(source.config.evaluation.sets), "greedy"))
        yield source, resolved


def _warn_of_sampling(values: Sequence[tuple[str, KeyPath, Any]], *, set_name: str) -> None:
    """Warn of keywords for the sampling in training, which evaluation sets such as `set_name` do not use.

    `values` has (keyword, key, value) for each key that a keyword sets.
    """
    sampling = {path[2]: (n, value) for n, path, value in values if path[:2] == ("rollout", "sampling") and path[2:]}
    if sampling:
        names = ", ".join(dict.fromkeys(n for n, _ in sampling.values()))
        write = {set_name: {"sampling": {key: value for key, (_, value) in sampling.items()}}}
        logger.warning("an evaluation set has its own sampling, so %s does not change it; write sets=%r", names, write)


def _announce(source: ConfigSource) -> None:
    from polyturn.api.console import quiet_transformers, tell_start

    tell_start(source.config.name)
    quiet_transformers()


@contextlib.contextmanager
def _logs_shown() -> Iterator[None]:
    """Show a run's log lines, unless the program configured logging."""
    from polyturn.api.console import ConsoleHandler

    ours = logging.getLogger("polyturn")
    if logging.getLogger().handlers or ours.handlers:
        yield
        return
    handler, level = ConsoleHandler(), ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
