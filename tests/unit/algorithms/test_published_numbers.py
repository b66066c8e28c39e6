"""Estimators against numbers and closed forms that their authors published: papers, and the code that came with them.

tests/property/test_estimator_invariants.py checks the definitions; a reader can look up the numbers here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.advantages import GroupView, MemberView, advantages
from support.samples import sample_of


def sample(id: str, turn_ids: list[int], *, weights: list[float] | None = None, values: list[float] | None = None) -> Any:
    n = len(turn_ids)
    return sample_of(
        ("g", id, 0),
        np.arange(n, dtype=np.int32),
        np.ones(n, np.float32) if weights is None else np.array(weights),
        turn_ids=np.array(turn_ids),
        values=None if values is None else np.array(values),
    )


def of_rewards(name: str, rewards: list[float], **options: Any) -> list[float]:
    """Return the advantage of each member of one group of one-token answers."""
    samples = [[sample(str(i), [0])] for i in range(len(rewards))]
    return [float(member[0][0]) for member in advantages.resolve(name)(np.array(rewards), samples, **options)]


def of_batch(name: str, groups: list[list[MemberView]], **options: Any) -> list[list[np.ndarray]]:
    """Return the advantages of each member's one sample."""
    views = [GroupView(id=str(g), members=tuple(members)) for g, members in enumerate(groups)]
    found = advantages.resolve(name)(views, **options)
    return [[member[0] for member in group] for group in found.advantages]


def member(id: str, reward: float = 0.0, turn_ids: tuple[int, ...] = (0,), **known: Any) -> MemberView:
    values = known.pop("values", None)
    return MemberView(id=id, reward=reward, samples=(sample(id, list(turn_ids), values=values),), **known)


