"""E2BSandbox against a small server that speaks the protocol, and runs its commands on this machine."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polyturn.core.errors import ConfigError
from polyturn.sandbox import (
    BaseSandbox,
    SandboxError,
    SandboxGoneError,
    SandboxSetupError,
    SandboxSpec,
    check_spec,
    open_sandbox,
    try_sandbox,
)
from support.refusals import refuses_later

SPEC = SandboxSpec(backend="e2b", image="mine", env={"WORD": "x"})


class Service:
    """The service: its sandboxes, and the requests that it saw."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.created: list[dict[str, Any]] = []
        self.users: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/sandboxes", self.create)
        app.router.add_get("/sandboxes/{id}", self.look)
        app.router.add_delete("/sandboxes/{id}", self.delete)
        app.router.add_post("/sandboxes/{id}/timeout", self.look)
        app.router.add_post("/files", self.write)
        app.router.add_post("/process.Process/Start", self.start)
        return app

    async def create(self, request: web.Request) -> web.Response:
        if request.headers["X-API-KEY"] != "key":
            return web.json_response({"message": "no such key"}, status=401)
        self.created.append(await request.json())
        self.live.add("b1")
        return web.json_response({"sandboxID": "b1", "envdAccessToken": "token", "envdVersion": "0.5"})

    async def look(self, request: web.Request) -> web.Response:
        await self.answers.wait()
        is_live = request.match_info["id"] in self.live
        return web.json_response({"state": "running"}, status=200 if is_live else 404)

    async def delete(self, request: web.Request) -> web.Response:
        self.live.discard(request.match_info["id"])
        return web.Response(status=204)

    async def write(self, request: web.Request) -> web.Response:
        field = (await request.post())["file"]
        await asyncio.to_thread(Path(request.query["path"]).write_bytes, field.file.read())  # type: ignore[union-attr]
        return web.json_response([])

    async def start(self, request: web.Request) -> web.StreamResponse:
        if not self.live or request.headers["X-Access-Token"] != "token":
            return web.json_response({"message": "The sandbox was not found"}, status=502)
        self.users.append(base64.b64decode(request.headers["Authorization"].split()[1]).decode())
        process = json.loads((await request.read())[5:])["process"]
        reply = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await reply.prepare(request)

        async def say(message: Any, flags: int = 0) -> None:
            data = json.dumps(message).encode()
            await reply.write(bytes([flags]) + len(data).to_bytes(4, "big") + data)

        await say({"event": {"start": {"pid": 7}}})
        if process["args"] == ["die"]:
            self.live.clear()
            return reply
        running = await asyncio.create_subprocess_exec(
            process["cmd"], *process["args"], cwd=process["cwd"] or tempfile.gettempdir(), stdout=-1, stderr=-1,
            env={"PATH": os.environ["PATH"], **process["envs"]},
        )  # fmt: skip
        for name, data in zip(("stdout", "stderr"), await running.communicate(), strict=True):
            for at in range(0, len(data), 1 << 16):
                await say({"event": {"data": {name: base64.b64encode(data[at : at + (1 << 16)]).decode()}}})
        end = {"exited": True, **({"exitCode": running.returncode} if running.returncode else {})}
        await say({"event": {"end": end}})
        await say({}, flags=2)
        return reply


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    found = Service()
    runner = web.AppRunner(found.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    for name, value in (("E2B_API_URL", url), ("E2B_SANDBOX_URL", url), ("E2B_API_KEY", "key")):
        monkeypatch.setenv(name, value)
    yield found
    await runner.cleanup()


@pytest.fixture
async def box(service: Service, tmp_path: Path) -> AsyncIterator[BaseSandbox]:
    async with await open_sandbox(dataclasses.replace(SPEC, workdir=str(tmp_path))) as made:
        yield made


async def test_command_returns_its_output_and_exit_code(box: BaseSandbox, service: Service):
    result = await box.exec('echo "$WORD"; echo err >&2; exit 3')
    assert (result.exit_code, result.stdout, result.stderr) == (3, "x\n", "err\n")
    assert service.created[0]["templateID"] == "mine" and service.created[0]["allow_internet_access"] is False
    assert service.users[-1] == "user:"


async def test_files_and_input_are_bytes(box: BaseSandbox):
    data = bytes(range(256))
    await box.write("sub/file", data)
    assert await box.read("sub/file") == data
    assert (await box.exec("wc -c", stdin=data)).stdout.strip() == "256"


async def test_long_output_keeps_its_first_and_last_bytes(box: BaseSandbox):
    result = await box.exec("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last", max_bytes=1000)
    assert result.is_truncated and len(result.stdout) < 1100
    assert result.stdout.startswith("first") and result.stdout.endswith("last\n")


async def test_sandbox_that_dies_at_a_command_is_gone(box: BaseSandbox):
    await refuses_later(lambda: box._run(["sh", "die"], timeout_s=60), SandboxGoneError, "e2b")


async def test_service_that_does_not_answer_fails_the_command(
    box: BaseSandbox, service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("polyturn.sandbox.e2b.CONTROL_S", 0.5)
    service.answers.clear()
    await refuses_later(lambda: box.exec("true", timeout_s=60), SandboxError, "/timeout", "TimeoutError")
    service.answers.set()


async def test_closed_sandbox_is_deleted(service: Service):
    box = await open_sandbox(SPEC)
    assert await box.is_alive()
    await box.close()
    assert not service.live and not await box.is_alive()


async def test_refused_start_is_a_setup_error(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("E2B_API_KEY", "other")
    await refuses_later(lambda: open_sandbox(SPEC), SandboxSetupError, "401")


async def test_refused_start_is_reported_before_the_run(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("E2B_API_KEY", "other")
    await refuses_later(lambda: asyncio.to_thread(try_sandbox, SPEC, where="tools"), ConfigError, "401")


async def test_tried_sandbox_is_deleted(service: Service, tmp_path: Path):
    spec = dataclasses.replace(SPEC, workdir=str(tmp_path))
    result = await asyncio.to_thread(try_sandbox, spec, where="tools", command="exit 3")
    assert result.exit_code == 3 and len(service.created) == 1 and not service.live


async def test_hosted_sandbox_cannot_be_reached_by_its_process(box: BaseSandbox):
    await refuses_later(lambda: box.pid(), SandboxError, "reach_as")


@pytest.mark.parametrize(("options", "key"), [({"memory_mb": 64}, "memory_mb"), ({}, "E2B_API_KEY")])
def test_option_that_e2b_cannot_take_is_refused(options: Any, key: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=key):
        check_spec(SandboxSpec(backend="e2b", **options))
