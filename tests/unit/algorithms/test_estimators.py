"""Every estimator against its definition, written out in loops, on random batches of trajectories of several turns.

A trajectory here is a list of turns, a turn (score or None, number of tokens, of these trained); observations stand between.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.advantages import (
    advantages,
    assign_advantages,
    bind_estimator,
    check_estimator,
    components_of,
    declare,
    members_needed,
)
from polyturn.compat.verl.batch_estimator import as_estimator
from polyturn.core.errors import ConfigError, TrainingError, UnknownNameError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup, Turn

TASK = Task(id="t", prompt=())
ALL = [n for n in advantages if "test" not in n]


def play(rng: np.random.Generator, group: str, index: int) -> tuple[Trajectory, TrainSample]:
    """Return a trajectory of one to four turns, and its sample."""
    num_turns = int(rng.integers(1, 5))
    turns, columns = [], []
    for k in range(num_turns):
        score = None if rng.random() < 0.3 else float(rng.normal())
        seen = (Message(role="user", content=f"state {rng.integers(2)}"),)
        turns.append(
            Turn(
                index=k,
                message=Message(role="assistant", content="x"),
                finish_reason=FinishReason.STOP,
                scores={} if score is None else {"env": score},
                observation=seen,
            )
        )
        trained = int(rng.integers(1, 5)) if rng.random() < 0.85 else 0
        columns += [(1.0, k)] * trained + [(0.0, k)] * int(rng.integers(1, 4))  # observations belong to the turn too
    n = len(columns) + 2  # two of the prompt
    sample = TrainSample(
        id=SampleId(group, f"{group}/{index}", 0),
        token_ids=np.arange(n),
        loss_weights=np.array([0, 0, *(w for w, _ in columns)], np.float32),
        turn_ids=np.array([-1, -1, *(k for _, k in columns)], np.int32),
        values=rng.normal(size=n),
        rewards=0.1 * rng.normal(size=n),
    )
    components = {"outcome": float(rng.integers(0, 2)), "format": float(rng.normal())}
    reward = Reward(total=float(rng.integers(0, 3)), components=components)
    id = f"{group}/{index}"
    made = Trajectory(id=id, task=TASK, segments=(), turns=tuple(turns), stop_reason=StopReason.STOP, reward=reward)
    return made, sample


def batch(seed: int) -> tuple[list[TrajectoryGroup], list[TrainSample]]:
    groups, samples = [], []
    for g in range(3):
        rng = np.random.default_rng([seed, g])
        members = []
        for m in range(4):
            trajectory, own = play(rng, f"g{g}", m)
            members.append(trajectory)
            samples.append(own)
        baseline, _ = play(np.random.default_rng([seed, g, 2]), f"g{g}", 9)
        groups.append(TrajectoryGroup(id=f"g{g}", task=TASK, trajectories=tuple(members), baseline=baseline))
    return groups, samples


def tokens(trajectory: Trajectory, samples: list[TrainSample]) -> list[dict[str, Any]]:
    """Return the trained tokens of one trajectory in the order of time, each with all that is known of it."""
    out = []
    for s in samples:
        if s.id.trajectory != trajectory.id:
            continue
        for t in range(len(s)):
            if s.loss_weights[t]:
                known = {
                    name: None if getattr(s, name) is None else float(getattr(s, name)[t])
                    for name in ("values", "rewards", "advantages", "returns")
                }
                out.append({"turn": int(s.turn_ids[t]), **known})
    return out


def run(name: str, seed: int = 0, **kwargs: Any) -> Any:
    groups, samples = batch(seed)
    estimator = bind_estimator(advantages.resolve(name), offered={}, kwargs=kwargs)
    found = assign_advantages(groups, samples, estimator=estimator)
    return groups, found


def total(trajectory: Trajectory, samples: list[TrainSample]) -> float:
    assert trajectory.reward is not None
    return trajectory.reward.total + sum(t["rewards"] for t in tokens(trajectory, samples))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def turn_reward(trajectory: Trajectory, k: int) -> float:
    """The score of turn k; the last one also has what the scores leave of the reward."""
    assert trajectory.reward is not None
    scores = [t.score or 0.0 for t in trajectory.turns]
    return scores[k] + (trajectory.reward.total - sum(scores) if k == len(scores) - 1 else 0.0)


def whitened(expected: dict[str, list[float]]) -> dict[str, list[float]]:
    flat = [v for values in expected.values() for v in values]
    scale = math.sqrt(std(flat) ** 2 + 1e-8)
    return {key: [(v - mean(flat)) / scale for v in values] for key, values in expected.items()}


def compare(groups: Any, found: Any, expected: dict[str, list[float]], what: str = "advantages") -> None:
    """Every trained token has what the definition says, and nothing else has anything."""
    for group in groups:
        for trajectory in group.trajectories:
            got = [t[what] for t in tokens(trajectory, found)]
            assert got == pytest.approx(expected[trajectory.id], abs=2e-5, nan_ok=True), trajectory.id
    for s in found:
        assert not np.any(s.advantages[s.loss_weights == 0])


def per_trajectory(groups: Any, found: Any, numbers: dict[str, float]) -> dict[str, list[float]]:
    return {t.id: [numbers[t.id]] * len(tokens(t, found)) for g in groups for t in g.trajectories}


SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "remax", "reinforce_plus_plus_baseline", "gpg"])
def test_estimators_of_one_number_per_trajectory(name: str, seed: int) -> None:
    groups, found = run(name, seed)
    numbers = {}
    everyone = [[total(t, found) for t in g.trajectories] for g in groups]
    num_flat = sum(len(r) for r in everyone if max(r) == min(r))
    for group, rewards in zip(groups, everyone, strict=True):
        lengths = [len(tokens(t, found)) for t in group.trajectories]
        for i, trajectory in enumerate(group.trajectories):
            r = rewards[i]
            numbers[trajectory.id] = {
                "grpo": (r - mean(rewards)) / (std(rewards) + 1e-6),
                "dr_grpo": r - mean(rewards),
                "rloo": r - mean([x for j, x in enumerate(rewards) if j != i]),
                "opo": r - sum(n * x for n, x in zip(lengths, rewards, strict=True)) / sum(lengths),
                "remax": r - group.baseline.reward.total,
                "reinforce_plus_plus_baseline": r - mean(rewards),
                "gpg": 12 / (12 - num_flat) * (r - mean(rewards)),
            }[name]
    expected = per_trajectory(groups, found, numbers)
    compare(groups, found, whitened(expected) if name == "reinforce_plus_plus_baseline" else expected)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_pass_at_k_is_the_mean_over_all_sets_of_k(seed: int, k: int) -> None:
    groups, found = run("grpo_passk", seed, k=k)
    numbers = {}
    for group in groups:
        rewards = [total(t, found) for t in group.trajectories]
        sets = list(itertools.combinations(range(4), k))
        best = [max(rewards[i] for i in s) for s in sets]
        spread = math.sqrt(mean([(b - mean(best)) ** 2 for b in best]))
        for i, t in enumerate(group.trajectories):
            mine = mean([b for s, b in zip(sets, best, strict=True) if i in s])
            numbers[t.id] = (mine - mean(best)) / (spread + 1e-6)
    compare(groups, found, per_trajectory(groups, found, numbers))


def test_pass_at_the_size_of_the_group_gives_the_best_its_lead() -> None:
    groups, found = run("grpo_passk", norm_by_std=False)
    for group in groups:
        rewards = [total(t, found) for t in group.trajectories]
        for t, r in zip(group.trajectories, rewards, strict=True):
            lead = r - sorted(rewards)[-2] if r == max(rewards) else 0.0
            assert all(x["advantages"] == pytest.approx(lead, abs=1e-5) for x in tokens(t, found))


def test_a_group_that_failures_left_too_small_for_k_teaches_nothing_and_does_not_end_the_run() -> None:
    _, found = run("grpo_passk", k=4)
    assert not any(np.any(s.advantages) for s in found)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_normalises_token_returns_over_the_batch(seed: int, gamma: float) -> None:
    groups, found = run("reinforce_plus_plus", seed, gamma=gamma)
    expected = {}
    for group in groups:
        for t in group.trajectories:
            rewards = [x["rewards"] for x in tokens(t, found)]
            if rewards:
                rewards[-1] += t.reward.total
            n = len(rewards)
            expected[t.id] = [sum(gamma ** (i - j) * rewards[i] for i in range(j, n)) for j in range(n)]
    compare(groups, found, whitened(expected))


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_normalises_each_reward_in_its_group_and_the_sums_over_the_batch(seed: int) -> None:
    weights = {"outcome": 1.0, "format": 0.5}
    groups, found = run("gdpo", seed, weights=weights)
    sums = {}
    for group in groups:
        for name, weight in weights.items():
            values = [t.reward.components[name] for t in group.trajectories]
            for t, v in zip(group.trajectories, values, strict=True):
                sums[t.id] = sums.get(t.id, 0.0) + weight * (v - mean(values)) / (std(values) + 1e-6)
    flat = list(sums.values())
    numbers = {key: (v - mean(flat)) / (std(flat) + 1e-6) for key, v in sums.items()}
    compare(groups, found, per_trajectory(groups, found, numbers))
    with pytest.raises(UnknownNameError, match=r"'formt'.*Did you mean 'format'"):
        run("gdpo", weights={"formt": 1.0})
    groups, found = run("gdpo", seed, weights={**weights, "tool/search": 1.0, "interaction": 1.0})
    compare(groups, found, per_trajectory(groups, found, numbers))  # a step in which nobody searched is no mistake


def test_gdpo_says_which_parts_of_a_reward_it_weighs() -> None:
    """What resamples groups without signal has to know: rewards may be equal where their parts are not."""
    bound = bind_estimator(advantages.resolve("gdpo"), offered={"weights": {"outcome": 1.0, "tool_step": 0.0}}, kwargs={})
    assert components_of(bound) == {"outcome"}
    assert components_of(bind_estimator(bound, offered={}, kwargs={"weights": {"format": 0.5}})) == {"format"}
    assert components_of(advantages.resolve("grpo")) == frozenset()


def turn_returns(t: Trajectory, found: list[TrainSample], gamma: float) -> list[float]:
    n = len(t.turns)
    r = [turn_reward(t, k) + sum(x["rewards"] for x in tokens(t, found) if x["turn"] == k) for k in range(n)]
    return [sum(gamma ** (i - k) * r[i] for i in range(k, n)) for k in range(n)]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_return_to_go_against_the_others_at_the_same_turn(seed: int, gamma: float) -> None:
    groups, found = run("return_to_go", seed, gamma=gamma)
    expected = {}
    for group in groups:
        returns = {t.id: turn_returns(t, found, gamma) for t in group.trajectories}
        for t in group.trajectories:
            credit = []
            for k, g in enumerate(returns[t.id]):
                others = [r[k] for key, r in returns.items() if key != t.id and len(r) > k]
                credit.append(g - (mean(others) if others else 0.0))
            expected[t.id] = [credit[x["turn"]] for x in tokens(t, found)]
    compare(groups, found, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_mt_grpo_adds_the_standing_of_the_turn_and_of_the_outcome(seed: int) -> None:
    groups, found = run("mt_grpo", seed, outcome_weight=0.5)
    expected = {}
    for group in groups:
        rewards = [total(t, found) for t in group.trajectories]
        for t, r in zip(group.trajectories, rewards, strict=True):
            outcome = (r - mean(rewards)) / (std(rewards) + 1e-6)
            credit = []
            for k, turn in enumerate(t.turns):
                peers = [o.turns[k].score for o in group.trajectories if len(o.turns) > k]
                scores = [s for s in peers if s is not None]
                own = 0.0
                if turn.score is not None and len(scores) > 1:
                    own = (turn.score - mean(scores)) / (std(scores) + 1e-6)
                credit.append(own + outcome * (1.0 if k == len(t.turns) - 1 else 0.5))
            expected[t.id] = [credit[x["turn"]] for x in tokens(t, found)]
    compare(groups, found, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_gigpo_compares_turns_of_one_state(seed: int) -> None:
    groups, found = run("gigpo", seed, gamma=0.9, step_weight=0.7)
    expected = {}
    for group in groups:
        rewards = [total(t, found) for t in group.trajectories]
        met: dict[str, list[float]] = {}
        state = lambda t, k: "start" if k == 0 else str(t.turns[k - 1].observation[0].content)  # noqa: E731
        for t in group.trajectories:
            for k, g in enumerate(turn_returns(t, found, 0.9)):
                met.setdefault(state(t, k), []).append(g)
        for t, r in zip(group.trajectories, rewards, strict=True):
            credit = []
            for k, g in enumerate(turn_returns(t, found, 0.9)):
                anchor = met[state(t, k)]
                step = (g - mean(anchor)) / (std(anchor) + 1e-6) if len(anchor) > 1 else 0.0
                credit.append((r - mean(rewards)) / (std(rewards) + 1e-6) + 0.7 * step)
            expected[t.id] = [credit[x["turn"]] for x in tokens(t, found)]
    compare(groups, found, expected)


def lambda_sums(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, by its definition."""
    n = len(values)
    deltas = [rewards[i] + gamma * (values[i + 1] if i + 1 < n else 0.0) - values[i] for i in range(n)]
    return [sum((gamma * lam) ** (i - j) * deltas[i] for i in range(j, n)) for j in range(n)]


