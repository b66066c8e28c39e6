"""The comparison of answers in mathematics, in a process of its own (`rewards.processes`).

It has no time limit of its own, because the library would answer "not equal" at its limit. It is killed from outside, and
the comparison counts as late. Its memory is bounded, so that a huge number ends the comparison and not the machine.
"""

from __future__ import annotations

import resource

MEMORY = 4 << 30


class MathComparison:
    """Says whether two answers are the same mathematics."""

    def __init__(self) -> None:
        """Bound the memory of this process, and load the library."""
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        import math_verify

        self._library = math_verify
        self._latex = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

    def __call__(self, truth: str, answer: str) -> bool:
        """Compare; what the library raises on and cannot read is not the right answer."""
        parse, verify = self._library.parse, self._library.verify
        try:
            read = [
                parse(rf"\boxed{{{text}}}", extraction_config=self._latex, parsing_timeout=None) for text in (truth, answer)
            ]
            return bool(verify(*read, timeout_seconds=None))
        except Exception:
            return False
