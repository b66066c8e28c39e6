"""The scorer of programs: runs the last code block on test cases in a sandbox; 1 if it passes all, or the share it passes.

    "```python\\nprint(int(input()) + 1)\\n```"  against  {"inputs": ["1\\n"], "outputs": ["2\\n"]}   ->  1.0

The sandbox is a SandboxFusion service: POST `run_code` with {"code", "language", "stdin", …}, answered with
{"status", "run_result": {"status", "stdout", …}}. Without an address, `local_sandbox.py` runs programs on this machine and
answers in the same form. A program that fails, is late or prints something else fails its test. An unreachable sandbox is an
error, never a score of 0. If the sandbox does not answer the request for a program, it is asked to run a trivial program. If
it runs that one, the request is sent once more, and a program that again gets no answer counts as failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.errors import ConfigError, DataError, RewardError, one_line
from polyturn.core.secrets import bearer, hide, token_from
from polyturn.infra.deadline import Stretch
from polyturn.infra.http import send_now
from polyturn.rewards.options import SandboxOptions
from polyturn.sandbox.python.local_sandbox import LocalSandbox, local_sandbox

logger = logging.getLogger(__name__)

NUM_TRIES = 4
"""Requests for a program before the sandbox is tested with `PROBE`."""
QUEUE_S = 120.0
"""Seconds that a busy sandbox may keep a program waiting."""
BUSY = (429, 503)
"""HTTP statuses of an overloaded sandbox."""
PROBE = "print('ready')"
"""The trivial program that tests whether a sandbox works."""
TESTS_AT_ONCE = 8
CONTINUOUS_TESTS = 10
"""Number of tests that are run if the score is the share of passed tests."""

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_CALL = """

