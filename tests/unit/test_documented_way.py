"""docs/one-sample.md is true: what it lists is what a traced run passes, and what it tells comes in that order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.forked import run_program

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "one-sample.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./src/polyturn/([\w/]+\.py)#[\w.]+\)")
BEFORE_OR_AFTER = {
    "TaskDataset": "a class",
    "Task": "a record",
    "TrainSample": "a record",
    "filter_groups": "returns before anything is made of the sample",
    "grpo": "the traced run has an estimator of its own",
    "TargetForward": "a class",
    "PolicyTerms": "a class",
    "Optimizer.step": "runs behind `backward`",
}
"""What the page tells of that is not on the way, and why."""
TRACE = """
import json, sys
sys.path.insert(0, "benchmarks")
import house
on_way = house.way(house.traced())
print(json.dumps({"way": on_way, "page": house.documented(on_way), "mark": house.TRACED}))
"""


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    """What a run in a process of its own passed: the trace changes asyncio and torch while it lasts."""
    done = run_program(TRACE, cwd=ROOT)
    assert done.returncode == 0, done.err
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


def test_the_page_lists_the_functions_that_a_sample_passes(traced: dict[str, Any]) -> None:
    said, mark, listed = PAGE.read_text(encoding="utf-8").partition(traced["mark"])
    assert mark and said
    assert listed == traced["page"], "run: python benchmarks/house.py --document docs/one-sample.md"


def test_the_page_tells_of_them_in_their_order(traced: dict[str, Any]) -> None:
    order = {(file, name): index for index, (file, name) in enumerate(traced["way"])}
    told = [(file, name) for name, file in LINK.findall(PAGE.read_text(encoding="utf-8"))]
    assert {name for file, name in told if (file, name) not in order} == set(BEFORE_OR_AFTER)
    places = [order[one] for one in told if one in order and one != ("training/loop.py", "Trainer.run")]
    assert places == sorted(places), "the page tells of a function before one that comes first"
