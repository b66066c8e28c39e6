"""verl's `verl.utils.reward_score.prime_code`: programs run on their tests, here in a sandbox of this machine.

What verl tells of each test is empty here, because a failing test is said by the result, and a sandbox that cannot be asked
by an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyturn.rewards import code


def compute_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[float, list[Any]]:
    """Return whether the last code block passes all tests, or the share of the first ten (`continuous`), and [].

    Raises:
        RewardError: the sandbox cannot be asked.
    """
    score = code.compute_score(completion, test_cases, sandbox=code.Sandbox(), continuous=continuous)
    return score if continuous else score == 1.0, []


def run_test(
    in_outs: Mapping[str, Any], test: str, debug: bool = False, timeout: float = 15
) -> tuple[list[bool], dict[str, Any]]:
    """Return whether a program passes each of its tests, up to the first that it fails, and {}.

    Raises:
        RewardError: the sandbox cannot be asked.
    """
    sandbox, results = code.Sandbox(timeout_s=timeout), []
    for stdin, expected in zip(in_outs["inputs"], in_outs["outputs"], strict=True):
        one = {**in_outs, "inputs": [stdin], "outputs": [expected]}
        results.append(code.compute_score(f"```python\n{test}\n```", one, sandbox=sandbox) == 1.0)
        if not results[-1]:
            break
    return results, {}
