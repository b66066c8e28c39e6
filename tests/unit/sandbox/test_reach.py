"""`reach`: a sandbox without network reaches only the given address of this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from polyturn.sandbox import SandboxError, SandboxSpec, open_sandbox
from polyturn.sandbox.reach import reach
from support.sandboxes import needs_bubblewrap

pytestmark = needs_bubblewrap

ASK = "import sys, urllib.request; print(len(urllib.request.urlopen(sys.argv[1], sys.argv[2].encode() * 100000).read()))"


class Echo(BaseHTTPRequestHandler):
    """Answers a request with its own body."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values: object) -> None:
        pass


@pytest.fixture
def origin() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


async def test_box_without_network_reaches_the_one_address(origin: str):
    async with await open_sandbox(SandboxSpec()) as box:
        async with reach(box, origin) as inside:
            found = await box.exec(["python3", "-c", ASK, inside, "word"])
            assert (found.stdout, found.stderr) == ("400000\n", "")
            other = await box.exec(["python3", "-c", ASK, origin, "word"])
        behind = await box.exec(["python3", "-c", ASK, inside, "word"])
    assert "refused" in other.stderr and "refused" in behind.stderr


async def test_box_with_network_keeps_the_address(origin: str):
    async with await open_sandbox(SandboxSpec(network=True)) as box, reach(box, origin) as inside:
        assert inside == origin


async def test_box_that_is_gone_cannot_be_reached(origin: str):
    box = await open_sandbox(SandboxSpec())
    await box.close()
    with pytest.raises(SandboxError):
        async with reach(box, origin):
            pass
