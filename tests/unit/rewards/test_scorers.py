"""The shipped scorers: which text is the answer, which answer is right, and that no text makes them slow."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from polyturn.compat.verl.reward_score import default_compute_score
from polyturn.core.errors import ConfigError, DataError, RewardError
from polyturn.rewards import code, exact_match, geo3k, math, math_dapo, search_r1
from polyturn.sandbox.python.isolation import Isolation
from support.isolated import need_isolation
from support.refusals import refuses
from support.scripted_server import scripted_server


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("Paris", "Paris", 1.0),
        ("  PARIS.\n", "paris", 1.0),
        ("new\n york", "New York", 1.0),
        ("b", ["a", "B"], 1.0),
        ("42", 42, 1.0),
        ("It is Paris", "Paris", 0.0),
        ("", "Paris", 0.0),
        (None, "None", 0.0),
    ],
)
def test_exact_match_ignores_case_space_and_a_full_stop(text: Any, truth: Any, score: float) -> None:
    assert exact_match.compute_score(text, truth) == score


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} and then \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{a + \boxed{b}}", "b"),
        (r"\boxed{4} and \boxed{unclosed", "4"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("no box }}}", None),
    ],
)
def test_last_closed_box_is_the_answer(text: str, boxed: str | None) -> None:
    assert math.last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{$ 7. $}", "7", 1.0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1.0),
        (r"\boxed{x}", r"\boxed{x}", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1 + x^2}", "x^2+1", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{\text{Monday}}", "Monday", 1.0),
        (r"\boxed{x=5}", "5", 1.0),
        (r"\boxed{7}", "8", 0.25),
        (r"\boxed{\frac{1}{3}}", "0.5", 0.25),
        (rf"\boxed{{{'1' * 2000}}}", "1", 0.25),
        (r"\boxed{}{}", "1", 0.25),
        ("7", "7", 0.0),
        ("#### 7", "7", 0.0),
        (None, "7", 0.0),
        (7, "7", 0.0),
    ],
)
def test_boxed_answer_is_compared_as_mathematics(answer: Any, truth: str, score: float) -> None:
    assert math.compute_score(answer, truth, format_score=0.25) == score


def test_endless_comparison_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert math.is_equal("0.25", r"\frac{1}{4}")
    monkeypatch.setattr(math.checkers, "timeout_s", 0.3)
    refuses(lambda: math.compute_score(r"\boxed{9^{9^{9^{9^9}}} + 1}", "7"), RewardError, "twice")
    monkeypatch.setattr(math.checkers, "timeout_s", 120.0)
    assert math.is_equal("0.75", r"\frac{3}{4}")


def test_text_of_open_boxes_takes_linear_time() -> None:
    assert math.last_boxed(r"\boxed{" * 500_000) is None
    assert search_r1.extract_solution("<answer>" * 500_000) is None
    assert geo3k.format_reward("<think>" * 500_000 + "</think>" + r"\boxed{" * 500_000) == 0.0


@pytest.mark.parametrize(
    ("text", "truth", "pred", "score"),
    [
        ("So.\nAnswer: 42", "42", "42", 1.0),
        ("answer : $\\dfrac12$ cm", r"\frac{1}{2}", r"\frac{1}{2}", 1.0),
        ("Answer: 1\nAnswer: x = 1,234 dollars", "1234", "1234", 1.0),
        (r"Answer: \boxed{5^\circ}", "5", "5", 1.0),
        ("Answer: sqrt3", "sqrt{3}", "sqrt{3}", 1.0),
        ("Answer: 41", "42", "41", -1.0),
        ("The answer is 42.", "42", "[INVALID]", -1.0),
        ("Answer: 42" + " and so on" * 40, "42", "[INVALID]", -1.0),
    ],
)
def test_math_dapo_scores_the_end_of_the_text(text: str, truth: str, pred: str, score: float) -> None:
    assert math_dapo.compute_score(text, truth) == {"score": score, "acc": score > 0, "pred": pred}


def test_math_dapo_may_insist_on_a_box() -> None:
    assert math_dapo.compute_score(r"Answer: 3, \boxed{4}", "4", strict_box_verify=True)["acc"]
    assert not math_dapo.compute_score("Answer: 4", "4", strict_box_verify=True)["acc"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"<think>Two angles.</think> \boxed{30}", 1.0),
        (r"\boxed{30}", 0.9),
        (r"<think>Two angles.</think> \boxed{31}", 0.1),
        (r"<think>\boxed{30}", 0.9),
        ("", 0.0),
    ],
)
def test_geo3k_scores_the_answer_and_the_form(text: str, score: float) -> None:
    assert geo3k.compute_score(text, "30") == pytest.approx(score)
    bare = geo3k.compute_score(text.replace("30", "x"), "30", use_boxed=False, format_score=0.0)
    assert bare == 0.0
    assert geo3k.compute_score("30", "30", use_boxed=False, format_score=0.0) == 1.0


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("<answer> The Beatles. </answer>", {"target": ["beatles", "fab four"]}, 1.0),
        ("<answer>no</answer> wait <answer>Beatles</answer>", {"target": "Beatles"}, 1.0),
        ("<answer>Beatles</answer>", ["Stones", "Beatles"], 1.0),
        ("<answer>Beatles band</answer>", {"target": ["Beatles"]}, 0.25),
        ("Beatles", {"target": ["Beatles"]}, 0.0),
        ("</answer>Beatles<answer>", {"target": ["Beatles"]}, 0.0),
        ("<answer>no <answer>Beatles</answer>", {"target": ["Beatles"]}, 0.25),
        ("<answer>Beatles</answer> <answer>", {"target": ["Beatles"]}, 1.0),
        ("<answer>x</answer>" * 9 + "<answer>Beatles</answer>", {"target": ["Beatles"]}, 1.0),
        ("<answer>x</answer>" * 10 + "<answer>Beatles</answer>", {"target": ["Beatles"]}, 0.25),
        ("</answer>" * 10 + "<answer>Beatles</answer>", {"target": ["Beatles"]}, 0.25),
        (None, {"target": ["Beatles"]}, 0.0),
    ],
)
def test_search_r1_compares_the_last_answer_with_the_right_ones(text: Any, truth: Any, score: float) -> None:
    assert search_r1.compute_score(text, truth, format_score=0.25) == score


class Sandbox:
    """Answers with the sandbox's protocol and runs Python itself; `broken` answers are left first.

    With `is_down`, every answer is that one; a program with the text of `refuses` gets `reply_of_refused`.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.broken: list[tuple[int, dict[str, Any]]] = []
        self.is_down: tuple[int, dict[str, Any]] | None = None
        self.refuses: str | None = None
        self.reply_of_refused: tuple[int, Any] = (500, {})

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(asked)
        if self.refuses is not None and self.refuses in asked["code"]:
            return self.reply_of_refused
        return self.is_down or (self.broken.pop() if self.broken else (200, self.run(asked)))

    @staticmethod
    def run(asked: dict[str, Any]) -> dict[str, Any]:
        done = subprocess.run([sys.executable, "-c", asked["code"]], input=asked["stdin"], capture_output=True, text=True)
        state = "Finished" if done.returncode == 0 else "Error"
        result = {"status": state, "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return {"status": "Success" if done.returncode == 0 else "Failed", "run_result": result}


Service = tuple[str, Sandbox]


@pytest.fixture
def service() -> Iterator[Service]:
    sandbox = Sandbox()
    with scripted_server(sandbox.answer) as url:
        yield f"{url}/run_code", sandbox


PLUS_ONE = "Here:\n```python\nprint(int(input()) + 1)\n```\nDone."
IO_TESTS = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3"]}
ONE_TEST = {"inputs": ["1"], "outputs": ["2"]}


def test_program_must_print_what_each_test_expects(service: Service) -> None:
    sandbox = code.Sandbox(url=service[0], memory_limit_mb=512, timeout_s=3)
    assert code.compute_score(PLUS_ONE, IO_TESTS, sandbox=sandbox) == 1.0
    assert code.compute_score(PLUS_ONE, json.dumps(IO_TESTS), sandbox=sandbox) == 1.0
    wrong = {"inputs": ["1\n", "2\n"], "outputs": ["2", "4"]}
    assert code.compute_score(PLUS_ONE, wrong, sandbox=sandbox) == 0.0
    assert code.compute_score(PLUS_ONE, wrong, sandbox=sandbox, continuous=True) == 0.5
    assert code.compute_score("```python\nraise ValueError\n```", IO_TESTS, sandbox=sandbox) == 0.0
    assert code.compute_score("no program", IO_TESTS, sandbox=sandbox) == 0.0
    first = service[1].asked[0]
    assert (first["language"], first["run_timeout"], first["memory_limit_MB"]) == ("python", 3, 512)
    assert first["code"] == "print(int(input()) + 1)\n"


def test_tests_of_a_program_may_be_lists_of_lines(service: Service) -> None:
    lines = {"inputs": [["2", "3"], ["4", "5"]], "outputs": [["2", "3"], ["4", "5"]]}
    body = "```python\nprint(input())\nprint(int(input()))\n```"
    assert code.compute_score(body, lines, sandbox=code.Sandbox(url=service[0])) == 1.0
    assert code.compute_score(body, {**lines, "outputs": [["2"], ["4"]]}, sandbox=code.Sandbox(url=service[0])) == 0.0


def test_text_of_an_argument_may_have_any_line_separator(service: Service) -> None:
    tests = {"fn_name": "f", "inputs": ['"a\u2028b\x85c"\n2'], "outputs": [5]}
    body = "```python\ndef f(text, number):\n    return len(text)\n```"
    assert code.compute_score(body, tests, sandbox=code.Sandbox(url=service[0])) == 1.0


@pytest.mark.parametrize(
    "body", ["def add(a, b):\n    return [a + b]", "class Solution:\n    def add(self, a, b):\n        return [a + b]"]
)
def test_function_must_return_what_each_test_expects(service: Service, body: str) -> None:
    sandbox = code.Sandbox(url=service[0])
    tests = {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["[3]", [[7]]]}
    assert code.compute_score(f"```python\n{body}\n```", tests, sandbox=sandbox) == 1.0
    assert code.compute_score(f"```python\n{body}\n```", {**tests, "outputs": [[4], [7]]}, sandbox=sandbox) == 0.0


def test_broken_sandbox_is_an_error_and_never_a_zero(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.time, "sleep", lambda seconds: None)
    sandbox = code.Sandbox(url=service[0])
    service[1].broken += [(500, {}), (200, {"status": "SandboxError", "message": "full"})]
    assert code.compute_score(PLUS_ONE, ONE_TEST, sandbox=sandbox) == 1.0
    service[1].broken += [(500, {})] * code.NUM_TRIES
    assert code.compute_score(PLUS_ONE, ONE_TEST, sandbox=sandbox) == 1.0, "it works again as soon as it is looked at"
    service[1].is_down = (500, {})
    refuses(lambda: code.compute_score(PLUS_ONE, ONE_TEST, sandbox=sandbox), RewardError, "4 of 4 tries", "500")


def test_busy_sandbox_is_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.time, "sleep", lambda seconds: None)
    sandbox = code.Sandbox(url=service[0])
    service[1].broken += [(503, {}), (429, {})] * code.NUM_TRIES
    assert code.compute_score(PLUS_ONE, ONE_TEST, sandbox=sandbox) == 1.0
    monkeypatch.setattr(code, "QUEUE_S", 0.2)
    service[1].is_down = (503, {})
    refuses(lambda: code.compute_score(PLUS_ONE, ONE_TEST, sandbox=sandbox), RewardError, "did not run the program", "503")


