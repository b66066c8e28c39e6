"""MultiTurnScheduler: the one multi-turn loop, and the places where an author may decide.

    run                  the loop itself: limits, generation, `on_turn_end`, `check_finished`, `step`, recording
    step                 what answers a turn: nothing, a text, messages, a `Reply`, `episode.rewrite(…)`, `episode.go_on(…)`
    check_finished       whether the episode ends right after a turn, before anything answers it
    on_trajectory_start  before the prompt is encoded          on_trajectory_end   once, on every exit
    on_turn_end          after each completion

The default answers tool calls first, else lets the row's interaction answer, else ends. A scheduler of one's own is short:

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

from polyturn.core.aio import first_error
from polyturn.core.errors import DataError, SchedulerError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import NATIVE_AGENTS, Task
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import GivenReward, OpenTurn, Reply

__all__ = ["GivenReward", "MultiTurnScheduler", "Reply"]


@functools.partial(keeps_deadlines, also_plain=True)
class MultiTurnScheduler:
    """The default turn logic; subclass it and override `step`, `check_finished`, a hook, or `run`.

    Each of them may be plain or async, and has a deadline (`rollout.scheduler_timeout_s`). A plain one runs in a thread,
    where it blocks no other episode, and waits for what is async with `episode.wait`. An async one has as long for each
    stretch that it works by itself; what it waits for with its `episode` does not count. Only a plain `run`, which spans the
    whole episode, ends with the episode's own time limit.
    """

    shared: bool = False
    """Whether one object serves all trajectories; its plain methods then take turns. False gives each a shallow copy."""

    scores_turns: bool | None = False
    """True: it scores turns (`turn.scores`), and a task that nothing else scores is rewarded with their sum. False: it never
    does, so a run whose estimator needs such scores is refused before it begins. None, in a subclass that declares neither:
    it may."""

    forks: bool = False
    """Whether it goes on from one place in several ways. A run then names the tools whose state they share."""

    gives_reward: bool = False
    """Whether it may say itself what an episode is worth (`episode.given_reward`), so that tasks need no other reward."""

    shows_tools: bool = False
    """Whether it writes the tools into the prompt itself where the chat template does not render them (`show_tools`)."""

    stateless: bool = True
    """Whether nothing that it keeps of an episode changes with its turns: an episode then goes on after a restart, without
    `on_trajectory_start`. A subclass has to say so itself; one with state may offer `snapshot(episode)` and
    `restore(episode, state)` instead, which stands in for `on_trajectory_start` (see `core/snapshots.py`). `run`, if it is
    overridden as well, goes on from the turns that the episode has."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # One that adds nothing is what its base is; such is also what pickle makes first of a program's class, before it
        # sets all that differs from the base.
        if vars(cls).keys() - {"__module__", "__doc__"}:
            if "stateless" not in vars(cls):
                cls.stateless = False
            if "scores_turns" not in vars(cls) and not cls.scores_turns:
                cls.scores_turns = None

    def check_task(self, task: Task) -> None:
        """Refuse a task that this scheduler cannot run; called for all tasks before a run, and for that of each request.

        Raises:
            DataError: something is missing in the row.
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
            PolyturnError: the engine, a plug-in or an invariant failed; the caller decides what that means.
        """
        while True:
            if (limit := await episode.prepare()) is not None:
                return limit
            turn = await episode.generate()
            if (reason := await self.settle(episode, turn)) is not None:
                return reason

    async def settle(self, episode: Episode, turn: OpenTurn) -> StopReason | None:
        """Call the hooks behind a completion, answer it and record both; return why the episode ends with it, if it does.

        Raises:
            PolyturnError: a plug-in failed.
        """
        # First, so that no tool is called for a completion that a limit cut, or with which the episode ends.
        if (reason := await self._finished(episode, turn)) is not None:
            return reason
        answer = episode.guarded(self, self.step)(episode, turn)
        reply = Reply.of(await answer if inspect.isawaitable(answer) else answer)
        episode.record(turn, reply)
        if reply.is_done:
            return StopReason.ENV_DONE
        return None if reply.messages or reply.goes_on else StopReason.STOP

    async def run_forks(self, forks: Sequence[Episode]) -> list[StopReason]:
        """Drive forks of an episode side by side, each through the loop above, and return why each ended.

        If one fails, the others are cancelled and its error is raised.
        """
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(MultiTurnScheduler.run(self, fork), name=fork.id) for fork in forks]
        return [task.result() for task in running]

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Answer one turn: its tool calls first, else the row's interaction, else nothing.

        Returns one of:
            None: nothing answers, and the episode ends.
            a text: what the user says next.
            a polyturn.Message, or the dict of one, or a list of them: what the model reads next.
            a polyturn.Reply: messages with the turn's scores and notes, and whether the episode is over (`is_done`).
            episode.rewrite(messages): the history is replaced, and the model speaks again.
            episode.go_on(text): the model goes on with the message that it was writing.
        """
        if turn.message.tool_calls:
            return await episode.call_tools(turn)
        if episode.has_partner:
            return await episode.ask_partner(turn)
        return None

    def check_finished(self, episode: Episode, turn: OpenTurn) -> Any:
        """Return whether the episode ends with this turn: a StopReason, True (which is STOP), or None or False.

        The default ends it where a limit cut the completion, and says which limit.
        """
        return turn.cut_by if turn.finish_reason is FinishReason.LENGTH else None

    def on_trajectory_start(self, episode: Episode) -> Any:
        """Prepare the trajectory before its prompt is encoded; `episode.rewrite` replaces the prompt."""

    def show_tools(self, episode: Episode) -> Any:
        """Write the tools into the prompt, behind `on_trajectory_start`, where the chat template does not render them."""

    def on_turn_end(self, episode: Episode, turn: OpenTurn) -> Any:
        """Look at every completion, the last one included, before `check_finished` and `step`; scores go into `turn.scores`.

        Return a StopReason, or True (which is ENV_DONE), to end the episode here; None and False decide nothing.
        """

    def on_trajectory_end(self, episode: Episode) -> Any:
        """Release what the trajectory held. Called exactly once on every exit, also on errors and cancellation."""

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
                )
            if answer:
                return meaning
        return None
