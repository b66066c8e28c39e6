"""The sandbox example from an empty folder: it uses the real sandbox, and its tasks are as documented.

benchmarks/example_learns.py shows that the model learns.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyturn.cli.main import main
from polyturn.infra.plugins import import_attr
from polyturn.rewards import gsm8k
from polyturn.sandbox.python.isolation import Isolation, find_isolation
from polyturn.store.stored_run import open_store
from polyturn.tools.registry import initialize_tools_from_config
from support.runs import call_command

FOLDER = Path(__file__).parents[2] / "examples" / "sandbox"
ISOLATION, WHY = find_isolation()
isolated = pytest.mark.skipif(ISOLATION is Isolation.NONE, reason=f"the example's code cannot be isolated here: {WHY}")


def named(name: str) -> Any:
    return import_attr(f"sums.py:{name}", base=FOLDER)


async def ran(tool: Any, code: str) -> str:
    instance_id, _ = await tool.create()
    try:
        return str((await tool.execute(instance_id, {"code": code}))[0].text)
    finally:
        await tool.release(instance_id)


@pytest.mark.clock
@isolated
async def test_demonstrations_and_tasks_fit_the_sandbox() -> None:
    listed = yaml.safe_load((FOLDER / "config.yaml").read_text())["rollout"]["tools"]["file"]
    (tool,) = initialize_tools_from_config(listed)
    codes = set[str]()
    for conversation in named("demonstrations")(0, 40):
        called = [m for m in conversation.messages if m.tool_calls]
        told = [m for m in conversation.messages if m.role == "tool"]
        for message, reply in zip(called, told, strict=True):
            code = message.tool_calls[0].arguments["code"]
            codes.add(code.partition("(" if code.startswith("print") else " ")[0])
            assert await ran(tool, code) == reply.text
    assert codes == {"print", "x"}
    for task in named("tasks")(7, 8, is_held_out=True):
        printed = await ran(tool, f"print({task.extra['expression']})")
        assert gsm8k.compute_score(f"#### {printed}", task.ground_truth) == 1.0


def test_training_and_evaluation_have_different_tasks() -> None:
    train = {task.extra["expression"] for task in named("tasks")(0, 3000)}
    held_out = {task.extra["expression"] for task in named("tasks")(7, 256, is_held_out=True)}
    assert len(train) == 3000 and len(held_out) == 256 and not train & held_out


@pytest.mark.learns
@isolated
def test_short_run_goes_through_the_sandbox(tmp_path: Path) -> None:
    """A model that imitates people who always print calls the tool often enough within a few steps."""
    called = call_command(
        main,
        *("train", FOLDER / "config.yaml", f"out={tmp_path}", "num_threads=1", "model.init.hidden_size=64"),
        *("model.init.num_hidden_layers=1", "model.init.intermediate_size=128", "engine.num_slots=16"),
        *("warm_start.kwargs={seed: 0, num_conversations: 400, guess_share: 0, silent_share: 0}", "warm_start.steps=45"),
        *("warm_start.batch_size=8", "warm_start.optim.lr=1e-2", "warm_start.optim.warmup_steps=5"),
        *("train.steps=2", "train.groups_per_step=2", "train.group_size=4", "evaluation.data.kwargs.num_tasks=4"),
        "algorithm.drop_zero_variance=false",
    )
    assert called.code == 0 and "before and after" in called.out, called.err
    seen = [m.text for t in open_store(tmp_path / "sandbox").trajectories(split="train") for m in t.messages]
    assert any(re.fullmatch(r"\d+\n", text) for text in seen), f"no call printed a number: {seen}"
