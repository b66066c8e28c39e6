"""Scorers under verl's names, which users' own reward functions import."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from polyturn import compat
from polyturn.compat.verl import sandbox_fusion_utils
from polyturn.rewards import code, gsm8k, math


@pytest.fixture(autouse=True)
def verl() -> Iterator[None]:
    compat.install("verl")
    yield
    compat.uninstall("verl")


def scorer(name: str) -> Any:
    return importlib.import_module(f"verl.utils.reward_score.{name}")


@pytest.mark.parametrize(
    ("module", "arguments", "score"),
    [
        ("gsm8k", ("#### 72", "72"), 1.0),
        ("math", (r"\boxed{72}", "72"), 1.0),
        ("math_reward", (r"\boxed{72}", "72"), 1.0),
        ("math_verify", (r"\boxed{72}", "72"), 1.0),
        ("math_dapo", ("Answer: 72", "72"), {"score": 1.0, "acc": True, "pred": "72"}),
        ("geo3k", (r"\boxed{72}", "72"), 0.9),
        ("search_r1_like_qa_em", ("<answer>72</answer>", {"target": ["72"]}), 1.0),
        ("prime_math", (r"\boxed{72}", "72"), (True, True, "72")),
    ],
)
def test_every_scorer_is_found_and_scores(module: str, arguments: Any, score: Any) -> None:
    assert scorer(module).compute_score(*arguments) == score


@pytest.mark.parametrize(
    ("text", "truth", "found"),
    [
        ("The answer is 7. I hope it is right", "7", (True, True, "7")),
        ("The answer is 7. I checked it. It is 2 more than 5. Bye", "7", (True, True, "7")),
        ("We add 2 and 3. The sum is 5.", "5", (True, True, "5")),
        ("So x = 1. Then y = 2", "2", (True, True, "2")),
        ("So x = 5. I hope it is right. Thanks.", "5", (True, True, "5")),
        ("We add 2 and 3. 5 is the answer", "5", (True, True, "5")),
        ("We add 2 and 3. 5", "5", (True, True, "5")),
        ("It is y. The line is y = x.", "x", (True, True, "x")),
        (r"Answer: \boxed{x=7}", "7", (True, True, "7")),
        ("x^2 + y^2 + 4x - 6y + 13", "(x + 2)^2 + (y - 3)^2 ", (True, True, "x^2 + y^2 + 4x - 6y + 13")),
        ("3.14", r"\pi", (True, True, "3.14")),
        ("5.01", "5", (False, False, "5.01")),
        (r"Step 2: done. \boxed{8}", "7", (False, True, "8")),
        ("", "7", (False, False, "")),
    ],
)
def test_prime_math_reads_answers_in_words(text: str, truth: str, found: Any) -> None:
    assert scorer("prime_math").compute_score(text, truth) == found


BOX, SUM = r"so \boxed{72}", "```python\nprint(int(input()) + 1)\n```"
TESTS = {"inputs": ["1", "2", "3"], "outputs": ["2", "4", "4"]}


@pytest.mark.parametrize(
    ("module", "function", "arguments", "found"),
    [
        ("geo3k", "compute_score", {"predict_str": BOX, "ground_truth": "72", "use_boxed": True}, 0.9),
        ("geo3k", "acc_reward", {"predict_str": BOX, "ground_truth": "72"}, 1.0),
        ("geo3k", "format_reward", {"predict_str": "<think>a</think>" + BOX}, 1.0),
        ("math_reward", "is_equiv", {"str1": "7", "str2": "7.0", "verbose": False}, True),
        ("math_reward", "last_boxed_only_string", {"string": BOX}, r"\boxed{72}"),
        ("math_reward", "remove_boxed", {"s": r"\boxed{72}"}, "72"),
        ("math_verify", "compute_score", {"model_output": BOX, "ground_truth": "72", "timeout": 5.0}, 1.0),
        ("math_dapo", "normalize_final_answer", {"final_answer": "x = 1,000 cm"}, "1000"),
        ("math_dapo", "is_correct_minerva", {"solution_str": "A=7;", "gt": "7", "answer_pattern": "A=(.)"}, (True, "7")),
        ("search_r1_like_qa_em", "normalize_answer", {"s": "The  Cat."}, "cat"),
        ("prime_code", "compute_score", {"completion": SUM, "test_cases": TESTS}, (False, [])),
        ("prime_code", "compute_score", {"completion": SUM, "test_cases": TESTS, "continuous": True}, (2 / 3, [])),
        ("prime_code.testing_util", "run_test", {"in_outs": TESTS, "test": SUM[10:-4], "timeout": 9}, ([True, False], {})),
    ],
)
def test_parameters_have_verls_names(
    module: str, function: str, arguments: dict[str, Any], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(sandbox: code.Sandbox, program: str, *, stdin: str = "", language: str = "python") -> Any:
        return {"run_result": {"status": "Finished", "stdout": str(int(stdin) + 1)}}

    monkeypatch.setattr(code.Sandbox, "run", run)
    assert getattr(scorer(module), function)(**arguments) == found


def test_scorer_is_the_native_module() -> None:
    assert scorer("gsm8k") is gsm8k
    from verl.utils.reward_score import default_compute_score  # type: ignore[import-not-found]

    with patch("verl.utils.reward_score.gsm8k.compute_score", return_value=0.25):
        assert default_compute_score("openai/gsm8k", "x", "1") == 0.25


def test_search_r1_finds_a_right_answer_in_another() -> None:
    search_r1, truth = scorer("search_r1_like_qa_em"), {"target": ["the Beatles"]}
    assert search_r1.compute_score_subem("<answer>Beatles, 1962</answer>", truth) == 1.0
    assert search_r1.compute_score_subem("<answer>Stones</answer>", truth, format_score=0.25) == 0.25
    assert search_r1.compute_score_subem("Beatles", truth) == 0.0


def test_replaced_scorer_of_a_module_with_further_names_is_the_native_one() -> None:
    with patch("verl.utils.reward_score.math_reward.compute_score", return_value=0.25):
        assert math.compute_score("x", "1") == 0.25
    assert math.compute_score("x", "1") == 0.0


def test_answers_are_compared_in_parts() -> None:
    verls = scorer("math")
    box = verls.last_boxed_only_string(r"so \boxed{\frac{1}{2}}.")
    assert (box, verls.remove_boxed(box)) == (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}")
    assert verls.last_boxed_only_string("nothing") is None
    assert [verls.is_equiv("7", "7."), verls.is_equiv("7", None), verls.is_equiv(None, None)] == [True, False, True]
    prime = scorer("prime_math")
    assert [prime.grade_answer("0.7", "0.70"), prime.grade_answer(None, "7")] == [True, False]


def test_programs_are_scored_with_verls_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run(sandbox: code.Sandbox, program: str, *, stdin: str = "", language: str = "python") -> Any:
        ran.append((sandbox.url, sandbox.memory_limit_mb, sandbox.timeout_s))
        return {"run_result": {"status": "Finished", "stdout": stdin}}

    monkeypatch.setattr(code.Sandbox, "run", run)
    tests = {"inputs": ["1", "2"], "outputs": ["1", "3"]}
    program = "```python\nprint(input())\n```"
    assert scorer("sandbox_fusion").compute_score("http://box", None, 256, program, tests, continuous=True) == (0.5, [])
    assert ran[0] == ("http://box", 256, 10)


def test_each_case_of_a_program_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(status: str, stdout: str = "", code: int = 0) -> dict[str, Any]:
        return {"status": "Success", "run_result": {"status": status, "stdout": stdout, "return_code": code}}

    answers = {
        "right": (answer("Finished", "1\n"), None),
        "wrong": (answer("Finished", "2"), None),
        "late": (answer("TimeLimitExceeded"), None),
        "fails": (answer("Finished", code=1), None),
        "lost": (None, "gateway"),
        "not compiled": ({"status": "Failed", "compile_result": {"status": "Error"}}, None),
    }
    monkeypatch.setattr(sandbox_fusion_utils, "call_sandbox_api", lambda **asked: answers[asked["stdin"]])
    tests = {"inputs": list(answers), "outputs": ["1"] * len(answers)}
    results, known = sandbox_fusion_utils.check_correctness("http://sandbox", tests, "print(1)")
    assert results == [True, False, -3, -2, -1, -4] and known[4]["api_request_error"] == "gateway"
    assert [one["status"] for one in known[:2]] == ["success", "wrong_answer"] and known[1]["case_index"] == 1
    one = sandbox_fusion_utils._process_single_case(0, "right", None, "http://sandbox", "print(1)", 5, 1024, "python")
    assert one[0] is True and one[1]["run_status"] == "Finished" and one[1]["stdout"] == "1\n"
    asserted = {"inputs": ["right"], "outputs": ["9"], "assert_case": ["assert f(1)"]}
    (result,), (told,) = sandbox_fusion_utils.check_correctness("http://sandbox", asserted, "def f(x): return x")
    assert result is True and told["expected_output"] == "9"
    assert sandbox_fusion_utils.check_correctness("", None, "") == ([-1], [{"error": "Invalid input/output data"}])
    unequal = {"inputs": ["a"], "outputs": []}
    assert sandbox_fusion_utils.check_correctness("", unequal, "") == ([-1], [{"error": "Input/output count mismatch"}])
