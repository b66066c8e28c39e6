"""ms-swift's advantages: the numbers of its documentation, and its own function where a checkout is.

tests/unit/algorithms/test_published_numbers.py and the property tests of estimators check the native ones.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyturn.algorithms.advantages import GroupView, MemberView
from polyturn.compat.swift.advantage import ESTIMATORS, SCALES, estimate
from polyturn.compat.swift.args.arguments import parse, to_native
from polyturn.core.errors import ConfigError
from polyturn.core.sample import SampleId, TrainSample

FOLDER = os.environ.get("POLYTURN_MS_SWIFT", "")
ORIGINALS = sorted(Path(FOLDER).glob("**/swift/rl_core/advantage.py")) if FOLDER else []


def sample(name: str, part: int, num: int) -> TrainSample:
    return TrainSample(
        id=SampleId(group=name, trajectory=name, segment=part),
        token_ids=np.arange(num, dtype=np.int32),
        loss_weights=np.ones(num, np.float32),
        turn_ids=np.zeros(num, np.int32),
        rollout_logprobs=np.zeros(num, np.float32),
    )


def batch(
    groups: list[list[float]], *, parts: dict[tuple[int, int], int] | None = None, **components: Any
) -> list[GroupView]:
    """Return groups of these rewards; `parts` cuts a trajectory into several samples."""
    return [
        GroupView(
            id=f"g{i}",
            members=tuple(
                MemberView(
                    id=f"g{i}/{j}",
                    reward=reward,
                    samples=tuple(sample(f"g{i}/{j}", k, 2 + k + j) for k in range((parts or {}).get((i, j), 1))),
                    components={name: v for name, values in components.items() if (v := values[i][j]) is not None},
                )
                for j, reward in enumerate(rewards)
            ),
        )
        for i, rewards in enumerate(groups)
    ]


def numbers(groups: list[GroupView], **options: Any) -> list[float]:
    """Return the one advantage of each trajectory, which all its tokens have."""
    found = []
    for of_member in itertools.chain.from_iterable(estimate(groups, **options).advantages):
        values = {float(a) for of_sample in of_member for a in of_sample}
        assert len(values) == 1
        found.append(values.pop())
    return found


@pytest.mark.parametrize(("scale", "wanted"), [("none", 0.5), ("group", 0.70701), ("batch", 1.22444)])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_documented_example_of_reinforce_plus_plus(scale: str, wanted: float, num_parts: int) -> None:
    groups = batch([[1.0, 1.0], [0.0, 1.0]], parts={(0, 0): num_parts, (1, 1): num_parts})
    found = numbers(groups, estimator="reinforce_plus_plus", scale_rewards=scale)
    assert found == pytest.approx([0.0, 0.0, -wanted, wanted], abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "scale", "wanted"),
    [
        ("grpo", "none", [-1, 1, 0]),
        ("grpo", "group", [-(0.5**0.5), 0.5**0.5, 0]),
        ("grpo", "batch", [-1, 1, 0]),
        ("rloo", "none", [-2, 2, 0]),
        ("rloo", "batch", [-2, 2, 0]),
    ],
)
def test_estimators_by_hand(estimator: str, scale: str, wanted: list[float]) -> None:
    """The second group has one member, and the deviation of the three rewards is 1."""
    found = numbers(batch([[0.0, 2.0], [1.0]]), estimator=estimator, scale_rewards=scale)
    assert found == pytest.approx(wanted, abs=3e-4)


def nanstd(tensor: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the unbiased deviation of the values that are not NaN."""
    mean = torch.nanmean(tensor, dim=dim, keepdim=True)
    num = (~torch.isnan(tensor)).sum(dim=dim, keepdim=True)
    found = (torch.nansum((tensor - mean) ** 2, dim=dim, keepdim=True) / (num - 1)).sqrt()
    return found if keepdim else found.squeeze(dim)


