"""`warm`: sandboxes are started before they are needed, handed out once, and closed when nothing needs them any more."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from polyturn.sandbox import BaseSandbox, SandboxSetupError, SandboxSpec, open_sandbox
from polyturn.sandbox.warm import WarmSandboxes
from support.refusals import refuses_later
from support.sandboxes import StandIn, needs_bubblewrap, processes_with, stand_in, wait_until

WORD = "polyturn-warm-31340"
SPEC = SandboxSpec(warm=2, run_args=("--setenv", "WORD", WORD))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(monkeypatch, tmp_path, "docker")


def test_next_sandboxes_start_before_they_are_asked_for(engine: StandIn):
    async def use() -> None:
        async with await open_sandbox(SandboxSpec(backend="docker", image="x", warm=2)):
            while len(engine.calls("run")) < 3:  # noqa: ASYNC110 (programs record their calls)
                await asyncio.sleep(0.01)

    asyncio.run(use())
    assert len(engine.calls("rm")) == 3, "those that were not handed out are closed with the event loop"


def test_sandbox_that_does_not_start_fails_its_own_episode(engine: StandIn):
    async def use() -> None:
        spec = SandboxSpec(backend="docker", image="x", warm=1)
        engine.set("no-run")
        await refuses_later(lambda: open_sandbox(spec), SandboxSetupError, "no such image")
        (engine.folder / "no-run").unlink()
        with contextlib.suppress(SandboxSetupError):  # the one that had begun to start
            await (await open_sandbox(spec)).close()
        await (await open_sandbox(spec)).close()

    asyncio.run(use())


@needs_bubblewrap
def test_every_episode_has_a_sandbox_of_its_own():
    async def use() -> set[str]:
        boxes = [await open_sandbox(SPEC) for _ in range(3)]
        try:
            for box in boxes:
                await box.write("own", b"x")
                assert (await box.exec("ls")).stdout == "own\n"
            return {str(await box.pid()) for box in boxes}
        finally:
            for box in boxes:
                await box.close()

    assert len(asyncio.run(use())) == 3
    wait_until(lambda: not processes_with(WORD))


class Box(BaseSandbox):
    """A sandbox of nothing."""

    is_running = True

    async def is_alive(self) -> bool:
        return self.is_running

    async def _end(self) -> None:
        self.is_running = False


async def test_warm_sandbox_that_died_is_not_handed_out():
    made: list[Box] = []

    async def start(spec: SandboxSpec) -> BaseSandbox:
        made.append(Box(spec))
        return made[-1]

    warm = WarmSandboxes(SandboxSpec(warm=1), start)
    assert await warm.take() is made[0]
    while len(made) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    made[1].is_running = False
    assert await warm.take() is made[2]


_PROGRAM = f"""
import asyncio
import contextlib
from polyturn.sandbox import SandboxSpec, open_sandbox

async def main():
    box = await open_sandbox(SandboxSpec(warm=2, run_args=("--setenv", "WORD", "{WORD}")))
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.kill
@needs_bubblewrap
def test_killed_run_leaves_no_warm_sandbox():
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "ready\n"
        wait_until(lambda: len(processes_with(WORD)) >= 3)
        run.kill()
    wait_until(lambda: not processes_with(WORD))