@pytest.mark.parametrize(
    "answer",
    [
        (500, {}),
        (422, {"detail": "no"}),
        (200, {"status": "SandboxError", "message": "not UTF-8"}),
        (200, {"status": "Success", "run_result": ["x"]}),
        (200, "x" * 2000),
    ],
)
def test_program_that_breaks_a_sandbox_is_wrong(
    answer: tuple[int, Any],
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(code.time, "sleep", lambda seconds: None)
    monkeypatch.setattr("polyturn.infra.http.MAX_ANSWER_BYTES", 1000)
    service[1].refuses, service[1].reply_of_refused = "hostile", answer
    sandbox = code.Sandbox(url=service[0])
    assert code.compute_score("```python\n# hostile\nprint(2)\n```", ONE_TEST, sandbox=sandbox) == 0.0
    assert "a program counts as failed" in caplog.text
    assert code.compute_score(PLUS_ONE, ONE_TEST, sandbox=sandbox) == 1.0


HOSTILE_OUTPUTS = (
    "[" * 100_000,
    "[" * 990 + "]" * 990,
    "9" * 5_000,
    "1e999",
    "NaN",
    "[0, " * 1_000_000,
    '"' + "\\ud800" * 10 + '"',
    "\x00",
    "",
    "null",
)


@pytest.mark.parametrize("expected", [3, "3", [3], "[3]", {"a": [1, 2]}, "text", None, 1.5, [[1] * 50] * 50])
def test_hostile_output_is_compared_without_error(expected: Any) -> None:
    for printed in HOSTILE_OUTPUTS:
        wanted = code._as_value(expected)
        assert code.returns(printed, wanted) is (printed == "null" and wanted is None), printed[:20]
        assert code.returns(f"noise\n{json.dumps(wanted)}\n", wanted)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("{", "ground_truth"),
        ({"inputs": ["1"]}, "ground_truth"),
        ({"inputs": ["1"], "outputs": []}, "ground_truth"),
        ({"inputs": [], "outputs": []}, "ground_truth"),
        (3, "ground_truth"),
        ("[" * 100_000, "is not a set of tests"),
        ({"fn_name": "f", "inputs": ["1"], "outputs": ["[" * 100_000]}, "the expected output"),
    ],
)
def test_unreadable_tests_are_a_data_error_whatever_the_program(tests: Any, message: str) -> None:
    refuses(lambda: code.compute_score(PLUS_ONE, tests, sandbox=code.Sandbox(url="http://nowhere")), DataError, message)


