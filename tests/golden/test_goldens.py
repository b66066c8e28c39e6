"""What scripted runs leave behind is what they left when it was recorded: ids, weights, requests, rows and metrics."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from record import (
    FIXTURES,
    SCENARIO_FOLDER,
    SCENARIOS,
    differences,
    fixture,
    later_columns,
    load_renames,
    names,
    renamed,
    run,
)

NEAR = 1e-5
"""How far a model's numbers may be from the fixture's: processors round differently."""


LONG = ("compaction", "gym", "inference", "math_tips", "multimodal", "step", "thinking_tips", "tree")
"""Scenarios whose parts other scenarios have too."""
MARKS = {**dict.fromkeys(LONG, pytest.mark.slow), "journal": pytest.mark.kill}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in SCENARIOS])
def test_scenario_leaves_what_was_recorded(name: str, tmp_path: Path) -> None:
    renames = load_renames()
    record = json.loads(json.dumps(run(name, tmp_path / name)))
    found = names(record)
    for kind, changed in renames.items():
        stayed = sorted(changed.keys() & found[kind])
        assert not stayed, f"renames.yaml says that these {kind} have other names now, and they are still written: {stayed}"
    problems = differences(renamed(fixture(name), {**renames, "later": later_columns()}), record, near=NEAR)
    assert not problems, "\n".join([f"{len(problems)} differences", *problems[:30]])


def test_renames_lead_from_recorded_names() -> None:
    """That the new names are written follows from the test above: a recorded name that is gone is a difference."""
    recorded = [names(fixture(name)) for name in SCENARIOS]
    for kind, changed in load_renames().items():
        known = set().union(*(found[kind] for found in recorded))
        assert changed.keys() <= known, f"no fixture has the {kind} {sorted(changed.keys() - known)}"
        assert len(set(changed.values())) == len(changed), f"two {kind} get one name"
        assert not set(changed.values()) & (known - changed.keys()), f"a new name of {kind} is another one's"
        for old, new in changed.items():
            assert kind == "metrics" or old.count(".") == new.count("."), f"{old}: {new} moves a field to another place"


def test_every_scenario_is_recorded() -> None:
    folders = {path.name for path in SCENARIO_FOLDER.iterdir() if path.is_dir()}
    assert folders == set(SCENARIOS) == {path.stem for path in FIXTURES.glob("*.json")}


def test_each_script_was_used_up() -> None:
    for name in SCENARIOS:
        record = fixture(name)
        assert record["rows"] and record.get("num_left_in_script", 0) == 0, name
        assert "Nothing is left in the script" not in json.dumps(record), name


# The comparison itself.


def changed(name: str, change: Any) -> list[str]:
    old = fixture(name)
    new = copy.deepcopy(old)
    change(new)
    return differences(old, new, near=NEAR)


def test_comparison_sees_every_change() -> None:
    def swap(record: Any) -> None:
        record["asked"][0], record["asked"][1] = record["asked"][1], record["asked"][0]

    def other_id(record: Any) -> None:
        record["rows"][0]["ids"][3] += 1

    def weight(record: Any) -> None:
        record["loss_weights"]["g0/0"][0][1][0] = 0.5

    def text(record: Any) -> None:
        record["rows"][0]["messages"][0]["text"] += "."

    def lost(record: Any) -> None:
        del record["rows"][0]["reward"]

    def integer(record: Any) -> None:
        record["rows"][0]["num_turns"] = float(record["rows"][0]["num_turns"])

    assert not changed("tools", lambda record: None)
    for change in (swap, other_id, weight, text, lost, integer):
        assert changed("tools", change), change.__name__


def test_comparison_allows_only_rounding_of_model_numbers() -> None:
    def by(amount: float) -> Any:
        def change(record: Any) -> None:
            record["rows"][0]["policy_logprobs"][0] += amount
            record["metrics"][0]["loss/grad_norm"] += amount

        return change

    def advantage(record: Any) -> None:
        record["rows"][0]["advantages"][0][0] += 1e-6

    assert not changed("tools", by(5e-6))
    assert len(changed("tools", by(5e-5))) == 2
    assert changed("tools", advantage)


def test_renames_reach_columns_fields_and_metrics() -> None:
    record = {"rows": [{"spans": [{"length": 3}], "reward": 1.0}], "metrics": [{"loss/kl": 0.5, "step": 1}]}
    new = renamed(
        record, {"rows": {"spans": "pieces", "spans.length": "pieces.size"}, "metrics": {"loss/kl": "loss/kl_term"}}
    )
    assert new["rows"] == [{"pieces": [{"size": 3}], "reward": 1.0}]
    assert new["metrics"] == [{"loss/kl_term": 0.5, "step": 1}]
