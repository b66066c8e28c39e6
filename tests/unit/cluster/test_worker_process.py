"""A worker's process ends with its controller, also where a tool of the worker never returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyturn.infra.process import session_of

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch

CONTROLLER = """
import asyncio, os, subprocess, sys, time
from types import SimpleNamespace
from polyturn.cluster.worker_pool import travelling
from polyturn.cluster.worker_process import ProcessWorker

def holds_a_thread():
    return asyncio.to_thread(time.sleep, 1000)

async def holds_the_loop():
    time.sleep(1000)

hold, said = {"thread": holds_a_thread, "loop": holds_the_loop}[sys.argv[1]], sys.argv[2]

class Pool:
    async def run_one(self, spec, *, live):
        subprocess.Popen(["sleep", "1000"])
        with open(said + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(said + ".part", said)
        await hold()

async def main():
    engine = SimpleNamespace(generate=None, abort=None, end_session=None, capabilities=None)
    worker = ProcessWorker("one", travelling(lambda journal, engine: Pool()), engine)
    await worker.call("run", SimpleNamespace(id="group"), None, None)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("held", ["thread", "loop"])
def test_worker_with_a_hanging_tool_ends_with_its_controller(held: str, tmp_path: Path) -> None:
    said = tmp_path / "worker"
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, held, str(said)])
    try:
        while not said.exists():
            assert controller.poll() is None
            time.sleep(0.05)
    finally:
        controller.kill()
        controller.wait()
    worker = int(said.read_text())
    deadline = time.monotonic() + 120
    while (left := session_of(worker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "neither the worker nor what its tool started"
