"""The result of any sandbox run in the format of SandboxFusion's `run_code`.

RunResult(status="timeout")   ->   {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", …}, …}
"""

from __future__ import annotations

from typing import Any

from polyturn.sandbox.python.limits import RunResult


def reply_of(result: RunResult) -> dict[str, Any]:
    """Convert the result of a run to SandboxFusion's format."""
    if result.status == "sandbox_error":
        return {"status": "SandboxError", "message": result.stderr, "compile_result": None, "run_result": None, "files": {}}
    statuses = {"timeout": "TimeLimitExceeded", "output": "Error"}
    run = {
        "status": statuses.get(result.status, "Finished"),
        "execution_time": round(result.duration_s, 4),
        "return_code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr
        + ("\nThe program printed without end and was stopped." if result.status == "output" else ""),
    }
    is_fine = result.status in ("ok", "exit") and result.exit_code == 0
    return {
        "status": "Success" if is_fine else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": dict(result.files),
    }
