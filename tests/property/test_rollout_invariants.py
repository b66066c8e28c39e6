"""I1 to I4, I9, I12 and I13 over whole episodes: random failures, time-outs, cancellations, rewrites and full contexts.

One hypothesis plan says what everything around the loop does: what the model says, how tools and the interaction behave
at each point of their lives, whether the scheduler edits the history, the limits, and when an episode is cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.core.errors import ToolError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.lifecycle import TRANSITIONS, EpisodeState
from polyturn.core.messages import Message
from polyturn.core.serde import from_json, to_json
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.interactions.base import BaseInteraction
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import ContextPolicy, Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.testing.episodes import scripted_context, task, turn_ids
from polyturn.tools.base import BaseTool
from support.invariants import check_invariants, sampled_turns
from support.virtual_time import run_virtual

CALL = '<tool_call>\n{"name": "probe", "arguments": {"say": "hi"}}\n</tool_call>'
SAYINGS = (
    CALL,
    "#### 4",
    f"{CALL}\n{CALL}",
    CALL.replace("probe", "unknown"),
    '<tool_call>\n{"name": "probe", "arguments": {"say": 1}\n</tool_call>',
    "thinking",
    "an answer that is a good deal longer than the others, so that it is cut by some limits",
)

TOOL_MOMENTS = ("create", "execute", "calc_reward", "release")
PARTNER_MOMENTS = ("start", "reply", "score", "finalize")


@dataclass
class Plan:
    """What happens around the loop."""

    says: list[str]
    tool: dict[str, str]
    partner: dict[str, str]
    has_partner: bool
    partner_turns: int
    scheduler: list[str]
    limits: Limits
    lose_engine_at: int | None
    versions: list[int]
    cancel_at: int | None
    """Passes of the event loop after which the episode is cancelled; twice, to be nasty."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    behaviour = dict.fromkeys((*TOOL_MOMENTS, *PARTNER_MOMENTS), "ok")
    for moment in draw(st.lists(st.sampled_from(sorted(behaviour)), max_size=2)):
        behaviour[moment] = draw(st.sampled_from(["raise", "slow", "hang"]))
    return Plan(
        says=draw(st.lists(st.sampled_from(SAYINGS), min_size=1, max_size=5)),
        tool={m: behaviour[m] for m in TOOL_MOMENTS},
        partner={m: behaviour[m] for m in PARTNER_MOMENTS},
        has_partner=draw(st.sampled_from([True, True, False])),
        partner_turns=draw(st.integers(0, 3)),
        scheduler=draw(
            st.lists(
                st.sampled_from(["", "", "", "", "rewrite", "rewrite", "mask", "mask", "raise"]), min_size=5, max_size=5
            )
        ),
        limits=Limits(
            max_turns=draw(st.sampled_from([5, 3, 2, 1])),
            max_user_turns=draw(st.sampled_from([None, None, 2, 0])),
            max_tokens_per_turn=draw(st.sampled_from([60, 60, 8])),
            max_tokens=draw(st.sampled_from([None, None, None, 150, 60])),
            max_context=draw(st.sampled_from([None, None, 420, 340, 260])),
            timeout_s=draw(st.sampled_from([None, None, 0.006])),
            context_policy=draw(st.sampled_from(ContextPolicy)),
        ),
        lose_engine_at=draw(st.sampled_from([None] * 6 + [0, 1, 2])),
        versions=draw(st.lists(st.integers(0, 2), min_size=2, max_size=2)),
        cancel_at=draw(st.sampled_from([None] * 30 + list(range(0, 60, 3)))),
    )


async def behave(how: str, error: type[Exception] = ValueError) -> None:
    if how == "raise":
        raise error("as planned")
    if how != "ok":
        await asyncio.sleep({"slow": 0.001, "hang": 60}[how])