def landed(t: Trajectory, own: list[dict[str, Any]]) -> list[float]:
    """Return for each trained token the turn rewards that fall on it: on the last one of the last trained turn so far."""
    out = [0.0] * len(own)
    for k in range(len(t.turns)):
        before = [i for i, x in enumerate(own) if x["turn"] <= k]
        if before:
            out[before[-1]] += turn_reward(t, k)
    return out


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.95, 0.8), (0.9, 0.0)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_over_tokens(seed: int, gamma: float, lam: float) -> None:
    groups, found = run("gae", seed, gamma=gamma, lam=lam, whiten_batch=False)
    expected, targets = {}, {}
    for t in [t for g in groups for t in g.trajectories]:
        own = tokens(t, found)
        rewards = [a + x["rewards"] for a, x in zip(landed(t, own), own, strict=True)]
        values = [x["values"] for x in own]
        expected[t.id] = lambda_sums(rewards, values, gamma, lam)
        targets[t.id] = [a + v for a, v in zip(expected[t.id], values, strict=True)]
    compare(groups, found, expected)
    compare(groups, found, targets, "returns")
    groups, found = run("gae", seed, gamma=gamma, lam=lam)
    compare(groups, found, whitened(expected))
    compare(groups, found, targets, "returns")


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_over_turns(seed: int) -> None:
    groups, found = run("turn_gae", seed, gamma=0.9, lam=0.7, whiten_batch=False)
    expected, targets = {}, {}
    for t in [t for g in groups for t in g.trajectories]:
        own = tokens(t, found)
        turns = sorted({x["turn"] for x in own})
        fallen = landed(t, own)
        of = {k: [i for i, x in enumerate(own) if x["turn"] == k] for k in turns}
        rewards = [sum(fallen[i] + own[i]["rewards"] for i in of[k]) for k in turns]
        values = [own[of[k][0]]["values"] for k in turns]
        credit = dict(zip(turns, lambda_sums(rewards, values, 0.9, 0.7), strict=True))
        expected[t.id] = [credit[x["turn"]] for x in own]
        first = {of[k][0] for k in turns}
        targets[t.id] = [credit[x["turn"]] + x["values"] if i in first else math.nan for i, x in enumerate(own)]
    compare(groups, found, expected)
    compare(groups, found, targets, "returns")


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_over_turns_and_tokens(seed: int) -> None:
    options = {"gamma": 0.95, "lam": 0.8, "turn_gamma": 0.9, "turn_lam": 0.7}
    groups, found = run("bilevel_gae", seed, **options, whiten_batch=False)
    expected = {}
    for t in [t for g in groups for t in g.trajectories]:
        own = tokens(t, found)
        turns = sorted({x["turn"] for x in own})
        last = [max(i for i, x in enumerate(own) if x["turn"] == k) for k in turns]
        fallen = landed(t, own)
        rewards = [fallen[i] + own[i]["rewards"] for i in last]
        high = lambda_sums(rewards, [own[i]["values"] for i in last], 0.9, 0.7)
        expected[t.id] = []
        for k, top in zip(turns, high, strict=True):
            inner = [x for x in own if x["turn"] == k]
            for i in range(len(inner)):
                value = 0.0
                for j in range(i, len(inner) - 1):
                    delta = inner[j]["rewards"] + 0.95 * inner[j + 1]["values"] - inner[j]["values"]
                    value += (0.95 * 0.8) ** (j - i) * delta
                expected[t.id].append(value + (0.95 * 0.8) ** (len(inner) - 1 - i) * top)
    compare(groups, found, expected)


