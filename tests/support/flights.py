"""Episodes that die in the middle and go on in another life, from the journal of the one before.

_, (asked, counts) = await lives(folder, ["a", "b", "c"], die_at=1, tools=[tool])     the turns that were sampled
await check_like_whole(folder, ["a", "b", "c"], lambda: {"tools": [tool]})            the same as without a death
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polyturn.core.generation import GenerateRequest
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.training.journal_file import JournalFile


class Killed(BaseException):
    """Stands for kill -9: nothing that the library catches."""


async def lives(
    folder: Path, says: Sequence[str], *, die_at: int | None = None, die: Callable[[], None] | None = None, **options: Any
) -> tuple[Trajectory | None, Any]:
    """Run one life of the episode g1/0, which dies when the model is asked for turn `die_at`: `die` may end the process.

    Returns:
        Its trajectory, unless it died, and the turns that the model was asked for with the journal's metrics.
    """
    journal = JournalFile(folder)
    if any(folder.glob("*")):  # noqa: ASYNC240 (nothing else runs)
        journal.resume(0, oldest=lambda ticket: 0)
    else:
        journal.begin(0)
    asked: list[int] = []

    def answer(request: GenerateRequest) -> str:
        turn = int(request.request_id.rpartition("/")[2])
        if turn == die_at:
            if die is not None:
                die()
            raise Killed
        asked.append(turn)
        return says[turn]

    given = options.pop("task", None) or task(interaction="partner" if "interactions" in options else None)
    context = scripted_context(answer, journal=journal, **options)
    try:
        return await run_episode(context, given, id="g1/0", seed=1), (asked, journal.read_metrics())
    except Killed:
        return None, (asked, journal.read_metrics())
    finally:
        journal.close()


def counted(resumed: int = 0, restarted: int = 0, failed: int = 0) -> dict[str, float]:
    return {
        "rollout/resumed_episodes": resumed,
        "rollout/restarted_episodes": restarted,
        "rollout/failed_snapshots": failed,
    }


async def check_like_whole(folder: Path, says: Sequence[str], options: Callable[[], dict[str, Any]]) -> Trajectory:
    """Check that an episode that dies before every turn but the first leaves the trajectory of one that never died."""
    whole, _ = await lives(folder / "whole", says, **options())
    for turn in range(1, len(whole.turns)):
        broken, _ = await lives(folder / "parts", says, die_at=turn, **options())
        assert broken is None
    parts, (asked, counts) = await lives(folder / "parts", says, **options())
    assert parts is not None
    assert asked == [len(whole.turns) - 1], "only the last turn was left to do"
    assert counts == counted(resumed=1)
    assert all(s.same_as(o) for s, o in zip(whole.segments, parts.segments, strict=True))
    for field in ("message", "observation", "scores", "info", "spans"):
        assert [getattr(turn, field) for turn in parts.turns] == [getattr(turn, field) for turn in whole.turns]
    assert [turn.message.own for turn in parts.turns] == [turn.message.own for turn in whole.turns]
    assert parts.reward == whole.reward
    assert parts.stop_reason is whole.stop_reason
    again, (asked, counts) = await lives(folder / "parts", says, **options())
    assert again is not None and asked == [] and counts == counted(resumed=1), "what was over is not run again"
    assert all(s.same_as(o) for s, o in zip(whole.segments, again.segments, strict=True)) and again.reward == whole.reward
    return parts
