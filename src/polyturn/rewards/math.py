r"""The mathematics scorer: the answer in the last `\boxed{…}`, compared as mathematics.

    "… so the sum is \boxed{\frac{1}{2}}."  against  "0.5"   ->  1.0

Answers whose text is the same up to layout are equal. All others are compared by the math-verify library (pip install
'polyturn[math]') in a separate process, because a model may write an expression whose evaluation never ends, such as
9^{9^{9^9}}. If a comparison is late, or its process dies, it is tried once more in a new process. If that fails too, the
reward raises an error, and the trajectory is dropped and counted. The score is not 0.0 then, because on a busy machine right
answers would count as wrong.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from math import isclose, pi
from typing import Any

from polyturn.core.errors import ConfigError, RewardError
from polyturn.rewards.processes import EndedCallError, LateCallError, Processes

logger = logging.getLogger(__name__)

MAX_CHARS = 1000
"""Largest number of characters of an answer; a longer answer is wrong."""
TIMEOUT_S = 10.0
"""Seconds that one comparison may take."""
NUM_CHECKERS = 4
"""Largest number of concurrent comparisons."""
_PLAIN = (
    *((mark, "") for mark in (r"\left", r"\right", r"\!", r"\,", r"\;", r"\ ")),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
)
_OPENS_ANSWER = ("answer:", "answer is", "answers are")
_CLOSES_ANSWER = ("is answer", "is the answer", "are answers", "are the answers")
_EQUATES = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_SENTENCE_END = re.compile(r"\.(?:\s+|\Z)")
_VALUE = re.compile(r"[\d\\]")
"""A digit, or a command of LaTeX."""
_NEAR = 1e-4
_NUMBER = re.compile(r"\\?\$?(-?(?:\d[\d,]{0,30}\.?\d*|\.\d+)(?:e[+-]?\d{1,2})?)(?:\\?%)?")
_MIXED = re.compile(r"(?:(\d{1,9}) +)?(\d{1,9})/([1-9]\d{0,8})")
_OF_PI = re.compile(r"(\d*\.?\d+)?\\pi")
_NOTHING = re.compile(r"[\s$]")
_MARKS = re.compile(r"\\f?box(?:ed)?\s*\{|[{}]")


def compute_score(solution_str: Any, ground_truth: Any, *, score: float = 1.0, format_score: float = 0.0) -> float:
    r"""Return `score` for the right answer, `format_score` for another boxed answer, and 0.0 if the text has no box.

    Args:
        solution_str: The model's text; a value that is not a string has no answer.
        ground_truth: The right answer, as LaTeX or plain text, boxed or not.
        score: For the right answer.
        format_score: For an answer in the right form that is wrong.
    """
    answer = last_boxed(solution_str) if isinstance(solution_str, str) else None
    if answer is None:
        return 0.0
    return score if is_equal(answer, str(ground_truth)) else format_score


def stated_score(solution_str: Any, ground_truth: Any) -> float:
    """Return 1.0 if the answer that a text states, in a box or in words, is right, else 0.0."""
    return float(isinstance(solution_str, str) and is_near(stated_answer(solution_str), str(ground_truth)))


def is_near(answer: str, truth: str) -> bool:
    """Return whether two answers are mathematically equal, or are numbers whose ratio is 0.01, 1 or 100, up to 1e-4."""
    if len(answer) > MAX_CHARS:
        return False
    pairs = [(a, t * scale) for a in _numbers(answer) for t in _numbers(truth) for scale in (0.01, 1.0, 100.0)]
    return any(isclose(a, t, rel_tol=_NEAR) for a, t in pairs) or is_equal(answer, truth)


def _numbers(text: str) -> list[float]:
    r"""Return the value of a number such as 1,000, 50\%, 1e3 or 3 1/2; [] for other text.

    A multiple of \pi has two values, because some write 2\pi as 6.28.
    """
    if match := _MIXED.fullmatch(text.strip()):
        return [float(match[1] or 0) + float(match[2]) / float(match[3])]
    if match := _OF_PI.fullmatch(text.strip()):
        return [float(match[1] or 1) * value for value in (pi, 3.14)]
    match = _NUMBER.fullmatch(text.strip())
    return [float(match[1].replace(",", ""))] if match else []


def stated_answer(text: str) -> str:
    r"""Return the answer that a text states: "so x = 5", "The answer is 5", "5 is the answer", `\boxed{5}`  ->  "5".

    The text after "answer:" and before "is the answer" counts. Its last box is the answer. Without a box, the answer is
    the part after "is", "=" and similar words in one sentence: the first sentence after "answer:", else the last one in
    which a value follows such a word, else the last sentence.
    """
    whole = text
    for mark in _OPENS_ANSWER:
        text = _behind(text, mark)
    is_opened = text != whole
    for mark in _CLOSES_ANSWER:
        at = text.lower().rfind(mark)
        text = text if at < 0 else text[:at].strip()
    if box := last_boxed(text):
        return _behind_equation(box)
    sentences = [sentence for sentence in _SENTENCE_END.split(text) if sentence] or [text]
    if is_opened:
        return _behind_equation(sentences[0])
    for sentence in reversed(sentences):
        answer = _behind_equation(sentence)
        if answer != sentence and _VALUE.search(answer):
            return answer
    return _behind_equation(sentences[-1])


def _behind_equation(sentence: str) -> str:
    for mark in _EQUATES:
        sentence = _behind(sentence, mark)
    return sentence


def _behind(text: str, mark: str) -> str:
    at = text.lower().rfind(mark)
    return text if at < 0 else text[at + len(mark) :].strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` (or `\fbox{…}`) of a text, with matched braces; None if there is none."""
    last: tuple[int, str] | None = None
    open_at: list[tuple[bool, int]] = []  # of each open brace: whether it is a box's, and where its content begins
    for mark in _MARKS.finditer(text):
        if mark[0] != "}":
            open_at.append((mark[0] != "{", mark.end()))
        elif open_at:
            is_box, start = open_at.pop()
            if is_box and (last is None or start > last[0]):
                last = start, text[start : mark.start()].strip()
    return None if last is None else last[1]


