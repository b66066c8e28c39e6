"""SandboxFusionTool runs code in a service, in SandboxFusion's protocol; the model reads how the run ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.tools.executor import ToolBox
from polyturn.tools.python_sandbox import PythonSandbox
from polyturn.tools.sandbox import SandboxFusionTool
from polyturn.tools.service import HttpService
from support.services import serve


async def run_python(asked: dict[str, Any], number: int) -> Any:
    """A sandbox in miniature, in the protocol of the real one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", asked["code"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), asked["run_timeout"])
        status = "Finished"
    except TimeoutError:
        process.kill()
        await process.wait()
        out, err, status = b"", b"", "TimeLimitExceeded"
    run = {"status": status, "return_code": process.returncode, "stdout": out.decode(), "stderr": err.decode()}
    return {"status": "Success" if process.returncode == 0 else "Failed", "compile_result": None, "run_result": run}


async def ask(tool: SandboxFusionTool, **parameters: Any) -> tuple[str, dict[str, Any]]:
    instance_id, _ = await tool.create()
    response, reward, metrics = await tool.execute(instance_id, parameters)
    assert reward is None
    assert await tool.calc_reward(instance_id) is None
    await tool.release(instance_id)
    assert tool._instance_dict == {}
    return str(response.text), metrics


async def test_code_runs_and_what_it_prints_is_read() -> None:
    async with serve(run_python) as server:
        text, metrics = await ask(SandboxFusionTool({"sandbox_fusion_url": server.url}), code="print(6 * 7)")
    assert (text, metrics["status"], metrics["failed"]) == ("42\n", "finished", 0.0)
    (asked,) = server.asked
    assert (asked["language"], asked["run_timeout"], asked["memory_limit_MB"]) == ("python", 30, 1024)


async def test_a_crash_shows_its_traceback_and_is_no_failure_of_the_tool() -> None:
    async with serve(run_python) as server:
        text, metrics = await ask(SandboxFusionTool({"sandbox_fusion_url": server.url}), code="print(1); 1 / 0")
    assert text.startswith("1\nTraceback") and "ZeroDivisionError" in text
    assert (metrics["status"], metrics["failed"]) == ("code_error", 0.0)


async def test_code_that_runs_too_long_is_told_so() -> None:
    async with serve(run_python) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "default_timeout": 0.3})
        text, metrics = await ask(tool, code="while True: pass", timeout=99, language="python")
    assert (text, metrics["status"]) == ("The code took longer than 0.3 s and was stopped.", "code_timeout")
    assert server.asked[0]["run_timeout"] == 0.3


@pytest.mark.parametrize(
    ("reply", "status", "text"),
    [
        ({"status": "SandboxError", "message": "no worker"}, "sandbox_error", "The sandbox failed: no worker"),
        (
            {"status": "Failed", "compile_result": {"status": "Error", "stderr": "line 1: ;"}, "run_result": None},
            "compile_error",
            "line 1: ;",
        ),
        (
            {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": ""}},
            "finished",
            "The code ran and printed nothing.",
        ),
        ((500, "gone"), "server_error", "The sandbox gave no answer (server_error): HTTP 500: gone"),
        ((401, "who?"), "refused", "The sandbox gave no answer (refused): HTTP 401: who?"),
    ],
)
async def test_ends_of_a_run_are_told_apart(reply: Any, status: str, text: str) -> None:
    async with serve(lambda asked, number: reply) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "max_retries": 1})
        said, metrics = await ask(tool, code="x")
    assert (said, metrics["status"]) == (text, status)


async def test_the_limit_can_be_switched_off() -> None:
    async with serve(run_python) as server:
        tool = SandboxFusionTool({"sandbox_fusion_url": server.url, "enable_global_rate_limit": False})
        assert (await ask(tool, code="print(1)"))[0] == "1\n"


def test_the_url_is_needed() -> None:
    with pytest.raises(ConfigError, match="sandbox_fusion_url is not set"):
        SandboxFusionTool({})


async def test_code_waits_for_its_turn_outside_of_its_deadline() -> None:
    """Else endless programs of some episodes would be the time-outs of others, and open the tool's breaker."""

    async def answer(asked: dict[str, Any], number: int) -> Any:
        await asyncio.sleep(0.7)
        return {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "1"}}

    async with serve(answer) as served:
        service = HttpService(served.url, timeout_s=3.0, max_concurrent=1)
        service.open()
        replies = await asyncio.gather(*(service.post({}) for _ in range(5)))
        await service.close()
        assert [reply.status for reply in replies] == ["ok"] * 5
        tool = SandboxFusionTool({"sandbox_fusion_url": served.url, "num_workers": 3})
        assert tool.max_concurrency == 3 and ToolBox([tool]).concurrency.has_limit(tool.name)
    local = PythonSandbox({"num_workers": 2, "warm": 0, "allow_unsafe": True})
    assert local.max_concurrency == 2 and ToolBox([local]).concurrency.has_limit(local.name)