@pytest.mark.parametrize("name", ALL)
def test_what_stands_at_observations_changes_nothing(name: str) -> None:
    groups, samples = batch(1)
    estimator = advantages.resolve(name)
    plain = assign_advantages(groups, samples, estimator=estimator)
    noisy = []
    for s in samples:
        noise = np.where(s.loss_weights == 0, 100.0, 0.0).astype(np.float32)
        noisy.append(s.replace(values=s.values + noise, rewards=s.rewards + noise))
    changed = assign_advantages(groups, noisy, estimator=estimator)
    for a, b in zip(plain, changed, strict=True):
        assert np.array_equal(a.advantages, b.advantages)
        assert (a.returns is None) == (b.returns is None)
        assert a.returns is None or np.array_equal(a.returns, b.returns, equal_nan=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL)
def test_a_trajectory_that_is_cut_into_segments_has_the_same_advantages(name: str, seed: int) -> None:
    groups, whole = batch(seed)
    estimator = advantages.resolve(name)
    pieces = []
    for s in whole:
        cut = 2 + len(s) // 3
        while cut < len(s) and s.turn_ids[cut] == s.turn_ids[cut - 1]:
            cut += 1
        for segment, keep in enumerate([slice(0, cut), slice(cut, len(s))]):
            if np.any(s.loss_weights[keep]) or segment == 0:
                arrays = {n: getattr(s, n)[keep] for n in ("token_ids", "loss_weights", "turn_ids", "values", "rewards")}
                pieces.append(s.replace(id=s.id._replace(segment=segment), **arrays))
    found, again = (assign_advantages(groups, x, estimator=estimator) for x in (whole, pieces))
    for t in [t for g in groups for t in g.trajectories]:
        for what in ("advantages", "returns"):
            assert [x[what] for x in tokens(t, found)] == pytest.approx([x[what] for x in tokens(t, again)], nan_ok=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL)
