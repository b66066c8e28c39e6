"""Estimators in a batch: refusals, incomplete groups, interleaved segments, baselines of agents.

`tests/property/test_estimator_invariants.py` compares each with its definition, on made-up games.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter

from polyturn.algorithms.advantages import (
    GroupView,
    advantages,
    assign_advantages,
    bind_estimator,
    check_estimator,
    components_of,
    declare,
    members_needed,
    traits_of,
)
from polyturn.algorithms.advantages.base import MemberView
from polyturn.compat.verl.batch_estimator import as_estimator
from polyturn.config.models import AlgorithmConfig
from polyturn.config.parts import arguments_of
from polyturn.core.errors import ConfigError, TrainingError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory, TrajectoryGroup, Turn
from support.refusals import refuses
from support.samples import sample_of

TASK = Task(id="t", prompt=())
ALL = [n for n in advantages if "test" not in n and n != "maxrl"]  # which refuses the negative rewards of these tests


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
    sample = sample_of(
        (group, f"{group}/{index}", 0),
        np.arange(n),
        np.array([0, 0, *(w for w, _ in columns)], np.float32),
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
    """Return the trained tokens of one trajectory in the order of time, each with its data."""
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


def test_gdpo_weighs_components_that_a_step_lacks() -> None:
    weights = {"outcome": 1.0, "format": 0.5}
    _, plain = run("gdpo", weights=weights)
    _, found = run("gdpo", weights={**weights, "tool/search": 1.0, "interaction": 1.0})  # no searches in this step
    assert all(np.array_equal(a.advantages, b.advantages) for a, b in zip(plain, found, strict=True))


def test_gdpo_names_the_components_it_weighs() -> None:
    """Dynamic sampling needs the names: rewards may be equal although their components differ."""
    bound = bind_estimator(advantages.resolve("gdpo"), offered={"weights": {"outcome": 1.0, "tool_step": 0.0}}, kwargs={})
    assert components_of(bound) == {"outcome"}
    assert components_of(bind_estimator(bound, offered={}, kwargs={"weights": {"format": 0.5}})) == {"format"}
    assert components_of(advantages.resolve("grpo")) == frozenset()


@pytest.mark.parametrize("name", ALL)
def test_interleaved_segments_count_as_one(name: str) -> None:
    """An agent that returns to an older segment: turns 0, 2 in the first segment, 1, 3 in the second; time orders them."""
    groups, whole = batch(0)
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
    s = sample_of(("g", "0", 0), np.arange(3), np.array([0, 1, 1], np.float32), turn_ids=[-1, 0, 1])
    members = tuple(dataclasses.replace(t, id=str(i)) for i in range(size))
    samples = [s.replace(id=SampleId("g", str(i), 0)) for i in range(size)]
    return [TrajectoryGroup(id="g", task=TASK, trajectories=members)], samples


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("return_to_go", "scores of turns"),
        ("mt_grpo", "scores of turns"),
        ("gigpo", "observation or a state_key"),
        ("gae", "critic's values"),
    ],
)
def test_missing_input_of_an_estimator_is_named(name: str, words: str) -> None:
    refuses(lambda: assign_advantages(*plain(size=2), estimator=advantages.resolve(name)), TrainingError, words)


def test_step_without_scores_is_fine_after_one_with_scores() -> None:
    (found,) = assign_advantages(*plain(), estimator=advantages.resolve("return_to_go"), has_scored=True)
    assert found.advantages is not None and found.advantages.tolist() == [0, 1, 1], "the reward alone, from each turn on"


WITHOUT_BASELINE = ("rae", "reinforce_plus_plus", "remax", "gae", "turn_gae", "bilevel_gae")


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


@pytest.mark.parametrize("name", [n for n in ALL if n not in WITHOUT_BASELINE])
def test_last_member_of_a_group_has_no_advantage(name: str) -> None:
    """Three of four failed: the raw reward of the fourth is not an advantage, and not part of any statistic."""
    found = found_by_id(*with_survivors(0, (4, 1, 4)), name)
    without = found_by_id(*with_survivors(0, (4, 0, 4)), name)
    assert set(found.pop("g1/0")) == {0.0}
    assert found == without
    assert any(any(values) for values in found.values()), "the others do teach"


@pytest.mark.parametrize("name", WITHOUT_BASELINE)
def test_last_member_is_trained_without_a_group_baseline(name: str) -> None:
    assert any(found_by_id(*with_survivors(1, (4, 1, 4)), name)["g1/0"])


def test_return_to_go_compares_only_with_a_baseline() -> None:
    survivors = with_survivors(0, (4, 1, 4))
    assert not any(found_by_id(*survivors, "return_to_go")["g1/0"])
    assert any(found_by_id(*survivors, "return_to_go", baseline=False)["g1/0"])
    assert members_needed(advantages.resolve("return_to_go"), group_size=1) == 1, "a group of one that was asked for"


def test_return_to_go_divides_no_equal_returns() -> None:
    """Without others to compare with, A is the return; a deviation of 0 would make it a million times larger."""
    options = {"norm_by_std": True, "baseline": False}
    found = advantages.resolve("return_to_go")([_plain_group("g", [1.0, 1.0])], **options).advantages
    assert [a.tolist() for m in found[0] for a in m] == [[0, 1, 1], [0, 1, 1]]


def test_remax_needs_a_greedy_rollout() -> None:
    groups, samples = with_survivors(0, (4, 1, 4))
    groups[1] = dataclasses.replace(groups[1], baseline=None)
    assert not any(found_by_id(groups, samples, "remax")["g1/0"])


def test_verl_estimator_compares_where_it_reads_the_index() -> None:
    def reads_groups(token_level_rewards: Any, response_mask: Any, index: Any) -> Any:
        return token_level_rewards, token_level_rewards

    def reads_none(token_level_rewards: Any, response_mask: Any, **kwargs: Any) -> Any:
        return token_level_rewards, token_level_rewards

    def looks_groups_up(token_level_rewards: Any, response_mask: Any, **kwargs: Any) -> Any:
        return token_level_rewards - len(kwargs["index"]), token_level_rewards

    needed = [members_needed(as_estimator(f), group_size=4) for f in (reads_groups, looks_groups_up, reads_none)]
    assert needed == [2, 2, 1]
    assert members_needed(as_estimator(reads_groups), group_size=1) == 1


def test_estimator_that_compares_refuses_groups_of_one() -> None:
    for name in ALL:
        estimator = advantages.resolve(name)
        if name in (
            "hierarchical_grpo",
            "reinforce_plus_plus",
            "rae",
            "remax",
            "return_to_go",
            "gae",
            "turn_gae",
            "bilevel_gae",
        ):
            check_estimator(estimator, name=name, group_size=1)
        else:
            with pytest.raises(ConfigError, match=f"group_size is 1 and the estimator '{name}' compares"):
                check_estimator(estimator, name=name, group_size=1)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gae", {"gama": 0.9}, "'gama'.*'gamma'"),
        ("gae", {"outcome": "rset"}, "'rset'.*'rest'"),
        ("gdpo", {"weights": {"formt": 1.0}}, "'formt'.*'format'"),
    ],
)
def test_unknown_option_is_refused_with_the_nearest(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(name, **options)


def test_own_estimator_may_ask_for_the_batch() -> None:
    @declare(scope="batch")
    def ranks(batch: Any) -> Any:
        flat = sorted(m.total for g in batch for m in g.members)
        return [
            [[np.where(s.loss_weights != 0, flat.index(m.total), 0.0) for s in m.samples] for m in g.members] for g in batch
        ]

    groups, samples = batch(0)
    found = assign_advantages(groups, samples, estimator=ranks)
    assert max(float(s.advantages.max()) for s in found if s.advantages is not None) == 11


EQUAL = ([0.1] * 3, [0.7] * 3, [1 / 3] * 7, [1e5 / 3] * 6, [1e14 / 3] * 5)
OF_GROUPS: dict[str, dict[str, Any]] = {
    "grpo": {}, "rloo": {}, "opo": {}, "reinforce_plus_plus_baseline": {}, "gpg": {}, "remax": {}, "mt_grpo": {},
    "gdpo": {"weights": {"a": 1.0}}, "return_to_go": {"norm_by_std": True}, "grpo_passk": {"k": 2},
    "swift": {"scale_rewards": "gdpo", "reward_weights": {"a": 1.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", OF_GROUPS)
def test_equal_rewards_give_exactly_no_advantage(name: str) -> None:
    """In floats, the mean of three times 0.1 is not 0.1; dividing the rest by a deviation near 0 would enlarge it."""
    assert not any(np.any(a) for a in _advantages_of(name, EQUAL))


WITH_EPS = (
    "grpo", "grpo_passk", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "mt_grpo", "gigpo", "gdpo",
    "return_to_go",
)  # fmt: skip


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e5 / 3])
@pytest.mark.parametrize("name", WITH_EPS)
def test_eps_of_0_gives_equal_rewards_no_advantage(name: str, reward: float) -> None:
    assert not any(np.any(a) for a in _advantages_of(name, [[reward] * 7] * 3, eps=0.0))


@pytest.mark.parametrize("name", OF_GROUPS)
def test_only_differences_of_rewards_count(name: str) -> None:
    small, large = ([[shared, shared + 1, shared + 4]] for shared in (0.0, 2.0**40))
    for here, there in zip(_advantages_of(name, small), _advantages_of(name, large), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-6)


def _advantages_of(name: str, rewards: Sequence[Sequence[float]], **options: Any) -> list[np.ndarray]:
    from polyturn.algorithms.advantages.base import traits_of
    from polyturn.compat.swift.advantage import estimate

    function = estimate if name == "swift" else advantages.resolve(name)
    estimator = functools.partial(function, **OF_GROUPS.get(name, {}), **options)
    batch = [_plain_group(f"g{i}", rewards_G) for i, rewards_G in enumerate(rewards)]
    if traits_of(estimator).scope == "batch":
        return [a for g in estimator(batch).advantages for m in g for a in m]
    return [a for g in batch for m in estimator(g.totals, [m.samples for m in g.members]) for a in m]


def _plain_group(id: str, rewards_G: Sequence[float]) -> GroupView:
    def member(index: int, reward: float) -> MemberView:
        sample = sample_of((id, str(index), 0), np.arange(3), np.array([0, 1, 1], np.float32))  # fmt: skip
        return MemberView(id=str(index), reward=reward, samples=(sample,), components={"a": reward})

    return GroupView(id=id, members=tuple(member(i, r) for i, r in enumerate(rewards_G)))


def test_maxrl_divides_by_the_mean_reward() -> None:
    """Tajwar et al. 2026: with rewards of 0 and 1, r / p - 1, and no signal where nothing succeeds."""
    found = _advantages_of("maxrl", [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [2.0, 1.0, 0.0]])
    wanted = [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, -1.0]
    assert [float(a[-1]) for a in found] == pytest.approx(wanted, abs=1e-4)


def test_maxrl_refuses_negative_rewards() -> None:
    refuses(lambda: _advantages_of("maxrl", [[1.0, -0.5]]), TrainingError, "-0.5")


PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Advantages")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+)` \|(.*)\|$", SECTION, re.M)
OWN = [
    name for name, fn in ((n, advantages.resolve(n)) for n in advantages) if fn.__module__.startswith("polyturn.algorithms")
]


def test_every_estimator_is_documented() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(OWN)
    for name, rest in ROWS:
        cells = [c.strip() for c in rest.split("|")]
        assert len(cells) == 3 and all(cells), name
        assert re.search(r"20\d\d", cells[1]), name


@pytest.mark.parametrize("line", re.findall(r"^algorithm: (\{.*\})$", SECTION, re.M))
def test_documented_configuration_is_valid(line: str) -> None:
    config = TypeAdapter(AlgorithmConfig).validate_python(yaml.safe_load(line))
    bind_estimator(advantages.resolve(config.advantage.name), offered={}, kwargs=arguments_of(config.advantage))


def test_documented_estimators_work() -> None:
    made: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", SECTION, re.S)[0], made)
    assert made["above_half"](np.array([1.0]), [[]]) == [[]]
    assert traits_of(made["own_score"]).needs_turn_scores and made["own_score"]([]) == []


def sample(name: str) -> TrainSample:
    weights = np.array([0, 1, 1], np.float32)
    return sample_of(("g", name, 0), [1, 2, 3], weights, turn_ids=[-1, 0, 0])


def view(source: str, agent: str | None, *rewards: float) -> GroupView:
    members = tuple(MemberView(id=str(i), reward=r, samples=(sample(str(i)),)) for i, r in enumerate(rewards))
    return GroupView(id=f"g/{agent}", group="g", members=members, data_source=source, agent=agent)


def credit(state: dict[str, Any], *batch: GroupView, decay: float = 0.5) -> list[list[float]]:
    found = advantages.resolve("rae")(batch, state=state, decay=decay)
    return [[float(member[0][-1]) for member in group] for group in found.advantages]


def test_rewards_are_compared_with_their_own_game_and_role():
    state: dict[str, Any] = {}
    step = (view("chess", "white", 1.0), view("chess", "black", -1.0), view("go", "white", 3.0))
    assert credit(state, *step) == [[1.0], [-1.0], [3.0]]
    assert credit(state, *step) == [[0.5], [-0.5], [1.5]]
    assert credit(state, *step) == [[0.25], [-0.25], [0.75]]


def test_mean_of_equal_rewards_moves_as_one_by_one():
    together, apart = dict[str, Any](), dict[str, Any]()
    credit(together, view("go", None, 2.0, 2.0, 2.0))
    for _ in range(3):
        credit(apart, view("go", None, 2.0))
    assert together == pytest.approx(apart)


def test_order_within_a_step_changes_nothing():
    one, other = dict[str, Any](), dict[str, Any]()
    first, second = view("go", None, 1.0, 0.1), view("go", None, 0.7)
    assert credit(one, first, second) == credit(other, second, first)[::-1]
    assert one == other


def test_solvers_are_compared_on_the_problem_of_their_trajectory():
    """Two proposals; the first is solved by one of two solvers, the second by both."""
    batch = [
        view("", "proposer", 0.5, 0.0),
        view("", "solver 1", 1.0, 1.0),
        view("", "solver 2", 0.0, 1.0),
    ]
    assert peers(batch) == [[0.25, -0.25], [0.5, 0.0], [-0.5, 0.0]]
    assert peers(batch, within=["proposer"]) == [[0.0, 0.0], [0.0, 0.0], [-0.5, 0.5]]


def test_agent_without_peers_gets_no_advantage():
    assert peers([view("", "solver 1", 1.0), view("", "proposer", 3.0)]) == [[0.0], [0.0]]


def test_one_agent_is_centred_over_its_group(caplog: pytest.LogCaptureFixture):
    assert peers([view("", None, 1.0, 0.0)]) == [[0.5, -0.5]]
    assert "none with a separate reward" in caplog.text


def test_pattern_without_an_agent_is_logged(caplog: pytest.LogCaptureFixture):
    peers([view("", "solver 1", 1.0, 0.0)], within=["sover*"])
    assert "sover*" in caplog.text and "solver 1" in caplog.text


def peers(batch: list[GroupView], **options: Any) -> list[list[float]]:
    found = advantages.resolve("hierarchical_grpo")(batch, **options)
    return [[float(member[0][-1]) for member in group] for group in found.advantages]
