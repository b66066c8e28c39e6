"""The sandbox server runs programs in the protocol that SandboxFusionTool expects."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from polyturn.sandbox.python.limits import SandboxLimits
from polyturn.serving.sandbox import SandboxService, create_app
from polyturn.tools.http_service import ServiceReply
from polyturn.tools.sandbox import read_reply
from support.isolated import need_isolation, start_sandbox


def service(**changes: Any) -> SandboxService:
    limits = SandboxLimits(timeout_s=50.0)
    settings: dict[str, Any] = {"limits": limits, "max_concurrent": 2, "max_waiting": 2, "warm": 0, **changes}
    return SandboxService(lambda: start_sandbox(timeout_s=50.0), **settings)


async def post(body: Any, *, app: Any = None) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(service()) if app is None else app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await client.post("/run_code", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"code": "print(int(input()) * 2)", "language": "python", "stdin": "21", "files": {}}, "finished", "42\n"),
        ({"code": "1/0"}, "code_error", "ZeroDivisionError"),
        ({"code": "raise SystemExit(3)"}, "code_error", ""),
        ({"code": "while True: pass", "run_timeout": 0.3}, "code_timeout", ""),
        ({"code": "len(bytearray(150 << 20))", "memory_limit_MB": 100}, "code_error", "MemoryError"),
        ({"code": "len(bytearray(150 << 20))", "memory_limit_MB": -1}, "finished", ""),
        ({"code": "len(bytearray(150 << 20))", "memory_limit_MB": 1e9}, "finished", ""),
    ],
)
async def test_ends_of_a_program_are_told_apart(body: dict[str, Any], status: str, text: str) -> None:
    need_isolation()
    reply = (await post({"run_timeout": 50, **body})).json()
    assert reply["status"] == ("Success" if status == "finished" else "Failed")
    found = read_reply(ServiceReply(status="ok", data=reply, num_tries=1), timeout_s=50)
    assert found[0] == status
    assert text in found[1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "JSON"),
        ([], "JSON object"),
        ({"code": 1}, "code is 1"),
        ({}, "code is missing"),
        ({"code": "", "memory_limit_MB": "1G"}, "memory_limit_MB is '1G'"),
        ({"code": "", "language": "rust"}, "language is 'rust'"),
        ({"code": "", "run_timeout": -1}, "run_timeout is -1"),
        ({"code": "", "stdin": 5}, "stdin"),
        ({"code": "", "files": {"a": 1}}, "base64"),
        ({"code": "", "fetch_files": "a"}, "must be a list (names of files"),
        ({"code": "", "fetch_files": ["a"] * 257}, "256"),
    ],
)
async def test_wrong_request_is_refused_by_name(body: Any, message: str) -> None:
    reply = await post(body)
    assert (reply.status_code, message in reply.json()["detail"]) == (422, True), reply.text


async def test_request_is_refused_when_too_many_wait() -> None:
    full = create_app(service(max_concurrent=1, max_waiting=-1))
    assert (await post({"code": "1"}, app=full)).status_code == 503
