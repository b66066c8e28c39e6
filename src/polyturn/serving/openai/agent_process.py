"""An agent as a command: one process for each episode, which finds its model in the environment.

    OPENAI_BASE_URL, OPENAI_API_KEY          what openai's clients read
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY    what anthropic's clients read
    standard input                           the task, one JSON object; nothing for an agent of `agents.py`
    POLYTURN_REWARD_FD                       the number of a file descriptor with the reward key, where rewards are posted

Of the trainer's own environment it has a few names (`core.secrets.PASSED_ON`) and none of its secrets. Exit code 0 is an
agent that has finished. It posts its reward to `$OPENAI_BASE_URL/reward`, or the run's reward functions score the episode.
The key for that is not a variable, because programs that the agent starts for the model inherit those: it can be read once,
from a pipe. However the episode ends, the process and its session are gone behind it; a program that it started and that
left the session may live on, and holds up nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from polyturn.core.errors import SchedulerError
from polyturn.core.secrets import passed_on
from polyturn.core.serde import to_json
from polyturn.core.task import Task
from polyturn.infra.process import POLL_S, dies_with_parent, end_async
from polyturn.serving.openai.endpoint import Address

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Between the request to end and the end by force."""
LAST_WORDS_S = 1.0
"""Seconds for which its output is read after its end, if another process still holds its pipe."""
TAIL_BYTES = 4000


async def run_command(
    command: Sequence[str],
    *,
    address: Address,
    task: Task,
    env: Mapping[str, Any],
    cwd: Path | None,
    id: str,
    stdin: bytes | None = None,
) -> None:
    """Run an agent's process to its end; it is ended if the call is cancelled.

    Args:
        command: The program and its arguments.
        address: Of its model.
        task: Of the episode.
        env: Variables beside those of the address.
        cwd: The folder that it runs in.
        id: Of the episode.
        stdin: All that it reads; None is the task as JSON.

    Raises:
        SchedulerError: it cannot be started, or fails; with the last of what it said.
    """
    variables = address_variables(address, id)
    inherited: tuple[int, ...] = ()
    if address.reward_key is not None:
        inherited = (_readable_once(address.reward_key.encode()),)
        variables["POLYTURN_REWARD_FD"] = str(inherited[0])
    environ = {**passed_on(), **{k: str(v) for k, v in env.items()}, **variables}
    output = bytearray()
    async with _tail(output) as (writes, is_read):
        try:
            process = await asyncio.create_subprocess_exec(
                *dies_with_parent(command, env=environ, cwd=cwd, number=signal.SIGKILL),
                stdin=asyncio.subprocess.PIPE,
                stdout=writes,
                stderr=writes,
                cwd=cwd,
                env=environ,
                pass_fds=inherited,
                start_new_session=True,
            )
        except OSError as problem:
            raise SchedulerError(f"the agent's command {command[0]!r} cannot be started: {problem.strerror}") from problem
        finally:
            for fd in (writes, *inherited):
                os.close(fd)
        assert process.stdin is not None
        telling = asyncio.create_task(_tell(process.stdin, task_line(task) if stdin is None else stdin))
        try:
            while process.returncode is None:  # noqa: ASYNC110  # `process.wait` waits for other holders of its pipes, too
                await asyncio.sleep(POLL_S)
        finally:
            telling.cancel()
            await asyncio.shield(end_async(process, grace_s=GRACE_S))
        await asyncio.wait([is_read], timeout=LAST_WORDS_S)
    assert process.returncode is not None
    check_exit(command[0], process.returncode, output.decode(errors="replace"))


def address_variables(address: Address, id: str) -> dict[str, str]:
    """Return the variables in which an agent finds its model."""
    return {
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_KEY": address.api_key,
        "ANTHROPIC_BASE_URL": address.anthropic_base_url,
        "ANTHROPIC_API_KEY": address.api_key,
        "POLYTURN_EPISODE": id,
    }


def task_line(task: Task) -> bytes:
    """Return a task as the line of JSON that a command reads."""
    return json.dumps(to_json(task)).encode() + b"\n"


def check_exit(program: str, code: int, output: str) -> None:
    """Check that an agent succeeded.

    Raises:
        SchedulerError: it failed; with the last lines of its output.
    """
    if code != 0:
        last = " / ".join(output.strip().splitlines()[-3:])[-TAIL_BYTES:]
        raise SchedulerError(f"the agent's command {program!r} ended with exit code {code}: {last or 'it said nothing'}")


def _readable_once(text: bytes) -> int:
    """Return a file descriptor from which the first reader gets `text`, and later ones nothing."""
    readable, writable = os.pipe()
    os.write(writable, text)
    os.close(writable)
    return readable


async def _tell(stdin: asyncio.StreamWriter, text: bytes) -> None:
    try:
        stdin.write(text)
        await stdin.drain()
        stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        logger.debug("an agent's process did not read its task")


@asynccontextmanager
async def _tail(output: bytearray) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Keep in `output` the last of what is written to a pipe.

    Gives its writable end, which the caller closes, and a task that ends once no process holds it. Behind the context
    nothing is read, even if another process still holds it.
    """
    reads, writes = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reads, "rb", buffering=0)
    )

    async def keep() -> None:
        while piece := await reader.read(1 << 16):
            output[:] = (output + piece)[-TAIL_BYTES:]

    keeping = asyncio.create_task(keep())
    try:
        yield writes, keeping
    finally:
        keeping.cancel()
        transport.close()
