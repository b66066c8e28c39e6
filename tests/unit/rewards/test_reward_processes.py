"""Work in other processes: signals, deadlines, comparisons that never end, and modules that must not be imported there."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, RewardError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, Turn
from polyturn.rewards import math
from polyturn.rewards.options import CallOptions
from polyturn.rewards.processes import EndedCallError, LateCallError, Processes
from polyturn.rewards.router import RewardRouter
from support.refusals import refuses, refuses_later

pytestmark = pytest.mark.timeout(300)  # processes start, and a busy machine takes long to import what they need

SWALLOWS = r"""
import contextlib
from math_verify.metric import math_metric
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    verify = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    with contextlib.suppress(Exception):
        return verify(["\\boxed{" + ground_truth + "}"], [solution_str])[0]
    return 0.0
"""
"""A reward like that of verl's recipe for reasoning: every error is a wrong answer."""

PLAIN = """
import signal, os, time


def main_thread(solution_str, ground_truth=None):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return {"score": len(solution_str), "pid": os.getpid()}


def many(solution_strs, ground_truths):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return [len(s) for s in solution_strs]


def raises(solution_str):
    raise KeyError("no such answer")


def ends(solution_str):
    os._exit(3)


def hangs(solution_str):
    time.sleep(3600)


def unsendable(solution_str):
    return {"score": 1.0, "why": lambda: 0}


def judged(solution_str, judges):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    (tmp_path / "plain.py").write_text(PLAIN)
    return tmp_path


async def scored(folder: Path, function: str, text: str, **options: Any) -> Reward:
    router = RewardRouter(function=function, base=folder, calls=CallOptions(num_processes=1, **options))
    task = Task(id="t", prompt=(Message(role="user", content="?"),), ground_truth="3")
    turn = Turn(index=0, message=Message(role="assistant", content=text), finish_reason=FinishReason.STOP)
    return await router.score(Trajectory(id="t/0", task=task, segments=(), turns=(turn,), stop_reason=StopReason.STOP))


async def test_reward_that_swallows_errors_finds_right_answers(folder: Path) -> None:
    assert (await scored(folder, "swallows.py:compute_score", r"So it is \boxed{3}.")).total == 1.0
    assert (await scored(folder, "swallows.py:compute_score", r"So it is \boxed{4}.")).total == 0.0


async def test_functions_run_in_a_main_thread(folder: Path) -> None:
    assert (await scored(folder, "plain.py:main_thread", "abc")).total == 3.0
    assert (await scored(folder, "plain.py:many", "abcd")).total == 4.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "KeyError: 'no such answer'"),
        ("ends", "ended with exit code 3"),
        ("unsendable", "its result cannot be sent"),
    ],
)
async def test_error_in_the_process_is_a_reward_error(folder: Path, function: str, said: str) -> None:
    await refuses_later(lambda: scored(folder, f"plain.py:{function}", "abc"), RewardError, said)


@pytest.mark.parametrize(("log", "hint"), [("inherited", "; its output says why"), ("none", "")])
def test_ended_process_refers_to_its_output_if_there_is_any(folder: Path, log: Any, hint: str) -> None:
    with pytest.raises(EndedCallError, match=f"ended with exit code 3{hint}$"):
        Processes("plain.py:ends", base=folder, num=1, timeout_s=60.0, log=log)(solution_str="abc")


def test_call_past_its_deadline_is_killed(folder: Path) -> None:
    hangs = Processes("plain.py:hangs", base=folder, num=1, timeout_s=0.2)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"longer than 0\.2 s"):
            hangs(solution_str="abc")


def test_process_is_used_again_after_an_error(folder: Path) -> None:
    scorer = Processes("plain.py:main_thread", base=folder, num=1, timeout_s=60.0)
    first = scorer(solution_str="abc")
    refuses(lambda: scorer(solution_str=None), RewardError, "NoneType")
    assert scorer(solution_str="abc") == first
    scorer.close()


def test_arguments_that_cannot_be_sent_name_the_function(folder: Path) -> None:
    scorer = Processes("plain.py:main_thread", base=folder, num=1, timeout_s=60.0)
    refuses(lambda: scorer(solution_str=lambda: 0), RewardError, "plain.py:main_thread", "cannot be sent")
    assert scorer(solution_str="abc")["score"] == 3
    scorer.close()


def test_processes_end_with_their_owner(folder: Path) -> None:
    scorer = Processes("plain.py:main_thread", base=folder, num=1, timeout_s=60.0)
    pid = scorer(solution_str="abc")["pid"]
    del scorer
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_objects_of_this_process_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_processes"):
        RewardRouter(function="plain.py:judged", base=folder, calls=CallOptions(num_processes=1))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The results of the next comparisons; exceptions are raised."""
    outcomes: list[object] = []

    def checker(**_: str) -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(math, "checkers", checker)
    math._compare.cache_clear()
    return outcomes


@pytest.mark.parametrize("problem", [LateCallError("late"), EndedCallError("killed")])
def test_second_try_decides_and_is_logged(calls: list[object], problem: Exception, caplog: pytest.LogCaptureFixture) -> None:
    calls += [problem, True]
    with caplog.at_level("INFO", logger="polyturn"):
        assert math.is_equal("1/2", "0.50")
    assert "'1/2'" in caplog.text and str(problem) in caplog.text


def test_two_failures_are_an_error_that_is_not_remembered(calls: list[object]) -> None:
    calls += [LateCallError("late"), EndedCallError("killed"), True]
    refuses(lambda: math.compute_score(r"\boxed{1/2}", "0.50"), RewardError, "twice")
    assert math.compute_score(r"\boxed{1/2}", "0.50") == 1.0


PROGRAM = "def score(n):\n    return n + 1\n"


def test_module_of_the_working_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text(PROGRAM)
    work = tmp_path / "work"
    work.mkdir()
    (work / "difflib.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(work)
    processes = Processes(f"{tmp_path / 'reward.py'}:score", num=1, timeout_s=120.0)
    try:
        assert processes(n=1) == 2
    finally:
        processes.close()
    assert not (tmp_path / "ran").exists()
