"""Compaction: shortens a history that exceeds a token budget before the next generation.

    drop_reasoning   all turns but the newest lose their reasoning
    window           the prompt and the newest turns stay
    summarise        the model writes a summary of the history; the prompt, the summary and the newest turn stay;
                     like `window` if a limit leaves no room for a summary

The policies are applied in order until the history fits. Every shortened history opens a new segment, in which all earlier
tokens are prompt. A summary is a turn that is trained like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyturn.core.errors import ConfigError, did_you_mean
from polyturn.core.messages import Message, Origin
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.rollout.schedulers.reasoning import without_reasoning
from polyturn.rollout.schedulers.registry import schedulers

POLICIES = ("drop_reasoning", "window", "summarise")
REQUEST = "Summarise what was found out so far, as notes to go on with. Do not answer yet."


@schedulers.register("compaction")
@keeps_deadlines
class Compaction(MultiTurnScheduler):
    """The default turn logic with a history of at most `budget` tokens."""

    stateless = True
    scores_turns = False

    def __init__(
        self, *, budget: int, policies: Sequence[str] = ("drop_reasoning", "window"), request: str = REQUEST
    ) -> None:
        if isinstance(policies, str):
            raise ConfigError(f"compaction: policies is {policies!r}; write a list, [{policies}]")
        if not policies:
            raise ConfigError(f"compaction: policies is empty; give at least one of {', '.join(POLICIES)}")
        if unknown := [p for p in policies if p not in POLICIES]:
            raise ConfigError(f"compaction: there is no policy {unknown[0]!r}.{did_you_mean(str(unknown[0]), POLICIES)}")
        if budget < 1:
            raise ConfigError(f"compaction: the budget is {budget}; it must be a positive number of tokens")
        self.budget = budget
        self.policies = tuple(policies)
        self.request = request

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Answer like the default scheduler; if history and answer exceed the budget, shorten the history."""
        reply = Reply.of(await super().step(episode, turn))
        if reply.is_done or not reply.messages:
            return reply
        for policy in self.policies:
            if episode.count_tokens([*episode.messages, *reply.messages]) <= self.budget:
                break
            shorter = await self._shorter(policy, episode, reply.messages)
            if shorter != list(episode.messages):  # any rewrite, even without a change, causes a full render
                episode.rewrite(shorter)
        return reply

    async def _shorter(self, policy: str, episode: Episode, messages: Sequence[Message]) -> list[Message]:
        history, start = list(episode.messages), episode.history.num_prompt
        turns = [i for i, m in enumerate(history) if m.role == "assistant" and i >= start]
        if not turns:
            return history
        if policy == "drop_reasoning":
            return [without_reasoning(m) if i != turns[-1] else m for i, m in enumerate(history)]
        if policy == "summarise" and (summary := await self._summary(episode, messages)) is not None:
            return [*_with_notes(episode.prompt[:start], summary), *history[turns[-1] :]]
        for first in turns:
            shorter = history[: turns[0]] + history[first:]  # keeps notes after the prompt
            if episode.count_tokens([*shorter, *messages]) <= self.budget:
                break
        return shorter

    async def _summary(self, episode: Episode, messages: Sequence[Message]) -> str | None:
        """Let the model write a summary in a fork; return None if a limit leaves no room for a summary."""
        fork = episode.fork(
            messages=[*episode.messages, *messages, Message(role="user", content=self.request, origin=Origin.OWNER)]
        )
        if await fork.prepare() is not None:
            return None
        return without_reasoning((await fork.generate()).message).text


def _with_notes(prompt: Sequence[Message], summary: str) -> list[Message]:
    last = prompt[-1]
    notes = Message(role="user", content=f"{last.text}\n\nNotes so far:\n{summary}", origin=Origin.MODEL)
    return [*prompt[:-1], notes] if last.role == "user" and not last.media else [*prompt, notes]
