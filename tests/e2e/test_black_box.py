"""Agents with their own loop train unchanged: the recorded tokens are those that the engine received and sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn import build
from polyturn.cli.main import main
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.stored_run import open_store
from support.cases import each
from support.invariants import check_invariants
from support.runs import call_command, trained_steps

EXAMPLE = Path(__file__).parents[1] / "data/projects/black_box"
AGENTS = ["openai_client.py:agent", "agents_sdk.py:agent"]


@pytest.mark.parametrize("agent", each(2, AGENTS))
def test_black_box_example_trains(agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    called = call_command(
        main, "train", EXAMPLE / "config.yaml", f"out={tmp_path}", "name=t", f"rollout.scheduler_kwargs.agent={agent}"
    )
    assert called.code == 0, called.err
    steps = trained_steps(tmp_path / "t")
    assert len(steps) == 2
    for step in steps:
        assert np.isfinite(step["loss/total"]) and step["loss/grad_norm"] > 0
        assert step["policy/rollout_difference"] < 1e-4, "the trainer computes what the engine sampled"
    trajectories = list(open_store(tmp_path / "t").trajectories(split="train"))
    # The SDK raises if a completion of the random model is cut and has no text.
    assert len(trajectories) == 16 and {
        t.error is None or "produced no assistant text" in t.error for t in trajectories
    } == {True}
    whole = [t for t in trajectories if t.error is None]
    assert len(whole) >= 8 and all(t.reward is not None for t in whole)


def test_tools_of_the_run_are_refused_because_the_agent_offers_its_own(tmp_path: Path):
    (tmp_path / "tools.py").write_text(
        'import polyturn\n\n\n@polyturn.tool\ndef shelf() -> str:\n    """Find a book."""\n    return "A1"\n'
    )
    tools = f"rollout.tools.functions=['{tmp_path / 'tools.py'}:shelf']"
    called = call_command(main, "train", EXAMPLE / "config.yaml", "--dry-run", f"out={tmp_path}", tools)
    assert called.code == 2 and "rollout.tools has ['shelf']" in called.err and "remove rollout.tools" in called.err, (
        called.err
    )


@pytest.mark.parametrize("agent", AGENTS)
def test_record_holds_what_the_engine_saw_and_sampled(agent: str, tmp_path: Path):
    config = load_config(RunConfig, EXAMPLE / "config.yaml", [f"rollout.scheduler_kwargs.agent={agent}"]).config
    parts = build.build_parts(build.ConfigSource(config=config, base=EXAMPLE))
    tasks = build.build_tasks(config.data.train, base=EXAMPLE, split="train")  # type: ignore[arg-type]
    seen: list[tuple[GenerateRequest, Completion]] = []
    engine: Any = parts.engine
    generate = engine.generate

    async def listen(request: GenerateRequest) -> Completion:
        prompt = request.prompt_ids.copy()
        completion = await generate(request)
        seen.append((GenerateRequest(request_id=request.request_id, session_id="", prompt_ids=prompt), completion))
        return completion

    engine.generate = listen

    async def run() -> Sequence[Trajectory]:
        groups = await RolloutPool(parts.context).run([GroupSpec(id="g", task=tasks[0], size=4, seed=1)])
        await engine.close()
        return groups[0].trajectories

    found = asyncio.run(run())
    assert sum(len(t.turns) for t in found) == len(seen) > 4
    for trajectory in found:
        assert trajectory.error is None, trajectory.error
        mine = [pair for pair in seen if pair[0].request_id.startswith(trajectory.id)]
        assert len(mine) == len(trajectory.turns)
        check_invariants(trajectory, [(request.prompt_ids, completion) for request, completion in mine])
        assert trajectory.num_sampled_tokens == sum(len(completion.token_ids) for _, completion in mine)
