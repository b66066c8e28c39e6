"""Every advantage estimator on made-up games, against what its paper says and against itself.

A game is groups of plays, a play what one or two agents say in turn. There are groups of one, plays without a turn, turns
of which nothing was sampled or trained, turns that nothing scored, plays that failed or were truncated, histories that were
cut into segments. What is expected is written from the plays alone, with other formulas than the library's where there are
others: lambda-returns from n-step returns, pass@k from all sets of k, deviations from `statistics`. Numbers are eighths and
discounts halves, so that float32 holds them exactly.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.algorithms.advantages import advantages, assign_advantages, bind_estimator
from polyturn.batching.samples import to_samples
from polyturn.core.errors import TrainingError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.sample import TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, Span, SpanRef, SpanSource, Trajectory, TrajectoryGroup, Turn

TASK = Task(id="t", prompt=())
BY_SCORES = ("return_to_go", "mt_grpo")
OWN = [n for n in advantages if advantages.resolve(n).__module__.startswith("polyturn.algorithms")]


@dataclass(frozen=True)
class Token:
    value: float
    penalty: float
    is_trained: bool


@dataclass(frozen=True)
class Say:
    """A turn: what was sampled, how long the observation is, what scored it, the state it left."""

    tokens: tuple[Token, ...]
    gap: int
    score: float | None
    seen: str | None
    key: str | None
    agent: str
    is_cut: bool


@dataclass(frozen=True)
class Play:
    says: tuple[Say, ...]
    reward: float
    of_agents: tuple[float, float] | None
    parts: tuple[float, float]
    stop: StopReason


@dataclass(frozen=True)
class Game:
    groups: tuple[tuple[Play, ...], ...]
    greedy: tuple[Play | None, ...]


Dice = random.Random
STOPS = [StopReason.STOP, StopReason.STOP, StopReason.MAX_TOKENS, StopReason.MAX_TURNS, StopReason.ERROR]


def eighth(dice: Dice) -> float:
    return dice.randint(-16, 16) / 8


def earned(dice: Dice) -> float:
    return dice.choice([0.0, 1.0, eighth(dice)])


def a_say(dice: Dice, has_agents: bool) -> Say:
    tokens = tuple(Token(eighth(dice), eighth(dice), dice.random() < 0.8) for _ in range(dice.randint(0, 3)))
    return Say(
        tokens=tokens,
        gap=dice.randint(1 if has_agents else 0, 2),
        score=dice.choice([None, eighth(dice)]),
        seen=dice.choice([None, "left", "right"]),
        key=dice.choice([None, None, "here", "there"]),
        agent=dice.choice("ab") if has_agents else "assistant",
        is_cut=dice.random() < 0.3,
    )


def a_play(dice: Dice, has_agents: bool) -> Play:
    return Play(
        says=tuple(a_say(dice, has_agents) for _ in range(dice.randint(0, 4))),
        reward=earned(dice),
        of_agents=(earned(dice), earned(dice)) if has_agents else None,
        parts=(earned(dice), earned(dice)),
        stop=dice.choice(STOPS),
    )


def a_game(dice: Dice) -> Game:
    has_agents = dice.random() < 0.3
    groups = [tuple(a_play(dice, has_agents) for _ in range(dice.randint(1, 4))) for _ in range(dice.randint(1, 3))]
    return Game(tuple(groups), tuple(dice.choice([None, a_play(dice, has_agents)]) for _ in groups))


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def trajectory_of(play: Play, id: str) -> Trajectory:
    """Return the record that the play leaves: a new segment where it was cut and where the other agent speaks."""
    segments: list[list[Span]] = []
    agents: list[str] = []
    turns = []
    for k, say in enumerate(play.says):
        if not segments or say.is_cut or say.agent != agents[-1]:
            segments.append([Span(ids=ids(1, 2), source=SpanSource.PROMPT)])
            agents.append(say.agent)
        refs = []
        if say.tokens:
            weights = np.array([t.is_trained for t in say.tokens], np.float32)
            refs.append(SpanRef(len(segments) - 1, len(segments[-1])))
            segments[-1].append(Span(ids=ids(*[3] * len(weights)), source=SpanSource.SAMPLED, turn=k, weights=weights))
        if say.gap:
            refs.append(SpanRef(len(segments) - 1, len(segments[-1])))
            segments[-1].append(Span(ids=ids(*[4] * say.gap), source=SpanSource.OBSERVATION, turn=k))
        turns.append(
            Turn(
                index=k,
                message=Message(role="assistant", content="x"),
                finish_reason=FinishReason.STOP,
                spans=tuple(refs),
                scores={} if say.score is None else {"env": say.score},
                observation=() if say.seen is None else (Message(role="user", content=say.seen),),
                info={} if say.key is None else {"state_key": say.key},
            )
        )
    is_failed = play.stop.is_failure
    info = {} if play.of_agents is None else {"agents": dict(zip("ab", play.of_agents, strict=True))}
    reward = Reward(total=play.reward, components=dict(zip(("first", "second"), play.parts, strict=True)), info=info)
    return Trajectory(
        id=id,
        task=TASK,
        segments=tuple(Segment(spans=tuple(s), agent=a) for s, a in zip(segments, agents, strict=True)),
        turns=tuple(turns),
        stop_reason=play.stop,
        reward=None if is_failed else reward,
        error="broken" if is_failed else None,
    )


Found = dict[tuple[int, int], list[float]]
"""(group, member) -> the number of each of its trained tokens, in the order of time."""


def run(game: Game, name: str, options: dict[str, Any], *, elsewhere: float = math.nan) -> tuple[Found, Found | None]:
    """Return advantages and returns; where nothing is trained, values and penalties say `elsewhere`."""
    groups, samples = [], []
    for g, plays in enumerate(game.groups):
        members = tuple(trajectory_of(play, f"{g}/{m}") for m, play in enumerate(plays))
        greedy = game.greedy[g]
        baseline = None if greedy is None else trajectory_of(greedy, f"{g}/greedy")
        groups.append(TrajectoryGroup(id=str(g), task=TASK, trajectories=members, baseline=baseline))
        for sample in to_samples(groups[-1], temperature=1.0):
            play = plays[int(sample.id.trajectory.partition("/")[2])]
            arrays = {"values": np.full(len(sample), elsewhere), "rewards": np.full(len(sample), elsewhere)}
            for k, say in enumerate(play.says):
                at = np.flatnonzero((sample.turn_ids == k) & (sample.token_ids == 3))
                for place, token in zip(at, say.tokens if len(at) else (), strict=True):
                    if token.is_trained:
                        arrays["values"][place], arrays["rewards"][place] = token.value, token.penalty
            samples.append(sample.replace(**arrays))
    found = assign_advantages(
        groups, samples, estimator=bind_estimator(advantages.resolve(name), offered={}, kwargs=options)
    )
    assert [s.id for s in found] == [s.id for s in samples]
    for s in found:
        assert not np.any(s.advantages[s.loss_weights == 0]), "a reward has landed where nothing is trained"
        assert np.isfinite(s.advantages).all()
    numbers = by_member(game, found, "advantages")
    assert numbers is not None
    return numbers, by_member(game, found, "returns")


def by_member(game: Game, samples: Sequence[TrainSample], what: str) -> Found | None:
    out: Found = {(g, m): [] for g, plays in enumerate(game.groups) for m in range(len(plays))}
    for s in samples:
        array = s.advantages if what == "advantages" else s.returns
        if array is None:
            return None
        g, _, m = s.id.trajectory.partition("/")
        out[int(g), int(m)] += array[s.loss_weights != 0].tolist()
    return out


# --- what is expected: the same plays, seen without spans and samples


@dataclass
class Seen:
    """One agent of one play, as a definition sees it."""

    place: tuple[int, int]
    reward: float
    scores: list[float | None]
    states: list[str | None]
    parts: tuple[float, float]
    tokens: list[tuple[int, int, Token]] = field(default_factory=list)
    """(turn of the play, turn of the agent, token), of the trained ones."""

    @property
    def total(self) -> float:
        return self.reward + sum(t.penalty for _, _, t in self.tokens)

    @property
    def num_turns(self) -> int:
        return len(self.scores)

    def turn_rewards(self, outcome: str) -> list[float]:
        """What each turn earned: "rest" sums to the reward, "add" to reward and scores, "end" is the reward at the end."""
        scores = [s or 0.0 for s in self.scores]
        last = {"rest": self.reward - sum(scores), "add": self.reward, "ignore": 0.0, "end": self.reward}[outcome]
        own = [0.0] * len(scores) if outcome == "end" else scores
        return [r + (last if k == len(own) - 1 else 0.0) for k, r in enumerate(own)]

    def token_rewards(self, outcome: str) -> list[float]:
        """The penalty of each token, and on a turn's last one what the turns from it to the next trained one earned."""
        out = [t.penalty for _, _, t in self.tokens]
        for k, reward in enumerate(self.turn_rewards(outcome)):
            before = [i for i, (_, own, _) in enumerate(self.tokens) if own <= k]
            if before:
                out[before[-1]] += reward
        return out

    def returns(self, gamma: float, outcome: str) -> list[float]:
        r = self.turn_rewards(outcome)
        for _, k, token in self.tokens:
            r[k] += token.penalty
        return [sum(gamma ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))]


