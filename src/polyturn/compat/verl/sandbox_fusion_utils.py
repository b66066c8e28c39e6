"""verl.utils.reward_score.sandbox_fusion.utils: runs a program's tests in a SandboxFusion service.

results, metadata = check_correctness(url, {"inputs": ["1\\n"], "outputs": ["1\\n"]}, "print(input())")
results            [True]; False is a wrong answer, -1 a sandbox failure, -2 an error, -3 a timeout, -4 a compile error
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from polyturn.core.errors import RewardError
from polyturn.rewards import code

DEFAULT_TIMEOUT = 10
NUM_THREADS = 32


def call_sandbox_api(
    sandbox_fusion_url: str,
    code: str,
    stdin: str | None,
    compile_timeout: float,
    run_timeout: float,
    memory_limit_mb: int,
    language: str = "python",
) -> tuple[Mapping[str, Any] | None, str | None]:
    """Run one program; return (answer, None), or (None, reason) if the sandbox did not answer."""
    sandbox = _sandbox(sandbox_fusion_url, max(compile_timeout, run_timeout), memory_limit_mb)
    try:
        return sandbox.run(code, stdin=stdin or "", language=language), None
    except RewardError as problem:
        return None, f"API Call Failed: {problem}"


def check_correctness(
    sandbox_fusion_url: str,
    in_outs: Mapping[str, Any] | None,
    generation: str,
    timeout: float = DEFAULT_TIMEOUT,
    memory_limit_mb: int = 1024,
    language: str = "python",
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
) -> tuple[list[bool | int], list[dict[str, Any]]]:
    """Run a program on each of its tests.

    Args:
        sandbox_fusion_url: The service's `run_code`.
        in_outs: {"inputs": [text, …], "outputs": [text, …]}. With "fn_name", the inputs are JSON lines of arguments and the
            outputs JSON results. With "assert_case", its texts are code that is appended to the program.
        generation: The program.
        timeout: Seconds per test.
        memory_limit_mb: Memory limit per test in MB.
        language: The service's name of the language.
        concurrent_semaphore: Acquired for each test.

    Returns:
        The result and the metadata of each test.
    """
    cases = in_outs or {}
    asserts, name = cases.get("assert_case"), cases.get("fn_name")
    if not asserts and ("inputs" not in cases or "outputs" not in cases):
        return [-1], [{"error": "Invalid input/output data"}]
    inputs = cases.get("inputs", [""] * len(asserts or ()))
    outputs = cases.get("outputs", [None] * len(inputs))
    if len(inputs) != len(outputs) or (asserts and len(asserts) != len(inputs)):
        return [-1], [{"error": "Input/output count mismatch"}]
    limits = (timeout, memory_limit_mb, language, concurrent_semaphore)

    def run(number: int) -> tuple[bool | int, dict[str, Any]]:
        if not asserts:
            return _process_single_case(
                number, inputs[number], outputs[number], sandbox_fusion_url, generation, *limits, name
            )
        program = f"{code.as_call(generation, name) if name else generation}\n\n{asserts[number]}"
        result, known = _process_single_case(number, inputs[number], None, sandbox_fusion_url, program, *limits)
        return result, {**known, "expected_output": None if outputs[number] is None else str(outputs[number])}

    if not inputs:
        return [], []
    with ThreadPoolExecutor(min(len(inputs), NUM_THREADS)) as threads:
        results = list(threads.map(run, range(len(inputs))))
    return [result for result, _ in results], [known for _, known in results]


def _process_single_case(  # users' own tools call it by this name
    case_index: int,
    stdin_data: Any,
    expected_output: Any,
    sandbox_fusion_url: str,
    generation: str,
    timeout: float,
    memory_limit_mb: int,
    language: str,
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
    fn_name: str | None = None,
) -> tuple[bool | int, dict[str, Any]]:
    stdin, expected = (None if text is None else str(text) for text in (stdin_data, expected_output))
    with contextlib.nullcontext() if concurrent_semaphore is None else concurrent_semaphore:
        answer, problem = call_sandbox_api(
            sandbox_fusion_url=sandbox_fusion_url,
            code=code.as_call(generation, fn_name) if fn_name else generation,
            stdin=stdin,
            compile_timeout=timeout,
            run_timeout=timeout,
            memory_limit_mb=memory_limit_mb,
            language=language,
        )
    result, status = _judge(answer, expected_output, is_call=fn_name is not None)
    known = {"case_index": case_index, "input": stdin, "expected_output": expected, "status": status}
    return result, known | {"api_request_error": problem, "api_response": answer} | _fields_of(answer or {})


def _fields_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a service's answer for one program, with verl's field names."""
    run_result, compile_result = (answer.get(key) or {} for key in ("run_result", "compile_result"))
    return {
        "stdout": run_result.get("stdout"),
        "stderr": run_result.get("stderr"),
        "exit_code": run_result.get("return_code"),
        "duration": run_result.get("execution_time"),
        "compile_stderr": compile_result.get("stderr"),
        "api_status": answer.get("status"),
        "compile_status": compile_result.get("status"),
        "run_status": run_result.get("status"),
    }


def _sandbox(url: str, timeout_s: float, memory_limit_mb: int) -> code.Sandbox:
    return code.Sandbox(url=url, memory_limit_mb=memory_limit_mb, timeout_s=timeout_s)


def _judge(answer: Mapping[str, Any] | None, expected: Any, *, is_call: bool) -> tuple[bool | int, str]:
    if answer is None:
        return -1, "api_error"
    compiled, ran = (answer.get(key) or {} for key in ("compile_result", "run_result"))
    if compiled and _is_bad(compiled):
        return -4, "compile_timeout" if compiled.get("status") == "TimeLimitExceeded" else "compile_error"
    if answer.get("status") == "SandboxError":
        return -1, "sandbox_error"
    if not ran:
        return -1, "unknown_failure_state"
    if ran.get("status") == "TimeLimitExceeded":
        return -3, "timeout"
    if _is_bad(ran):
        return -2, "runtime_error"
    if expected is None or _is_same(str(ran.get("stdout") or ""), expected, is_call=is_call):
        return True, "success"
    return False, "wrong_answer"


def _is_bad(result: Mapping[str, Any]) -> bool:
    return result.get("status") != "Finished" or bool(result.get("return_code"))


def _is_same(printed: str, expected: Any, *, is_call: bool) -> bool:
    if not is_call:
        return code.lines_of(printed) == code.lines_of(str(expected))
    with contextlib.suppress(ValueError):
        expected = json.loads(expected) if isinstance(expected, str) else expected
    return code.returns(printed, expected)
