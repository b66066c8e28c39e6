"""E2BSandbox: a sandbox of a hosted service with E2B's protocol.

    POST   API/sandboxes                        starts a sandbox that ends by itself after a time, even if the run is killed
    POST   SANDBOX/process.Process/Start        runs a command and streams its output (the Connect protocol, in JSON)
    POST   SANDBOX/files?path=…                 writes the standard input of a command
    DELETE API/sandboxes/ID                     removes the sandbox

The environment variables are those of E2B's own client: E2B_API_KEY, and E2B_DOMAIN or E2B_API_URL and E2B_SANDBOX_URL.
E2B's client would keep all output as text; this class keeps a bounded part as bytes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import aiohttp

from polyturn.core.errors import ConfigError, one_line
from polyturn.sandbox.base import (
    MAX_OUTPUT,
    SLACK_S,
    BaseSandbox,
    SandboxError,
    SandboxGoneError,
    SandboxSetupError,
    SandboxSpec,
)
from polyturn.sandbox.command import Bounded, ProgramEnd

PORT = 49983
"""Port of the program in the sandbox that starts commands."""
LIFE_S = 900
"""Seconds that the service keeps a sandbox after the deadline of its last command."""
CONTROL_S = 120.0
"""Seconds for a request to the service, other than starting a sandbox or running a command."""
USER = "user"
"""The default user of E2B's templates."""
_OF_TEMPLATE = ("build", "cpus", "memory_mb", "processes", "disk_mb", "run_args", "build_args")
_PLAIN = SandboxSpec()


def check_e2b(spec: SandboxSpec) -> None:
    """Check that a spec sets no option that the template determines, and that there is a key.

    Raises:
        ConfigError: the spec sets such an option, or the key is missing.
    """
    for name in _OF_TEMPLATE:
        if (value := getattr(spec, name)) != getattr(_PLAIN, name):
            raise ConfigError(f"the sandbox's {name} is {value!r}, but e2b's template determines it: remove {name}")
    if not os.environ.get("E2B_API_KEY"):
        raise ConfigError("the e2b sandbox needs a key; set the variable E2B_API_KEY")