def seen(game: Game) -> tuple[list[list[Seen]], list[float | None]]:
    """Return the groups that a definition compares, each agent's apart, without what failed; and the greedy rewards."""
    groups, greedy = [], []
    for g, plays in enumerate(game.groups):
        live = [(m, p) for m, p in enumerate(plays) if not p.stop.is_failure]
        apart = ["a", "b"] if plays[0].of_agents is not None else [None]
        for index, agent in enumerate(apart if live else []):
            members = []
            for m, play in live:
                mine = [(k, say) for k, say in enumerate(play.says) if agent in (None, say.agent)]
                states: list[str | None] = ["start"]
                states += [f"key {say.key}" if say.key else say.seen for _, say in mine]
                reward = play.reward if play.of_agents is None or agent is None else play.of_agents[index]
                one = Seen((g, m), reward, [say.score for _, say in mine], states[: len(mine)], play.parts)
                one.tokens = [
                    (k, own, token) for own, (k, say) in enumerate(mine) for token in say.tokens if token.is_trained
                ]
                members.append(one)
            groups.append(members)
            other = game.greedy[g]
            failed = other is None or other.stop.is_failure
            whole = failed or agent is None or other.of_agents is None  # type: ignore[union-attr]
            greedy.append(None if failed else other.reward if whole else other.of_agents[index])  # type: ignore[union-attr,index]
    return groups, greedy


