"""verl's `verl.utils.reward_score.sandbox_fusion`: programs run on their tests in a SandboxFusion service.

verl returns the score with what became of each test; here the second value is an empty list, because a failing test is
said by the score and a sandbox that cannot be asked by an exception.
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
    """Return the share of the tests that the last code block passes (`continuous`), or whether it passes all, and [].

    Raises:
        RewardError: the sandbox cannot be asked.
    """
    slots = contextlib.nullcontext() if concurrent_semaphore is None else concurrent_semaphore
    limit = 1024 if memory_limit_mb is None else memory_limit_mb
    sandbox = code.Sandbox(url=sandbox_fusion_url, memory_limit_mb=limit, timeout_s=timeout, slots=slots)
    return code.compute_score(completion, test_cases, sandbox=sandbox, continuous=continuous), []
