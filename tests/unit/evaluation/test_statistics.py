"""Intervals, pass@k, maj@k, turn budgets and paired tests, against counts by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from polyturn.api.evaluating import EvaluatedSet
from polyturn.cli.main import main
from polyturn.core.errors import DataError
from polyturn.core.generation import GenerateRequest
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.evaluation.compare import compare, flip_test, holm, sign_test
from polyturn.evaluation.report import report
from polyturn.evaluation.statistics import bootstrap, maj_at_k, pass_at_k, statistics
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.parquet_store import ParquetStore
from polyturn.testing.episodes import scripted_context, task
from support.refusals import refuses
from support.runs import call_command


def score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    """Score the solution, and return it as the answer."""
    return {"score": float(solution_str == ground_truth), "pred": solution_str}


def groups_of(said: Sequence[Sequence[str]], *, sources: Sequence[str] = ("a",)) -> list[TrajectoryGroup]:
    """Run one task for each row, whose right answer is "4"; each word is the answer of one sample."""
    out = []
    for index, answers in enumerate(said):
        source = sources[index % len(sources)]
        spec = GroupSpec(id=f"g{index}", task=task(id=f"t{index}", data_source=source, ground_truth="4"), size=len(answers))
        context = scripted_context(_in_order(answers), rewards=dict.fromkeys(sources, score))
        out += asyncio.run(RolloutPool(context).run([spec]))
    return out


def _in_order(answers: Sequence[str]) -> Callable[[GenerateRequest], str]:
    left = iter(answers)
    return lambda request: next(left)


@pytest.mark.parametrize(("num", "correct"), [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(num: int, correct: int):
    samples = [True] * correct + [False] * (num - correct)
    for k in range(1, num + 1):
        counted = np.mean([any(subset) for subset in itertools.combinations(samples, k)])
        assert pass_at_k(num, correct, k) == pytest.approx(counted)


def test_maj_at_k_votes_and_splits_ties():
    preds, correct = ["4", "4", "5", None], [True, True, False, False]
    assert maj_at_k(preds, correct, 1) == pytest.approx(0.5)
    assert maj_at_k(preds, correct, 4) == 1.0
    assert maj_at_k(["4", "5"], [True, False], 2) == 0.5
    assert maj_at_k([None, None], [False, False], 2) == 0.0
    refuses(lambda: maj_at_k(preds, correct, 5), ValueError, "use 1 to 4")


def test_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for number in range(100):
        found = bootstrap(rng.normal(1.0, 1.0, 60), seed=number)
        hits += found.low <= 1.0 <= found.high
    assert 88 <= hits <= 99
    assert bootstrap([1.0]).low == bootstrap([1.0]).high == 1.0


def test_statistics_by_source_and_turn_budget():
    found = statistics(groups_of([["4", "5"], ["4", "4"], ["5", "6"], ["4", "5"]], sources=("a", "b")))
    assert list(found) == ["all", "a", "b"]
    everything = found["all"]
    assert (everything.num_tasks, everything.num_samples) == (4, 8)
    assert everything.success.mean == 0.5 and everything.pass_at[1].mean == 0.5 and everything.pass_at[2].mean == 0.75
    assert everything.maj_at[2].mean == (0.5 + 1 + 0 + 0.5) / 4
    assert {k: v.mean for k, v in everything.within_turns.items()} == {1: 0.5}
    assert found["a"].success.mean == 0.25 and found["b"].success.mean == 0.75
    assert everything.success.low < 0.5 < everything.success.high
    assert json.loads(json.dumps(everything.to_json()))["pass_at"]["2"]["mean"] == 0.75
    assert statistics([]) == {}


def test_undefined_share_is_null_in_json():
    (group,) = groups_of([["4"]])
    evaluated = EvaluatedSet(report=report(group.trajectories), statistics=statistics([group]))
    assert math.isnan(evaluated.report.valid_tool_calls)
    assert json.loads(json.dumps(evaluated.to_json(), allow_nan=False))["valid_tool_calls"] is None


def test_sign_test_is_binomial_and_holm_corrects():
    assert sign_test(0, 0) == 1.0 and sign_test(3, 3) == 1.0
    assert sign_test(10, 0) == pytest.approx(2 / 1024)
    assert sign_test(8, 1) == pytest.approx(2 * (1 + 9) / 2**9)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_random_signs_agree_with_all_signs():
    differences = [0.5, 0.25, 0.75, -0.25, 1.0, 0.5]
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in itertools.product((1, -1), repeat=6)
    ]
    exact = np.mean([s >= sum(differences) - 1e-9 for s in sums])
    assert flip_test(differences) == pytest.approx(exact, abs=0.015)
    assert flip_test([0.0, 0.0]) == 1.0


@pytest.mark.parametrize("scale", [1e-12, 1e6, 1e8, 1e14])
def test_sign_flips_depend_on_no_scale_of_rewards(scale: float):
    for seed in range(20):
        differences = np.random.default_rng(seed).uniform(0, 1, 4)
        assert flip_test(differences * scale) == flip_test(differences)


def test_comparison_pairs_tasks():
    a = groups_of([["5"]] * 12)
    b = groups_of([["4"]] * 9 + [["5"]] * 3)
    found = compare(a, b).table["all"]["success"]
    assert (found.a, found.b, found.num_better, found.num_worse) == (0.0, 0.75, 9, 0)
    assert found.test == "McNemar, exact" and found.p == pytest.approx(2 / 2**9) and found.is_significant()
    chance = compare(a[:3], b[:3]).table["all"]["success"]
    assert chance.p == 0.25 and not chance.is_significant()
    assert compare(groups_of([["4", "5"]] * 2), groups_of([["4", "4"]] * 2)).table["all"]["success"].test == "sign flips"


def test_comparison_needs_common_tasks():
    a, b = groups_of([["4"]] * 3), groups_of([["4"]] * 2)
    found = compare(a, b)
    assert (found.num_only_a, found.num_only_b) == (1, 0) and found.table["all"]["success"].num_tasks == 2
    refuses(lambda: compare(a, groups_of([["4"]], sources=("other",))), DataError, "no common task")


def test_command_compares_two_evaluations(tmp_path: Path):
    for name, said in (("a", [["5"]] * 8), ("b", [["4"]] * 8)):
        with ParquetStore(tmp_path / name) as store:
            for group in groups_of(said):
                store.add(group, step=0, split="eval/greedy")
    called = call_command(main, "compare", tmp_path / "a", tmp_path / "b")
    assert called.code == 0, called.err
    assert "B solves significantly more: +100.0 points" in called.out and "McNemar, exact" in called.out
    written = json.loads((tmp_path / "b" / "compare-a.json").read_text())
    assert written["splits"]["eval/greedy"]["table"]["all"]["success"]["significant"] is True
    called = call_command(main, "compare", tmp_path / "a", tmp_path / "b", "--json")
    assert math.isclose(json.loads(called.out)["splits"]["eval/greedy"]["table"]["all"]["success"]["p"], 2 / 256)
    (tmp_path / "b" / "compare-a.json").unlink()
    (tmp_path / "b" / "compare-a.json").mkdir()
    called = call_command(main, "compare", tmp_path / "a", tmp_path / "b")
    assert called.code == 0 and "B solves" in called.out and "compare-a.json cannot be written" in called.out
    (tmp_path / "a" / "trajectories" / "part-00007.parquet").write_bytes(b"damaged")
    called = call_command(main, "compare", tmp_path / "a", tmp_path / "b", "--json")
    unread, unwritten = json.loads(called.out)["problems"]
    assert called.code == 0 and "part-00007.parquet cannot be read" in unread and "cannot be written" in unwritten
    wrong = call_command(main, "compare", tmp_path / "a", tmp_path / "b", "--split", "eval/gredy")
    assert wrong.code == 2 and "eval/greedy" in wrong.err