def standing(value: float, among: Sequence[float], *, divided: bool = True, eps: float = 1e-6) -> float:
    if len(among) < 2:
        return 0.0
    centred = value - statistics.fmean(among)
    return centred / (statistics.stdev(among) + eps) if divided else centred


def lambda_returns(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """(1 - lam) sum over n of lam^(n-1) times the n-step return, the last of which has all the weight that is left."""
    out = []
    for t in range(len(values)):
        left = len(values) - t
        steps = [
            sum(gamma**i * rewards[t + i] for i in range(n)) + (gamma**n * values[t + n] if n < left else 0.0)
            for n in range(1, left + 1)
        ]
        weights = [(1 - lam) * lam ** (n - 1) for n in range(1, left)] + [lam ** (left - 1)]
        out.append(sum(w * g for w, g in zip(weights, steps, strict=True)))
    return out


def one_number(number: Callable[[list[Seen], Seen, float | None], float]) -> Callable[..., list[list[list[float]]]]:
    def of(groups: list[list[Seen]], greedy: list[float | None], **options: Any) -> list[list[list[float]]]:
        return [
            [[number(group, m, base, **options)] * len(m.tokens) for m in group]
            for group, base in zip(groups, greedy, strict=True)
        ]

    return of


def grpo(group, m, greedy, norm_by_std=True):
    return standing(m.total, [x.total for x in group], divided=norm_by_std)


def rloo(group, m, greedy):
    others = [x.total for x in group if x is not m]
    return m.total - statistics.fmean(others) if others else 0.0


def opo(group, m, greedy):
    """The mean over the tokens of the group of what their trajectory earned."""
    earned = [x.total for x in group for _ in x.tokens] or [x.total for x in group]
    return m.total - statistics.fmean(earned)


def grpo_passk(group, m, greedy, k=None, norm_by_std=True):
    totals = [x.total for x in group]
    if k is None:  # what the maximum loses without this one, and of several best ones nothing
        lead = max(totals) - max(x.total for x in group if x is not m)
        return lead / (statistics.stdev(totals) + 1e-6) if norm_by_std else lead
    sets = list(itertools.combinations(group, k))
    if len(sets) < 2:
        return 0.0
    best = [max(x.total for x in s) for s in sets]
    mine = statistics.fmean(b for s, b in zip(sets, best, strict=True) if any(x is m for x in s))
    centred = mine - statistics.fmean(best)
    return centred / (statistics.pstdev(best) + 1e-6) if norm_by_std else centred


def remax(group, m, greedy):
    return rloo(group, m, None) if greedy is None else m.total - greedy


def gpg(groups, greedy, f_norm=1.0):
    members = [(group, m) for group in groups for m in group]
    live = [m for group, m in members if len({x.total for x in group}) > 1]
    alpha = len(members) / len(live) if live else 1.0
    centred = one_number(lambda group, m, _: m.total - statistics.fmean(x.total for x in group))
    return [[[alpha / f_norm * a for a in m] for m in group] for group in centred(groups, greedy)]


def whitened(found: list[list[list[float]]], eps: float = 1e-8) -> list[list[list[float]]]:
    flat = [a for group in found for m in group for a in m]
    if not flat:
        return found
    mean, scale = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + eps) if len(flat) > 1 else 1.0
    return [[[(a - mean) / scale for a in m] for m in group] for group in found]


