"""verl's `verl.utils.reward_score.sandbox_fusion`: runs programs on tests in a SandboxFusion service.

verl returns the score and the results of the tests. Here the results are an empty list: failing tests lower the score, and
an unavailable sandbox raises an exception.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from polyturn.rewards import code


def compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: AbstractContextManager[Any] | None,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[Any]]:
    """Return (score, []): the share of passed tests (`continuous`), or whether all passed, for the last code block.

    Raises:
        RewardError: the sandbox is unavailable.
    """
    slots = contextlib.nullcontext() if concurrent_semaphore is None else concurrent_semaphore
    limit = 1024 if memory_limit_mb is None else memory_limit_mb
    sandbox = code.Sandbox(url=sandbox_fusion_url, memory_limit_mb=limit, timeout_s=timeout, slots=slots)
    return code.compute_score(completion, test_cases, sandbox=sandbox, continuous=continuous), []
