"""Projects written for verl run unchanged: the configs and commands of its documents, with their placeholders filled.

The model is tiny and random, and the data are a few problems in GSM8K's form. One run belongs to `make test`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyturn.cli.main import main
from polyturn.compat.verl_config.command import run_main_ppo
from polyturn.core.trajectory import Trajectory
from polyturn.data.prepare import prepare_gsm8k
from polyturn.infra.plugins import import_attr
from polyturn.store.stored_run import open_store
from support.models import write_brief_model
from support.runs import call_command

LIMIT_S = 600
"""A limit for what hangs: a busy machine takes a minute to import what a run needs."""
pytestmark = pytest.mark.timeout(2 * LIMIT_S)

PROJECT = Path(__file__).parents[1] / "data" / "verl_project"
EXAMPLES = PROJECT / "examples" / "sglang_multiturn" / "config"
INTERACTION = str(EXAMPLES / "interaction_config" / "gsm8k_interaction_config.yaml")
TURNS = "actor_rollout_ref.rollout.multi_turn"
SMALL = [
    "data.train_batch_size=2",
    "data.max_prompt_length=1400",
    "data.max_response_length=160",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "trainer.total_training_steps=1",
    "data.val_max_samples=1",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, and with rows for a tool and for an interaction."""
    folder = tmp_path_factory.mktemp("project")
    write_brief_model(folder / "model")
    problems = [{"question": f"What is {i} + 2?", "answer": f"It is {i + 2}.\n#### {i + 2}"} for i in range(3)]
    (folder / "raw").mkdir()
    for split in ("train", "test"):
        (folder / "raw" / f"{split}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    prepare_gsm8k(folder / "raw", variant="tool", out=folder / "tool")
    prepare_gsm8k(folder / "raw", variant="interaction", out=folder / "interaction")
    return folder


def fill(project: Path, kind: str, run: Path) -> list[str]:
    """Return the overrides for the placeholders of a config."""
    return [
        *SMALL,
        f"actor_rollout_ref.model.path={project / 'model'}",
        f"data.train_files={project / kind / 'train.parquet'}",
        f"data.val_files={project / kind / 'test.parquet'}",
        f"trainer.default_local_dir={run}",
    ]


def trained(run: Path) -> list[Trajectory]:
    """Return the trajectories of the one step that a run took."""
    assert (run / "checkpoints" / "step-000001").is_dir()
    found = list(open_store(run).trajectories(split="train"))
    assert len(found) == 4
    assert not any(t.is_failed for t in found)
    return found


def write_config(tmp_path: Path, **rollout: Any) -> Path:
    file = tmp_path / "verl.yaml"
    file.write_text(yaml.safe_dump({"actor_rollout_ref": {"rollout": rollout}}))
    return file


def call(*arguments: object) -> str:
    """Run a command of polyturn in this process; return its output."""
    called = call_command(main, *arguments)
    assert called.code == 0, called.err
    return called.out


def speakers(trajectories: list[Trajectory]) -> set[str]:
    """Return the roles of the messages after the prompt, other than the model's."""
    return {m.role for t in trajectories for turn in t.turns for m in turn.observation}


def test_documented_setup_trains_and_continues_in_its_folder(project: Path, tmp_path: Path):
    """verl's `resume_mode` is auto: the same command again continues the run."""
    turns = {"enable": True, "interaction_config_path": INTERACTION, "max_user_turns": 10, "max_assistant_turns": 10}
    file = write_config(tmp_path, multi_turn=turns)
    command = ["train", "--verl", file, *fill(project, "interaction", tmp_path / "run"), "data.val_files=null"]
    call(*command)
    found = trained(tmp_path / "run")
    assert speakers(found) == {"user"}
    assert max(len(t.turns) for t in found) > 1
    call(*command, "trainer.total_training_steps=2")
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
    assert not (tmp_path / "run-2").exists()
    call(*command, "trainer.total_training_steps=0", "trainer.resume_mode=disable")
    assert (tmp_path / "run-2").is_dir()


@pytest.mark.slow
def test_training_command_of_the_document_runs(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_main_ppo(
        [
            f"--config-path={EXAMPLES}",
            "--config-name=gsm8k_multiturn_grpo_w_interaction",
            *("algorithm.adv_estimator=grpo", "data.return_raw_chat=True", "trainer.total_epochs=15"),
            *("actor_rollout_ref.rollout.name=sglang", f"{TURNS}.interaction_config_path={INTERACTION}"),
            *fill(project, "interaction", tmp_path / "run"),
        ]
    )
    assert speakers(trained(tmp_path / "run")) == {"user"}


@pytest.mark.slow
def test_run_script_trains_in_a_process_of_its_own(project: Path, tmp_path: Path):
    """It is `polyturn run-as verl -- python3 -m verl.trainer.main_ppo …` with every key that such scripts write."""
    script = EXAMPLES.parent / "run_qwen2.5-3b_gsm8k_multiturn.sh"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "MODEL": str(project / "model"), "DATA": str(project / "tool"), "PATH": path}
    overrides = [*fill(project, "tool", tmp_path / "run"), "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    ended = subprocess.run(
        ["bash", script, *overrides],
        capture_output=True,
        text=True,
        env=variables,
        cwd=tmp_path,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("tensor_model_parallel_size") == 1
    assert all(t.task.tools == ("calc_gsm8k_reward",) for t in trained(tmp_path / "run"))


@pytest.mark.slow
def test_migrated_config_trains(project: Path, tmp_path: Path):
    turns = {"enable": True, "interaction_config_path": INTERACTION}
    file, out = write_config(tmp_path, multi_turn=turns, gpu_memory_utilization=0.5), tmp_path / "native" / "config.yaml"
    printed = call("config", "migrate", file, *fill(project, "interaction", tmp_path / "run"), "--out", out)
    assert "gpu_memory_utilization" in printed
    notes = out.with_suffix(".md").read_text()
    assert "| `actor_rollout_ref.rollout.gpu_memory_utilization` | `0.5` | ignored |" in notes
    assert "| `actor_rollout_ref.rollout.n` | `2` | `train.group_size` |" in notes
    call("train", out)
    assert speakers(trained(tmp_path / "run")) == {"user"}


def test_dry_run_reads_function_tools_and_drops_long_prompts(project: Path, tmp_path: Path):
    (tmp_path / "tools.py").write_text(
        "from verl.tools.function_tool import function_tool\n\n\n@function_tool\ndef shout(text: str) -> str:\n"
        '    """Say something loudly.\n\n    Args:\n        text: What to say.\n    """\n    return text.upper()\n'
    )
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "What is 1 + 2?" * times}],
            "reward_model": {"style": "rule", "ground_truth": "3"},
        }
        for times in (1, 40, 1)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "verl.yaml").write_text("data: {filter_overlong_prompts: True, truncation: error}\n")
    printed = call(
        *("train", "--verl", tmp_path / "verl.yaml", "--dry-run", *fill(project, "tool", tmp_path / "run")),
        *(f"data.train_files={tmp_path / 'rows.jsonl'}", "data.val_files=null", "data.max_prompt_length=500"),
        f"{TURNS}.function_tool_path={tmp_path / 'tools.py'}",
    )
    assert '"name": "shout"' in printed
    assert "2 to train on" in printed
    assert not (tmp_path / "run").exists()


