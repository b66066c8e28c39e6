"""Every metric that a run reports has a sentence about its meaning."""

from __future__ import annotations

import json
import re
from pathlib import Path

from polyturn.cli.main import main
from polyturn.tracking.metric_docs import MEANINGS, meaning
from support.runs import call_command, write_tiny_run

SOURCE = Path(__file__).parents[3] / "src" / "polyturn"
SECTIONS = "rollout|reward|tokens|policy|loss|critic|buffer|engine|time|tool"
LITERAL = re.compile(rf'"((?:{SECTIONS})/[a-z_0-9/]*[a-z0-9])"')
UNITS = {"tokens/s"}
"""A unit."""


def test_metric_of_a_run_has_a_meaning(tmp_path: Path):
    called = call_command(main, "train", write_tiny_run(tmp_path), "train.steps=1")
    assert called.code == 0, called.err
    reported: set[str] = set()
    for path in tmp_path.rglob("*metrics.jsonl"):
        reported.update(*(json.loads(line) for line in path.read_text().splitlines()))
    reported = {name for name in reported if "/" in name}
    assert len(reported) > 50
    assert sorted(name for name in reported if meaning(name) is None) == []


def test_metric_named_in_the_source_has_a_meaning():
    files = (path for path in SOURCE.rglob("*.py") if "compat" not in path.parts)  # that computes verl's own metrics
    named = {name for path in files for name in LITERAL.findall(path.read_text())} - UNITS
    assert len(named) > 60
    vague = {MEANINGS["policy/<figure>"], MEANINGS["reward/<component>"]}
    assert sorted(name for name in named if meaning(name) is None) == []
    assert sorted(name for name in named if meaning(name) in vague and not name.startswith("reward/")) == []


def test_exact_name_comes_before_a_pattern():
    assert meaning("reward/mean") == "Mean total reward of the scored trajectories."
    assert meaning("eval/one turn/openai/gsm8k/reward/mean@4") == MEANINGS["eval/<set>/<source>/<variable>/<metric>"]
    assert meaning("policy/rollout_k3_turn3plus") == MEANINGS["policy/rollout_<figure>_turn<n>"]
    assert meaning("nonsense") is None
