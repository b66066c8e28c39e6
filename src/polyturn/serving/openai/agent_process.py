"""Runs an agent as a command: one process per episode, which finds its model through environment variables.

    OPENAI_BASE_URL, OPENAI_API_KEY          the names that openai's clients read
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY    the names that anthropic's clients read
    standard input                           the task, one JSON object; nothing for an agent of `agents.py`
    POLYTURN_REWARD_FD                       the number of a file descriptor with the reward key, if rewards are posted

The process inherits a few of the trainer's variables (`core.secrets.PASSED_ON`) and no secrets. Exit code 0 means success.
The agent posts its reward to `$OPENAI_BASE_URL/reward`, or the run's reward functions score the episode. The reward key is
not an environment variable, because programs that the agent starts for the model would inherit it; it can be read once,
from a pipe. When the episode ends, the process and its session are killed. A child process that left the session may
survive, but the episode does not wait for it.
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
"""Seconds between SIGTERM and SIGKILL."""
LAST_WORDS_S = 1.0
"""Seconds to keep reading the output after the process has ended, if another process still holds its pipe."""
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
    """Run an agent's process to its end; kill it if the call is cancelled.

    Args:
        command: The program and its arguments.
        address: The address of the model.
        task: The episode's task.
        env: Environment variables in addition to the address and key of the model.
        cwd: The working folder.
        id: The episode's id.
        stdin: The whole standard input; None sends the task as JSON.

    Raises:
        SchedulerError: the process cannot be started, or fails; the message has the end of its output.
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
        writing = asyncio.create_task(_write_stdin(process.stdin, task_line(task) if stdin is None else stdin))
        try:
            while process.returncode is None:  # noqa: ASYNC110  # `process.wait` waits for other holders of its pipes, too
                await asyncio.sleep(POLL_S)
        finally:
            writing.cancel()
            await asyncio.shield(end_async(process, grace_s=GRACE_S))
        await asyncio.wait([is_read], timeout=LAST_WORDS_S)
    assert process.returncode is not None
    check_exit(command[0], process.returncode, output.decode(errors="replace"))


def address_variables(address: Address, id: str) -> dict[str, str]:
    """Return the environment variables with an agent's model address."""
    return {
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_KEY": address.api_key,
        "ANTHROPIC_BASE_URL": address.anthropic_base_url,
        "ANTHROPIC_API_KEY": address.api_key,
        "POLYTURN_EPISODE": id,
    }


def task_line(task: Task) -> bytes:
    """Return a task as one line of JSON, as a command reads it."""
    return json.dumps(to_json(task)).encode() + b"\n"


def check_exit(program: str, code: int, output: str) -> None:
    """Check an agent's exit code.

    Raises:
        SchedulerError: the code is not 0; the message has the last lines of the output.
    """
    if code != 0:
        last = " / ".join(output.strip().splitlines()[-3:])[-TAIL_BYTES:]
        raise SchedulerError(f"the agent's command {program!r} ended with exit code {code}: {last or 'no output'}")


def _readable_once(text: bytes) -> int:
    """Return the readable end of a pipe that holds `text`: the first reader gets it, later ones get nothing."""
    readable, writable = os.pipe()
    os.write(writable, text)
    os.close(writable)
    return readable


async def _write_stdin(stdin: asyncio.StreamWriter, text: bytes) -> None:
    try:
        stdin.write(text)
        await stdin.drain()
        stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        logger.debug("an agent's process did not read its task")


@asynccontextmanager
async def _tail(output: bytearray) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Collect the last `TAIL_BYTES` written to a pipe in `output`.

    Yields the writable end, which the caller closes, and a task that ends once no process holds that end. Reading stops
    when the context closes, even if another process still holds the pipe.
    """
    reads, writes = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reads, "rb", buffering=0)
    )

    async def collect() -> None:
        while piece := await reader.read(1 << 16):
            output[:] = (output + piece)[-TAIL_BYTES:]

    collecting = asyncio.create_task(collect())
    try:
        yield writes, collecting
    finally:
        collecting.cancel()
        transport.close()