@pytest.mark.skipif(not ORIGINALS, reason="POLYTURN_MS_SWIFT names no folder with swift/rl_core/advantage.py")
@pytest.mark.parametrize("file", ORIGINALS, ids=str)
def test_ms_swifts_own_functions_give_the_same_numbers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ms_swift_advantage")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = vars(module)
    theirs["nanstd"] = nanstd
    exec(compile(file.read_text().replace("from swift.utils import nanstd", ""), str(file), "exec"), theirs)
    draws = np.random.default_rng(1)
    for estimator, scale in itertools.product(ESTIMATORS, SCALES):
        for _ in range(10):
            num, size = int(draws.integers(1, 5)), int(draws.integers(2, 6))
            of_funcs = draws.integers(0, 3, size=(num, size, 2)).astype(np.float64)
            weights = [1.0, 0.25]
            totals = of_funcs @ np.array(weights)
            tensor = torch.tensor(of_funcs.reshape(-1, 2), dtype=torch.float32)
            wanted = theirs["compute_advantages"](tensor, torch.tensor(weights), size, estimator, scale)[0]
            groups = batch(totals.tolist(), a=of_funcs[..., 0].tolist(), b=of_funcs[..., 1].tolist())
            options = {"estimator": estimator, "scale_rewards": scale, "reward_weights": {"a": 1.0, "b": 0.25}}
            assert numbers(groups, **options) == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-4)
            if scale == "gdpo":
                continue  # its own function for trajectories of several samples does not know it
            ids = [f"{i}/{j}" for i in range(num) for j in range(size) for _ in range(1 + (i + j) % 3)]
            rows = [i * size + j for i in range(num) for j in range(size) for _ in range(1 + (i + j) % 3)]
            split = theirs["compute_advantages_dynamic"](
                tensor[rows], torch.tensor(weights), [one.split("/")[0] for one in ids], ids, estimator, scale
            )[0]
            parts = {(i, j): 1 + (i + j) % 3 for i in range(num) for j in range(size)}
            by_row = dict(zip(rows, split.tolist(), strict=True))
            mine = numbers(batch(totals.tolist(), parts=parts), estimator=estimator, scale_rewards=scale)
            assert mine == pytest.approx([by_row[k] for k in range(num * size)], rel=1e-4, abs=1e-4)


def test_gdpo_leaves_out_missing_scores() -> None:
    groups = batch([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]], a=[[0, 1, 2], [0, 0, 1]], b=[[1, None, 0], [None, None, None]])
    found = numbers(groups, scale_rewards="gdpo", reward_weights={"a": 1.0, "b": 0.5})
    half = 0.5 * np.array([1, 0, -1]) / np.std([1, 0], ddof=1) / 2
    first = np.array([-1.0, 0.0, 1.0]) + half
    second = (np.array([0, 0, 1]) - 1 / 3) / np.std([0, 0, 1], ddof=1)
    flat = np.concatenate([first, second])
    assert found == pytest.approx(((flat - flat.mean()) / flat.std(ddof=1)).tolist(), abs=1e-5)


@pytest.mark.parametrize("weights", [None, {}])
def test_gdpo_without_weights_is_refused(weights: Any) -> None:
    with pytest.raises(ConfigError, match="reward_weights is missing"):
        estimate(batch([[0.0, 1.0]], a=[[0.0, 1.0]]), scale_rewards="gdpo", reward_weights=weights)


BASE = (
    "--model m --per_device_train_batch_size 8 --dataset rows.jsonl --reward_funcs accuracy format --reward_weights 1 0.2 "
)


@pytest.mark.parametrize(
    ("flags", "name", "kwargs"),
    [
        ("", "grpo", {"eps": 1e-4}),
        ("--scale_rewards none", "grpo", {"norm_by_std": False}),
        ("--scale_rewards false", "grpo", {"norm_by_std": False}),
        ("--scale_rewards batch", None, {"estimator": "grpo", "scale_rewards": "batch"}),
        (
            "--scale_rewards gdpo",
            None,
            {"estimator": "grpo", "scale_rewards": "gdpo", "reward_weights": {"accuracy": 1.0, "format": 0.2}},
        ),
        ("--advantage_estimator rloo", "rloo", {}),
        ("--advantage_estimator rloo --scale_rewards group", None, {"estimator": "rloo", "scale_rewards": "group"}),
        ("--advantage_estimator reinforce_plus_plus", None, {"estimator": "reinforce_plus_plus", "scale_rewards": "batch"}),
    ],
)
def test_arguments_choose_the_equal_estimator(flags: str, name: str | None, kwargs: Any) -> None:
    algorithm = to_native(parse((BASE + flags).split())).native["algorithm"]
    assert algorithm["advantage"] == {"name": name or "polyturn.compat.swift.advantage:estimate", **kwargs}


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--scale_rewards bach", "'batch'"),
        ("--scale_rewards gdpo --advantage_estimator reinforce_plus_plus", "gdpo"),
        ("--scale_rewards gdpo --kl_in_reward true", "gdpo"),
    ],
)
def test_combinations_without_an_estimator_are_refused(flags: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        to_native(parse((BASE + flags).split()))