def reinforce_plus_plus_baseline(groups, greedy):
    one = one_number(lambda group, m, _: m.total - statistics.fmean(x.total for x in group))
    return whitened(one(groups, greedy))


def reinforce_plus_plus(groups, greedy, gamma=1.0, outcome="end"):
    def of(m):
        r = m.token_rewards(outcome)
        return [sum(gamma ** (i - t) * r[i] for i in range(t, len(r))) for t in range(len(r))]

    return whitened([[of(m) for m in group] for group in groups])


def gdpo(groups, greedy, weights=None, norm_by_std=True, whiten_batch=True):
    weights = weights or {"first": 1.0, "second": 1.0}
    sums = [
        [
            sum(
                weights.get(name, 0.0) * standing(m.parts[i], [x.parts[i] for x in group], divided=norm_by_std)
                for i, name in enumerate(("first", "second"))
            )
            for m in group
        ]
        for group in groups
    ]
    flat = [s for group in sums for s in group]
    if whiten_batch and len(flat) > 1:
        sums = [[standing(s, flat) for s in group] for group in sums]
    return [[[s] * len(m.tokens) for s, m in zip(of, group, strict=True)] for of, group in zip(sums, groups, strict=True)]


def on_turns(m: Seen, credit: Sequence[float]) -> list[float]:
    return [credit[k] for _, k, _ in m.tokens]


def return_to_go(groups, greedy, gamma=1.0, outcome="rest", baseline=True, norm_by_std=False):
    out: list[Any] = []
    for group in groups:
        returns = {m.place: m.returns(gamma, outcome) for m in group}
        credits = []
        for m in group:
            others = [[g[k] for p, g in returns.items() if p != m.place and len(g) > k] for k in range(m.num_turns)]
            credits.append(
                [g - (statistics.fmean(o) if baseline and o else 0.0) for g, o in zip(returns[m.place], others, strict=True)]
            )
        flat = [c for credit in credits for c in credit]
        scale = statistics.stdev(flat) + 1e-6 if norm_by_std and len({*flat}) > 1 else 1.0
        out.append([on_turns(m, [c / scale for c in credit]) for m, credit in zip(group, credits, strict=True)])
    return out


def mt_grpo(groups, greedy, outcome_weight=1.0, outcome="end", norm_by_std=True):
    def counted(m):
        return {"rest": m.total - sum(s or 0.0 for s in m.scores), "ignore": 0.0}.get(outcome, m.total)

    out: list[Any] = []
    for group in groups:
        out.append([])
        for m in group:
            whole = standing(counted(m), [counted(x) for x in group], divided=norm_by_std)
            credit = []
            for k, score in enumerate(m.scores):
                peers = [x.scores[k] for x in group if x.num_turns > k and x.scores[k] is not None]
                turn = 0.0 if score is None else standing(score, peers, divided=norm_by_std)
                credit.append(turn + (1.0 if k == m.num_turns - 1 else outcome_weight) * whole)
            out[-1].append(on_turns(m, credit))
    return out


