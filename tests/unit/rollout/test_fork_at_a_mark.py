"""A place in an episode can be taken up again after the episode has gone on: the ids there are those that were sampled."""

from __future__ import annotations

import numpy as np

from polyturn.core.lifecycle import StopReason
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, task, turn_ids


class TakesUp(MultiTurnScheduler):
    """Plays two turns, then goes on behind the first one, twice with the same words."""

    async def run(self, episode: Episode) -> StopReason:
        await episode.prepare()
        first = await episode.generate()
        mark = episode.mark()
        await self.say(episode, first, "One.")
        for text in ("Two.", "One."):
            await self.say(episode.fork(at=mark), first, text)
        return StopReason.STOP

    async def say(self, episode: Episode, turn: OpenTurn, text: str) -> None:
        episode.record(turn, Reply.of(text))
        await episode.prepare()
        await episode.generate()
        assert episode.turns[0] is turn and len(episode.turns) == 2


async def test_a_fork_behind_an_earlier_turn_replays_what_was_sampled_there():
    t = await run_episode(scripted_context(["four"], scheduler=TakesUp()), task(), id="e")
    assert len(t.segments) == 3 and len(t.turns) == 4
    main = t.segments[0]
    for branch in t.segments[1:]:
        assert branch.parent is not None and branch.parent.segment == 0
        shared = branch.parent.length
        assert np.array_equal(branch.token_ids[:shared], main.token_ids[:shared])
        assert not branch.loss_weights[:shared].any() and branch.loss_weights.sum() == len(turn_ids("four"))
    assert t.segments[2].parent is not None and t.segments[1].parent is not None
    assert t.segments[2].parent.length > t.segments[1].parent.length, "the same words are shared, too"
