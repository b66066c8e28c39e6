"""Episodes on a worker are kept in the controller's journal, line by line, and continue on another worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyturn.cluster.journal import ResumeState, WorkerJournal, carry
from polyturn.core.generation import GenerateRequest
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.training.journal_file import JournalFile

CHECK = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "5"}}\n</tool_call>'
SAYS = [CHECK, CHECK, "#### 4"]


class WorkerDied(Exception):
    pass


async def run_on_worker(
    file: JournalFile, state: ResumeState | None, *, die_at: int | None = None
) -> tuple[Trajectory | None, list[int]]:
    """Run the episode g1/0 on a worker of its own, which dies when the model is asked for turn `die_at`."""
    asked: list[int] = []

    def answer(request: GenerateRequest) -> str:
        turn = int(request.request_id.rpartition("/")[2])
        asked.append(turn)
        return SAYS[turn]

    journal, dead = WorkerJournal(), asyncio.Event()
    journal.hand(state)

    async def answer_or_die(request: GenerateRequest) -> Any:
        if int(request.request_id.rpartition("/")[2]) == die_at:
            dead.set()
            await asyncio.Event().wait()
        return await generate(request)

    context = scripted_context(answer, journal=journal, tools=[Gsm8kTool({})])
    generate = context.engine.generate
    context.engine.generate = answer_or_die  # type: ignore[method-assign]
    carrying = asyncio.create_task(carry(file, journal.posts))
    running = asyncio.create_task(run_episode(context, task(), id="g1/0", seed=1))
    dying = asyncio.create_task(dead.wait())
    try:
        await asyncio.wait({running, dying}, return_when=asyncio.FIRST_COMPLETED)
        return (running.result() if running.done() else None), asked
    finally:
        for work in (running, dying, carrying):
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


def begun(folder: Path) -> JournalFile:
    file = JournalFile(folder)
    file.begin(0)
    return file


def resume_state(recall: Callable[[str], Any]) -> ResumeState:
    held = recall("g1/0")
    return ResumeState({} if held is None else {"g1/0": held}, None)


async def test_episode_continues_on_another_worker(tmp_path: Path) -> None:
    file = begun(tmp_path)
    assert await run_on_worker(file, resume_state(file.recall), die_at=2) == (None, [0, 1])
    done, asked = await run_on_worker(file, resume_state(file.recall_lost))
    assert len(done.turns) == 3 and asked == [2]
    assert file.read_metrics()["rollout/resumed_episodes"] == 1
    again, asked = await run_on_worker(file, resume_state(file.recall_lost))
    assert again is not None and asked == [] and again.reward == done.reward


async def test_resumed_run_hands_its_journal_to_a_worker(tmp_path: Path) -> None:
    file = begun(tmp_path)
    assert await run_on_worker(file, resume_state(file.recall), die_at=1) == (None, [0])
    later = JournalFile(tmp_path)
    later.resume(0, oldest=lambda ticket: 0)
    done, asked = await run_on_worker(later, resume_state(later.recall))
    assert done is not None and asked == [1, 2]
    assert later.read_metrics()["rollout/resumed_episodes"] == 1


async def test_worker_without_a_journal_of_the_controller_keeps_nothing(tmp_path: Path) -> None:
    file = begun(tmp_path)
    done, asked = await run_on_worker(file, None)
    assert done is not None and asked == [0, 1, 2]
    assert file.recall_lost("g1/0") is None


async def test_episode_that_may_not_be_kept_restarts(tmp_path: Path) -> None:
    file = begun(tmp_path)
    why = "engine.deterministic restarts every conversation"
    assert await run_on_worker(file, ResumeState({}, why), die_at=1) == (None, [0])
    held = file.recall_lost("g1/0")
    assert held is not None
    done, asked = await run_on_worker(file, ResumeState({"g1/0": held}, why))
    assert done is not None and asked == [0, 1, 2]
    assert file.read_metrics()["rollout/restarted_episodes"] == 1


async def test_line_is_on_disk_before_the_episode_continues(tmp_path: Path) -> None:
    journal, file = WorkerJournal(), begun(tmp_path)
    journal.hand(ResumeState({}, None))
    writing = asyncio.create_task(journal.write("g1/0", lambda: {"begun": "d", "why_not": None}))
    (post,) = await journal.posts(0)
    await asyncio.sleep(0.01)
    assert not writing.done()
    assert post.line is not None
    await file.append(post.episode, post.line)
    journal.count("resumed")
    (second,) = await journal.posts(post.number)
    await writing
    assert second.counted == "resumed"
    held = file.recall_lost("g1/0")
    assert held.digest == "d"