def is_equal(answer: str, truth: str) -> bool:
    """Return whether two answers are mathematically equal.

    Raises:
        RewardError: two attempts to compare them failed or took too long.
    """
    truth = last_boxed(truth) or truth
    if len(answer) > MAX_CHARS:
        return False
    if _plain(answer) == _plain(truth):
        return True
    if not answer.strip() or not truth.strip():
        return False
    return _compare(truth, answer)


def require() -> None:
    """Check that mathematics can be compared.

    Raises:
        ConfigError: the library is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "answers in mathematics are compared by math-verify, which is not installed: pip install 'polyturn[math]'"
        )


def _plain(text: str) -> str:
    for old, new in _PLAIN:
        text = text.replace(old, new)
    return _NOTHING.sub("", text).removesuffix(".")


@functools.lru_cache(maxsize=1 << 14)
def _compare(truth: str, answer: str) -> bool:
    """Compare two answers and cache the result, because the trajectories of a group often give the same answer.

    A retry is only logged, because it does not change a score. A second failure fails the trajectory, and is counted.
    """
    require()
    for is_last in (False, True):
        try:
            return bool(checkers(truth=truth, answer=answer))
        except (LateCallError, EndedCallError) as problem:
            if is_last:
                raise RewardError(
                    f"the answer {answer[:80]!r} could not be compared with {truth[:80]!r}, twice: {problem}"
                ) from problem
            logger.info("the answer %.80r is compared again: %s", answer, problem)
    raise AssertionError("unreachable")


checkers = Processes("polyturn.rewards.math_worker:MathComparison", num=NUM_CHECKERS, timeout_s=TIMEOUT_S, log="none")
"""The processes that compare expressions."""
