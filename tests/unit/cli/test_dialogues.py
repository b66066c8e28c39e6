"""The dialogues that `polyturn train` prints side by side: the same tasks in the first and the last evaluation."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from polyturn.cli.dialogues import dialogues
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup, Turn
from polyturn.store.parquet_store import ParquetStore

FEEDBACK = Message(role="user", content="Try again.")


def one(task: str, *answers: str, reward: float) -> TrajectoryGroup:
    """An evaluated task with its answers, each but the last followed by the feedback."""
    row = Task(id=task, prompt=(Message(role="user", content=f"What is {task}?"),))
    turns = tuple(
        Turn(
            index=number,
            message=Message(role="assistant", content=answer),
            finish_reason=FinishReason.STOP,
            observation=(FEEDBACK,) if number + 1 < len(answers) else (),
        )
        for number, answer in enumerate(answers)
    )
    trajectory = Trajectory(
        id=f"eval-{task}/0",
        task=row,
        segments=(),
        turns=turns,
        stop_reason=StopReason.ENV_DONE,
        reward=Reward(total=reward),
    )
    return TrajectoryGroup(id=f"eval-{task}", task=row, trajectories=(trajectory,))


def text_of(folder: Path) -> str:
    console = Console(file=io.StringIO(), width=120)
    for table in dialogues(folder, "eval/greedy"):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_repaired_task_comes_before_one_solved_at_once(tmp_path: Path) -> None:
    with ParquetStore(tmp_path) as store:
        for group in (one("1+1", "3", reward=0), one("2+2", "5", reward=0), one("3+3", "6", reward=1)):
            store.add(group, step=0, split="eval/greedy")
        for group in (one("1+1", "2", reward=1), one("2+2", "5", "4", reward=1), one("3+3", "6", reward=1)):
            store.add(group, step=8, split="eval/greedy")
    text = text_of(tmp_path)
    assert text.index("task 2+2") < text.index("task 1+1") and "3+3" not in text
    assert "before: reward 0" in text and "after: reward 1" in text and "Try again." in text


def test_long_message_is_cut_with_its_length(tmp_path: Path) -> None:
    with ParquetStore(tmp_path) as store:
        store.add(one("1+1", "x" * 900, reward=0), step=0, split="eval/greedy")
        store.add(one("1+1", "2", reward=1), step=8, split="eval/greedy")
    assert "900 characters" in text_of(tmp_path)


def test_answer_without_text_is_a_row_of_its_own(tmp_path: Path) -> None:
    with ParquetStore(tmp_path) as store:
        store.add(one("1+1", "", "3", reward=0), step=0, split="eval/greedy")
        store.add(one("1+1", "", "2", reward=1), step=8, split="eval/greedy")
    assert "(no text)" in text_of(tmp_path)


def test_run_with_one_evaluation_shows_no_dialogue(tmp_path: Path) -> None:
    with ParquetStore(tmp_path) as store:
        store.add(one("1+1", "3", reward=0), step=0, split="eval/greedy")
    assert dialogues(tmp_path, "eval/greedy") == [] == dialogues(tmp_path, "eval/other")