@pytest.mark.parametrize(("n", "right", "k"), [(8, 1, 4), (8, 3, 4), (8, 3, 2), (16, 5, 8), (8, 7, 4), (8, 6, 1)])
def test_pass_at_k_of_right_and_wrong_answers(n: int, right: int, k: int) -> None:
    """Chen et al. 2025 (Pass@k Training), analytical derivation, and the code that came with it.

    Of n answers `wrong` are wrong: mean 1 - C(wrong, k) / C(n, k), deviation sqrt(mean (1 - mean)); a right answer has
    (1 - mean) / deviation, a wrong one (1 - mean - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / deviation.
    """
    wrong = n - right
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    deviation = math.sqrt(mean * (1 - mean)) + 1e-6
    of_right, of_wrong = (
        (1 - mean) / deviation,
        (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation,
    )
    found = of_rewards("grpo_passk", [1.0] * right + [0.0] * wrong, k=k)
    assert found == pytest.approx([of_right] * right + [of_wrong] * wrong, rel=1e-4, abs=1e-5)


def test_gdpo_tells_three_reward_combinations_apart() -> None:
    """Liu et al. 2026 (GDPO), its example: two rollouts, two rewards of 0 and 1, before the batch is normalised."""

    def pair(first: tuple[float, float], second: tuple[float, float]) -> list[float]:
        group = [member(str(i), sum(r), components=dict(zip("ab", r, strict=True))) for i, r in enumerate((first, second))]
        ((one, two),) = of_batch("gdpo", [group], whiten_batch=False)
        return [float(one[0]), float(two[0])]

    half = math.sqrt(0.5)
    assert pair((0, 0), (1, 0)) == pytest.approx([-half, half], abs=1e-4)
    assert pair((0, 0), (1, 1)) == pytest.approx([-2 * half, 2 * half], abs=1e-4)
    assert of_rewards("grpo", [0.0, 1.0]) == pytest.approx(of_rewards("grpo", [0.0, 2.0]), abs=1e-4)


def test_gdpo_normalises_sums_over_trajectories() -> None:
    """Liu et al. 2026, the last of its three steps, as in its code: mean and deviation over trajectories, not tokens."""
    long = (0, 0, 0, 0, 0, 0)
    groups = [
        [member("0", components={"a": 1.0}, turn_ids=long), member("1", components={"a": 0.0})],
        [member("2", components={"a": 2.0}), member("3", components={"a": 2.0})],
    ]
    half = math.sqrt(0.5)
    sums = np.array([half, -half, 0.0, 0.0])
    expected = (sums - sums.mean()) / sums.std(ddof=1)
    found = [float(a[0]) for group in of_batch("gdpo", groups) for a in group]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_gpg_makes_up_for_groups_without_a_gradient() -> None:
    """Chu et al. 2025 (GPG): alpha = B / (B - M). Here 2 of 3 groups teach nothing, so the third counts three times."""
    groups = [[member(f"{g}{i}", r) for i, r in enumerate(of)] for g, of in enumerate([(1, 0), (1, 1), (0, 0)])]
    found = [float(a[0]) for group in of_batch("gpg", groups) for a in group]
    assert found == [1.5, -1.5, 0, 0, 0, 0]


def test_opo_is_the_baseline_weighted_by_length() -> None:
    """Hao et al. 2025 (OPO): b = sum of l r / sum of l."""
    samples = [[sample("0", [0, 0, 0])], [sample("1", [0])]]
    found = advantages.resolve("opo")(np.array([1.0, 0.0]), samples)
    assert [float(m[0][0]) for m in found] == [0.25, -0.75]


def test_bilevel_gae_by_hand() -> None:
    """Wang et al. 2025 (VAGEN): ten tokens in two turns with values 0.1 to 1.0, a reward of 1 on the last token of each,
    gamma and lambda 1 within turns and a turn discount of 0.95; the example at the end of the code that came with it.

    Turns: A_2 = 1 - 1.0 = 0, A_1 = 1 + 0.95 * 1.0 - 0.5 + 0.95 * 0 = 1.45. Tokens: what a turn returns at its end, 1.95 and
    1.0, less their own value.
    """
    values = [i / 10 for i in range(1, 11)]
    one = member("0", turn_ids=(0,) * 5 + (1,) * 5, values=values, turn_scores_K=np.array([1.0, 1.0]))
    options = {"outcome": "ignore", "turn_gamma": 0.95, "whiten_batch": False}
    ((found,),) = of_batch("bilevel_gae", [[one]], **options)
    assert found.tolist() == pytest.approx([1.95 - v for v in values[:5]] + [1.0 - v for v in values[5:]], abs=1e-6)


def test_mt_grpo_of_two_turns() -> None:
    """Zeng et al. 2025 (MT-GRPO): A_1 = A_turn + lambda A_outcome, A_2 = A_outcome, each normalised in its group."""
    half = math.sqrt(0.5)
    group = [
        member("0", 1.0, turn_ids=(0, 1), turn_scores_K=np.array([0.0, np.nan])),
        member("1", 0.0, turn_ids=(0, 1), turn_scores_K=np.array([1.0, np.nan])),
    ]
    ((one, two),) = of_batch("mt_grpo", [group], outcome_weight=0.5)
    assert one.tolist() == pytest.approx([-half + 0.5 * half, half], abs=1e-4)
    assert two.tolist() == pytest.approx([half - 0.5 * half, -half], abs=1e-4)


def test_gigpo_adds_the_standing_in_the_group_and_in_the_state() -> None:
    """Feng et al. 2025 (GiGPO), equations 3, 5, 7 and 8: two trajectories that pass one state with returns 0.9 and 0."""
    half = math.sqrt(0.5)
    group = [
        member("0", 1.0, turn_ids=(0, 1), turn_scores_K=np.array([0.0, 1.0]), states_K=("task", "a")),
        member("1", 0.0, turn_ids=(0, 1), turn_scores_K=np.array([0.0, 0.0]), states_K=("task", "b")),
    ]
    ((one, two),) = of_batch("gigpo", [group], gamma=0.9)
    assert one.tolist() == pytest.approx([2 * half, half], abs=1e-4)
    assert two.tolist() == pytest.approx([-2 * half, -half], abs=1e-4)


def test_reinforce_plus_plus_normalises_over_tokens_of_the_batch() -> None:
    """Hu et al. 2025 (REINFORCE++): a long answer weighs as its tokens do in mean and variance."""
    flat = np.array([1.0, 1.0, 1.0, 0.0])
    expected = (flat - flat.mean()) / flat.std(ddof=1)
    found = of_batch("reinforce_plus_plus", [[member("0", 1.0, turn_ids=(0, 0, 0))], [member("1", 0.0)]])
    assert np.concatenate([a for group in found for a in group]).tolist() == pytest.approx(expected.tolist(), abs=1e-4)