def gigpo(groups, greedy, step_weight=1.0, gamma=0.95, outcome="rest", norm_by_std=True):
    out: list[Any] = []
    for group in groups:
        taken = [(s, g) for m in group for s, g in zip(m.states, m.returns(gamma, outcome), strict=True)]
        out.append([])
        for m in group:
            episode = standing(m.total, [x.total for x in group], divided=norm_by_std)
            credit = [
                episode
                + (0.0 if s is None else step_weight * standing(g, [x for t, x in taken if t == s], divided=norm_by_std))
                for s, g in zip(m.states, m.returns(gamma, outcome), strict=True)
            ]
            out[-1].append(on_turns(m, credit))
    return out


def gae(groups, greedy, gamma=1.0, lam=1.0, outcome="rest", whiten_batch=True):
    def of(m):
        values = [t.value for _, _, t in m.tokens]
        found = lambda_returns(m.token_rewards(outcome), values, gamma, lam)
        return [g - v for g, v in zip(found, values, strict=True)]

    found = [[of(m) for m in group] for group in groups]
    return whitened(found) if whiten_batch else found


def by_turn(m: Seen) -> list[list[int]]:
    """The places of the tokens of each turn that has any."""
    return [list(places) for _, places in itertools.groupby(range(len(m.tokens)), key=lambda i: m.tokens[i][1])]


def turn_gae(groups, greedy, gamma=1.0, lam=1.0, outcome="rest", whiten_batch=True):
    def of(m):
        rewards, turns = m.token_rewards(outcome), by_turn(m)
        values = [m.tokens[turn[0]][2].value for turn in turns]
        found = lambda_returns([sum(rewards[i] for i in turn) for turn in turns], values, gamma, lam)
        return [g - v for turn, g, v in zip(turns, found, values, strict=True) for _ in turn]

    found = [[of(m) for m in group] for group in groups]
    return whitened(found) if whiten_batch else found


def bilevel_gae(groups, greedy, gamma=1.0, lam=1.0, turn_gamma=1.0, turn_lam=1.0, outcome="rest", whiten_batch=True):
    """Each turn is an episode of its own, at whose end stands the return of the turns."""

    def of(m):
        rewards, turns = m.token_rewards(outcome), by_turn(m)
        values = [t.value for _, _, t in m.tokens]
        ends = [turn[-1] for turn in turns]
        high = lambda_returns([rewards[i] for i in ends], [values[i] for i in ends], turn_gamma, turn_lam)
        out = []
        for turn, final in zip(turns, high, strict=True):
            own = [*(rewards[i] for i in turn[:-1]), final]
            inner = lambda_returns(own, [values[i] for i in turn], gamma, lam)
            out += [g - values[i] for g, i in zip(inner, turn, strict=True)]
        return out

    found = [[of(m) for m in group] for group in groups]
    return whitened(found) if whiten_batch else found


DEFINITIONS: dict[str, Callable[..., list[list[list[float]]]]] = {
    "grpo": one_number(grpo),
    "dr_grpo": one_number(lambda group, m, greedy: grpo(group, m, greedy, norm_by_std=False)),
    "rloo": one_number(rloo),
    "opo": one_number(opo),
    "grpo_passk": one_number(grpo_passk),
    "remax": one_number(remax),
    "gpg": gpg,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "hierarchical_grpo": one_number(lambda group, m, _: m.total - statistics.fmean(x.total for x in group)),
    "rae": one_number(lambda group, m, _: m.total),  # in a first step; the next ones: algorithms/test_estimators.py
    "gdpo": gdpo,
    "return_to_go": return_to_go,
    "mt_grpo": mt_grpo,
    "gigpo": gigpo,
    "gae": gae,
    "turn_gae": turn_gae,
    "bilevel_gae": bilevel_gae,
}
COMPARE = ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline", "gdpo", "mt_grpo", "gigpo")
"""Those for which a member that is alone in its group is 0, and in no statistics."""


