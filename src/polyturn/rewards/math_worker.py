"""Compares mathematical answers in a separate process (`rewards.processes`).

The library's own time limit is not used, because the library returns "not equal" when it is reached. Instead, the caller
kills this process after its deadline, and the comparison counts as late. The memory of this process is limited, so that a
huge number makes only this comparison fail.
"""

from __future__ import annotations

import resource

MEMORY = 4 << 30


class MathComparison:
    """Checks whether two answers are mathematically equal."""

    def __init__(self) -> None:
        """Limit the memory of this process, and load the library."""
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        import math_verify

        self._library = math_verify
        self._latex = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

    def __call__(self, truth: str, answer: str) -> bool:
        """Compare two answers; an answer on which the library raises is wrong."""
        parse, verify = self._library.parse, self._library.verify
        try:
            read = [
                parse(rf"\boxed{{{text}}}", extraction_config=self._latex, parsing_timeout=None) for text in (truth, answer)
            ]
            return bool(verify(*read, timeout_seconds=None))
        except Exception:
            return False
