"""Environment: the tools and the interaction of one episode, from their start to their release.

Separate from the episode, which keeps tokens and turns: everything here is foreign code that may raise, hang or score, and
what matters is that each start has exactly one end. Forks of an episode share it, but for the tools that can be snapshotted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyturn.core.errors import InteractionError, LifecycleError, SnapshotError
from polyturn.core.messages import Message, Origin
from polyturn.core.task import Task
from polyturn.core.trajectory import ToolResult
from polyturn.interactions.context import ConversationView
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import Reply
from polyturn.rollout.tool_branches import ToolBranch
from polyturn.tools.session import copied


class Environment:
    """What answers the turns of one task."""

    def __init__(self, context: RolloutContext, task: Task, *, id: str) -> None:
        self._id = id
        self._task = task
        self._tools = context.tools.session(id)
        self._seams = context.tools.seams
        self._partner = context.partner_for(task)
        self._branches: list[ToolBranch] = []

    @property
    def has_partner(self) -> bool:
        """Whether the task's row names an interaction."""
        return self._partner is not None

    @property
    def asks_person(self) -> bool:
        """Whether it is a person who answers."""
        return self._partner is not None and self._partner.asks_person

    async def start(self) -> tuple[Message, ...]:
        """Create the tools and start the interaction; return what the tools say at once, for the prompt."""
        said = await self._tools.start(self._task)
        if self._partner is not None:
            await self._partner.start(self._id)
        return _tool_messages(said)

    @property
    def why_not(self) -> str | None:
        """Why a conversation with these tools and this interaction cannot go on after a restart; None where it can."""
        seams = [self._seams[name] for name in self._tools.names]
        found = [*seams, *([] if self._partner is None else [self._partner.seam])]
        return next((seam.why_not for seam in found if seam.why_not is not None), None)

    async def snapshot(self) -> dict[str, Any]:
        """Return what tools and interaction keep of the episode.

        Raises:
            SnapshotError: one of them raised or was late.
        """
        return {"tools": await self._tools.snapshot(), "partner": None if self._partner is None else await self._kept()}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Begin again, and let everyone take up what `snapshot` returned.

        Raises:
            PolyturnError: one of them raised or was late.
        """
        await self.start()
        await self._tools.restore(state["tools"])
        if self._partner is not None:
            await self._partner.restore(state["partner"])

    async def _kept(self) -> Any:
        assert self._partner is not None
        try:
            return await self._partner.snapshot()
        except InteractionError as problem:
            raise SnapshotError(str(problem)) from problem

    def branch(self, id: str, *, above: ToolBranch | None, states: Mapping[str, Any] | None) -> ToolBranch | None:
        """Return the tools of a fork; None where it shares all of them.

        Args:
            id: The fork's id.
            above: The tools of the fork that it is a fork of.
            states: What the tools kept where it goes on; None is what they keep when it first calls one.
        """
        if not self._tools.has_states:
            return None
        made = ToolBranch(above or self._tools, id=id, states=states)
        self._branches.append(made)
        return made

    async def tool_states(self, branch: ToolBranch | None) -> Mapping[str, Any] | None:
        """Return what the tools of the episode, or of a fork, keep now; None where none keeps anything that can be had.

        Raises:
            SnapshotError: a tool's `snapshot` raised, was late, or returned what cannot be copied.
        """
        if not self._tools.has_states:
            return None
        return copied(await (self._tools.snapshot() if branch is None else branch.states()))

    async def call_tools(
        self, turn: OpenTurn, messages: Callable[[], list[dict[str, Any]]], *, branch: ToolBranch | None = None
    ) -> Reply:
        """Run the turn's tool calls; a call that fails is an observation like any other. A fork brings its `branch`."""
        began = time.monotonic()
        tools = self._tools if branch is None else await branch.session()
        turn.tool_results = await tools.call(turn.message.tool_calls, messages=messages)
        turn.timings["tools"] = time.monotonic() - began
        for result in turn.tool_results:
            if result.reward is not None:
                key = f"tool/{result.name}"
                turn.scores[key] = turn.scores.get(key, 0.0) + result.reward
        return Reply(messages=_tool_messages(turn.tool_results))

    async def ask_partner(
        self, turn: OpenTurn, messages: list[dict[str, Any]], scene: ConversationView | None = None
    ) -> Reply:
        """Let the interaction answer the turn and score it; one that asks for the scene is told it.

        Raises:
            InteractionError: it raised, was late, or answered something that cannot be understood.
        """
        if self._partner is None:
            raise LifecycleError(f"task {self._task.id!r} has no interaction; ask `has_partner` first")
        began = time.monotonic()
        answer = await self._partner.reply(messages, scene)
        turn.timings["interaction"] = time.monotonic() - began
        if answer.score is not None:
            turn.scores["interaction"] = answer.score
        return Reply(
            messages=(Message(role="user", content=answer.content, origin=Origin.ENVIRONMENT),),
            is_done=answer.is_done,
            info=dict(answer.metadata),
        )

    async def score_last(self, turns: Sequence[OpenTurn]) -> None:
        """Ask the interaction for the score of a final turn that no reply scored."""
        if self._partner is not None and turns and "interaction" not in turns[-1].timings:
            score = await self._partner.final_score()
            if score is not None:
                turns[-1].scores["interaction"] = score

    async def tool_rewards(self) -> dict[str, float | None]:
        """Return each tool's `calc_reward`."""
        return await self._tools.finish()

    async def close(self) -> list[str]:
        """Release the tools and finalize the interaction; return what went wrong."""
        problems = [problem for branch in self._branches for problem in await branch.close()]
        problems += [str(p) for p in await self._tools.close()]
        if self._partner is not None and (problem := await self._partner.close()) is not None:
            problems.append(problem)
        return problems


def _tool_messages(results: Sequence[ToolResult]) -> tuple[Message, ...]:
    return tuple(
        Message(role="tool", content=r.content, tool_call_id=r.call_id, name=r.name, origin=Origin.ENVIRONMENT)
        for r in results
    )