class E2BSandbox(BaseSandbox):
    """A sandbox of a hosted service."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._http: aiohttp.ClientSession | None = None
        self._id: str | None = None

    async def is_alive(self) -> bool:
        """Return whether the service lists the sandbox."""
        try:
            return self._closing is None and bool(await self._control("GET", f"/sandboxes/{self._id}"))
        except SandboxError:
            return False

    async def kill_all(self) -> None:
        """Kill every process of the sandbox's user; root's processes belong to the service."""
        await self._run(["sh", "-c", "kill -9 -1"], cwd="/", timeout_s=SLACK_S)

    async def _begin(self) -> None:
        check_e2b(self.spec)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        body = {
            "templateID": self.spec.image or "base",
            "timeout": LIFE_S,
            "secure": True,
            "allow_internet_access": self.spec.network,
            "metadata": {"polyturn": str(os.getpid())},
        }
        try:
            created = await self._control("POST", "/sandboxes", body, timeout_s=self.spec.start_timeout_s)
        except SandboxError as problem:
            raise SandboxSetupError(str(problem)) from problem
        self._id = created["sandboxID"]
        domain = created.get("domain") or os.environ.get("E2B_DOMAIN", "e2b.app")
        self._origin = os.environ.get("E2B_SANDBOX_URL", f"https://{PORT}-{self._id}.{domain}")
        token = created.get("envdAccessToken") or ""
        self._headers = {"E2b-Sandbox-Id": created["sandboxID"], "E2b-Sandbox-Port": str(PORT), "X-Access-Token": token}

    async def _end(self) -> None:
        try:
            if self._id is not None:
                await self._control("DELETE", f"/sandboxes/{self._id}")
        finally:
            if self._http is not None:
                await self._http.close()

    async def _control(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Send a request to the service and return its answer; {} if that is empty.

        Raises:
            SandboxError: the service refuses the request, does not answer in time, or cannot be reached.
        """
        assert self._http is not None
        domain = os.environ.get("E2B_DOMAIN", "e2b.app")
        url = os.environ.get("E2B_API_URL", f"https://api.{domain}") + path
        try:
            headers, limit = {"X-API-KEY": os.environ["E2B_API_KEY"]}, aiohttp.ClientTimeout(total=timeout_s or CONTROL_S)
            async with self._http.request(method, url, json=body, headers=headers, timeout=limit) as reply:
                text = await reply.text()
                if reply.status >= 400:
                    raise SandboxError(f"the e2b service answers {method} {path} with {reply.status}: {text[:300]}")
                return json.loads(text or "{}")
        except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
            raise SandboxError(f"the e2b service cannot be used at {url}: {one_line(problem)}") from problem

    async def _run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        max_bytes: int = MAX_OUTPUT,
    ) -> ProgramEnd:
        where = str(PurePosixPath(self.workdir, self.workdir if cwd is None else cwd)) if cwd != "" else ""
        output = {"stdout": Bounded(max_bytes), "stderr": Bounded(max_bytes)}
        code, is_late = 0, False
        try:
            await self._control("POST", f"/sandboxes/{self._id}/timeout", {"timeout": int(timeout_s) + LIFE_S})
            async with asyncio.timeout(timeout_s) as limit:
                headers = self._as(user)
                argv = await self._fed(argv, stdin, headers) if stdin else argv
                process = {"cmd": argv[0], "args": list(argv[1:]), "envs": {**self.spec.env, **(env or {})}, "cwd": where}
                async for event in self._events({"process": process, "stdin": False}, headers):
                    for name, data in event.get("data", {}).items():
                        output[name].add(base64.b64decode(data))
                    code = int(event.get("end", {}).get("exitCode", code))
        except TimeoutError:
            if not limit.expired():
                raise
            code, is_late = 124, True
        except (aiohttp.ClientError, SandboxError, asyncio.IncompleteReadError) as problem:
            kind = SandboxError if await self.is_alive() else SandboxGoneError
            raise kind(f"the e2b sandbox failed at a command: {one_line(problem)}") from problem
        return ProgramEnd(
            exit_code=code,
            stdout=output["stdout"].value(),
            stderr=output["stderr"].value(),
            is_late=is_late,
            is_truncated=any(one.num_left_out for one in output.values()),
        )

    def _as(self, user: str | None) -> dict[str, str]:
        name = user or self.spec.user or USER
        return {**self._headers, "Authorization": f"Basic {base64.b64encode(f'{name}:'.encode()).decode()}"}

    async def _fed(self, argv: Sequence[str], stdin: bytes, headers: Mapping[str, str]) -> list[str]:
        """Write a command's standard input to a file, and return the command that reads that file."""
        assert self._http is not None
        path = f"/tmp/polyturn-{uuid.uuid4().hex}"
        form = aiohttp.FormData()
        form.add_field("file", stdin, filename=path)
        async with self._http.post(f"{self._origin}/files", params={"path": path}, data=form, headers=headers) as reply:
            reply.raise_for_status()
        return ["sh", "-c", 'exec < "$1"; rm -f "$1"; shift; exec "$@"', "sh", path, *argv]

    async def _events(self, body: Any, headers: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """Start a command and yield its events: start, data, end."""
        assert self._http is not None
        data = json.dumps(body).encode()
        json_type = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        message = b"\0" + len(data).to_bytes(4, "big") + data
        url = f"{self._origin}/process.Process/Start"
        async with self._http.post(url, data=message, headers={**headers, **json_type}) as reply:
            reply.raise_for_status()
            while True:
                flags, *size = await reply.content.readexactly(5)
                frame = json.loads(await reply.content.readexactly(int.from_bytes(bytes(size), "big")))
                if flags & 2:  # the last event
                    if "error" in frame:
                        raise SandboxError(str(frame["error"].get("message", frame["error"])))
                    return
                yield frame.get("event", {})
