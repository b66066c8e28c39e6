"""Programs of a checkout of verl, as they are: its own scripts, configs, preparation, classes and rewards, two steps each.

POLYTURN_VERL_CHECKOUT names the checkout, its recipes included (`benchmarks/verl_tests.py --cache DIR` makes DIR/checkouts/
0.7.1 and its like). Each program runs in it by `polyturn run-as verl -- bash SCRIPT`, with sizes that fit a processor. The
model is tiny and random; where it is to call a tool, the run begins with supervised steps that teach it one call.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import polyturn.testing
from polyturn import compat
from polyturn.compat.verl.agent_scheduler import AgentLoopScheduler
from polyturn.compat.verl_config.compose import compose_name
from polyturn.core.task import ToolKwargs
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.run_episode import run_episode
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from support.models import tiny_model, write_brief_model
from support.runs import trained_steps

CHECKOUT = Path(os.environ.get("POLYTURN_VERL_CHECKOUT", "/nowhere"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (CHECKOUT / "verl").is_dir(), reason="POLYTURN_VERL_CHECKOUT names no checkout of verl"),
]
NUM_STEPS = 2
QWEN = Path(polyturn.testing.__file__).parent / "qwen" / "qwen2_5.jinja"
"""The chat template of the models that verl's scripts name."""
SMALL = [
    "data.train_batch_size=2",
    "data.max_prompt_length=1400",
    "data.max_response_length=400",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "data.val_max_samples=1",
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.val_before_train=False",
]
ROWS = """---
configs:
- {config_name: main, data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]}
---
"""
"""The card of a data set with a train and a test file."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with GSM8K in small, and a model of short random turns."""
    folder = tmp_path_factory.mktemp("home")
    write_brief_model(folder / "model")
    problems = [{"question": f"What is {i} + 2?", "answer": f"It is {i + 2}.\n#### {i + 2}"} for i in range(4)]
    write_rows(folder / "gsm8k", problems)
    return folder


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a data set as the hub has them."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(ROWS)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_as(home: Path, *command: object, overrides: Sequence[str] = (), at: str = ".", program: str = "") -> str:
    """Run a command in the checkout under `run-as verl`; return its output."""
    sets = [part for override in overrides for part in ("--set", override)]
    variables = {
        **os.environ,
        "HOME": str(home),
        "DATA_ROOT": str(home),
        "PYTHONPATH": os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home / "hub"),
        "OMP_NUM_THREADS": "1",
    }
    line = [sys.executable, "-m", "polyturn", "run-as", "verl", *sets, "--", *map(str, command)]
    ended = subprocess.run(line, capture_output=True, text=True, env=variables, cwd=CHECKOUT / at, timeout=900, check=False)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    return ended.stdout + ended.stderr


def trained(home: Path, script: str, *overrides: str, at: str = ".") -> list[Trajectory]:
    """Run a script; return the trajectories of its steps."""
    run = home / "runs" / Path(script).stem
    sizes = [*SMALL, f"actor_rollout_ref.model.path={home / 'model'}", f"trainer.default_local_dir={run}"]
    run_as(home, "bash", script, overrides=[*sizes, *overrides], at=at)
    assert [s["step"] for s in trained_steps(run)] == [1, 2]
    found = list(open_store(run).trajectories(split="train"))
    assert len(found) == NUM_STEPS * 4 and not any(t.is_failed for t in found), [t.error for t in found]
    return found


def prepared(home: Path, kind: str, name: str) -> Path:
    """Let verl's own program prepare GSM8K for a kind of run; return the folder, which its script expects."""
    folder = home / "data" / name
    program = f"examples/data_preprocess/gsm8k_multiturn_w_{kind}.py"
    run_as(home, "python3", program, "--local_dataset_path", home / "gsm8k", "--local_save_dir", folder)
    return folder


def taught(home: Path, rows: Path, name: str, arguments: dict[str, Any]) -> list[str]:
    """Return the overrides with which a run begins by learning one call of a tool, and an answer behind its result."""
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(home / "learner")
    tiny_model(tokenizer, hidden=64, layers=2, max_positions=8192).save_pretrained(home / "learner")
    call = {"id": "0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "?", "tool_call_id": "0"},
        {"role": "assistant", "content": "#### 3"},
    ]
    demos = [{"messages": [*row["prompt"], *said]} for row in pq.read_table(rows).to_pylist()]
    (home / "demos.jsonl").write_text("".join(json.dumps(demo) + "\n" for demo in demos))
    start = {"conversations": home / "demos.jsonl", "steps": 120, "batch_size": 2, "optim.lr": 3e-3}
    sizes = ["data.max_prompt_length=3000", "data.max_response_length=600"]
    sizes.append(f"actor_rollout_ref.model.path={home / 'learner'}")
    return [*(f"+polyturn.warm_start.{key}={value}" for key, value in start.items()), *sizes]


# --- examples -------------------------------------------------------------------------------------------------------------


def test_script_with_an_interaction(home: Path):
    prepared(home, "interaction", "gsm8k_verl_sgl_multi_turn_w_interaction")
    found = trained(home, "examples/sglang_multiturn/run_qwen2.5-0.5b_gsm8k_multiturn_w_interaction.sh")
    told = [m.text for t in found for turn in t.turns for m in turn.observation if m.role == "user"]
    assert told and all(text.startswith("Your response is incorrect!") for text in told)
    assert max(len(t.turn_scores) for t in found) > 1


