"""`max_alive`: the number of sandboxes that live at once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from polyturn.infra.deadline import Stretch
from polyturn.sandbox import EpisodeSandboxes, SandboxSetupError, SandboxSpec, open_sandbox
from support.sandboxes import StandIn, stand_in


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(monkeypatch, tmp_path, "podman")


def spec_of(engine: StandIn) -> SandboxSpec:
    return SandboxSpec(backend="podman", image="i", workdir=str(engine.folder / "work"), max_alive=1)


async def test_further_sandbox_waits_until_one_is_closed(engine: StandIn):
    first = await open_sandbox(spec_of(engine))
    opening = asyncio.create_task(open_sandbox(spec_of(engine)))
    await asyncio.sleep(0)
    await first.close()
    await (await opening).close()
    calls = [json.loads(line)[0] for line in (engine.folder / "calls").read_text().splitlines()]
    assert [name for name in calls if name in ("run", "rm")] == ["run", "rm", "run", "rm"]


async def test_sandbox_that_does_not_start_keeps_no_room(engine: StandIn):
    engine.set("no-run")
    for _ in range(2):
        with pytest.raises(SandboxSetupError):
            await open_sandbox(spec_of(engine))


async def test_waiting_for_a_sandbox_does_not_count_for_a_call(engine: StandIn):
    first, boxes, clock = await open_sandbox(spec_of(engine)), EpisodeSandboxes(), [0.0]
    boxes.join("e", spec_of(engine))
    stretch = Stretch(now=lambda: clock[0])
    with stretch.running():
        opening = asyncio.create_task(boxes.of("e"))
    await asyncio.sleep(0)
    clock[0] = 1000.0
    assert stretch.seconds == 0.0
    await first.close()
    await opening
    clock[0] += 1.0
    assert stretch.seconds == 1.0
    await boxes.leave("e")
