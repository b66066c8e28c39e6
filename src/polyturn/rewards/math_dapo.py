r"""The scorer of DAPO's mathematics data: the text after the last `Answer:`, normalised and compared as text; 1 or -1.

    "… Answer: $\dfrac{1}{2}$ cm"  against  "\frac12"   ->  {"score": 1.0, "acc": True, "pred": "\\frac{1}{2}"}

The normalisation is that of Minerva (Lewkowycz et al. 2022, appendix D): it removes units, words and thousands separators,
and adds the braces of fractions and roots. Only the last 300 characters are searched.
"""

from __future__ import annotations

import re
from typing import Any

from polyturn.rewards.math import last_boxed

SEARCHED_CHARS = 300
INVALID = "[INVALID]"
"""The answer that is reported for a text without an answer."""

ANSWER = r"(?i)answer\s*:\s*([^\n]+)"
_REPLACED = (("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"))
_JOINED = ((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"))
_UNITS = (
    "square", "units", "inches", "degrees", "minutes", "seconds", "miles", "hours", "meters", "meals",
    "points", "edges", "students", "tickets", "multiples", "dollars", "cents", "mph", "ft", "cm",
    "km", "mL", "integers", "feet", "ways", "days", "years", "sides",
)  # fmt: skip
_REMOVED = (
    *_UNITS, "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", r"\mathrm{th}",
    r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip


def compute_score(
    solution_str: Any, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    r"""Return {"score": 1.0 or -1.0, "acc": whether it is right, "pred": the answer that was read}.

    Args:
        solution_str: The text of the model.
        ground_truth: The right answer.
        strict_box_verify: Compare the content of the last `\boxed{…}`, without normalisation, instead of the text after
            `Answer:`.
        pause_tokens_index: Not used; accepted because callers of this interface pass it.
    """
    text = solution_str[-SEARCHED_CHARS:] if isinstance(solution_str, str) else ""
    if strict_box_verify:
        answer = last_boxed(text) or INVALID
        is_right = answer == str(ground_truth).strip()
    else:
        matches = re.findall(ANSWER, text)
        answer = normalize_final_answer(matches[-1]) if matches else INVALID
        is_right = answer == normalize_final_answer(str(ground_truth))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer}


def normalize_final_answer(final_answer: str) -> str:
    """Normalise an answer, so that most equal answers have the same text."""
    answer = final_answer.rsplit("=", 1)[-1]
    for old, new in (*_REPLACED, *_JOINED):
        answer = answer.replace(old, new)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    answer = re.sub(r"^.*?\$(.*?)\$.*$", r"\1", answer, flags=re.DOTALL)
    answer = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", answer)
    if (boxed := last_boxed(answer)) is not None:
        answer = boxed
    answer = re.sub(r"[td]frac", "frac", answer)
    answer = re.sub(r"frac([^{\s])([^{\s])", r"frac{\1}{\2}", answer)
    answer = re.sub(r"frac([^{\s])\{", r"frac{\1}{", answer)
    answer = re.sub(r"(frac\{[^{}]*\})([^{\s])", r"\1{\2}", answer)
    answer = re.sub(r"sqrt([^{\[\s])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "").strip()
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer
