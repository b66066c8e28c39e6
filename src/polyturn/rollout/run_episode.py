"""run_episode: lets the scheduler drive one episode to its end, releases its resources, and scores the trajectory.

    run_episode    task -> Trajectory with its reward; resumes the episode if the journal has it

This module decides what counts as a failure. An error that the model caused is an observation, and the episode continues.
Any other `PolyturnError` makes its trajectory a failed one, except the errors in `BROKEN`, which end the run. In every case,
including cancellation, all tools, interactions and engine sessions that were started are released once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from polyturn.core.code_origin import defined_at
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
    raised_by_author,
)
from polyturn.core.generation import SamplingParams
from polyturn.core.lifecycle import EpisodeState, StopReason
from polyturn.core.protocols import Scheduler
from polyturn.core.reward import MAX_REWARD, as_score, brief
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, Turn
from polyturn.infra.aio import finish
from polyturn.rollout.calls import AsSchedulerError
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.history import History
from polyturn.rollout.journal import EpisodeJournal
from polyturn.rollout.limits import Limits
from polyturn.rollout.open_turn import GivenReward, OpenTurn
from polyturn.tokens import sanity

logger = logging.getLogger(__name__)

BROKEN = (AlignmentError, LifecycleError, ConfigError, TemplateError, RolloutError)
"""Broken invariants and set-ups that cannot work: these errors end the run, not only the trajectory."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds that a scheduler's `on_trajectory_end` may take."""
CANCELLED_S = 3.0
"""Seconds that a cancelled episode waits for its releases; slower ones continue in the background."""


async def run_episode(
    context: RolloutContext,
    task: Task,
    *,
    id: str,
    seed: int = 0,
    sampling: SamplingParams | None = None,
    limits: Limits | None = None,
    on_start: Callable[[Episode], object] | None = None,
) -> Trajectory:
    """Run `task` to its end and return the trajectory with its reward.

    If the engine, a plug-in or the reward fails, the trajectory has `stop_reason` ERROR; a broken invariant (`BROKEN`) is
    raised. Tools and the interaction are released exactly once, also on error, time-out and cancellation.

    Args:
        context: The objects and settings that all episodes of a run share.
        task: The task.
        id: Unique among live episodes; also the engine's session id.
        seed: Determines every random choice of the episode.
        sampling: Overrides the context's sampling.
        limits: Overrides the context's limits.
        on_start: Called with the episode before the scheduler drives it.
    """

    def make() -> Episode:
        episode = Episode(context, task, id=id, seed=seed, sampling=sampling, limits=limits)
        episode.resources.bridge.enter()
        return episode

    journal, episode, scheduler = None, None, context.scheduler_for_episode()
    if context.journal is not None and context.journal.takes(id):
        journal = EpisodeJournal(context.journal, context, task, id=id, sampling=sampling or context.sampling)
        if (finished := journal.trajectory()) is not None:
            return finished
        episode = await _resumed(journal, make, scheduler)
    is_resumed = episode is not None
    if episode is None:
        # A new copy: after a failed restore, the scheduler may hold partial state.
        episode, scheduler = make(), context.scheduler_for_episode()
    if journal is not None:
        journal.attach(episode, scheduler)
    if on_start is not None:
        on_start(episode)
    try:
        monitor = context.monitor
        with nullcontext() if monitor is None else monitor.watching(id):
            trajectory, tool_rewards = await _drive(context, episode, scheduler, journal, is_resumed=is_resumed)
            trajectory = _with_blocks(context, await _score(context, episode, trajectory, tool_rewards))
        if journal is not None:
            await journal.end(trajectory)
    except BaseException as problem:
        _end(episode, EpisodeState.ABORTED if isinstance(problem, asyncio.CancelledError) else EpisodeState.FAILED)
        raise
    ends = {StopReason.ERROR: EpisodeState.FAILED, StopReason.ABORTED: EpisodeState.ABORTED}
    _end(episode, ends.get(trajectory.stop_reason, EpisodeState.COMPLETED))
    return trajectory


def trajectory_of(
    episode: Episode, stop_reason: StopReason, *, error: str | None = None, extra: Mapping[str, float] | None = None
) -> Trajectory:
    """Return the trajectory of an episode, without a reward; its task has the prompt that the model saw.

    Args:
        episode: The episode, which has ended.
        stop_reason: Why it ended.
        error: The error, if it failed.
        extra: Further metrics.
    """
    first_prompt, task = episode.history.prompt, episode.task
    turns = (
        Turn(
            index=turn.index,
            message=turn.message,
            finish_reason=turn.finish_reason,
            spans=tuple(turn.spans),
            tool_results=turn.tool_results,
            observation=turn.observation,
            scores=turn.scores,
            info=turn.info,
            timings=turn.timings,
            is_continued=turn.is_continued,
        )
        for turn in episode.resources.turns
    )
    return Trajectory(
        id=episode.id,
        task=task if first_prompt in (None, task.prompt) else dataclasses.replace(task, prompt=first_prompt),
        segments=episode.history.builder.build(),
        turns=tuple(turns),
        stop_reason=stop_reason,
        error=error,
        metrics={**_metrics(episode), **(extra or {})},
    )


