"""verl's `verl.utils.reward_score.prime_code`: runs programs on tests, in a sandbox of this machine.

verl's details of each test are empty here, because the result shows failing tests and an unavailable sandbox raises an
exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyturn.rewards import code


def compute_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[float, list[Any]]:
    """Return (score, []): whether the last code block passes all tests, or the share of the first ten (`continuous`).

    Raises:
        RewardError: the sandbox is unavailable.
    """
    score = code.compute_score(completion, test_cases, sandbox=code.Sandbox(), continuous=continuous)
    return score if continuous else score == 1.0, []


def run_test(
    in_outs: Mapping[str, Any], test: str, debug: bool = False, timeout: float = 15
) -> tuple[list[bool], dict[str, Any]]:
    """Return (results, {}): whether a program passes each test, up to the first failure.

    Raises:
        RewardError: the sandbox is unavailable.
    """
    sandbox, results = code.Sandbox(timeout_s=timeout), []
    for stdin, expected in zip(in_outs["inputs"], in_outs["outputs"], strict=True):
        one = {**in_outs, "inputs": [stdin], "outputs": [expected]}
        results.append(code.compute_score(f"```python\n{test}\n```", one, sandbox=sandbox) == 1.0)
        if not results[-1]:
            break
    return results, {}
