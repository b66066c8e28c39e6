"""examples/harbor trains with a tiny model; its command-line agents are evaluated on the tokens that were sampled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.cli.main import main
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.engines.embedded import EmbeddedEngine
from polyturn.store.stored_run import open_store
from support.invariants import Exchange, check_invariants
from support.models import write_brief_model
from support.runs import call_command, trained_steps
from support.sandboxes import needs_bubblewrap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_bubblewrap]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "harbor"
TASKS = {"harbor-answer-from-file", "harbor-fix-test", "harbor-write-script"}
SMALL = ("num_threads=1", "rollout.limits.max_tokens_per_turn=24", "rollout.limits.max_context=16384")
FAILS = """
import dataclasses, runpy

small = runpy.run_path({path!r})["small"]
line = 'python3 "$0" "$1"; case "$1" in *count.sh*) exit 3;; esac'
fails = dataclasses.replace(small, command=("sh", "-c", line, *small.command[1:]))
"""
"""An agent that asks its model and then fails in one of the three tasks."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    write_brief_model(tmp_path / "model", max_positions=16384)
    return str(tmp_path / "model")


def test_tiny_model_trains_on_the_three_tasks(model: str, tmp_path: Path) -> None:
    called = call_command(
        main,
        *("train", EXAMPLE / "config.yaml", f"out={tmp_path}", f"model.path={model}", *SMALL),
        *("train.steps=2", "train.group_size=2"),
        # Every reward of a random model is 0, so only the entropy gives a gradient.
        *("algorithm.drop_zero_variance=false", "algorithm.entropy_coef=0.1"),
    )
    assert called.code == 0, called.err
    steps = trained_steps(tmp_path / "harbor")
    assert len(steps) == 2
    for step in steps:
        assert np.isfinite(step["loss/total"]) and step["loss/grad_norm"] > 0
    trajectories = list(open_store(tmp_path / "harbor").trajectories(split="train"))
    assert {t.task.id for t in trajectories} == TASKS and len(trajectories) == 12
    for t in trajectories:
        assert t.error is None and t.reward is not None and t.reward.info["steps"], "the verifier has scored it"
        check_invariants(t)


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Exchange]]:
    """The prompts and completions of the embedded engine, with the ids of their requests."""
    seen: list[tuple[str, Exchange]] = []
    generate = EmbeddedEngine.generate

    async def listen(self: EmbeddedEngine, request: GenerateRequest) -> Completion:
        prompt = request.prompt_ids.copy()
        completion = await generate(self, request)
        seen.append((request.request_id, (prompt, completion)))
        return completion

    monkeypatch.setattr(EmbeddedEngine, "generate", listen)
    return seen


def mini_swe_agent() -> Iterator[str]:
    """Yield the settings that mount mini-swe-agent into the sandbox."""
    command = [sys.executable, str(ROOT / "scripts/environments/build.py"), "agents", "--where"]
    python = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not (python.parents[1] / ".complete").exists():
        pytest.skip("mini_swe_agent is not installed: python scripts/environments/build.py agents")
    folders = (python.parents[1], Path(os.path.realpath(python)).parents[1])
    binds = [argument for folder in folders for argument in ("--ro-bind", str(folder), str(folder))]
    path = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    yield f"env.kwargs.agent={json.dumps({'agent': 'mini_swe_agent', 'kwargs': path})}"
    yield f"env.kwargs.sandbox={json.dumps({'backend': 'bubblewrap', 'memory_mb': 4096, 'run_args': binds})}"


@pytest.mark.parametrize("agent", ["small", "fails", "mini_swe_agent"])
def test_command_line_agent_is_evaluated_on_exact_tokens(
    agent: str, model: str, tmp_path: Path, exchanges: list[tuple[str, Exchange]]
) -> None:
    settings: list[str] = []
    if agent == "fails":
        (tmp_path / "agents.py").write_text(FAILS.format(path=str(EXAMPLE / "agents.py")))
        settings = [f"env.kwargs.agent={tmp_path / 'agents.py'}:fails"]
    elif agent == "mini_swe_agent":
        settings = list(mini_swe_agent())
    called = call_command(
        main,
        *("eval", EXAMPLE / "agent.yaml", f"out={tmp_path}", "--model", model, "--json", *SMALL, *settings),
        *("env.kwargs.eval=tasks", "env.eval_tasks=3", "rollout.max_failed_share=0.5"),
    )
    assert called.code == 0, called.err
    found: dict[str, Any] = json.loads(called.out)
    trajectories = list(open_store(Path(found["folder"])).trajectories())
    assert {t.task.id for t in trajectories} == TASKS
    failed = [t.task.id for t in trajectories if t.is_failed]
    assert failed == (["harbor-write-script"] if agent == "fails" else []), [t.error for t in trajectories]
    (report,) = json.loads((Path(found["folder"]) / "report.json").read_text()).values()
    assert report["failed"] == pytest.approx(len(failed) / 3)
    for t in trajectories:
        mine = [exchange for id, exchange in exchanges if id.startswith(t.id)]
        assert mine and len(mine) == len(t.turns)
        check_invariants(t, mine)
    if agent == "mini_swe_agent":
        assert max(len(t.turns) for t in trajectories) > 1, "it asks again for a command"