def test_segments_that_take_turns_have_the_advantages_of_one_segment(name: str, seed: int) -> None:
    """An agent that returns to an older segment: turns 0, 2 in the first segment, 1, 3 in the second; time orders them."""
    groups, whole = batch(seed)
    estimator = advantages.resolve(name)
    pieces = []
    for s in whole:
        for segment, keep in enumerate([s.turn_ids % 2 == 0, s.turn_ids % 2 == 1]):
            if np.any(s.loss_weights[keep]) or segment == 0:
                arrays = {n: getattr(s, n)[keep] for n in ("token_ids", "loss_weights", "turn_ids", "values", "rewards")}
                pieces.append(s.replace(id=s.id._replace(segment=segment), **arrays))
    found, again = (assign_advantages(groups, x, estimator=estimator) for x in (whole, pieces))
    for t in [t for g in groups for t in g.trajectories]:
        for what in ("advantages", "returns"):
            by_turn = sorted(tokens(t, again), key=lambda x: x["turn"])
            assert [x[what] for x in tokens(t, found)] == pytest.approx([x[what] for x in by_turn], nan_ok=True)


def test_rewards_of_turns_nothing_of_which_is_trained_fall_to_the_turn_before() -> None:
    turns = tuple(
        Turn(index=k, message=Message(role="assistant", content="x"), finish_reason=FinishReason.STOP, scores={"env": 1.0})
        for k in range(3)
    )
    t = Trajectory(id="0", task=TASK, segments=(), turns=turns, stop_reason=StopReason.STOP, reward=Reward(total=3.0))
    s = TrainSample(
        id=SampleId("g", "0", 0),
        token_ids=np.arange(4),
        loss_weights=np.array([0, 0, 1, 0], np.float32),
        turn_ids=np.array([-1, 0, 1, 2]),
        values=np.zeros(4, np.float32),
    )
    estimator = bind_estimator(advantages.resolve("gae"), offered={}, kwargs={"whiten_batch": False})
    (found,) = assign_advantages([TrajectoryGroup(id="g", task=TASK, trajectories=(t,))], [s], estimator=estimator)
    assert found.advantages is not None and found.advantages.tolist() == [0, 0, 2, 0]


