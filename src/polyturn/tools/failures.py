"""The kinds of failed tool calls, and the classification of a tool's exceptions.

    unknown_tool  bad_json  schema  skipped        the call never reached a tool: the model can correct it
    tool_error                                     the tool refused with a reason: the model can correct it
    exception  too_large                           the tool crashed, or its answer exceeds the limit
    timeout  connection                            the tool's service is slow or gone
    circuit_open                                   the service failed so often that it was not called

`EpisodeTools`, the circuit breaker, the metrics and the documentation share this list. Failures that the model can cause
never count for the circuit breaker: otherwise a policy could switch off a tool that rewards or penalises it.
"""

from __future__ import annotations

from enum import StrEnum

from polyturn.core.errors import ToolConnectionError, ToolError, ToolTimeoutError, one_line
from polyturn.core.secrets import scrubbed
from polyturn.infra.deadline import DeadlineError


class ToolFailure(StrEnum):
    """The kinds of failed calls, as in `ToolResult.error` and in the model's observation."""

    UNKNOWN_TOOL = "unknown_tool"
    """The model named a tool that the task does not have."""
    BAD_JSON = "bad_json"
    """The text of the call could not be parsed."""
    SCHEMA = "schema"
    """The arguments do not fit the tool's schema."""
    SKIPPED = "skipped"
    """The turn had more calls than are run in one turn; this one was not run."""
    TOOL_ERROR = "tool_error"
    """The tool refused: it raised `ToolError`."""
    EXCEPTION = "exception"
    """The tool crashed: it raised another error, or returned a value that is not a valid result."""
    TOO_LARGE = "too_large"
    """The answer exceeds a size limit, so the model does not see any of it."""
    TIMEOUT = "timeout"
    """A deadline of the call passed: the tool's own or the run's."""
    CONNECTION = "connection"
    """The service behind the tool cannot be reached, or closed the connection before its answer was complete."""
    CIRCUIT_OPEN = "circuit_open"
    """The tool failed so often in a row that its calls are suspended for a while; this call was not made."""

    @property
    def is_infrastructure(self) -> bool:
        """Whether failures of this kind count for the tool's circuit breaker."""
        return self in (ToolFailure.TIMEOUT, ToolFailure.CONNECTION)

    @property
    def reached_tool(self) -> bool:
        """Whether the tool itself was called, so that the call's duration counts in the metrics."""
        return self in (
            ToolFailure.TOOL_ERROR,
            ToolFailure.EXCEPTION,
            ToolFailure.TOO_LARGE,
            ToolFailure.TIMEOUT,
            ToolFailure.CONNECTION,
        )


class ArgumentError(ToolError):
    """An argument fits the tool's schema, but not the annotation of its parameter."""


class TooLargeError(Exception):
    """A tool's answer exceeds the size limit."""


def kind_of(problem: Exception) -> ToolFailure:
    """Classify an exception that a call raised."""
    if isinstance(problem, DeadlineError | ToolTimeoutError | TimeoutError):
        return ToolFailure.TIMEOUT
    if isinstance(problem, ToolConnectionError | ConnectionError | EOFError):
        return ToolFailure.CONNECTION
    if isinstance(problem, TooLargeError):
        return ToolFailure.TOO_LARGE
    if isinstance(problem, ArgumentError):
        return ToolFailure.SCHEMA
    return ToolFailure.TOOL_ERROR if isinstance(problem, ToolError) else ToolFailure.EXCEPTION


def reason_of(problem: Exception, *, tool: str) -> str:
    """Return the message to the model about an error that a call raised."""
    if isinstance(problem, DeadlineError):
        return f"{tool!r} did not answer: {problem}"
    return scrubbed(str(problem)) if isinstance(problem, ToolError | TooLargeError) else one_line(problem)
