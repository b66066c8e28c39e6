"""verl.utils.reward_score: `default_compute_score`, which chooses a scorer by data_source.

Each scorer is called through its module, so that a replaced `compute_score` is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "openai/gsm8k": "gsm8k",
    "hiyouga/geometry3k": "geo3k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "codecontests": "prime_code",
    "apps": "prime_code",
    "codeforces": "prime_code",
    "taco": "prime_code",
}
_MODULES |= {
    f"searchR1_{name}": "search_r1"
    for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
}


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """Return the score of `solution_str`, as the scorer of `data_source` says.

    Raises:
        NotImplementedError: no scorer has that data_source; give `reward.routes` one for it.
    """
    name = "math_dapo" if data_source.startswith("aime") else _MODULES.get(data_source)
    if name is None:
        raise NotImplementedError(f"Reward function is not implemented for data_source={data_source!r}")
    scorer = importlib.import_module(f"polyturn.rewards.{name}")
    if name == "prime_code":
        return scorer.compute_score(
            solution_str, ground_truth, sandbox_fusion_url=sandbox_fusion_url, memory_limit_mb=memory_limit_mb, **kwargs
        )
    return scorer.compute_score(solution_str, ground_truth, **kwargs)