def test_a_greedy_rollout_that_failed_is_replaced_by_the_others() -> None:
    groups, samples = batch(0)
    groups = [TrajectoryGroup(id=g.id, task=TASK, trajectories=g.trajectories) for g in groups]
    found = assign_advantages(groups, samples, estimator=advantages.resolve("remax"))
    again = assign_advantages(groups, samples, estimator=advantages.resolve("rloo"))
    assert all(np.array_equal(a.advantages, b.advantages) for a, b in zip(found, again, strict=True))


def plain(turn_scores: tuple[float | None, ...] = (None, None), seen: str | None = None, *, size: int = 1) -> Any:
    turns = tuple(
        Turn(
            index=k,
            message=Message(role="assistant", content="x"),
            finish_reason=FinishReason.STOP,
            scores={} if score is None else {"env": score},
            observation=() if seen is None else (Message(role="user", content=seen),),
        )
        for k, score in enumerate(turn_scores)
    )
    t = Trajectory(id="0", task=TASK, segments=(), turns=turns, stop_reason=StopReason.STOP, reward=Reward(total=1.0))
    s = TrainSample(
        id=SampleId("g", "0", 0), token_ids=np.arange(3), loss_weights=np.array([0, 1, 1], np.float32), turn_ids=[-1, 0, 1]
    )
    members = tuple(dataclasses.replace(t, id=str(i)) for i in range(size))
    samples = [s.replace(id=SampleId("g", str(i), 0)) for i in range(size)]
    return [TrajectoryGroup(id="g", task=TASK, trajectories=members)], samples


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("return_to_go", "needs scores of turns and none of the 2 trajectories"),
        ("mt_grpo", "needs scores of turns and none of the 2 trajectories"),
        ("gigpo", "no turn of this step left an observation or a state_key"),
        ("gae", "needs a critic's values and sample .* has none"),
    ],
)
def test_what_an_estimator_lacks_is_said(name: str, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        assign_advantages(*plain(size=2), estimator=advantages.resolve(name))


def test_a_step_in_which_nobody_earned_a_score_is_no_mistake_where_earlier_ones_had_some() -> None:
    (found,) = assign_advantages(*plain(), estimator=advantages.resolve("return_to_go"), has_scored=True)
    assert found.advantages is not None and found.advantages.tolist() == [0, 1, 1], "the reward alone, from each turn on"


WITHOUT_BASELINE = ("reinforce_plus_plus", "remax", "gae", "turn_gae", "bilevel_gae")


def with_survivors(seed: int, numbers: tuple[int, ...]) -> tuple[list[TrajectoryGroup], list[TrainSample]]:
    """Return a batch of which so many trajectories of each group are left."""
    groups, samples = batch(seed)
    left = [dataclasses.replace(g, trajectories=g.trajectories[:n]) for g, n in zip(groups, numbers, strict=True)]
    ids = {t.id for g in left for t in g.trajectories}
    return left, [s for s in samples if s.id.trajectory in ids]


def found_by_id(groups: Any, samples: Any, name: str, **kwargs: Any) -> dict[str, list[float]]:
    estimator = bind_estimator(advantages.resolve(name), offered={}, kwargs=kwargs)
    least = members_needed(estimator, group_size=4)
    made = assign_advantages(groups, samples, estimator=estimator, min_members=least)
    return {s.id.trajectory: s.advantages.tolist() for s in made}  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [n for n in ALL if n not in WITHOUT_BASELINE])
