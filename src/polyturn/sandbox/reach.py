"""Makes an address of this machine reachable from a sandbox without network.

    async with reach(box, "http://127.0.0.1:8000") as inside:       inside == "http://127.0.0.1:40123"
        await box.exec(f"curl {inside}/v1/models")

A socket listens on the sandbox's loopback device. This process accepts its connections and forwards them to the address. The
sandbox needs no program for this, and can reach no other address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from polyturn.core.errors import one_line
from polyturn.sandbox.base import BaseSandbox, SandboxError

logger = logging.getLogger(__name__)

CHUNK = 1 << 16
LISTEN_S = 30.0
"""Time limit in seconds of the program `listen.py`."""


@contextlib.asynccontextmanager
async def reach(box: BaseSandbox, origin: str) -> AsyncIterator[str]:
    """Forward an address of this machine into a sandbox; yield the origin under which the sandbox reaches it.

    Args:
        box: A sandbox on this machine.
        origin: http://HOST:PORT, as seen from this process.

    Raises:
        SandboxError: the sandbox cannot be reached from here.
    """
    namespaces = await asyncio.to_thread(_other_namespaces, await box.pid())
    if "net" not in namespaces:
        yield origin
        return
    listening = await asyncio.to_thread(_listen, await box.pid(), namespaces)
    target = urlsplit(origin)
    connections: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        task.add_done_callback(connections.discard)
        writers = [writer]
        try:
            answers, requests = await asyncio.open_connection(target.hostname, target.port)
            writers.append(requests)
            await asyncio.gather(_copy(reader, requests), _copy(answers, writer))
        except OSError as problem:  # the client sees its connection closed
            logger.debug("a connection from a sandbox failed: %s", one_line(problem))
        finally:
            for one in writers:
                one.close()

    server = await asyncio.start_server(forward, sock=listening)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _other_namespaces(pid: int) -> list[str]:
    """Return the namespaces that a process does not share with this one, the user namespace first."""
    try:
        own, other = Path("/proc/self/ns"), Path(f"/proc/{pid}/ns")
        return [name for name in ("user", "net") if os.readlink(own / name) != os.readlink(other / name)]
    except OSError as problem:
        raise SandboxError(f"the namespaces of the sandbox's process {pid} cannot be read: {problem.strerror}") from problem


def _listen(pid: int, namespaces: list[str]) -> socket.socket:
    """Return a socket that listens on a free port of the sandbox's loopback device."""
    program = str(Path(__file__).with_name("listen.py"))
    command = [sys.executable, "-I", "-S", program, str(pid), ",".join(namespaces)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            subprocess.run(command, stdin=theirs.fileno(), capture_output=True, timeout=LISTEN_S, check=True)
        except (OSError, subprocess.SubprocessError) as problem:
            error_bytes = getattr(problem, "stderr", None) or b""
            raise SandboxError(
                f"listening in the sandbox's network failed ({error_bytes.decode().strip() or one_line(problem)}); set "
                "sandbox.network: true, and host and reach_as to an address of this machine that the sandbox can reach"
            ) from problem
        _, (descriptor, *_), _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptor)