def test_script_with_a_tool(home: Path):
    rows = prepared(home, "tool", "gsm8k") / "train.parquet"
    lesson = taught(home, rows, "calc_gsm8k_reward", {"answer": "3"})
    found = trained(home, "examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh", *lesson)
    results = [result for t in found for turn in t.turns for result in turn.tool_results]
    scored = [str(result.content) for result in results if result.error is None]
    assert any(text.startswith("Current parsed answer='3'") for text in scored), results[:3]


async def test_copy_of_verls_tool_agent_loop_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Projects begin their own loops with such a copy, under another name."""
    source = CHECKOUT / "verl" / "experimental" / "agent_loop" / "tool_agent_loop.py"
    if not source.is_file() or "await tool.create()" in source.read_text():
        pytest.skip("this release has none, or one whose tools return an id alone")
    compat.install("verl")
    monkeypatch.syspath_prepend(tmp_path)
    text = source.read_text().replace("class ToolAgentLoop", "class Copied").replace('"tool_agent"', '"copied"')
    (tmp_path / "copied_loop.py").write_text(text)
    function = {"name": "calc_gsm8k_reward", "description": "Check.", "parameters": {"type": "object", "properties": {}}}
    item = {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {}}
    tools = {"tools": [{**item, "tool_schema": {"type": "function", "function": function}}]}
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    monkeypatch.chdir(CHECKOUT)
    at = "actor_rollout_ref.rollout.multi_turn"
    asked = [f"{at}.enable=True", f"{at}.tool_config_path={tmp_path / 'tools.json'}", "actor_rollout_ref.model.path=m"]
    tree = compose_name("ppo_trainer", folder=None, overrides=[*asked, "data.train_files=t"]).values
    scheduler = AgentLoopScheduler(loops={"copied": {"_target_": "copied_loop.Copied"}}, default="copied", config=tree)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN.read_text()
    call = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "5"}}\n</tool_call>'
    context = dataclasses.replace(scripted_context([call, "It is 5."], scheduler=scheduler), codec=Codec(tokenizer))
    asks = task("3 + 2?", tools_kwargs={"calc_gsm8k_reward": ToolKwargs(create_kwargs={"ground_truth": "5"})})
    found = await run_episode(context, asks, id="e")
    assert [turn.message.text for turn in found.turns] == ["", "It is 5."], found.error
    (segment,) = found.segments
    assert "answer='5' reward=1.0" in tiny_codec().decode(segment.spans[2].ids)
    assert np.array_equal(segment.loss_weights > 0, segment.sampled_mask)


# --- recipes --------------------------------------------------------------------------------------------------------------


def test_recipe_char_count(home: Path):
    if not (CHECKOUT / "recipe" / "char_count").is_dir():
        pytest.skip("this release has no recipe char_count")
    run_as(home, "python3", "recipe/char_count/create_dataset.py", "--total_number", 20)
    script = CHECKOUT / "recipe" / "char_count" / "train_grpo.sh"  # its paths start from the checkout in the first releases
    at = "." if "=recipe/char_count" in script.read_text() else "recipe/char_count"
    found = trained(home, script.relative_to(CHECKOUT / at).as_posix(), at=at)
    assert all(len(t.turns) == 1 for t in found) and {t.task.data_source for t in found} == {"char_count"}


USER_MODEL = """
import json
from types import SimpleNamespace


class RateLimitError(Exception):
    pass


async def acompletion(*, model, messages, **kwargs):
    said = {"current_answer": "?", "thought": "?", "response": "Go on.", "accuracy": 1, "interactivity": 0.5}
    return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=json.dumps(said)))])
"""
"""What the recipe collabllm asks for its simulated user and its judges, with one answer to all of them."""


def test_recipe_collabllm(home: Path):
    """An agent loop that forks conversations with a simulated user, and a reward manager that judges them."""
    if not (CHECKOUT / "recipe" / "collabllm" / "train_rl_collabllm.sh").is_file():
        pytest.skip("this release has no recipe collabllm")
    (home / "litellm.py").write_text(USER_MODEL)
    problems = [{"prompt": [{"role": "user", "content": f"Add 2 to {i}."}], "completion": f"{i + 2}"} for i in range(20)]
    told = {"single_turn_prompt": "What is the sum?", "single_turn_completion": "3"}
    write_rows(home / "dialogues", [{**problem, **told} for problem in problems])
    folder = home / "data" / "collabllm-math-hard-large"
    program = "recipe/collabllm/process_dataset.py"
    run_as(home, "python3", program, "--dataset", home / "dialogues", "--local_dir", folder, "--num_proc", 1)
    sizes = ["data.max_prompt_length=1500", "data.max_response_length=500"]
    found = trained(home, "recipe/collabllm/train_rl_collabllm.sh", *sizes)
    assert {t.task.extra["agent_name"] for t in found} == {"collabllm_agent"}
    assert all(t.reward is not None for t in found)


def test_agent_loop_of_langgraph(home: Path):
    """A graph of LangGraph's over the model of the run, with a tool."""
    pytest.importorskip("langgraph")
    program = "recipe/langgraph_agent/example/create_dataset.py"
    if not (CHECKOUT / program).is_file():
        pytest.skip("this release has no recipe langgraph_agent")
    folder = home / "data" / "math_expression_tool"
    run_as(home, "python3", program, "--train_size", 8, "--test_size", 2, "--output_dir", folder)
    write_brief_model(home / "qwen")
    (home / "qwen" / "chat_template.jinja").write_text(QWEN.read_text())
    found = trained(
        home, "recipe/langgraph_agent/example/run_qwen2.5_3b.sh", f"actor_rollout_ref.model.path={home / 'qwen'}"
    )
    assert {t.task.extra["agent_name"] for t in found} == {"math_expression"}
    assert all(t.turns for t in found)