async def close_episode(episode: Episode, scheduler: Scheduler) -> list[str]:
    """Close the episode even while it is being cancelled, and return the failures.

    A cancellation continues once everything is released, or after `CANCELLED_S`; the release then continues in the
    background.
    """

    async def close() -> list[str]:
        # The scheduler first, because it may still use the tools; if it fails, the tools are released all the same.
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await episode.call(scheduler, scheduler.on_trajectory_end, episode)
            lines = []
        except (PolyturnError, TimeoutError) as problem:
            lines = [f"{one_line(problem)}{raised_at(problem)}"]
            episode.warn(f"on_trajectory_end failed: {lines[0]}", reason=f"on_trajectory_end{raised_at(problem)}")
        return lines + await episode.resources.close()

    problems, cancelled = await finish(asyncio.create_task(close()), grace_s=CANCELLED_S)
    if cancelled is not None:
        raise cancelled
    return problems


async def _resumed(journal: EpisodeJournal, make: Callable[[], Episode], scheduler: Scheduler) -> Episode | None:
    """Resume an episode after its last complete turn; return None if it has to start from its task."""
    if not journal.can_resume():
        return None
    episode = make()
    try:
        await journal.restore(episode, scheduler)
    except BaseException as problem:
        await close_episode(episode, scheduler)
        if not isinstance(problem, PolyturnError):
            raise
        journal.restart(problem)
        return None
    return episode


async def _drive(
    context: RolloutContext,
    episode: Episode,
    scheduler: Scheduler,
    journal: EpisodeJournal | None,
    *,
    is_resumed: bool,
) -> tuple[Trajectory, Mapping[str, float | None]]:
    """Let the scheduler drive the episode to its end, and close it; return the trajectory and the tools' rewards."""
    resources, stop = episode.resources, None if journal is None else journal.stop
    tool_rewards: dict[str, float | None] = {}
    extra: dict[str, float] = {}
    error: str | None = None
    try:
        try:
            async with resources.within(episode.limits.timeout_s) as timeout:
                if stop is None:
                    if not is_resumed:
                        await episode.call(scheduler, scheduler.on_trajectory_start, episode)
                        if scheduler.shows_tools:
                            await episode.call(scheduler, scheduler.show_tools, episode)
                    run = episode.guarded(scheduler, scheduler.run, is_driver=True)
                    with AsSchedulerError("the scheduler's run"):
                        stop = await run(episode)
            if not isinstance(stop, StopReason):
                at = defined_at(scheduler.run)
                raise SchedulerError(f"the scheduler's run returned {stop!r:.100}; return a StopReason{at}")
        except TimeoutError:
            if not timeout.expired():  # the time-out comes from a plug-in, not from the episode's limit
                raise
            stop = StopReason.TIMEOUT
        if not stop.is_failure:
            if journal is not None:
                await journal.keep(episode, stop=stop)
            _check_scores(resources.turns)
            extra.update(_check_tokens(context, episode))
            # If only forks have turns, as in a tree, the final turn is the last one of all forks.
            await resources.score_last(episode.turns or resources.turns)
            tool_rewards = await resources.tools.finish()
    except BROKEN:  # these are PolyturnErrors as well, but end the run
        raise
    except PolyturnError as problem:
        stop, error = StopReason.ERROR, _failure_text(context, episode.id, problem)
    finally:
        problems = await close_episode(episode, scheduler)
    if problems:
        extra["close_errors"] = float(len(problems))
    return trajectory_of(episode, stop, error=error, extra=extra), tool_rewards


async def _score(
    context: RolloutContext, episode: Episode, trajectory: Trajectory, tool_rewards: Mapping[str, float | None]
) -> Trajectory:
    """Return the trajectory with its reward, if the run needs one or something scores the task; if the reward raises, the
    trajectory has failed."""
    if not trajectory.stop_reason.is_failure:
        try:
            outcome = _outcome_of(episode.given_reward)
            if context.needs_rewards or outcome is not None or context.scores(trajectory.task):
                reward = await context.rewarder.score(trajectory, tool_rewards, outcome=outcome)
                trajectory = dataclasses.replace(trajectory, reward=reward)
        except BROKEN:
            raise
        except PolyturnError as problem:
            error = _failure_text(context, episode.id, problem)
            trajectory = dataclasses.replace(trajectory, stop_reason=StopReason.ERROR, error=error)
    total = None if trajectory.reward is None else trajectory.reward.total
    reason, count = trajectory.stop_reason.value, len(trajectory.turns)
    logger.debug("%s ends: %s after %d turns, reward %s", episode.id, reason, count, total)
    return trajectory


