"""verl.tools.sandbox_fusion_tools: the sandbox tool, with the pool in which recipes run their own `execute`.

    result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)

The pool uses threads of this process, at most the tool's `max_concurrency`. An error of a function is raised; verl's pool
logs it and returns None.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar

from polyturn.core.errors import ConfigError, RewardError
from polyturn.rewards.code import Sandbox
from polyturn.tools import sandbox
from polyturn.tools.http_service import ServiceReply
from polyturn.tools.schema import ToolResponse

T = TypeVar("T")


class PoolMode(Enum):
    """The kind of a pool's workers."""

    ThreadMode = 1
    ProcessMode = 2


class ExecutionPool:
    """Runs functions in at most `num_workers` threads."""

    def __init__(self, num_workers: int) -> None:
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="verl-pool")
        self.execute = SimpleNamespace(remote=self._execute)
        self.ping = SimpleNamespace(remote=functools.partial(self._execute, bool, True))

    def _execute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(function, *args, **kwargs))


def init_execution_pool(
    num_workers: int, enable_global_rate_limit: bool = True, rate_limit: int = 10, mode: PoolMode = PoolMode.ThreadMode
) -> ExecutionPool:
    """Return a pool of threads.

    Raises:
        NotImplementedError: the mode is not `ThreadMode`.
    """
    if mode is not PoolMode.ThreadMode:
        raise NotImplementedError(f"a pool runs its functions in threads; {mode} is not offered")
    return ExecutionPool(min(num_workers, rate_limit) if enable_global_rate_limit else num_workers)


class VerlSandboxFusionTool(sandbox.SandboxFusionTool):
    """The native tool with a pool of threads, for subclasses whose `execute` runs `execute_code` in the pool."""

    @functools.cached_property
    def execution_pool(self) -> ExecutionPool:
        """The pool in which subclasses run their functions."""
        return ExecutionPool(self.max_concurrency)

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """Run code and return the text for the model; called in a thread."""
        fusion = Sandbox(url=self.sandbox_fusion_url, memory_limit_mb=self.memory_limit_mb, timeout_s=timeout)
        try:
            reply = ServiceReply(status="ok", data=fusion.run(code, language=language))
        except (RewardError, ConfigError) as problem:
            reply = ServiceReply(status="unreachable", error=str(problem))
        return ToolResponse(text=sandbox.read_reply(reply, timeout_s=timeout)[1])


SandboxFusionTool = VerlSandboxFusionTool  # the name in users' imports
