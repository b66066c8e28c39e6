"""verl.utils.reward_score: `default_compute_score`, which scores text by data_source.

    default_compute_score("openai/gsm8k", "… #### 72", "72")   ->  1.0

Runs use `RewardRouter`, which has the same routes. Scorers are called through their modules, so that a scorer that a user
replaced there takes effect.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from polyturn.rewards import code, geo3k, gsm8k, math, math_dapo, search_r1
from polyturn.rewards.registry import BUILT_IN_ROUTES

_SCORERS: Mapping[str, Callable[..., Any]] = {
    "gsm8k": lambda text, truth: gsm8k.compute_score(text, truth),
    "math": lambda text, truth: math.compute_score(text, truth),
    "math_stated": lambda text, truth: math.stated_score(text, truth),
    "math_dapo": lambda text, truth: math_dapo.compute_score(text, truth),
    "geo3k": lambda text, truth: geo3k.compute_score(text, truth),
    "search_r1": lambda text, truth: search_r1.compute_score(text, truth),
}


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """Score a text; return a number or a mapping with a "score".

    Args:
        data_source: Chooses the scorer.
        solution_str: The text of the model.
        ground_truth: The right answer, in the form that the scorer expects.
        extra_info: Not used; callers of this interface pass it.
        sandbox_fusion_url: Address of the sandbox for programs.
        concurrent_semaphore: Entered for each program.
        memory_limit_mb: Memory limit of a program, in megabytes.
        kwargs: Not used.

    Raises:
        NotImplementedError: no scorer is known for the data_source. Users match on the message.
    """
    name = next((to for pattern, to in BUILT_IN_ROUTES.items() if fnmatch.fnmatchcase(data_source, pattern)), None)
    if name == "code":
        slots = contextlib.nullcontext() if concurrent_semaphore is None else concurrent_semaphore
        sandbox = code.Sandbox(url=sandbox_fusion_url, memory_limit_mb=memory_limit_mb or 1024, slots=slots)
        return code.compute_score(solution_str, ground_truth, sandbox=sandbox, continuous=True)
    if name is None or name not in _SCORERS:
        raise NotImplementedError(f"Reward function is not implemented for data_source={data_source!r}")
    return _SCORERS[name](solution_str, ground_truth)


_default_compute_score = default_compute_score
"""The function's name in verl before its multi-turn releases."""
