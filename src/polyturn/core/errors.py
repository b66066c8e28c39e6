"""The tree of errors. Its root is `PolyturnError`, and each class also inherits the standard type that it refines.

    ConfigError("unknown key 'max_turn' in rollout; did you mean 'max_turns'?")   is a PolyturnError and a ValueError

A message says what is wrong, shows the value, and says what to do. `ToolError` is not in the tree, because it reports no
failure of the run: a tool raises it to tell the *model* that a call went wrong. The model reads it as an observation, and
the episode continues.
"""

from __future__ import annotations

import contextlib
import difflib
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType

from polyturn.core.code_origin import defined_at, is_an_authors, line_of
from polyturn.core.printable import printable
from polyturn.core.secrets import scrubbed

PLUGIN_RAISES = (Exception, SystemExit)
"""The exceptions to catch around a plug-in's code. A KeyboardInterrupt always ends the run: it is the user's Ctrl-C."""


class PolyturnError(Exception):
    """Root of every error the library raises on purpose."""


class ConfigError(PolyturnError, ValueError):
    """A configuration, a plug-in file or a registry name that cannot work."""


class UnknownNameError(ConfigError, LookupError):
    """A name that is not registered; the message shows the closest known names."""


class MissingModuleError(ConfigError, ModuleNotFoundError):
    """A dotted path whose module cannot be imported."""


class MissingAttributeError(ConfigError, AttributeError):
    """A dotted path whose module exists but has no such attribute."""


class DataError(PolyturnError, ValueError):
    """A dataset row or file that cannot be used."""


class TemplateError(PolyturnError, ValueError):
    """A chat template that cannot render the messages or tools of the run."""


class HiddenToolsError(TemplateError):
    """A chat template that leaves out the tools of a request."""


class AlignmentError(PolyturnError, ValueError):
    """Per-token arrays that do not describe the same tokens: a broken invariant."""


class LifecycleError(PolyturnError, RuntimeError):
    """A state change that `lifecycle.TRANSITIONS` forbids, or an episode or plug-in used before start or after end."""


class EngineError(PolyturnError, RuntimeError):
    """An inference engine that cannot answer."""


class EngineLostError(EngineError):
    """A server did not answer: it crashed, hangs or cannot be reached. The request may be sent to another server."""


class EngineBusyError(EngineLostError):
    """A server refused a request because its queue is full. The request may be sent again."""


class EngineGoneError(EngineLostError):
    """A server that is lost for good: it has used up its restarts."""


class InteractionError(PolyturnError, RuntimeError):
    """An interaction raised or missed its deadline. The trajectory fails; the run continues."""


class SchedulerError(PolyturnError, RuntimeError):
    """A scheduler or environment raised, or returned invalid values. The trajectory fails; the run continues."""


class ToolUnavailableError(PolyturnError, RuntimeError):
    """Raised by a tool that cannot start any call, because something that it needs is missing. The trajectory fails; the run
    continues. For an error that the model can cause, raise a `ToolError`: the model reads it."""


class RewardError(PolyturnError, RuntimeError):
    """A reward function raised, was late or returned no finite number. The trajectory fails; it does not get reward 0."""


class RolloutError(PolyturnError, RuntimeError):
    """The run must end: too many failed trajectories or hung plug-in calls, or an event loop stopped by a plug-in."""


class TrainingError(PolyturnError, RuntimeError):
    """A training step that cannot be taken, for example a loss that is not finite."""


class RankLostError(TrainingError):
    """A process that trains or runs episodes for this run died; training cannot continue without it."""


class CheckpointError(PolyturnError, RuntimeError):
    """A checkpoint that is missing, damaged or made by another model."""


class SnapshotError(PolyturnError, RuntimeError):
    """A live conversation cannot be saved or restored; it restarts from its task when the run is resumed."""


class NoSnapshotError(SnapshotError):
    """A plug-in keeps state but has no `snapshot` and `restore`."""


class ToolError(Exception):
    """Raised by a tool's author to tell the model what went wrong; it becomes an observation, never a failure."""