def _outcome_of(reward: Any) -> tuple[float, Mapping[str, Any]] | None:
    """Return the score and the info of the reward that the scheduler gave, or None.

    Raises:
        SchedulerError: the reward is not a `GivenReward` with a finite score.
    """
    if reward is None:
        return None
    score = as_score(reward.score) if isinstance(reward, GivenReward) else None
    if score is None or not isinstance(reward.info, Mapping):
        raise SchedulerError(
            f"the scheduler set episode.given_reward to {brief(reward)}; use GivenReward(score=…) with a finite number of "
            f"at most {MAX_REWARD:g}"
        )
    return score, reward.info


def _end(episode: Episode, state: EpisodeState) -> None:
    """Move the episode and its forks to their final state."""
    episode.lifecycle.move(state)
    for fork in episode.resources.forks:
        fork.lifecycle.move(state)
    episode.resources.forks.clear()


def _failure_text(context: RolloutContext, episode_id: str, problem: PolyturnError) -> str:
    """Return the error of an episode as text, and warn the first, tenth, hundredth … time that a reason occurs.

    Errors with the same origin in an author's code count as one reason. The first warning has the author's traceback.
    """
    where = raised_at(problem)
    error = one_line(problem).removesuffix(where) + where
    level, again = context.counted(where or error.replace(episode_id, "…"))
    trace = None if again else raised_by_author(problem)
    logger.log(level, "trajectory %s failed: %s%s", episode_id, error, again, exc_info=trace)
    return error


def _metrics(episode: Episode) -> dict[str, float]:
    """Return the metrics of an episode by name; metrics of forks, asides and cuts only if there were any."""
    resources, turns = episode.resources, episode.resources.turns
    metrics: dict[str, float] = {
        "num_turns": len(turns),
        "sampled_tokens": sum(len(t.completion.token_ids) for t in turns),
        "prompt_tokens": episode.history.prompt_tokens,
        "context_tokens": episode.history.builder.num_tokens,
        "duration_s": resources.duration_s,
    }
    if num_cut := episode.history.num_cut + sum(fork.history.num_cut for fork in resources.forks):
        metrics["dropped_cut"] = num_cut
    if resources.forks:
        metrics["num_forks"] = len(resources.forks)
    if resources.num_asides:
        metrics |= {"num_asides": resources.num_asides, "aside_tokens": resources.aside_tokens}
    for name in ("generate", "tools", "interaction"):
        metrics[f"{name}_s"] = sum(t.timings.get(name, 0.0) for t in turns)
    metrics["prefilled_tokens"] = sum(t.completion.info.get("prefilled_tokens", 0) for t in turns)
    return metrics


def _check_scores(turns: Sequence[OpenTurn]) -> None:
    """Check the turns' scores and convert them to float.

    Raises:
        SchedulerError: a score is not a finite number of at most `MAX_REWARD`.
    """
    for turn in turns:
        for name, score in turn.scores.items():
            if not isinstance(score, bool | int | float | np.number) or as_score(score) is None:
                raise SchedulerError(
                    f"turn {turn.index} has the score {name}={brief(score)}; it must be a finite number of at most "
                    f"{MAX_REWARD:g}"
                )
            turn.scores[name] = float(score)


def _check_tokens(context: RolloutContext, episode: Episode) -> dict[str, float]:
    """Compare the episode's token ids with a full render of the same messages, if a check is due; return metrics.

    Differences are counted, and `warn_of` reports them; the ids do not change. A history that was edited, or whose prompts
    are full renders already, is not compared (`is_canonical`).
    """
    if not episode.resources.turns or not context.is_sanity_due():
        return {}
    histories: list[History] = [episode.history, *(fork.history for fork in episode.resources.forks)]
    checked = [history for history in histories if history.turns and history.is_canonical]
    if not checked:
        return {}
    metrics = {"sanity_checked": 1.0}
    for history in checked:
        context_ids, codec = history.context, context.codec
        try:
            differences = sanity.differences(
                context_ids, history.full_render(), codec, mode=context.sanity_mode, parser=context.parser
            )
        except TemplateError as problem:
            differences = (sanity.refused(problem, context_ids, codec),)
        for one in differences:
            context.warn_of(one, where=episode.id)
            metrics[f"sanity_{one.kind}"] = metrics.get(f"sanity_{one.kind}", 0.0) + 1.0
    return metrics


def _with_blocks(context: RolloutContext, trajectory: Trajectory) -> Trajectory:
    """Add metrics for the times the event loop was blocked since the last trajectory."""
    count, seconds = (0, 0.0) if context.monitor is None else context.monitor.take()
    if not count:
        return trajectory
    blocks = {"loop_blocked": float(count), "loop_blocked_s": seconds}
    return dataclasses.replace(trajectory, metrics={**trajectory.metrics, **blocks})