# The quick start in verl's forms

DEMO = PROJECT / "quickstart"


@pytest.mark.slow
def test_quickstart_trains_through_a_config_in_verl_keys(tmp_path: Path):
    command = [sys.executable, str(DEMO / "rows.py"), "--out", str(tmp_path), "--train", "8", "--test", "1"]
    subprocess.run(command, timeout=LIMIT_S, check=True)
    small = "{model_type: qwen3, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"
    call(
        *("train", "--verl", DEMO / "config.yaml"),
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'test.parquet'}",
        *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"),
        *("trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'run'}"),
        *(f"polyturn.model.init={small}", "polyturn.num_threads=1"),
        *("polyturn.warm_start.steps=2", "polyturn.warm_start.kwargs.num_conversations=16"),
    )
    found = list(open_store(tmp_path / "run").trajectories(split="train"))
    assert len(found) == 16
    assert {t.task.data_source for t in found} == {"quickstart/lookup", "quickstart/arithmetic"}
    for t in found:
        assert t.error is None
        assert t.reward.total == t.reward.components["outcome"], "the price is not a reward"
        assert (t.reward.components["tool/lookup"] > 0) == (t.task.data_source == "quickstart/lookup")


def test_quickstart_reward_compares_with_the_tools_price():
    compute_score = import_attr(f"{DEMO / 'lookup.py'}:compute_score")
    answer = "Easy:\nred lamp = 83\n#### 83"
    extra = {"rollout_reward_scores": {"lookup": 83.0}}
    assert compute_score("quickstart/lookup", answer, "", extra) == 1.0
    assert compute_score("quickstart/lookup", answer.replace("83", "38"), "", extra) == 0.0
    assert compute_score("quickstart/arithmetic", "#### 31", "31", extra) == 1.0


def test_migrated_quickstart_keeps_its_paths(tmp_path: Path):
    out = tmp_path / "elsewhere" / "config.yaml"
    call("config", "migrate", DEMO / "config.yaml", "--out", out)
    native = yaml.safe_load(out.read_text())
    for value in (
        native["model"]["chat_template"],
        native["model"]["tokenizer"]["corpus"],
        native["warm_start"]["conversations"],
        native["rollout"]["tools"]["file"],
        native["reward"]["function"]["name"],
    ):
        assert (out.parent / value.partition(":")[0]).is_file(), value