def defined(name, groups, greedy, **options):
    if name not in COMPARE:
        return DEFINITIONS[name](groups, greedy, **options)
    kept = [(group, base) for group, base in zip(groups, greedy, strict=True) if len(group) > 1]
    found = iter(DEFINITIONS[name]([group for group, _ in kept], [base for _, base in kept], **options))
    return [next(found) if len(group) > 1 else [[0.0] * len(m.tokens) for m in group] for group in groups]


FLAG, PART, OUTCOME = [True, False], [0.0, 0.5, 1.0], ["rest", "add", "ignore", "end"]
GAE: dict[str, list[Any]] = {"gamma": PART, "lam": PART, "outcome": OUTCOME, "whiten_batch": FLAG}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "grpo": {"norm_by_std": FLAG},
    "grpo_passk": {"norm_by_std": FLAG},
    "gpg": {"f_norm": [1.0, 2.0]},
    "reinforce_plus_plus": {"gamma": PART, "outcome": OUTCOME},
    "gdpo": {"weights": [{"first": 1.0, "second": 0.5}, {"second": 1.0}], "norm_by_std": FLAG, "whiten_batch": FLAG},
    "return_to_go": {"gamma": PART, "outcome": OUTCOME, "baseline": FLAG, "norm_by_std": FLAG},
    "mt_grpo": {"outcome_weight": PART, "outcome": OUTCOME, "norm_by_std": FLAG},
    "gigpo": {"gamma": PART, "step_weight": PART, "outcome": OUTCOME, "norm_by_std": FLAG},
    "gae": GAE,
    "turn_gae": GAE,
    "bilevel_gae": {**GAE, "turn_gamma": PART, "turn_lam": PART},
}
SEEDS = st.integers(0, 10**9)


def drawn(name: str, seed: int) -> tuple[Game, dict[str, Any]]:
    """Return a game, and options of which about half are set."""
    dice = Dice(seed)
    game = a_game(dice)
    options = {key: dice.choice(values) for key, values in OPTIONS.get(name, {}).items() if dice.random() < 0.5}
    if name == "grpo_passk" and dice.random() < 0.5:
        options["k"] = dice.randint(1, 3)  # failures may leave fewer
    return game, options


def assert_equal(found: Found, expected: Found) -> None:
    """Up to float32, of which whitening makes much where all advantages are nearly one number."""
    flat = [abs(a) for numbers in expected.values() for a in numbers]
    tolerance = 1e-3 if flat and max(flat) < 0.1 else 1e-4
    assert found.keys() == expected.keys()
    for place, numbers in found.items():
        assert numbers == pytest.approx(expected[place], abs=tolerance, rel=1e-4), place


def in_order(game: Game, groups: list[list[Seen]], found: list[list[list[float]]]) -> Found:
    """Return the numbers of agents as numbers of their plays, in the order of time."""
    told: dict[tuple[int, int], list[tuple[int, float]]] = {
        (g, m): [] for g, plays in enumerate(game.groups) for m in range(len(plays))
    }
    for group, of_group in zip(groups, found, strict=True):
        for m, numbers in zip(group, of_group, strict=True):
            told[m.place] += [(k, a) for (k, _, _), a in zip(m.tokens, numbers, strict=True)]
    return {place: [a for _, a in sorted(pairs, key=lambda pair: pair[0])] for place, pairs in told.items()}


def test_every_estimator_has_a_definition_here() -> None:
    refuses_negative_rewards = {"maxrl"}  # tests/unit/algorithms/test_estimators.py
    assert set(OWN) == set(DEFINITIONS) | refuses_negative_rewards and not set(OPTIONS) - set(OWN)