def test_one_that_is_left_of_a_group_teaches_nothing_and_changes_nothing(name: str, seed: int) -> None:
    """Three of four failed: the raw reward of the fourth is no advantage, and in no statistic of the batch."""
    found = found_by_id(*with_survivors(seed, (4, 1, 4)), name)
    without = found_by_id(*with_survivors(seed, (4, 0, 4)), name)
    assert set(found.pop("g1/0")) == {0.0}
    assert found == without
    assert any(any(values) for values in found.values()), "the others do teach"


@pytest.mark.parametrize("name", WITHOUT_BASELINE)
def test_without_a_group_baseline_one_that_is_left_is_trained_like_any_other(name: str) -> None:
    assert any(found_by_id(*with_survivors(1, (4, 1, 4)), name)["g1/0"])


def test_return_to_go_compares_unless_it_has_no_baseline() -> None:
    survivors = with_survivors(0, (4, 1, 4))
    assert not any(found_by_id(*survivors, "return_to_go")["g1/0"])
    assert any(found_by_id(*survivors, "return_to_go", baseline=False)["g1/0"])
    assert members_needed(advantages.resolve("return_to_go"), group_size=1) == 1, "a group of one that was asked for"


def test_remax_without_a_greedy_rollout_has_nothing_to_compare_one_with() -> None:
    groups, samples = with_survivors(0, (4, 1, 4))
    groups[1] = dataclasses.replace(groups[1], baseline=None)
    assert not any(found_by_id(groups, samples, "remax")["g1/0"])