def test_other_languages_need_a_service() -> None:
    refuses(lambda: code.Sandbox().run("int main() {}", language="cpp"), ConfigError, "'cpp'", "reward.sandbox.url")


def test_programs_without_a_sandbox_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(lambda: code.Sandbox(url=None, python="/nowhere/python").require(), ConfigError, "'/nowhere/python'")
    monkeypatch.setattr("polyturn.sandbox.python.isolation.find_isolation", lambda: (Isolation.NONE, "no bubblewrap"))
    refuses(lambda: code.Sandbox(url=None).require(), ConfigError, "reward.sandbox.url is not set", "no bubblewrap")
    refuses(
        lambda: code.compute_score(PLUS_ONE, IO_TESTS, sandbox=code.Sandbox(url=None)),
        ConfigError,
        "reward.sandbox.url is not set",
    )


def local_sandbox(timeout_s: float = 50.0) -> code.Sandbox:
    """Return a sandbox of this machine; code that ends has 50 s for it."""
    need_isolation()
    return code.Sandbox(url=None, memory_limit_mb=128, timeout_s=timeout_s)


def test_programs_run_isolated_on_this_machine() -> None:
    sandbox = local_sandbox()
    sandbox.require()
    assert code.compute_score(PLUS_ONE, IO_TESTS, sandbox=sandbox) == 1.0
    add = "```python\ndef add(a, b):\n    return a + b\n```"
    assert code.compute_score(add, {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, sandbox=sandbox) == 1.0
    peek = "import os\nprint(os.path.exists('/etc/shadow') or os.path.exists('seen') or 'no')\nopen('seen', 'w')"
    twice = {"inputs": ["", ""], "outputs": ["no", "no"]}
    assert code.compute_score(f"```python\n{peek}\n```", twice, sandbox=sandbox) == 1.0
    numbers = {"inputs": [""], "outputs": ["\n".join(map(str, range(50_000)))]}
    assert code.compute_score("```python\nfor i in range(50_000): print(i)\n```", numbers, sandbox=sandbox) == 1.0


@pytest.mark.parametrize(
    "body",
    [
        "def f(x):\n    import os\n    os.write(1, b'[' * 100_000)\n    os._exit(0)",
        "def f(x):\n    y = []\n    for _ in range(900): y = [y]\n    return y",
        "def f(x):\n    import os\n    os.write(1, bytes(range(256)) * 99)\n    os._exit(0)",
        "def f(x):\n    while True: pass",
        "def f(x):\n    bytearray(1 << 30)",
        "def f(x):\n    import os\n    os.kill(os.getppid(), 9)\n    os.kill(0, 9)",
        "import json\njson.dumps = lambda x: '\\ud800'\ndef f(x): return 2",
        "def f(x): return 2\nraise SystemExit(10 ** 30)",
        "f = 2",
        "x = '\x00'",
        "y = '\ud800'",
    ],
)
def test_hostile_program_is_wrong_but_not_an_error(body: str) -> None:
    sandbox = local_sandbox(1.0 if "while" in body else 50.0)
    tests = {"fn_name": "f", "inputs": ["1"], "outputs": ["2"]}
    assert code.compute_score(f"```python\n{body}\n```", tests, sandbox=sandbox) == 0.0


@pytest.mark.parametrize(
    ("source", "text", "truth", "score"),
    [
        ("openai/gsm8k", "#### 72", "72", 1.0),
        ("lighteval/MATH", r"\boxed{72}", "72", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{72}", "72", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{72}", "72", 1.0),
        ("numina_olympiads", r"\boxed{72}", "72", 1.0),
        ("numina_aops_forum", "It is half: so x = 36", "36", 1.0),
        ("numina_cn_k12", "I do not know", "36", 0.0),
        ("math_dapo", "Answer: 72", "72", {"score": 1.0, "acc": True, "pred": "72"}),
        ("aime_2024", "Answer: 7", "72", {"score": -1.0, "acc": False, "pred": "7"}),
        ("hiyouga/geometry3k", r"<think>.</think>\boxed{72}", "72", 1.0),
        ("searchR1_nq", "<answer>Ada</answer>", {"target": ["ada"]}, 1.0),
    ],
)
def test_default_score_knows_the_data_sources(source: str, text: str, truth: Any, score: Any) -> None:
    assert default_compute_score(source, text, truth, extra_info={"index": 1}) == score


def test_default_score_runs_programs_in_the_given_sandbox(service: Service) -> None:
    slots = threading.Semaphore(1)
    told = {"sandbox_fusion_url": service[0], "concurrent_semaphore": slots, "memory_limit_mb": 128}
    assert default_compute_score("codecontests", PLUS_ONE, IO_TESTS, **told) == 1.0
    assert service[1].asked[0]["memory_limit_MB"] == 128


def test_unknown_data_source_is_not_implemented() -> None:
    """Users match on the message."""
    refuses(lambda: default_compute_score("mine", "", ""), NotImplementedError, "'mine'", "data_source=")