class ToolConnectionError(ToolError):
    """Raised by a tool that cannot reach its service, or lost the connection; the model did not cause it."""


class ToolTimeoutError(ToolError):
    """Raised by a tool whose service did not answer within the tool's timeout; the model did not cause it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint that ends an error message about an unknown name.

    did_you_mean("max_turn", ["max_turns", "seed"])  ->  " Did you mean 'max_turns'?"
    did_you_mean("zzz", ["max_turns", "seed"])       ->  " Known: 'max_turns', 'seed'."
    """
    names = sorted(set(known))
    # The high cutoff first: with thousands of names it is ten times faster.
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.85)
    if len(near) < 2:
        near = difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    if near and not any(n.startswith(name) for n in near):  # suggest 'ppo_clip' before 'dppo_tv' for 'ppo'
        near = [*[n for n in names if n.startswith(name)][:1], *near][:2]
    if near:
        return " Did you mean " + " or ".join(repr(n) for n in near) + "?"
    if not names:
        return " Nothing is registered."
    alike = difflib.SequenceMatcher(b=name)

    def distance(one: str) -> float:
        alike.set_seq1(one)
        return -alike.ratio()

    closest = ", ".join(map(repr, sorted(names, key=distance)[:12]))  # 'ppo_clip' before 'cispo' for 'ppoo'
    return f" Known: {closest}{', …' if len(names) > 12 else ''}."


def raised_by_author(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType] | None:
    """Return the exception of a plug-in that caused `error`, with its traceback; None if no plug-in did.

    Of `error` and its causes, it is the innermost exception that passed through an author's file (`core/code_origin.py`).
    The returned traceback starts at the first frame in such a file.
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
    """Return the plug-in's line that caused `error`, as " (tutor.py, line 12)"; "" if no plug-in did."""
    if (location := raised_by_author(error)) is None:
        return ""
    last = [f for f in traceback.extract_tb(location[2]) if is_an_authors(f.filename)][-1]
    return line_of(last.filename, last.lineno or 0)


@contextlib.contextmanager
def plugin_errors_as(what: str, error: type[PolyturnError]) -> Iterator[None]:
    """Convert exceptions of a plug-in into an `error` that starts with `what` and shows the line that raised.

    A `PolyturnError` passes unchanged.
    """
    try:
        yield
    except PolyturnError:
        raise
    except PLUGIN_RAISES as problem:
        raise error(f"{what} raised {one_line(problem)}{raised_at(problem)}") from problem


@contextlib.contextmanager
def errors_at(code: object) -> Iterator[None]:
    """Add the line that defines an author's function or class to a `PolyturnError` about it."""
    try:
        yield
    except PolyturnError as problem:
        at = defined_at(code)
        if not at or str(problem).endswith(at):
            raise
        raise type(problem)(f"{problem}{at}") from problem


MAX_LINE = 10_000
"""The most characters of an exception's message that are shown; a message may quote megabytes from a server or a policy."""


def most_common(reasons: Counter[str], limit: int) -> str:
    """Summarise the most frequent reasons: "3 times: EngineError: gone; once: it took 60 s"."""
    return "; ".join(f"{f'{n} times' if n > 1 else 'once'}: {reason}" for reason, n in reasons.most_common(limit))


def one_line(error: BaseException) -> str:
    """Return an exception as one short line: its type, then its message without secrets and control characters."""
    try:
        whole = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as odd:  # `__str__` of the exception may be a user's code
        whole = f"(its message cannot be read: {type(odd).__name__})"
    head = whole[: 2 * MAX_LINE]
    if len(head) < len(whole) and len(head.split()) > 1 and not head[-1].isspace():
        head = head.removesuffix(head.split()[-1])  # this cut may split a secret, which would not be recognised
    # Hide secrets before the cut to MAX_LINE, which could leave half of a secret visible.
    text = printable(" ".join(scrubbed(head).split()))
    if len(text) > MAX_LINE or len(whole) > 2 * MAX_LINE:
        text = f"{text[:MAX_LINE]}… ({len(whole)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
