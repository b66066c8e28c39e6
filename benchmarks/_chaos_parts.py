"""The parts of the chaos run: tools with faults, an MCP server, and inference servers that can be killed.

The script of the model (`plan`) sets the fault of each call, so that a run with faults and a run without do the same work:
without faults, the tool takes the time that the fault would have taken, and answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyturn.core.errors import EngineError, EngineLostError, ToolError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.protocols import EngineCapabilities
from polyturn.infra.deadline import GRACE_S
from polyturn.testing.episodes import turn_ids
from polyturn.tools.base import BaseTool
from polyturn.tools.schema import ToolResponse

HUGE = 100_000_000
FAULTS = ("hang", "crash", "garbage", "huge")
SERVER = Path(__file__).with_name("_chaos_mcp_server.py")

ENGINE = """
import heapq, os, select, sys, time
heap, rest = [], b""
while True:
    now = time.monotonic()
    while heap and heap[0][0] <= now:
        os.write(1, heapq.heappop(heap)[1] + b"\\n")
    ready = select.select([0], [], [], max(0.0, heap[0][0] - now) if heap else None)[0]
    if ready:
        data = os.read(0, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\\n")
        for line in lines:
            number, seconds = line.split()
            heapq.heappush(heap, (time.monotonic() + float(seconds), number))
"""
"""Code of a server that answers each line "number seconds" with the number, after that many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Settings of a chaos run."""

    episodes: int
    concurrency: int
    fault_share: float = 0.2
    """Share of the tool calls that have a fault."""
    mcp_share: float = 0.1
    """Share of the episodes that have an MCP session."""
    drop_share: float = 0.05
    """Share of the MCP sessions that are dropped."""
    bad_call_share: float = 0.05
    """Share of the calls with an error of the model: no JSON, an unknown tool, wrong arguments."""
    engine_s: tuple[float, float] = (0.2, 0.6)
    tool_s: tuple[float, float] = (0.02, 0.15)
    deadline_s: float = 1.0
    """Deadline of a tool call, in seconds."""
    replicas: int = 3
    kill_every_s: float = 60.0
    is_hostile: bool = True
    """Whether the faults of the plan happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The text of the model in one turn, and the seconds to sample it."""

    text: str
    seconds: float


def plan(world: World, number: int) -> list[Turn]:
    """Return the turns of one episode, the same in every run."""
    rng = random.Random(f"chaos {number}")
    has_mcp = rng.random() < world.mcp_share
    drops_at = rng.randrange(2) if has_mcp and rng.random() < world.drop_share else -1
    turns = []
    for at in range(rng.randint(2, 4) if has_mcp else rng.randint(1, 4)):
        arguments: dict[str, Any] = {"seconds": round(rng.uniform(*world.tool_s), 4), "fault": ""}
        if rng.random() < world.fault_share:
            arguments["fault"] = rng.choice(FAULTS)
            arguments["seed"] = rng.randrange(1000)
        name = rng.choice(("waits", "waits", "blocks"))
        if has_mcp and at < 2:
            name, arguments = "work", {"seconds": arguments["seconds"], "drop": at == drops_at}
        call = json.dumps({"name": name, "arguments": arguments})
        if rng.random() < world.bad_call_share and name != "work":
            call = rng.choice(
                ('{"name": "waits", "argu', '{"name": "wait", "arguments": {}}', '{"name": "waits", "arguments": {}}')
            )
        turns.append(Turn(text=f"<tool_call>\n{call}\n</tool_call>", seconds=round(rng.uniform(*world.engine_s), 4)))
    return [*turns, Turn(text="#### 4", seconds=round(rng.uniform(*world.engine_s), 4))]


class _Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("this cannot be printed")


def _nested() -> Any:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def garbage(seed: int) -> Any:
    """Return a value that a tool must not return."""
    kinds = (
        lambda: (1, 2, 3, 4, 5),
        lambda: _Unprintable(),
        lambda: "\ud800\x00<|im_end|>\x1b[31m\u202e",
        lambda: b"\xff\xfe\x00",
        lambda: ("fine", None, ["no", "mapping"]),
        lambda: ToolResponse(image=["no/such/file.png"]),
        lambda: {"image": b"not an image"},
        lambda: {1: {2, 3}, "x": float("nan")},
        lambda: _nested(),
        lambda: (i for i in range(3)),
        lambda: ("fine", float("nan")),  # an invalid reward: the trajectory fails with a named error
    )
    return kinds[seed % len(kinds)]()


def huge(seed: int) -> Any:
    """Return a result that is far too large."""
    kinds = (lambda: "x" * HUGE, lambda: bytes(HUGE), lambda: {"rows": ["y" * HUGE]}, lambda: "<|im_start|>" * (HUGE // 12))
    return kinds[seed % len(kinds)]()


MADE = {"garbage": garbage, "huge": huge}
"""Results that the tool also returns in a run without faults."""

CRASHES: tuple[type[BaseException], ...] = (
    ValueError,
    KeyError,
    AssertionError,
    ConnectionResetError,
    BrokenPipeError,
    MemoryError,
    RecursionError,
    StopIteration,
    SystemExit,
    GeneratorExit,
    asyncio.CancelledError,
    ToolError,
)


def crash(seed: int) -> None:
    """Raise an exception."""
    raise CRASHES[seed % len(CRASHES)]("no")


SECONDS = {"seconds": {"type": "number"}, "fault": {"type": "string"}, "seed": {"type": "integer"}}


class Chaotic(BaseTool):
    """A tool whose instances are counted. `execute` is async here and synchronous in `Blocks`."""

    NAME = "waits"

    def __init__(self, world: World) -> None:
        parameters = {"type": "object", "properties": SECONDS, "required": ["seconds", "fault"]}
        function = {"name": self.NAME, "description": "Take time.", "parameters": parameters}
        super().__init__({}, {"type": "function", "function": function})
        self.world = world
        self.live: set[str] = set()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.live.add(instance_id)
        return instance_id

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.live.remove(instance_id)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:
        return None

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        fault, seed = parameters["fault"], parameters.get("seed", 0)
        is_stubborn = seed % 10 == 0
        await asyncio.sleep(parameters["seconds"])
        if fault == "hang" and not self.world.is_hostile:
            await asyncio.sleep(max(0.0, self.world.deadline_s - parameters["seconds"]) + GRACE_S * is_stubborn)
        elif fault == "hang":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if not is_stubborn:
                    raise
                await asyncio.sleep(1.5 * GRACE_S)  # it ignores its cancellation
        return self.answer(fault, seed)

    def answer(self, fault: str, seed: int) -> Any:
        if fault in MADE:
            result = MADE[fault](seed)
            return result if self.world.is_hostile else "fine"
        if self.world.is_hostile and fault == "crash":
            crash(seed)
        return "fine"


class Blocks(Chaotic):
    """The same tool with a synchronous method, which runs in a thread that cannot be stopped."""

    NAME = "blocks"

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        time.sleep(parameters["seconds"])
        if parameters["fault"] == "hang":
            rest_s = max(0.0, self.world.deadline_s - parameters["seconds"])
            time.sleep(rest_s + 2 * self.world.deadline_s if self.world.is_hostile else rest_s)
        return self.answer(parameters["fault"], parameters.get("seed", 0))


class ServerProcess:
    """An inference server: a process that waits as long as the plan says and can be killed. The plan has its texts."""

    def __init__(self, world: World, *, name: str) -> None:
        self.name = name
        self.num_restarts = 0
        self.lost_s = 0.0
        """Total seconds that lost requests had run."""
        self._world = world
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[asyncio.Future[None], float]] = {}
        self._count = 0
        self._version = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(seeded=True, logprobs=True)

    async def start(self) -> None:
        """Start the process."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-SE", "-c", ENGINE, stdin=pipe, stdout=pipe)
        self._reader = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            future, _ = self._waiting.pop(int(line), (None, 0.0))
            if future is not None and not future.done():
                future.set_result(None)
        now = time.monotonic()
        for future, sent_at in self._waiting.values():
            if not future.done():
                self.lost_s += now - sent_at
                future.set_exception(EngineLostError(f"{self.name} was killed"))
        self._waiting.clear()
        await process.wait()

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def generate(self, request: GenerateRequest) -> Completion:
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None or process.stdin.is_closing():
            raise EngineLostError(f"{self.name} cannot be reached")
        episode, _, turn = request.request_id.rpartition("/")
        if not episode.startswith("g"):  # the pool checks whether the server works again
            turn_plan = Turn(text="a", seconds=0.01)
        else:
            turn_plan = plan(self._world, int(episode[1:].partition("/")[0]))[int(turn)]
        self._count += 1
        number, future = self._count, asyncio.get_running_loop().create_future()
        self._waiting[number] = future, time.monotonic()
        try:
            process.stdin.write(b"%d %f\n" % (number, turn_plan.seconds))
            await future
        finally:
            self._waiting.pop(number, None)
        ids = turn_ids(turn_plan.text)[: request.sampling.max_tokens]
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Completion(
            token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, policy_versions=((0, self._version),)
        )

    async def revive(self) -> None:
        """Restart the process if it is dead."""
        if self._process is not None and self._process.returncode is None:
            return
        if self._reader is not None:
            await self._reader
        self.num_restarts += 1
        await self.start()

    async def abort(self, request_id: str) -> None:
        raise EngineError("nothing is aborted here")

    async def end_session(self, session_id: str) -> None:
        return None

    async def update_weights(self, version: int, *, weights: Any = None) -> None:
        self._version = version

    async def close(self) -> None:
        self.kill()
        if self._reader is not None:
            await self._reader