def test_an_estimator_for_verl_compares_where_it_reads_the_index() -> None:
    def reads_groups(token_level_rewards: Any, response_mask: Any, index: Any) -> Any:
        return token_level_rewards, token_level_rewards

    def reads_none(token_level_rewards: Any, response_mask: Any, **kwargs: Any) -> Any:
        return token_level_rewards, token_level_rewards

    assert [members_needed(as_estimator(f), group_size=4) for f in (reads_groups, reads_none)] == [2, 1]
    assert members_needed(as_estimator(reads_groups), group_size=1) == 1


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    for name in ALL:
        estimator = advantages.resolve(name)
        if name in ("reinforce_plus_plus", "remax", "return_to_go", "gae", "turn_gae", "bilevel_gae"):
            check_estimator(estimator, name=name, group_size=1)
        else:
            with pytest.raises(ConfigError, match=f"group_size is 1 and the estimator '{name}' compares"):
                check_estimator(estimator, name=name, group_size=1)


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"takes no 'gama'.*Did you mean 'gamma'"):
        bind_estimator(advantages.resolve("gae"), offered={}, kwargs={"gama": 0.9})
    with pytest.raises(ConfigError, match=r"outcome is 'rset'.*Did you mean 'rest'"):
        run("gae", outcome="rset")


def test_gdpo_has_no_use_for_a_kl_penalty() -> None:
    with pytest.raises(ConfigError, match=r"kl\.place to loss"):
        check_estimator(advantages.resolve("gdpo"), name="gdpo", group_size=4, has_penalties=True)


def test_an_estimator_of_ones_own_may_ask_for_the_batch() -> None:
    @declare(scope="batch")
    def ranks(batch: Any) -> Any:
        flat = sorted(m.total for g in batch for m in g.members)
        return [
            [[np.where(s.loss_weights != 0, flat.index(m.total), 0.0) for s in m.samples] for m in g.members] for g in batch
        ]

    groups, samples = batch(0)
    found = assign_advantages(groups, samples, estimator=ranks)
    assert max(float(s.advantages.max()) for s in found if s.advantages is not None) == 11
