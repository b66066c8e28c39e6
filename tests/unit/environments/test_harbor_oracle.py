"""Our Harbor adapter against Harbor's own runner: rewards of the examples, and the fields of a task.toml.

Harbor runs in the interpreter that `python scripts/environments/build.py harbor` makes, which needs Python 3.12. Its own
environments need images of a registry, so each command of a trial runs under bubblewrap (`support/harbor_oracle.py`).
Agents, verifier and the reading of files are Harbor's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import DataError
from polyturn.environments import find_adapter
from polyturn.environments.harbor import Harbor
from polyturn.environments.harbor_task import read_task
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context
from support.parts import call
from support.sandboxes import needs_bubblewrap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
TASKS = sorted((ROOT / "examples/harbor/tasks").iterdir())
FILES = {
    "empty": "",
    "full": """
version = "1.3"
multi_step_reward_strategy = "final"
artifacts = ["/a", {source = "/b", exclude = ["c"]}]
[metadata]
anything = [1]
[agent]
timeout_sec = 5
user = "nobody"
[verifier]
timeout_sec = 7
env = {A = "1"}
[[verifier.collect]]
command = "true"
[environment]
cpus = 2
memory_mb = 512
build_timeout_sec = 9
workdir = "/work"
env = {B = "2"}
healthcheck = {command = "true", retries = 5}
""",
    "steps": """
[[steps]]
name = "one"
min_reward = 0.5
agent = {timeout_sec = 3}
[[steps]]
name = "two"
min_reward = {reward = 0.1}
""",
    "negative-deadline": '[verifier]\ntimeout_sec = "x"',
    "unknown-strategy": 'multi_step_reward_strategy = "max"',
    "unknown-system": '[environment]\nos = "beos"',
    "unknown-network": '[environment]\nnetwork_mode = "some"',
}


@pytest.fixture(scope="module")
def python() -> Path:
    """Return Harbor's interpreter."""
    command = [sys.executable, str(ROOT / "scripts/environments/build.py"), "harbor", "--where"]
    found = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not (found.parents[1] / ".complete").exists():
        pytest.skip("Harbor is not installed: python scripts/environments/build.py harbor (it needs python3.12)")
    return found


def ask_harbor(python: Path, *arguments: str) -> Any:
    variables = {**os.environ, "HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    command = [str(python), str(ROOT / "tests/support/harbor_oracle.py"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT / "tests/support")
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


async def rewards_here(folder: Path, says: Sequence[str]) -> dict[str, float]:
    adapter = find_adapter(f"harbor:{folder}", {"host_programs": True})
    assert isinstance(adapter, Harbor)
    context = scripted_context(
        says, tools=adapter.tools(), scheduler=adapter.scheduler(), limits=Limits(max_context=1 << 20), tool_timeout_s=60.0
    )
    (task,) = adapter.tasks(split="train", seeds=range(1))
    trajectory = await run_episode(context, task, id="e")
    assert trajectory.reward is not None, trajectory.error
    (rewards,) = trajectory.reward.info["steps"]
    return dict(rewards)


@needs_bubblewrap
async def test_rewards_are_those_of_harbors_runner(python: Path):
    theirs = ask_harbor(python, json.dumps([[str(folder), agent] for folder in TASKS for agent in ("oracle", "nop")]))
    ours = []
    for folder in TASKS:
        solution = call("bash", command=(folder / "solution/solve.sh").read_text())
        ours += [await rewards_here(folder, [solution, "Done."]), await rewards_here(folder, ["No."])]
    assert ours == theirs and [one["reward"] for one in ours] == [1.0, 0.0] * len(TASKS)


def test_files_are_read_as_harbor_reads_them(python: Path, tmp_path: Path):
    for name, text in FILES.items():
        for part in ("environment", "tests", "steps/one", "steps/two"):
            (tmp_path / name / part).mkdir(parents=True)
            (tmp_path / name / part / "instruction.md").write_text("Do it.")
        (tmp_path / name / "instruction.md").write_text("Do it.")
        (tmp_path / name / "task.toml").write_text(text)
    folders = [*(tmp_path / name for name in FILES), *TASKS]
    for folder, theirs in zip(folders, ask_harbor(python, "--read", json.dumps([*map(str, folders)])), strict=True):
        try:
            ours: Any = json.loads(read_task(folder).file.model_dump_json(exclude_unset=True))
        except DataError:
            ours = None
        assert (ours is None) == (theirs is None), folder.name
        assert ours is None or not differences(ours, theirs), (folder.name, differences(ours, theirs))


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Return the fields of ours that have another value in theirs."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [line for key in ours for line in differences(ours[key], theirs.get(key), f"{at}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [line for i, pair in enumerate(zip(ours, theirs, strict=True)) for line in differences(*pair, f"{at}[{i}]")]
    return [] if ours == theirs else [f"{at}: {ours!r} here, {theirs!r} there"]