import json as _json, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin.read().split('\\n') if line.strip()]
_function = globals().get({name!r}) or getattr(Solution(), {name!r})
print(_json.dumps(_function(*_arguments)))
"""


class _BusyError(ConnectionError):
    """The sandbox is overloaded at the moment."""


@dataclass(frozen=True, kw_only=True)
class Sandbox(SandboxOptions):
    """The sandbox for programs, with their limits."""

    token: str | None = field(default=None, repr=False)
    """The token for the sandbox's authentication; None if it needs none."""
    slots: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    """Entered for each program; a semaphore limits how many run at once."""

    @classmethod
    def of(cls, options: SandboxOptions) -> Sandbox:
        """Return the sandbox of a run.

        Raises:
            ConfigError: `options` name a token that is not in the environment.
        """
        token = token_from({"token_env": options.token_env}, where="reward.sandbox")
        return cls(**dataclasses.asdict(options), token=token, slots=threading.Semaphore(options.max_concurrent))

    def require(self) -> None:
        """Check that this machine can isolate programs, if there is no address and programs run here.

        Raises:
            ConfigError: this machine cannot isolate programs, or the interpreter does not start.
        """
        if not self.url:
            self._here().require()

    def run(self, code: str, *, stdin: str = "", language: str = "python") -> Mapping[str, Any]:
        """Run one program and return the sandbox's answer.

        Raises:
            RewardError: the sandbox does not work.
            ConfigError: there is no address, and this machine cannot isolate programs, or `language` is not Python.
        """
        with Stretch.paused():
            if not self.url:
                if language != "python":
                    raise ConfigError(
                        f"the program is in {language!r}, but this machine only runs Python; set reward.sandbox.url to the "
                        "address of a SandboxFusion service"
                    )
                with self.slots:
                    return self._here().run(code, stdin=stdin)
            return self._run_there(self.url, self._request(code, stdin=stdin, language=language))

    def _run_there(self, url: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self._ask(url, request)
        except RewardError:
            if not self._works(url):
                raise
        try:
            return self._ask(url, request, num_tries=1)
        except RewardError as problem:
            logger.warning("a program counts as failed, because the sandbox works but does not answer for it: %s", problem)
            return {"status": "Failed", "run_result": {"status": "Error", "stderr": str(problem)}}

    def _ask(self, url: str, request: Mapping[str, Any], *, num_tries: int = NUM_TRIES) -> Mapping[str, Any]:
        """Send a request until it is answered, at most `num_tries` times.

        Answers of an overloaded sandbox do not count as tries; they are retried for `QUEUE_S` seconds.

        Raises:
            RewardError: there is no answer.
        """
        problem, num_asked, pause_s, until = "", 0, 0.25, time.monotonic() + QUEUE_S
        while num_asked < num_tries:
            try:
                with self.slots:
                    answer = self._post(url, request)
            except (ConnectionError, TimeoutError, ValueError) as error:
                problem, is_busy = one_line(error), isinstance(error, _BusyError)
                num_asked += not is_busy
                if (is_busy or isinstance(error, TimeoutError)) and time.monotonic() > until:
                    break
            else:
                if _is_answer(answer):
                    return answer  # type: ignore[no-any-return]
                problem, num_asked = f"it answered {answer!r:.200}", num_asked + 1
            if num_asked < num_tries:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 4.0)
        message = f"the sandbox {url} did not run the program ({num_asked} of {num_tries} tries): {problem}"
        raise RewardError(hide(message, self.token))

    def _works(self, url: str) -> bool:
        """Return whether the sandbox runs the trivial program `PROBE`."""
        try:
            answer = self._ask(url, self._request(PROBE, stdin="", language="python"), num_tries=1)
        except RewardError:
            return False
        return lines_of(str((answer.get("run_result") or {}).get("stdout"))) == ["ready"]

    def _request(self, code: str, *, stdin: str, language: str) -> dict[str, Any]:
        return run_request(
            code, stdin=stdin, language=language, timeout_s=self.timeout_s, memory_limit_mb=self.memory_limit_mb
        )

    def _post(self, url: str, request: Mapping[str, Any]) -> Any:
        limit_s = 2 * self.timeout_s + 10 + QUEUE_S
        reply = send_now("POST", url, request, headers=bearer(self.token), timeout_s=limit_s)
        if reply.status in BUSY:
            raise _BusyError(f"it answered {reply.status}: {reply.excerpt(200)}")
        if reply.status != 200:
            raise ConnectionError(f"it answered {reply.status}: {reply.excerpt(200)}")
        return reply.json()

    def _here(self) -> LocalSandbox:
        return local_sandbox(timeout_s=self.timeout_s, memory_mb=self.memory_limit_mb, python=self.python)


def run_request(code: str, *, stdin: str | None, language: str, timeout_s: float, memory_limit_mb: int) -> dict[str, Any]:
    """Return the body of a `run_code` request; the tool that runs code uses it, too."""
    return {
        "code": code,
        "language": language,
        "stdin": stdin,
        "compile_timeout": timeout_s,
        "run_timeout": timeout_s,
        "memory_limit_MB": memory_limit_mb,
        "files": {},
        "fetch_files": [],
    }


def compute_score(solution_str: Any, ground_truth: Any, *, sandbox: Sandbox, continuous: bool = False) -> float:
    """Return 1.0 if the program passes every test, else 0.0; with `continuous`, the share of the first ten tests it passes.

    Args:
        solution_str: The text of the model; its last fenced code block is the program.
        ground_truth: {"inputs": […], "outputs": […]}, or this as JSON text. If it has a "fn_name", an input contains the
            arguments of that function (one JSON value per line, or a list), and the output is its result. If not, the
            program reads the input from stdin and prints the output; both are texts or lists of lines.
        sandbox: The sandbox that runs the program.
        continuous: Whether the score is the share of passed tests.

    Raises:
        DataError: the test cases cannot be read.
        RewardError: the sandbox does not work.
    """
    name, cases = _read_cases(ground_truth)
    blocks = _BLOCK.findall(solution_str) if isinstance(solution_str, str) else []
    if not blocks:
        return 0.0
    program = as_call(blocks[-1], name) if name else blocks[-1]
    if not _is_text(program):
        return 0.0
    cases = cases[:CONTINUOUS_TESTS] if continuous else cases
    passed = 0
    for start in range(0, len(cases), TESTS_AT_ONCE):
        batch = cases[start : start + TESTS_AT_ONCE]
        with Stretch.paused(), ThreadPoolExecutor(len(batch)) as threads:
            results = list(threads.map(lambda case: _passes(program, case, sandbox, is_call=bool(name)), batch))
        passed += sum(results)
        if not continuous and not all(results):
            return 0.0
    return passed / len(cases)


