"""The error tree. One root, and each class also inherits the standard type it refines.

    ConfigError("unknown key 'max_turn' in rollout; did you mean 'max_turns'?")   is a PolyturnError and a ValueError

A message says what is wrong, shows the value, and says what to do. `ToolError` is not in the tree: a tool's author raises
it to tell the *model* something, and the episode goes on (a bad rollout is data, a broken invariant is a crash).
"""

from __future__ import annotations

import contextlib
import difflib
import os
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType

from polyturn.core.code_origin import is_an_authors
from polyturn.core.interrupts import PLUGIN_RAISES, pass_interrupt
from polyturn.core.printable import printable
from polyturn.core.secrets import scrubbed


class PolyturnError(Exception):
    """Root of every error the library raises on purpose."""


class ConfigError(PolyturnError, ValueError):
    """A configuration, a plug-in file or a registry name that cannot work."""


class UnknownNameError(ConfigError, LookupError):
    """A name that is not registered; the message carries the nearest known ones."""


class MissingModuleError(ConfigError, ModuleNotFoundError):
    """A dotted path whose module cannot be imported."""


class MissingAttributeError(ConfigError, AttributeError):
    """A dotted path whose module exists and whose attribute does not."""


class DataError(PolyturnError, ValueError):
    """A dataset row or file that cannot be used."""


class TemplateError(PolyturnError, ValueError):
    """A chat template that cannot render what the run needs."""


class HiddenToolsError(TemplateError):
    """A chat template that leaves out the tools of a request."""


class AlignmentError(PolyturnError, ValueError):
    """Per-token arrays that do not describe the same tokens: a broken invariant."""


class LifecycleError(PolyturnError, RuntimeError):
    """A request state transition that the table does not allow, or a plug-in instance used outside its life."""


class EngineError(PolyturnError, RuntimeError):
    """An inference engine that cannot answer."""


class EngineLostError(EngineError):
    """A server did not answer: it crashed, hangs or cannot be reached. The request may be asked of another one."""


class EngineBusyError(EngineLostError):
    """A server took no request for now: its queue is full. It may be asked again."""


class EngineGoneError(EngineLostError):
    """A server that is lost for good: it died more often than it may be started again."""


class InteractionError(PolyturnError, RuntimeError):
    """An interaction that raised or missed its deadline: the trajectory fails, the run goes on."""


class SchedulerError(PolyturnError, RuntimeError):
    """A scheduler that raised or answered nothing that can be understood: the trajectory fails, the run goes on."""


class ToolUnavailableError(PolyturnError, RuntimeError):
    """Raised by a tool that cannot even begin a call, for want of something that no argument can bring about: the trajectory
    fails, the run goes on. What a model can bring about is a `ToolError`, or any other exception: it reads that."""


class RewardError(PolyturnError, RuntimeError):
    """A reward function that raised or returned something that is not a finite number. Never 0.0."""


class RolloutError(PolyturnError, RuntimeError):
    """Too large a share of trajectories failed for the run to go on."""


class TrainingError(PolyturnError, RuntimeError):
    """A training step that cannot be taken, for example a loss that is not finite."""


class RankLostError(TrainingError):
    """A process that trains or runs episodes for this run died: training cannot go on without it."""


class CheckpointError(PolyturnError, RuntimeError):
    """A checkpoint that is missing, damaged or made by another model."""


class SnapshotError(PolyturnError, RuntimeError):
    """A live conversation that cannot be kept or taken up again: it starts from its task when the run is resumed."""


class NoSnapshotError(SnapshotError):
    """A plug-in that keeps state and offers no way to take it up again."""


class ToolError(Exception):
    """Raised by a tool's author to tell the model what went wrong; it becomes an observation, never a failure."""


class ToolConnectionError(ToolError):
    """Raised by a tool that cannot reach what it asks, or lost it: nothing that the model did."""


class ToolTimeoutError(ToolError):
    """Raised by a tool when what it asks did not answer in the tool's own time: nothing that the model did."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint that ends an error message about an unknown name.

    did_you_mean("max_turn", ["max_turns", "seed"])  ->  " Did you mean 'max_turns'?"
    did_you_mean("zzz", ["max_turns", "seed"])       ->  " Known: 'max_turns', 'seed'."
    """
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.85)  # among thousands of keys, ten times sooner
    if len(near) < 2:
        near = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    if near and not any(n.startswith(name) for n in near):  # 'ppo' is nearer to 'ppo_clip' than to 'dppo_tv'
        near = [*[n for n in names if n.startswith(name)][:1], *near][:2]
    if near:
        return " Did you mean " + " or ".join(repr(n) for n in near) + "?"
    if not names:
        return " Nothing is registered."
    # Of many names the most similar ones: 'ppo_clip' for 'ppoo', which the first ones of the alphabet would hide.
    alike = difflib.SequenceMatcher(b=name)

    def distance(one: str) -> float:
        alike.set_seq1(one)
        return -alike.ratio()

    listed = names if len(names) <= 12 else sorted(sorted(names, key=distance)[:12])
    closest = ", ".join(map(repr, listed))
    return f" Known: {closest}{', …' if len(names) > 12 else ''}."


def raised_by_author(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType] | None:
    """Return the exception of a plug-in behind `error`, with its traceback from the plug-in on; None if there is none.

    It is the innermost exception that passed through a file that is neither of this library nor installed.
    """
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    for one in reversed(chain):
        calls = one.__traceback__
        while calls is not None and not is_an_authors(calls.tb_frame.f_code.co_filename):
            calls = calls.tb_next
        if calls is not None:
            return type(one), one, calls
    return None


def raised_at(error: BaseException) -> str:
    """Return the line of a plug-in that raised the cause of `error`: " (tutor.py, line 12)"; empty if there is none."""
    if (location := raised_by_author(error)) is None:
        return ""
    last = [f for f in traceback.extract_tb(location[2]) if is_an_authors(f.filename)][-1]
    return f" ({os.path.basename(last.filename)}, line {last.lineno})"


@contextlib.contextmanager
def told_in_a_sentence(what: str, error: type[PolyturnError]) -> Iterator[None]:
    """Raise what the code of a plug-in raises here as an `error`, with the line that raised; `what` is how it is called."""
    try:
        yield
    except PolyturnError:
        raise
    except PLUGIN_RAISES as problem:
        pass_interrupt(problem)
        raise error(f"{what} raised {one_line(problem)}{raised_at(problem)}") from problem


MAX_LINE = 10_000
"""Characters of an exception's message that are shown: it may quote megabytes from a server or a policy."""


def most_common(reasons: Counter[str], limit: int) -> str:
    """The most frequent reasons: "3 times: EngineError: gone; once: it took 60 s"."""
    return "; ".join(f"{f'{n} times' if n > 1 else 'once'}: {reason}" for reason, n in reasons.most_common(limit))


def one_line(error: BaseException) -> str:
    """Return an exception as one short line: its type, then its message without secrets and what a screen obeys."""
    try:
        whole = str(error)
    except BaseException as odd:  # the exception's own code may be a user's, too
        whole = f"(its message cannot be read: {type(odd).__name__})"
    text = printable(" ".join(scrubbed(whole[: 2 * MAX_LINE]).split()))  # a secret that the line's end cuts is hidden before
    if len(text) > MAX_LINE or len(whole) > 2 * MAX_LINE:
        text = f"{text[:MAX_LINE]}… ({len(whole)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