class Probe(BaseTool):
    """A tool that behaves as planned and counts its lives."""

    def __init__(self, plan: Plan) -> None:
        properties = {"say": {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": ["say"]}
        super().__init__(
            {}, {"type": "function", "function": {"name": "probe", "description": "d", "parameters": parameters}}
        )
        self.plan = plan.tool
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        try:
            await behave(self.plan["create"])
        except BaseException:
            self.begun[str(instance_id)] += 1  # it may have taken something, so it is released under the id it was given
            raise
        own = f"tool-{instance_id}"
        self.begun[own] += 1
        return own

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await behave(self.plan["execute"], ToolError)
        return "heard", 0.5, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        await behave(self.plan["calc_reward"])
        return 1.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.ended[instance_id] += 1
        await behave(self.plan["release"])


class Partner(BaseInteraction):
    """An interaction that behaves as planned and counts its lives."""

    def __init__(self, plan: Plan) -> None:
        super().__init__({})
        self.plan, self.turns = plan.partner, plan.partner_turns
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        try:
            await behave(self.plan["start"])
        except BaseException:
            self.begun[str(instance_id)] += 1
            raise
        own = f"partner-{instance_id}"
        self.begun[own] += 1
        return own

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        await behave(self.plan["reply"])
        replies = sum(m["role"] == "user" for m in messages) - 1
        return replies >= self.turns, "say more " * 6, 0.25, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        await behave(self.plan["score"])
        return 0.5

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self.ended[instance_id] += 1
        await behave(self.plan["finalize"])


class Planned(MultiTurnScheduler):
    """The default scheduler, which now and then edits the history or masks a turn."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.episodes: list[Episode] = []  # the same list in every copy

    async def run(self, episode: Episode) -> Any:
        self.episodes.append(episode)
        return await super().run(episode)

    async def step(self, episode: Episode, turn: Any) -> Any:
        what = self.plan.scheduler[turn.index % 5]
        if what == "raise":
            raise KeyError("as planned")
        if what == "mask":
            episode.weigh(turn, np.zeros(len(turn.completion.token_ids)))
        answer = await super().step(episode, turn)
        if what == "rewrite":
            episode.rewrite([*episode.task.prompt, Message(role="user", content=f"so far: {turn.index} turns")])
        return answer


@dataclass
class Outcome:
    """What an episode left."""

    context: RolloutContext
    trajectory: Trajectory | None
    probe: Probe
    partner: Partner
    scheduler: Planned
    asked: list[tuple[np.ndarray, Completion]] = field(default_factory=list)
    """(prompt that the engine saw, what it answered), turn by turn."""


async def carry_out(plan: Plan) -> Outcome:
    probe, partner, scheduler = Probe(plan), Partner(plan), Planned(plan)
    asked: list[tuple[np.ndarray, Completion]] = []
    context = scripted_context(
        lambda request: OSError("the engine is lost"),
        tools=[probe],
        interactions={"partner": partner},
        limits=plan.limits,
        scheduler=scheduler,
        tool_timeout_s=0.01,
        interaction_timeout_s=0.01,
    )

    async def generate(request: GenerateRequest) -> Completion:
        number = len(asked)
        if number == plan.lose_engine_at:
            return await scripted(request)
        ids = turn_ids(plan.says[min(number, len(plan.says) - 1)])
        is_cut = len(ids) > request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        first, second = sorted(plan.versions)
        runs = ((0, first),) if first == second or len(ids) < 3 else ((0, first), (2, second))
        completion = Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            policy_versions=runs,
        )
        asked.append((request.prompt_ids.copy(), completion))
        await asyncio.sleep(0)
        return completion

    scripted, context.engine.generate = context.engine.generate, generate  # type: ignore[method-assign]
    row = task(interaction="partner" if plan.has_partner else None)
    running = asyncio.ensure_future(run_episode(context, row, id="e", seed=1))
    trajectory = None
    if plan.cancel_at is not None:
        for _ in range(plan.cancel_at):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()
    try:
        trajectory = await running
    except asyncio.CancelledError:
        assert plan.cancel_at is not None
    while context.tools.late:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return Outcome(context, trajectory, probe, partner, scheduler, asked)


def check(plan: Plan, outcome: Outcome) -> None:
    check_lives(outcome)
    check_states(outcome)
    if outcome.trajectory is not None:
        check_tokens(plan, outcome.trajectory, outcome.asked)
        check_records(outcome.trajectory)


def check_lives(outcome: Outcome) -> None:
    """I9: every create and start has exactly one release and finalize, and nothing stays live."""
    assert outcome.probe.begun == outcome.probe.ended
    assert outcome.partner.begun == outcome.partner.ended
    assert set(outcome.probe.begun.values()) <= {1} and set(outcome.partner.begun.values()) <= {1}
    assert outcome.context.num_live_interactions == 0 and not outcome.context.tools.live_ids
    assert set(outcome.context.engine.ended_sessions) <= {"e"}  # type: ignore[attr-defined]


def check_states(outcome: Outcome) -> None:
    """I12: only transitions of the table, and the last state is an end that fits the record."""
    for episode in outcome.scheduler.episodes:
        states = episode.lifecycle.history
        assert all(after in TRANSITIONS[before] for before, after in itertools.pairwise(states))
        assert not TRANSITIONS[episode.lifecycle.state]
        if outcome.trajectory is None:
            assert states[-1] is EpisodeState.ABORTED
        else:
            assert (states[-1] is EpisodeState.COMPLETED) == (not outcome.trajectory.is_failed)


def check_tokens(plan: Plan, trajectory: Trajectory, asked: list[tuple[np.ndarray, Completion]]) -> None:
    """I1 to I4, and the weights of turns that the scheduler masked."""
    answered = asked[: len(trajectory.turns)]
    check_invariants(trajectory, answered, is_all_trained=False)
    assert trajectory.num_sampled_tokens == sum(len(completion.token_ids) for _, completion in answered)
    for index, segment, start, end in sampled_turns(trajectory):
        weight = 0.0 if was_masked(plan, trajectory, index) else 1.0
        assert set(segment.loss_weights[start:end]) <= {weight}, "I3"


def was_masked(plan: Plan, trajectory: Trajectory, index: int) -> bool:
    """Return whether the scheduler was asked about a turn and masked it; a turn that was cut is never shown to it."""
    turn = trajectory.turns[index]
    reached_step = turn.finish_reason is not FinishReason.LENGTH
    return plan.scheduler[index % 5] == "mask" and reached_step


def check_records(trajectory: Trajectory) -> None:
    """I13: the record pickles and goes through JSON unchanged, and comes back read-only."""
    copy = pickle.loads(pickle.dumps(trajectory))
    assert copy.same_as(trajectory)
    read = from_json(Trajectory, json.loads(json.dumps(to_json(trajectory))))
    assert read.same_as(trajectory)
    for each in (copy, read):
        assert all(not s.token_ids.flags.writeable for s in each.segments)


@given(plans())
def test_episode_keeps_its_invariants_through_failures(plan: Plan):
    check(plan, run_virtual(carry_out(plan)))


def test_plans_reach_every_outcome():
    """A property test that only ever sees quiet episodes would say nothing."""
    seen: Counter[str] = Counter()

    @given(plans())
    @settings(max_examples=120, derandomize=True, database=None)
    def look(plan: Plan) -> None:
        outcome = run_virtual(carry_out(plan))
        t = outcome.trajectory
        seen["cancelled"] += t is None
        if t is not None:
            seen[t.stop_reason.value] += 1
            seen["several segments"] += len(t.segments) > 1
            seen["several turns"] += len(t.turns) > 1
            seen["two versions in a turn"] += any(
                sum(t.span(r).source is SpanSource.SAMPLED for r in turn.spans) > 1 for turn in t.turns
            )
            seen["close errors"] += t.metrics.get("close_errors", 0) > 0

    look()
    expected = {"cancelled", "error", "stop", "env_done", "max_turns", "length", "timeout", "several segments"}
    expected |= {"several turns", "two versions in a turn", "close errors"}
    assert not {what for what in expected if not seen[what]}, seen
