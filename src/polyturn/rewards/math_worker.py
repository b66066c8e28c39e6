"""The process that compares answers in mathematics: a line [right answer, answer] in, a line true or false out.

Run by `rewards.math` as `python -m polyturn.rewards.math_worker`. It may be killed at any moment, and ends by itself when
its input does. Its memory is bounded, so that a huge number ends the comparison and not the machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys

MEMORY = 4 << 30
SECONDS = 5
"""After which the library gives up by itself; what it cannot interrupt is killed from outside."""


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # whatever the libraries print must not look like an answer
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def is_equal(truth: str, answer: str) -> bool:
        try:
            read = [
                parse(rf"\boxed{{{text}}}", extraction_config=latex, parsing_timeout=SECONDS) for text in (truth, answer)
            ]
            return bool(verify(*read, timeout_seconds=SECONDS))
        except Exception:  # the library raises on some of what it cannot read, which is then not the right answer
            return False

    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(is_equal(*json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