@pytest.mark.parametrize("name", DEFINITIONS)
@given(seed=SEEDS)
def test_estimator_equals_its_definition(name: str, seed: int) -> None:
    game, options = drawn(name, seed)
    groups, greedy = seen(game)
    expected = in_order(game, groups, defined(name, groups, greedy, **options))
    members = [m for group in groups if name not in COMPARE or len(group) > 1 for m in group]
    lacks_scores = not any(s is not None for m in members for s in m.scores)
    lacks_states = not any(s is not None for m in members for s in m.states[1:]) and any(m.states[1:] for m in members)
    if members and ((name in BY_SCORES and lacks_scores) or (name == "gigpo" and lacks_states)):
        with pytest.raises(TrainingError, match=r"needs scores of turns|that were taken in the same state"):
            run(game, name, options)
    else:
        assert_equal(run(game, name, options)[0], expected)


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
@given(seed=SEEDS)
def test_critic_returns_are_value_plus_advantage(name: str, seed: int) -> None:
    """By turns at the first token of each, and nothing at the others."""
    game, options = drawn(name, seed)
    groups, greedy = seen(game)
    missed = DEFINITIONS[name](groups, greedy, **{**options, "whiten_batch": False})
    wanted = []
    for group, of_group in zip(groups, missed, strict=True):
        wanted.append(
            [[a + t.value for a, (_, _, t) in zip(of, m.tokens, strict=True)] for m, of in zip(group, of_group, strict=True)]
        )
        for m, of in zip(group, wanted[-1], strict=True):
            for turn in by_turn(m) if name == "turn_gae" else ():
                of[turn[0] + 1 : turn[-1] + 1] = [math.nan] * (len(turn) - 1)
    returns = run(game, name, options)[1]
    expected = in_order(game, groups, wanted)
    assert returns is not None or not any(expected.values())
    for place, numbers in (returns or {}).items():
        assert numbers == pytest.approx(expected[place], abs=1e-4, nan_ok=True), place


def without_cuts(game: Game) -> Game:
    return replace(
        game,
        groups=tuple(
            tuple(replace(p, says=tuple(replace(s, is_cut=False) for s in p.says)) for p in plays) for plays in game.groups
        ),
    )


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(max_examples=15)
@given(seed=SEEDS)
def test_irrelevant_changes_leave_advantages(name: str, seed: int) -> None:
    """Numbers at observations, cuts, failed and truncated members, the order of members and of groups."""
    game, options = drawn(name, seed)
    try:
        found, returns = run(game, name, options)
    except TrainingError:
        return
    again, targets = run(game, name, options, elsewhere=1e6)
    assert again == found and (targets is None) == (returns is None)
    if targets is not None and returns is not None:
        assert all(targets[at] == pytest.approx(returns[at], abs=0, nan_ok=True) for at in returns)
    assert_equal(run(without_cuts(game), name, options)[0], found)
    stop = {True: StopReason.ERROR, False: StopReason.STOP}
    plain = replace(
        game, groups=tuple(tuple(replace(p, stop=stop[p.stop.is_failure]) for p in plays) for plays in game.groups)
    )
    assert run(plain, name, options)[0] == found
    kept = [[m for m, p in enumerate(plays) if not p.stop.is_failure] for plays in game.groups]
    smaller = replace(game, groups=tuple(tuple(p[m] for m in ms) for p, ms in zip(game.groups, kept, strict=True)))
    if all(kept):
        alone, _ = run(smaller, name, options)
        assert_equal(
            {(g, kept[g][m]): numbers for (g, m), numbers in alone.items()},
            {p: found[p] for p in found if p[1] in kept[p[0]]},
        )
    turned = replace(game, groups=tuple(plays[::-1] for plays in game.groups[::-1]), greedy=game.greedy[::-1])
    back, _ = run(turned, name, options)
    last = len(game.groups) - 1
    assert_equal(back, {(last - g, len(game.groups[g]) - 1 - m): numbers for (g, m), numbers in found.items()})


BEYOND_GROUPS = ("remax", "reinforce_plus_plus", "gigpo", "gae", "turn_gae", "bilevel_gae", "rae")
"""Those that compare with more than the group: gigpo with the trajectory itself, rae with the steps before."""
COMPARES = [n for n in DEFINITIONS if n not in BEYOND_GROUPS]


@pytest.mark.parametrize("name", COMPARES)
@settings(max_examples=10)
@given(seed=SEEDS, size=st.integers(2, 4))
def test_equal_members_have_no_advantage(name: str, seed: int, size: int) -> None:
    live = [replace(plays[0], stop=StopReason.STOP) for plays in a_game(Dice(seed)).groups]
    same = Game(tuple((play,) * size for play in live), (None,) * len(live))
    try:
        found, _ = run(same, name, {})
    except TrainingError:
        return
    for numbers in found.values():
        assert numbers == pytest.approx([0.0] * len(numbers), abs=1e-5)
