"""The life of an episode, whatever happens: the scheduler drives it, everything is released, what came of it is scored.

    run_episode      task -> Trajectory, taken up from a journal where an earlier process left it there
    run_and_score    Episode -> Trajectory with its reward

Separate from the episode, which the scheduler acts through, because here it is decided what a failure is: what the model
cannot answer for ends the trajectory with its error, a broken invariant ends the run, and whatever happens, also a
cancellation, everything that was started is released once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from polyturn.core.errors import (
    AlignmentError,
    ConfigError,
    LifecycleError,
    PolyturnError,
    RolloutError,
    SchedulerError,
    TemplateError,
    one_line,
    raised_at,
)
from polyturn.core.generation import SamplingParams
from polyturn.core.lifecycle import RequestState, StopReason
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.rollout import event_log
from polyturn.rollout.backstage import close_episode
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.journal import EpisodeJournal
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.watched import watched, with_blocks

logger = logging.getLogger(__name__)

BROKEN = (AlignmentError, LifecycleError, ConfigError, TemplateError, RolloutError)
"""A broken invariant or a set-up that cannot work: these end the run, not the trajectory."""


async def run_episode(
    context: RolloutContext,
    task: Task,
    *,
    id: str,
    seed: int = 0,
    sampling: SamplingParams | None = None,
    on_start: Callable[[Episode], object] | None = None,
) -> Trajectory:
    """Run `task` to its end and return the record, with its reward.

    A failure that the model cannot answer for ends the trajectory with its error; a broken invariant is raised.
    Tools and the interaction are released exactly once, also on error, time-out and cancellation.

    Args:
        context: What the episodes of a run share.
        task: The task.
        id: Unique among live episodes; the engine's session id.
        seed: Every random choice of the episode follows from it.
        sampling: Overrides the context's sampling.
        on_start: Is told the episode before anything else happens.
    """

    def make() -> Episode:
        episode = Episode(context, task, id=id, seed=seed, sampling=sampling)
        episode.backstage.bridge.enter()
        return episode

    flight: EpisodeJournal | None = None
    if context.journal is not None and context.journal.takes(id):
        flight = EpisodeJournal(context.journal, context, task, id=id, sampling=sampling or context.sampling)
        if (finished := flight.trajectory()) is not None:
            return finished
        episode = await flight.resume(make) or make()
        episode.backstage.flight = flight
    else:
        episode = make()
    if on_start is not None:
        on_start(episode)
    try:
        trajectory = await run_and_score(context, episode, flight)
    except BaseException as problem:
        is_cancelled = isinstance(problem, asyncio.CancelledError)
        episode.end(RequestState.ABORTED if is_cancelled else RequestState.FAILED)
        raise
    ends = {StopReason.ERROR: RequestState.FAILED, StopReason.ABORTED: RequestState.ABORTED}
    episode.end(ends.get(trajectory.stop_reason, RequestState.COMPLETED))
    return trajectory


async def run_and_score(context: RolloutContext, episode: Episode, flight: EpisodeJournal | None = None) -> Trajectory:
    """Let the scheduler drive the episode, release everything, and score what came of it.

    Args:
        context: What the episodes of a run share.
        episode: The episode, which may stand behind a turn already.
        flight: Keeps it in a journal, and has the scheduler of one that goes on.
    """
    with context.rewarder.running.one(), watched(context, episode.id):
        trajectory = with_blocks(context, await _run_and_score(context, episode, flight))
    if flight is not None:
        await flight.end(trajectory)
    return trajectory


async def _run(episode: Episode, scheduler: MultiTurnScheduler, *, is_resumed: bool) -> StopReason:
    """Let the scheduler drive the episode to its end."""
    if not is_resumed:
        await episode.call(scheduler, scheduler.on_trajectory_start, episode)
    stop = await episode.call(scheduler, scheduler.run, episode, is_driver=True)
    if not isinstance(stop, StopReason):
        raise SchedulerError(f"the scheduler's run returned {stop!r:.100}; return a StopReason")
    return stop


async def _run_and_score(context: RolloutContext, episode: Episode, flight: EpisodeJournal | None) -> Trajectory:
    backstage = episode.backstage
    is_resumed = flight is not None and flight.scheduler is not None
    scheduler = context.scheduler_for_episode() if flight is None else flight.scheduler or context.scheduler_for_episode()
    stop = None
    if flight is not None:
        flight.scheduler, stop = scheduler, flight.stop
    tool_rewards: dict[str, float | None] = {}
    extra: dict[str, float] = {}
    error: str | None = None
    try:
        try:
            async with backstage.record.clock.within(context.limits.timeout_s) as timeout:
                stop = stop or await _run(episode, scheduler, is_resumed=is_resumed)
        except TimeoutError:
            if not timeout.expired():
                raise
            stop = StopReason.TIMEOUT
        if not stop.is_failure:
            if flight is not None:
                await flight.keep(episode, stop=stop)
            backstage.record.check_scores()
            extra.update(episode.check_tokens())
            episode.lifecycle.move(RequestState.SCORING)
            await backstage.environment.score_last(episode.turns or backstage.record.turns)
            tool_rewards = await backstage.environment.tool_rewards()
    except BROKEN:
        raise
    except PolyturnError as problem:
        stop, error = StopReason.ERROR, _told(context, episode.id, problem)
    finally:
        problems = await close_episode(episode, scheduler)
    if problems:
        extra["close_errors"] = float(len(problems))
    trajectory = episode.trajectory(stop, error=error, extra=extra)
    if not stop.is_failure:
        try:
            given = episode.given_reward
            outcome = None if given is None else (given.score, given.info)
            reward = await context.rewarder.score(trajectory, tool_rewards, outcome=outcome)
            trajectory = dataclasses.replace(trajectory, reward=reward)
        except BROKEN:
            raise
        except PolyturnError as problem:
            failed = _told(context, episode.id, problem)
            trajectory = dataclasses.replace(trajectory, stop_reason=StopReason.ERROR, error=failed)
    if event_log.is_on():
        event_log.ended(trajectory)
    return trajectory


def _told(context: RolloutContext, episode_id: str, problem: PolyturnError) -> str:
    """Log why an episode failed, with the traceback of a plug-in's exception once for each line that raises; return why."""
    where = raised_at(problem)
    error = one_line(problem) + where
    is_news = bool(where) and where not in context.told
    context.told.add(where)
    logger.warning("trajectory %s failed: %s", episode_id, error, exc_info=problem if is_news else None)
    return error
