"""MultiTurnScheduler: the multi-turn loop, and the methods that an author may override.

    run                  the loop itself: limits, generation, `on_turn_end`, `check_finished`, `step`, recording
    step                 answers a turn: nothing, a text, messages, a `Reply`, `episode.rewrite(…)`, `episode.go_on(…)`
    check_finished       whether the episode ends right after a turn, without an answer
    on_trajectory_start  before the prompt is encoded          on_trajectory_end   once, on every exit
    on_turn_end          after each completion

By default, the tools answer a turn with tool calls, and the interaction that the row names answers any other turn. If the
row names none, the episode ends. A custom scheduler is short:

    class Hint(MultiTurnScheduler):
        async def step(self, episode, turn):
            return None if "####" in turn.message.text else "Think step by step, then write #### and the answer."
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from typing import Any

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import DataError, SchedulerError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import NATIVE_AGENTS, Task
from polyturn.infra.aio import first_error
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import GivenReward, OpenTurn, Reply

__all__ = ["GivenReward", "MultiTurnScheduler", "Reply"]


@functools.partial(keeps_deadlines, also_plain=True)
class MultiTurnScheduler:
    """The default turn logic; subclass it and override `step`, `check_finished`, a hook, or `run`.

    Each method may be plain or async, and has a deadline (`rollout.scheduler_timeout_s`). A plain method runs in a thread,
    so it does not block other episodes; it waits for async methods with `episode.wait`. For an async method, the deadline
    covers each stretch of its own work and excludes the time that it awaits its `episode`. Only a plain `run`, which
    spans the whole episode, has the episode's time limit instead.
    """

    shared: bool = False
    """Whether all trajectories share one object, whose plain methods then take turns. False gives each a shallow copy."""

    scores_turns: bool | None = False
    """True: it scores turns (`turn.scores`); if nothing else scores a task, its reward is their sum. False: it never scores
    turns, so a run whose estimator needs such scores is refused at the start. None, the default of a subclass that does not
    set it: it may score turns."""

    forks: bool = False
    """Whether it forks episodes. A run then lists the tools whose state the forks share."""

    gives_reward: bool = False
    """Whether it may set an episode's reward (`episode.given_reward`), so that tasks do not need another reward."""

    shows_tools: bool = False
    """Whether it writes the tools into the prompt if the chat template does not render them (`show_tools`)."""

    offers_tools: bool = True
    """Whether the model can call the run's tools; False if its tools come from elsewhere, such as an agent's requests."""

    stateless: bool = True
    """Whether the state that it keeps for an episode never changes between turns. An episode can then be resumed, without
    another call of `on_trajectory_start`. A subclass must set this explicitly. A scheduler with state may instead offer
    `snapshot(episode)` and `restore(episode, state)`, which replaces `on_trajectory_start` on a resume (see
    `core/snapshots.py`). An overridden `run` must continue from the turns that the episode already has."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass with an empty body inherits both values. cloudpickle first creates each class with an empty body and
        # sets its attributes later, so this method must not overrule them.
        if vars(cls).keys() - {"__module__", "__doc__"}:
            if "stateless" not in vars(cls):
                cls.stateless = False
            if "scores_turns" not in vars(cls) and not cls.scores_turns:
                cls.scores_turns = None

    def check_task(self, task: Task) -> None:
        """Refuse a task that this scheduler cannot run; called for all tasks before a run, and for the task of each request.

        Raises:
            DataError: the row does not fit this scheduler.
        """
        agent = task.extra.get("agent_name")
        if type(self) is MultiTurnScheduler and agent is not None and agent not in NATIVE_AGENTS:
            raise DataError(
                f"task {task.id!r} has the agent_name {agent!r}, and this run has no agent of that name; name a scheduler "
                "that runs it, or leave the column out"
            )

    async def run(self, episode: Episode) -> StopReason:
        """Drive `episode`, or a fork of one, to its end and return why it ended.

        Raises:
            PolyturnError: the engine, a plug-in or an invariant failed; the caller decides whether the run continues.
        """
        while (limit := await episode.prepare()) is None:
            turn = await episode.generate()
            if (reason := await self.settle(episode, turn)) is not None:
                return reason
        return limit

    async def settle(self, episode: Episode, turn: OpenTurn) -> StopReason | None:
        """Call the hooks after a completion, answer it and record both; return why the episode ends here, or None.

        Raises:
            PolyturnError: a plug-in failed.
        """
        # Before `step`, so that tools are not called for a completion that a limit cut or that ends the episode.
        if (reason := await self._finished(episode, turn)) is not None:
            return reason
        answer = episode.guarded(self, self.step)(episode, turn)
        return episode.record(turn, Reply.of(await answer if inspect.isawaitable(answer) else answer, source=self.step))

    async def run_forks(self, forks: Sequence[Episode]) -> list[StopReason]:
        """Drive forks concurrently with `MultiTurnScheduler.run`, even if `run` is overridden; return why each ended.

        If one fails, the others are cancelled and its error is raised.
        """
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(MultiTurnScheduler.run(self, fork), name=fork.id) for fork in forks]
        return [task.result() for task in running]

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Answer one turn: its tool calls first, else the row's interaction, else nothing.

        Returns one of:
            None: the turn has no answer, and the episode ends.
            a text: the next user message.
            a polyturn.Message, its dict, or a list of them: the messages that the model sees next.
            a polyturn.Reply: messages with the turn's scores and info, and whether the episode is over (`is_done`).
            episode.rewrite(messages): the history is replaced, and the model generates again.
            episode.go_on(text): the model continues its last message.
        """
        if turn.message.tool_calls:
            return await episode.call_tools(turn)
        if episode.has_partner:
            return await episode.ask_partner(turn)
        return None

    def check_finished(self, episode: Episode, turn: OpenTurn) -> Any:
        """Decide whether the episode ends with this turn: return a StopReason or True (meaning STOP), else None or False.

        By default, the episode ends if a limit cut the completion; the stop reason names the limit.
        """
        return turn.cut_by if turn.finish_reason is FinishReason.LENGTH else None

    def on_trajectory_start(self, episode: Episode) -> Any:
        """Prepare the trajectory before its prompt is encoded; `episode.rewrite` replaces the prompt."""

    def show_tools(self, episode: Episode) -> Any:
        """Write the tools into the prompt if the chat template does not render them; called after `on_trajectory_start`."""

    def on_turn_end(self, episode: Episode, turn: OpenTurn) -> Any:
        """Handle every completion, also the last one, before `check_finished` and `step`; scores go into `turn.scores`.

        Return a StopReason or True (meaning ENV_DONE) to end the episode; None and False continue it.
        """

    def on_trajectory_end(self, episode: Episode) -> Any:
        """Release the trajectory's resources. Called exactly once on every exit, also on errors and cancellation."""

    async def _finished(self, episode: Episode, turn: OpenTurn) -> StopReason | None:
        if turn.finish_reason is FinishReason.ABORT:
            return StopReason.ABORTED
        for method, meaning in ((self.on_turn_end, StopReason.ENV_DONE), (self.check_finished, StopReason.STOP)):
            answer = episode.guarded(self, method)(episode, turn)
            if inspect.isawaitable(answer):
                answer = await answer
            if answer is None:
                continue
            if isinstance(answer, StopReason):
                return answer
            if answer not in (False, True):
                raise SchedulerError(
                    f"the scheduler's {method.__name__} returned {answer!r:.100}; return a StopReason, True, False or None"
                    f"{defined_at(method)}"
                )
            if answer:
                return meaning
        return None
