"""The example files of ms-swift, as they are: each release's plug-ins are loaded and played.

Nothing of theirs is kept here. POLYTURN_MS_SWIFT names a folder that holds checkouts of its releases, or one checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("POLYTURN_MS_SWIFT", "")
FILES = sorted(Path(FOLDER).glob("**/examples/**/*.py")) if FOLDER else []
PLUGINS = [file for file in FILES if any(word in file.read_text() for word in ("multi_turns[", "orms[", "envs["))]

PLAY = r"""
import asyncio, json, sys
from pathlib import Path
from polyturn import compat
compat.install("swift")
from polyturn.compat.swift.adapter import SwiftScheduler
from polyturn.compat.swift.schedulers import multi_turns
from polyturn.serving.outputs import rollout_outputs
from polyturn.infra.plugins import load_plugins
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec

load_plugins([Path(sys.argv[1])])
says = json.loads(sys.argv[3])
context = scripted_context(says, scheduler=SwiftScheduler(sys.argv[2], max_turns=4), rewards={"*": lambda t: 1.0})
row = task("<placeholder>", ground_truth="42", extra={"env_config": {"name": "frozen_lake", "seed": 0}})
trajectory = asyncio.run(run_episode(context, row, id="e0"))
print(json.dumps({
    "error": trajectory.error,
    "turns": len(trajectory.turns),
    "result": len(tiny_codec().encode("Result: 20")),
    "said": [m.text for m in trajectory.messages if m.role == "assistant"],
    "masks": rollout_outputs(trajectory)[-1].response_loss_mask if trajectory.turns else [],
}))
"""
"""Plays one scheduler of a file; in a process of its own, because two releases of one file share a module's name."""

CALL = "Action: calculator\nAction Input: (2+3)*4\n"
SCRIPTS = {
    "tool_call_scheduler": ([CALL, "The answer is 20"], [f"{CALL}Result: 20The answer is 20"]),
    "deepeyes_scheduler": (["<answer>4</answer>"], ["<answer>4</answer>"]),
    "gym_scheduler": (["<action>up</action>", "<action>left</action>", "<action>left</action>"], None),
}
"""What the model says to a scheduler, and what its messages say in the end."""


def _cases() -> list[tuple[Path, str]]:
    found = []
    for file in PLUGINS:
        text = file.read_text()
        found += [(file, name) for name in SCRIPTS if f"multi_turns['{name}']" in text]
        found += [(file, "gym_scheduler")] if "envs['frozen_lake']" in text else []
    return found


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(not FOLDER, reason="POLYTURN_MS_SWIFT names no checkout of ms-swift"),
]


@pytest.mark.parametrize("file", PLUGINS, ids=lambda file: str(file.relative_to(FOLDER)))
def test_plugin_of_ms_swift_loads(file: Path) -> None:
    line = "import sys\nfrom polyturn.infra.plugins import load_plugins\nload_plugins([sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", line, str(file)], capture_output=True, text=True, check=False, timeout=600)
    if "No module named" in done.stderr and "No module named 'swift" not in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("file", "name"), _cases(), ids=lambda value: str(value).removeprefix(FOLDER))
def test_scheduler_of_ms_swift_plays_and_is_trained(file: Path, name: str) -> None:
    says, messages = SCRIPTS[name]
    line = [sys.executable, "-c", PLAY, str(file), name, json.dumps(says)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    if "No module named" in done.stderr and "No module named 'swift" not in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] is None and found["turns"] == len(says)
    assert messages is None or found["said"] == messages
    assert all(any(mask) for mask in found["masks"])
    if name == "tool_call_scheduler":
        (mask,) = found["masks"]
        assert mask.count(0) == found["result"], "the result of the tool is masked, and nothing else"
