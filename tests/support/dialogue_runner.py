"""Runs a written dialogue as a real episode: loop, encoder and record are real, only the model is told what to say.

Runner(codec).tell(dialogue, [[9, 2], [5, 2]])  ->  the prompt ids that the engine was shown at each turn, the trajectory
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.messages import Message
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rewards.router import RewardRouter
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.run_episode import trajectory_of
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import ParsedTurn
from polyturn.tools.base import BaseTool
from polyturn.tools.toolbox import Toolbox
from support.dialogues import TOOLS, Dialogue, DialogueTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDialogue:
    """What a dialogue left when it was run as an episode."""

    prompts: list[list[int]]
    """The ids that the engine was shown at each turn."""
    trajectory: Trajectory
    encoder: DeltaEncoder


class _Script(MultiTurnScheduler):
    """Answers each turn with the dialogue's answer; a cut turn is answered too."""

    def __init__(self, told: Dialogue) -> None:
        self._told = told

    async def step(self, episode: Episode, turn: OpenTurn) -> Reply:
        return Reply(messages=self._told.turns[turn.index].answer)

    def check_finished(self, episode: Episode, turn: OpenTurn) -> None:
        return None


class _DialogueParser:
    """Reads each turn as the dialogue's message, in order: parsers are judged elsewhere."""

    def __init__(self, turns: Sequence[DialogueTurn]) -> None:
        self._turns = iter(turns)

    def parse(self, text: str, *, id_prefix: str = "call", tools: Sequence[Mapping[str, Any]] = ()) -> ParsedTurn:
        m = next(self._turns).message
        return ParsedTurn(m.text, m.tool_calls, m.reasoning)


class Runner:
    """Runs dialogues as episodes over one codec, with the tools of `TOOLS` or none."""

    def __init__(self, codec: Codec, **options: Any) -> None:
        """Take the codec, and further fields of `RolloutContext`."""
        self.codec = codec
        self._contexts: dict[bool, RolloutContext] = {}
        self._options = options

    def context(self, *, has_tools: bool) -> RolloutContext:
        """Return the context of episodes with or without tools, made once: encoders are shared, as in a run."""
        if has_tools not in self._contexts:
            self._contexts[has_tools] = RolloutContext(
                engine=ScriptedEngine([]),
                codec=self.codec,
                parser=_DialogueParser(()),
                tools=Toolbox([BaseTool({}, schema) for schema in TOOLS] if has_tools else []),
                interactions={},
                rewarder=RewardRouter({}),
                scheduler=MultiTurnScheduler(),
                limits=Limits(max_turns=None, max_tokens_per_turn=None),
                **{"sanity_every": 0, **self._options},
            )
        return self._contexts[has_tools]

    def encoder(self, *, has_tools: bool) -> DeltaEncoder:
        """Return the encoder of episodes with or without tools."""
        return self.context(has_tools=has_tools).encoder_for(Task(id="t", prompt=(Message(role="user", content="Hi"),)))

    def tell(self, told: Dialogue, said: Sequence[Sequence[int]]) -> RecordedDialogue:
        """Run `told` as an episode in which the model samples the ids `said`.

        Raises:
            TemplateError: the template cannot render it.
        """
        prompts: list[list[int]] = []

        def answer(request: GenerateRequest) -> Completion:
            turn = len(prompts)
            prompts.append(request.prompt_ids.tolist())
            reason = FinishReason.LENGTH if told.turns[turn].is_cut else FinishReason.STOP
            logprobs = np.full(len(said[turn]), -1.0, np.float32)
            return Completion(token_ids=np.array(said[turn], np.int32), logprobs=logprobs, finish_reason=reason)

        context = self.context(has_tools=bool(told.tools))
        context.engine, context.parser, context.scheduler = (
            ScriptedEngine(answer),
            _DialogueParser(told.turns),
            _Script(told),
        )
        task = Task(id=f"{told.kind}/{told.seed}", prompt=told.prompt, data_source=None)
        episode = Episode(context, task, id=task.id)

        async def run() -> Trajectory:
            try:
                return trajectory_of(episode, await context.scheduler.run(episode))
            finally:
                await episode.resources.close()

        return RecordedDialogue(prompts=prompts, trajectory=asyncio.run(run()), encoder=context.encoder_for(task))
