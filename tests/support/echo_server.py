"""A server that costs nothing, and the engine that asks it: it answers one token, and says whose weights it was given.

It is started, killed and given checkpoints like a real one, so that what happens around servers is tested in seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.base import ServerPlaces
from polyturn.engines.dialect import HttpCall, Memory, ServerFacts
from polyturn.engines.launcher import LaunchSpec
from polyturn.engines.options import ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.supervisor import ServerSupervisor

SERVE = """
import http.server, json, os, pathlib, sys, time
held = {"tag": "", "bytes": 0}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(held)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/load":
            held.update(bytes=(pathlib.Path(body["folder"]) / "model.safetensors").stat().st_size)
        if self.path == "/rename":
            held.update(tag=body["tag"])
        if self.path == "/generate":
            time.sleep(0.05)
        self.reply({"token": 7, "pid": os.getpid(), **held})
    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *a): pass
print("echo serves", sys.argv[1:], flush=True)
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


class EchoEngine(RemoteEngine):
    """A client of the server above; a completion's info says which process answered, and how large its weights are."""

    name = "echo"

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(logprobs=True, max_context=self._context)

    async def _describe(self) -> ServerFacts:
        return ServerFacts(seeded=True, max_context=64)

    async def _look(self) -> None:
        await self._link.get("/health", timeout_s=self._health_s)

    def _call(self, request: GenerateRequest, wire_id: str) -> HttpCall:
        return HttpCall("/generate", {"id": wire_id})

    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        return Completion(
            token_ids=[reply["token"]],
            logprobs=[-1.0],
            finish_reason=FinishReason.STOP,
            policy_versions=((0, self.version_of(reply["tag"])),),
            info={"pid": float(reply["pid"]), "bytes": float(reply["bytes"])},
        )

    async def _abort(self, wire_id: str) -> None:
        return

    async def _pause(self) -> None:
        return

    async def load_folder(self, folder: Path) -> None:
        """Load a checkpoint."""
        await self._post("/load", {"folder": str(folder)})

    async def _loaded(self) -> None:
        return

    async def _rename(self, tag: str) -> None:
        await self._post("/rename", {"tag": tag})

    async def _named(self) -> str:
        return str((await self._link.get("/named"))["tag"])

    async def _forget(self) -> None:
        return

    async def _resume(self) -> None:
        return

    async def _sleep(self) -> None:
        await self._post("/sleep", {})

    async def _wake(self, memory: Memory) -> None:
        await self._post("/wake", {"memory": memory})


async def echo_pool(places: ServerPlaces) -> EnginePool:
    """Make a pool of such servers, and let all come up."""
    spec = LaunchSpec(command=(sys.executable, "-c", SERVE, "{host}", "{port}"), stop_timeout_s=5)
    engines = [
        EchoEngine(
            "",
            ServedModel(vocab_size=10),
            options=ServerOptions(kind="vllm", health_s=5),
            supervisor=ServerSupervisor(spec, start=places.starter(number)),
        )
        for number in range(places.count)
    ]
    pool = EnginePool(engines, slots=8, patience_s=120, files=places.store(None))
    await pool.update_weights(0)
    return pool


async def missing_server(places: ServerPlaces) -> EnginePool:
    """Start a server whose interpreter no node has."""
    await places.starter(0)(LaunchSpec(command=("/no/such/python", "-m", "x")))
    raise AssertionError("it started")