def as_call(program: str, name: str) -> str:
    """Append code to a program that reads arguments from stdin, one JSON value per line, calls the program's function `name`
    with them, and prints the result as JSON."""
    return program + _CALL.format(name=name)


def _read_cases(truth: Any) -> tuple[str | None, Sequence[tuple[Any, Any]]]:
    try:
        read = json.loads(truth) if isinstance(truth, str | bytes) else truth
        cases = list(zip(read["inputs"], read["outputs"], strict=True))
        name = read.get("fn_name")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise DataError(
            f"the ground_truth {truth!r:.80} is not a set of tests: {one_line(problem)}; write {{'inputs': […], "
            "'outputs': […]}"
        ) from problem
    if not cases:
        raise DataError(f"the ground_truth {truth!r:.100} has no test")
    if name is None:
        return name, [(_joined(stdin), _joined(expected)) for stdin, expected in cases]
    return name, [(stdin, _as_value(expected)) for stdin, expected in cases]


def _joined(text: Any) -> Any:
    """Return a list of lines, as APPS has them, as one text; return any other value unchanged."""
    is_lines = isinstance(text, list | tuple) and all(isinstance(line, str) for line in text)
    return "\n".join(text) if is_lines else text


def _as_value(expected: Any) -> Any:
    """Decode the expected result of a function, which some data sets write as JSON.

    Raises:
        DataError: the value is nested too deeply to be compared.
    """
    try:
        with contextlib.suppress(ValueError):
            expected = json.loads(expected) if isinstance(expected, str) else expected
        json.dumps(expected)
    except (RecursionError, TypeError, ValueError) as problem:
        raise DataError(f"the expected output {expected!r:.80} is not a JSON value: {one_line(problem)}") from problem
    return expected


def _is_text(program: str) -> bool:
    """Return whether a program can be encoded as UTF-8, that is, has no lone surrogate."""
    try:
        program.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_answer(answer: Any) -> bool:
    if not isinstance(answer, Mapping) or answer.get("status") not in ("Success", "Failed"):
        return False
    return answer.get("run_result") is None or isinstance(answer["run_result"], Mapping)


def _passes(program: str, case: tuple[Any, Any], sandbox: Sandbox, *, is_call: bool) -> bool:
    stdin_text, expected = case
    stdin = stdin_text if isinstance(stdin_text, str) else "\n".join(json.dumps(argument) for argument in stdin_text)
    result = sandbox.run(program, stdin=stdin).get("run_result") or {}
    if result.get("status") != "Finished" or result.get("return_code", 0) != 0:
        return False
    printed = str(result.get("stdout") or "")
    return returns(printed, expected) if is_call else lines_of(printed) == lines_of(str(expected))


def returns(printed: str, expected: Any) -> bool:
    """Return whether the printed result equals the expected value, which some data sets wrap in a list.

    Only the last printed line is compared. A line that is not JSON, or is much longer than the expected value, is wrong.
    """
    last = printed.strip().rsplit("\n", 1)[-1]
    if len(last) > 1000 + 8 * len(json.dumps(expected)):
        return False
    try:
        returned = json.loads(last)
        return bool(returned == expected or [returned] == expected)
    except (ValueError, RecursionError):
        return False


def lines_of(text: str) -> list[str]:
    """Return the lines of a text without trailing spaces, and without leading and trailing empty lines."""
    return [line.rstrip() for line in text.strip().splitlines()]
