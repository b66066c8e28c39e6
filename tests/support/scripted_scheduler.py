"""Random turn logic, written down as a plan: what a scheduler does after each turn, and what the model says.

    plan = random_plan(7)                 Plan(moves=(Move(kind="go_on", text="…"), Move(kind="edit", …), …), max_turns=4)
    context = plan_context(plan, scheduler=ScriptedScheduler(plan))

One plan can be played by schedulers of several interfaces, in several processes: all of them must leave the same tokens,
weights, logprobs, scores and infos. The model's answer depends on the prompt and on nothing else.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.limits import Limits
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, tiny_codec

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.open_turn import OpenTurn

KINDS = ("say", "say", "say_twice", "go_on", "cut", "edit", "mask", "done", "finish")
WORDS = ("no", "yes", "try again", "2+2", "so", "it is 4", "a", "\n", "####", "wait,", "é")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What happens after one turn."""

    kind: str
    """One of `KINDS`."""
    text: str
    """What is said, or what the message goes on with."""
    share: float
    """How much of the turn is kept, or how many of its tokens are trained."""
    score: float | None
    info: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPlan:
    """All moves of an episode."""

    seed: int
    moves: tuple[Move, ...]
    max_turns: int

    def kept(self, turn: int, num_tokens: int) -> int:
        """Return the number of a turn's tokens that its move keeps."""
        return int(self.moves[turn].share * num_tokens)


def random_plan(seed: int) -> SchedulerPlan:
    """Return the plan of a seed."""
    rng = random.Random(seed)
    turns = rng.randint(1, 6)
    moves = [
        Move(
            kind=rng.choice(KINDS),
            text=" ".join(rng.choices(WORDS, k=rng.randint(1, 4))),
            share=rng.random(),
            score=round(rng.uniform(-1, 1), 3) if rng.random() < 0.5 else None,
            info={rng.choice("xyz"): rng.randint(0, 9)} if rng.random() < 0.5 else {},
        )
        for _ in range(turns)
    ]
    return SchedulerPlan(seed=seed, moves=tuple(moves), max_turns=turns)


def plan_context(plan: SchedulerPlan, *, scheduler: MultiTurnScheduler) -> RolloutContext:
    """Return a context in which a scheduler plays a plan."""
    context = scripted_context(
        ["unused"],
        scheduler=scheduler,
        rewards={"*": lambda trajectory: 0.0},
        limits=Limits(max_turns=plan.max_turns, max_tokens_per_turn=24),
        sanity_every=0,
    )
    context.engine = ScriptedEngine(answer)
    return context


def answer(request: GenerateRequest) -> Completion:
    """Return the model's completion of a prompt: some words, the end of the turn or a cut, and a logprob for each token."""
    digest = hashlib.sha256(np.asarray(request.prompt_ids, np.int32).tobytes()).digest()
    rng = random.Random(digest)
    codec = tiny_codec()
    ids = list(codec.encode_plain(" ".join(rng.choices(WORDS, k=rng.randint(1, 3)))))[:22]
    is_cut = rng.random() < 0.05
    if not is_cut:
        ids.append(codec.stop_token_ids[0])
    probs = np.array([-3 * rng.random() for _ in ids], np.float32)
    reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    return Completion(token_ids=np.array(ids, np.int32), logprobs=probs, finish_reason=reason)


class ScriptedScheduler(MultiTurnScheduler):
    """Plays a plan in the native interface."""

    def __init__(self, plan: SchedulerPlan) -> None:
        self.plan = plan

    async def on_turn_end(self, episode: Episode, turn: OpenTurn) -> Any:
        """Score, and end where the environment is done."""
        move = self.plan.moves[turn.index]
        if move.score is not None:
            turn.scores["env"] = move.score
        return StopReason.ENV_DONE if move.kind == "done" else None

    async def check_finished(self, episode: Episode, turn: OpenTurn) -> Any:
        """End where the plan does."""
        if turn.finish_reason is FinishReason.LENGTH:
            return turn.cut_by
        if len(episode.turns) >= self.plan.max_turns:
            return StopReason.MAX_TURNS
        return self.plan.moves[turn.index].kind == "finish"

    async def step(self, episode: Episode, turn: OpenTurn) -> Reply:
        """Make the move."""
        move = self.plan.moves[turn.index]
        turn.info.update(move.info)
        kept = self.plan.kept(turn.index, turn.num_tokens)
        if move.kind == "go_on":
            return episode.go_on(move.text)
        if move.kind == "cut":
            return episode.go_on(tiny_codec().encode_plain(move.text), keep=kept)
        if move.kind == "edit":
            episode.rewrite(episode.task.prompt)
        if move.kind == "mask":
            episode.weigh(turn, np.arange(turn.num_tokens) < kept)
        said = [move.text, "And?"] if move.kind == "say_twice" else [move.text]
        return Reply.of([{"role": "user", "content": text} for text in said])
