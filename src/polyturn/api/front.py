"""`polyturn.train`, `polyturn.evaluate`, `polyturn.rollout`: a run from Python, with objects in the place of names.

    run = polyturn.train(model="Qwen/Qwen3-0.6B", tasks=rows, tools=[price], reward=right, steps=100, max_turns=4)

Underneath is the configuration that a YAML file would hold, and the run that the command line would start: `run.config` says
which. Nothing heavy is imported before a function is called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from polyturn.core.errors import ConfigError, PolyturnError, raised_by_author

if TYPE_CHECKING:
    from polyturn.api.dry_run import DryRunReport
    from polyturn.api.given import GivenArguments
    from polyturn.api.run import Run
    from polyturn.api.stepping import Steps
    from polyturn.config.config_source import ConfigSource

logger = logging.getLogger(__name__)

OnStep = Callable[[int, Mapping[str, float]], object]
P = ParamSpec("P")
R = TypeVar("R")
_OF_TRAINING = ("train", "algorithm", "warm_start")
"""Sections that a run reads which trains."""


def _in_a_sentence(function: Callable[P, R]) -> Callable[P, R]:
    """Let an error of the library end at the caller's line, with only what code of the caller's raised behind it.

    Its whole traceback is logged at the level DEBUG.
    """

    @functools.wraps(function)
    def shortly(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 2:
            raise ConfigError(
                f"polyturn.{function.__name__} takes the model and the tasks by position, and {len(args)} were given; name "
                "what follows: reward=right, tools=[price]"
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
    """Train a model, and return the run: its metrics, its trajectories, its model.

        run = polyturn.train(model="Qwen/Qwen3-0.6B", tasks=rows, tools=[price], reward=right, steps=100, group_size=8)

    On a machine without a CUDA GPU a step has 4 groups, not 32, and a turn at most 128 tokens, not 512, unless
    `groups_per_step` and `max_tokens_per_turn` say otherwise.

    Works in a script, in a notebook, under torchrun (every rank returns the run) and on a Ray cluster. In a notebook, or
    wherever an event loop runs, training takes place in a thread of its own; an interrupt leaves a checkpoint either way.

    Args:
        model: A name on the hub, a folder, a run or its folder (which mean its newest checkpoint), the section `model` as a
            dict, or a causal language model of transformers, which is trained in place. A YAML file here is `config`.
        tasks: What to train on: a list of rows (dicts with a `prompt`), of texts or of `polyturn.Task`; a data set of
            Hugging Face; the path of a jsonl or Parquet file, or several; a function that returns one of these.
        tools: What the model may call: functions with annotations and a docstring, or tools; or the path of a tools file.
        interaction: Who answers where no tool does: a subclass of `polyturn.BaseInteraction` or an object of one, or
            several by name. A single one answers every task that does not name one.
        reward: What a trajectory is worth: a function of the trajectory, or of (data_source, solution_str, ground_truth).
        eval_tasks: Tasks to evaluate on before and after, given as `tasks` are.
        config: A YAML file, or the same as a dict; everything above and below goes before it.
        resume: Go on from the newest checkpoint of the run of this name; "auto": where there is one.
        on_step: Called as `on_step(step, metrics)` once each step is taken and recorded; what it raises ends the run.
        dry_run: Check everything, print what the run would start from, as `polyturn train --dry-run` does, and return that
            in place of a run.
        overrides: Further keys of the configuration: a whole section (`train={"steps": 100}`), the last part of a key
            (`steps=100`, `lr=1e-5`, `max_turns=4`, `temperature=0.8`, `name="mine"`), or a whole key
            (`**{"rollout.tools.timeout_s": 5}`). Functions, classes and objects may stand where YAML has an import path,
            and a number may be its text, as it comes from the environment (`steps=os.environ["STEPS"]`).
            Of these, `scheduler` is a subclass of `polyturn.MultiTurnScheduler`, an object of one, or the name of one;
            `engine` is "embedded" (the default), "vllm" or "sglang", or the section `engine` as a dict; `tokenizer` is a
            tokenizer of transformers, its folder or its name, the model's own by default; and `ray` is the address of a
            Ray cluster, or "auto".

    Raises:
        PolyturnError: something cannot work; one sentence says what, and what to write.
    """
    from polyturn.api.given import GivenArguments

    own = {"model": model, "tasks": tasks, "tools": tools, "interaction": interaction, "reward": reward}
    arguments = GivenArguments.of(overrides, **own, eval_tasks=eval_tasks, config=config)
    return _show_plan(arguments, resume=resume) if dry_run else _train(arguments, resume=resume, on_step=on_step)


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
    """Evaluate a model on tasks, and return the run: `run.reports`, `run.trajectories`.

        run = polyturn.evaluate(model="runs/mine/checkpoints/step-100/model", tasks="held_out.jsonl", reward=right)

    Args:
        model: As for `train`.
        tasks: What to evaluate on; `evaluation.data` of the configuration by default.
        tools, interaction, reward, config, overrides: As for `train`.

    Raises:
        PolyturnError: something cannot work; one sentence says what, and what to write.
    """
    from polyturn.api.given import GivenArguments

    own = {"model": model, "tools": tools, "interaction": interaction, "reward": reward}
    arguments = GivenArguments.of(overrides, **own, eval_tasks=tasks, config=config, tasks=None, ray=None, evaluates=True)
    with _begun(arguments) as (source, resolved):
        from polyturn.api import evaluating
        from polyturn.api.event_loop import run_beside
        from polyturn.api.run import Run

        folder, evaluation = run_beside(lambda signals: evaluating.evaluate_sets(source, resolved))
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
    """Let a model run episodes without training it, and return the run with their trajectories.

        for trajectory in polyturn.rollout(model="Qwen/Qwen3-0.6B", tasks=rows, reward=right).trajectories: …

    Args:
        model, tasks, tools, interaction, reward, config, overrides: As for `train`.
        num_tasks: How many of the tasks; None is all of them.
        group_size: How many episodes of each task.

    Raises:
        PolyturnError: something cannot work; one sentence says what, and what to write.
    """
    from polyturn.api.given import GivenArguments

    own = {"model": model, "tasks": tasks, "tools": tools, "interaction": interaction, "reward": reward}
    overrides = {"group_size": group_size, **overrides}
    arguments = GivenArguments.of(overrides, **own, config=config, eval_tasks=None, ray=None)
    with _begun(arguments, reads=("group_size",)) as (source, resolved):
        from polyturn.api import rolling
        from polyturn.api.event_loop import run_beside
        from polyturn.api.run import Run

        folder, _ = run_beside(lambda signals: rolling.roll_out(source, resolved, num_tasks=num_tasks))
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
    """Train a step at a time, with the groups, samples, advantages and metrics of each in hand before it is taken.

        for step in polyturn.steps("config.yaml", steps=100):
            step.advantages = [a.clip(-2, 2) for a in step.advantages]
            print(step.number, len(step.trajectories), step.update()["loss/total"])

    What the body sets is what is trained: `step.groups` (credited again), `step.samples`, `step.advantages`. The step is
    taken by `step.update()`, or when the loop asks for the next one; leaving the loop ends the run with a checkpoint.

    Args:
        model, tasks, tools, interaction, reward, eval_tasks, config, resume, overrides: As for `train`.

    Raises:
        PolyturnError: something cannot work; one sentence says what, and what to write.
    """
    from polyturn.api.given import GivenArguments, read

    own = {"model": model, "tasks": tasks, "tools": tools, "interaction": interaction, "reward": reward}
    arguments = GivenArguments.of(overrides, **own, eval_tasks=eval_tasks, config=config)
    with _shown():
        source, resolved = read(arguments, resume=resume)
    from polyturn.api.stepping import Steps

    @_in_a_sentence
    def work(hooks: Any) -> Run:
        with _shown():
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
        from polyturn.api.event_loop import run_beside
        from polyturn.api.training import RunOptions, run_training

        options = RunOptions(again=_again, resume=resume, on_step=called)
        finished = run_beside(lambda signals: run_training(source, resolved, replace(options, signals=signals)))
        run = _run_of(finished, arguments, source, on_step=on_step)
        if not isinstance(finished, Path):  # which a rank gets that follows another
            logger.info("look at it: run.show(), or in a shell: polyturn view %s", run.folder)
    return run


def _show_plan(arguments: GivenArguments, *, resume: bool | Literal["auto"]) -> DryRunReport:
    """Check what a run would start from, print it, and return it.

    Raises:
        ConfigError: the run would not start on this machine; what it would start from is printed before.
    """
    with _begun(arguments, resume=resume) as (source, resolved):
        from polyturn.api.dry_run import report_of
        from polyturn.api.event_loop import run_beside
        from polyturn.api.training import RunOptions, run_training
        from polyturn.infra.console import make_console

        reports: list[DryRunReport] = []
        options = RunOptions(
            again=_again, resume=resume, dry_run=lambda parts, tasks: reports.append(report_of(parts, tasks, resolved))
        )
        run_beside(lambda signals: run_training(source, resolved, replace(options, signals=signals)))
    if not reports:
        raise SystemExit(0)  # on a rank that follows another one, which has printed the report
    make_console().print(str(reports[0]), soft_wrap=True)
    reports[0].require_start()
    return reports[0]


def _called_each_step(on_step: OnStep | None) -> OnStep:
    """Return `on_step` with what it raises as one sentence.

    Raises:
        ConfigError: it cannot be called with a step and its metrics, or nothing would await it.
    """
    from polyturn.core.errors import TrainingError, told_in_a_sentence
    from polyturn.core.plugin_shape import CallShape, check_function

    if on_step is None:
        return lambda step, metrics: None
    if inspect.iscoroutinefunction(on_step):
        raise ConfigError("on_step is async, and nothing awaits it here; write it as `def on_step(step, metrics)`")
    check_function(on_step, CallShape(num=2, write="def on_step(step, metrics)"), where="on_step")

    def call(step: int, metrics: Mapping[str, float]) -> None:
        with told_in_a_sentence(f"on_step, called behind step {step},", TrainingError):
            on_step(step, dict(metrics))

    return call


def _run_of(finished: Any, arguments: Any, source: Any, *, on_step: OnStep | None = None) -> Run:
    """Return the run that training left, as seen from this process."""
    from polyturn.api.folders import name_of
    from polyturn.api.run import Run
    from polyturn.api.training import TrainedRun

    if finished is None:
        raise SystemExit(0)  # the run went on in processes that this one started, which have done what is left to do
    folder = finished.folder if isinstance(finished, TrainedRun) else finished

    @_in_a_sentence
    def again(changes: Mapping[str, Any]) -> Run:
        return _train(arguments.changed(changes, name=name_of(folder, source.config.out)), resume=True, on_step=on_step)

    return Run(folder, model=finished.model if isinstance(finished, TrainedRun) else None, again=again)


@contextlib.contextmanager
def _begun(
    arguments: GivenArguments, *, reads: Collection[str] = (), resume: bool | Literal["auto"] | None = None
) -> Iterator[tuple[ConfigSource, dict[str, Any]]]:
    """Read what was given, and show the lines of the run that begins.

    Args:
        arguments: What was given.
        reads: Of the keywords of training, those that a run without training reads too.
        resume: Whether the run that it trains goes on; None where nothing is trained.
    """
    from polyturn.api.given import read
    from polyturn.api.keywords import path_of

    with _shown():
        source, resolved = read(arguments, resume=resume)
        _announce(source)
        idle = [n for n in arguments.overrides if resume is None and n not in reads and path_of(n)[0] in _OF_TRAINING]
        if idle:
            instead = "; how often a task is answered: sets={'greedy': {'samples': 8}}" if "group_size" in idle else ""
            logger.warning("nothing is trained here, so %s has no effect%s", ", ".join(idle), instead)
        yield source, resolved


def _announce(source: ConfigSource) -> None:
    from polyturn.api.console import quiet_transformers
    from polyturn.api.ranks import tell_start

    tell_start(source.config.name)
    quiet_transformers()


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Show a run's log lines unless the program configured logging; otherwise an imported library stays silent."""
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
