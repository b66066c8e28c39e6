"""Projects written for verl run as they are: its documents' configs and commands, with the placeholders filled.

The model is tiny and random and the data a few problems in GSM8K's form, prepared by the shipped scripts; each run takes one
step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from polyturn.cli.main import main
from polyturn.compat.verl_config.command import run_main_ppo
from polyturn.core.registry import import_attr
from polyturn.core.trajectory import Trajectory
from polyturn.store.stored_run import open_store
from support.models import write_brief_model
from support.runs import call_command

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "tests" / "data" / "verl_project"
EXAMPLES = PROJECT / "examples" / "sglang_multiturn" / "config"
PREPARE = PROJECT / "examples" / "data_preprocess"
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
    """A folder with a model, and with data that the shipped scripts prepared."""
    folder = tmp_path_factory.mktemp("project")
    write_brief_model(folder / "model")
    problems = [{"question": f"What is {i} + 2?", "answer": f"It is {i + 2}.\n#### {i + 2}"} for i in range(3)]
    (folder / "raw").mkdir()
    for split in ("train", "test"):
        (folder / "raw" / f"{split}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    for kind in ("tool", "interaction"):
        prepared = run_script(f"gsm8k_multiturn_w_{kind}.py", "--local_dataset_path", folder / "raw", out=folder / kind)
        assert prepared.returncode == 0, prepared.stderr
    return folder


def run_script(name: str, *arguments: object, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PREPARE / name, "--local_save_dir", out, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)


def fill(project: Path, kind: str, run: Path) -> list[str]:
    """Return the overrides that fill what a config leaves open."""
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
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if "loss/total" in s or "loss" in str(s)][-1] == 1
    found = list(open_store(run).trajectories(split="train"))
    assert len(found) == 4 and not any(t.is_failed for t in found)
    return found


def train(config: dict[str, Any], project: Path, kind: str, tmp_path: Path, *overrides: str) -> list[Trajectory]:
    """Train one step of a config in verl's keys."""
    file = tmp_path / "verl.yaml"
    file.write_text(yaml.safe_dump(config))
    called = call_command(main, "train", "--verl", file, *fill(project, kind, tmp_path / "run"), *overrides)
    assert called.code == 0, called.err
    return trained(tmp_path / "run")


def rollout(**keys: Any) -> dict[str, Any]:
    return {"actor_rollout_ref": {"rollout": keys}}


def speakers(trajectories: Sequence[Trajectory]) -> set[str]:
    """Return who but the model spoke after the prompt."""
    return {m.role for t in trajectories for turn in t.turns for m in turn.observation}


# The documents


@pytest.mark.slow
def test_the_keys_that_were_documented_and_never_read(project: Path, tmp_path: Path):
    path = EXAMPLES / "interaction_config" / "gsm8k_interaction_config.yaml"
    config = rollout(multi_turn=True, name="sglang", interaction_config_file=str(path))
    assert speakers(train(config, project, "interaction", tmp_path)) == {"user"}


@pytest.mark.slow
def test_tools_under_the_key_of_the_translated_document(project: Path, tmp_path: Path):
    path = EXAMPLES / "tool_config" / "gsm8k_tool_config.yaml"
    config = rollout(multi_turn=True, name="sglang", tool_kwargs={"tools_config_file": str(path)})
    turns = "actor_rollout_ref.rollout.multi_turn"
    checks = f"{turns}.tokenization_sanity_check_mode=ignore_strippable"
    found = train(config, project, "tool", tmp_path, checks, f"{turns}.use_inference_chat_template=True")
    assert all(t.task.tools == ("calc_gsm8k_reward",) for t in found)


@pytest.mark.slow
def test_the_training_command_of_the_interaction_document(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_main_ppo(
        [
            f"--config-path={EXAMPLES}",
            "--config-name=gsm8k_multiturn_grpo_w_interaction",
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=512",
            "data.return_raw_chat=True",
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.rollout.multi_turn.interaction_config_path="
            f"{EXAMPLES / 'interaction_config' / 'gsm8k_interaction_config.yaml'}",
            "trainer.total_epochs=15",
            *fill(project, "interaction", tmp_path / "run"),
        ]
    )
    assert speakers(trained(tmp_path / "run")) == {"user"}


def test_the_run_script_in_a_process_of_its_own(project: Path, tmp_path: Path):
    """`polyturn run-as verl -- python3 -m verl.trainer.main_ppo …`, with every key that such scripts write."""
    script = EXAMPLES.parent / "run_qwen2.5-3b_gsm8k_multiturn.sh"
    variables = {
        **os.environ,
        "MODEL": str(project / "model"),
        "DATA": str(project / "tool"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    batch = ["actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    command = ["bash", str(script), *fill(project, "tool", tmp_path / "run"), *batch]
    ended = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "the embedded engine samples" in ended.stderr and ended.stderr.count("tensor_model_parallel_size") == 1
    assert all(t.task.tools == ("calc_gsm8k_reward",) for t in trained(tmp_path / "run"))


# The quick start


@pytest.mark.slow
def test_the_demos_rows_train_through_a_config_in_verls_keys(tmp_path: Path):
    demo = PROJECT / "quickstart"
    command = [sys.executable, str(demo / "rows.py"), "--out", str(tmp_path), "--train", "8", "--test", "1"]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    small = "{model_type: qwen3, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"
    called = call_command(
        main,
        *("train", "--verl", demo / "config.yaml"),
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'test.parquet'}",
        *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"),
        *("trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'run'}"),
        *(f"polyturn.model.init={small}", "polyturn.num_threads=1"),
        *("polyturn.warm_start.steps=2", "polyturn.warm_start.kwargs.num_conversations=16"),
    )
    assert called.code == 0, called.err
    found = list(open_store(tmp_path / "run").trajectories(split="train"))
    assert len(found) == 16 and not any(t.is_failed for t in found)
    assert {t.task.data_source for t in found} == {"quickstart/lookup", "quickstart/arithmetic"}
    for t in found:
        assert t.reward is not None and set(t.reward.components) >= {"outcome", "tool/lookup"}
        assert t.reward.total == t.reward.components["outcome"], "the price is no reward"
        assert (t.reward.components["tool/lookup"] > 0) == (t.task.data_source == "quickstart/lookup")


def test_the_demos_reward_compares_with_the_price_of_the_episode():
    compute_score = import_attr(f"{PROJECT / 'quickstart' / 'lookup.py'}:compute_score")
    said = "Easy:\nred lamp = 83\n#### 83"
    extra = {"rollout_reward_scores": {"lookup": 83.0}}
    assert compute_score("quickstart/lookup", said, "", extra) == 1.0
    assert compute_score("quickstart/lookup", said.replace("83", "38"), "", extra) == 0.0
    assert compute_score("quickstart/arithmetic", "#### 31", "31", extra) == 1.0


# Around them


def test_a_run_goes_on_from_its_folder_unless_it_is_told_not_to(project: Path, tmp_path: Path):
    """verl's resume_mode auto: the same command again continues."""
    path = EXAMPLES / "interaction_config" / "gsm8k_interaction_config.yaml"
    turns = {"enable": True, "interaction_config_path": str(path), "max_user_turns": 10, "max_assistant_turns": 10}
    found = train(rollout(multi_turn=turns), project, "interaction", tmp_path, "data.val_files=null")
    assert speakers(found) == {"user"} and max(len(t.turns) for t in found) > 1, "the documents' basic setup"
    arguments = ["train", "--verl", tmp_path / "verl.yaml", *fill(project, "interaction", tmp_path / "run")]
    two = ["data.val_files=null", "trainer.total_training_steps=2"]
    assert call_command(main, *arguments, *two).code == 0
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir() and not (tmp_path / "run-2").exists()
    no_step = ["data.val_files=null", "trainer.total_training_steps=0", "trainer.resume_mode=disable"]
    assert call_command(main, *arguments, *no_step).code == 0
    assert (tmp_path / "run-2").is_dir()


def test_a_migrated_config_trains_and_says_what_became_of_each_key(project: Path, tmp_path: Path):
    path = EXAMPLES / "interaction_config" / "gsm8k_interaction_config.yaml"
    config = rollout(multi_turn={"enable": True, "interaction_config_path": str(path)}, gpu_memory_utilization=0.5)
    file, out = tmp_path / "verl.yaml", tmp_path / "native" / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    called = call_command(main, "config", "migrate", file, *fill(project, "interaction", tmp_path / "run"), "--out", out)
    assert called.code == 0, called.err
    assert "gpu_memory_utilization" in called.out
    notes = out.with_suffix(".md").read_text()
    assert "| `actor_rollout_ref.rollout.gpu_memory_utilization` | `0.5` | ignored |" in notes
    assert "| `actor_rollout_ref.rollout.n` | `2` | `train.group_size` |" in notes
    called = call_command(main, "train", out)
    assert called.code == 0, called.err
    assert speakers(trained(tmp_path / "run")) == {"user"}


def test_a_migrated_demo_keeps_its_paths_wherever_it_is_written(tmp_path: Path):
    out = tmp_path / "elsewhere" / "config.yaml"
    demo = PROJECT / "quickstart" / "config.yaml"
    assert call_command(main, "config", "migrate", demo, "--out", out).code == 0
    native = yaml.safe_load(out.read_text())
    model, sft = native["model"], native["warm_start"]
    for value in (
        model["chat_template"],
        model["tokenizer"]["corpus"].partition(":")[0],
        sft["conversations"].partition(":")[0],
        native["rollout"]["tools"]["file"],
        native["reward"]["function"]["name"].partition(":")[0],
    ):
        assert (out.parent / value).is_file(), value


def test_a_dry_run_reads_function_tools_and_leaves_long_prompts_out(project: Path, tmp_path: Path):
    (tmp_path / "tools.py").write_text(
        "from verl.tools.function_tool import function_tool\n\n\n@function_tool\ndef shout(text: str) -> str:\n"
        '    """Say something loudly.\n\n    Args:\n        text: What to say.\n    """\n    return text.upper()\n'
    )
    rows = [json.loads(line) for line in (project / "raw" / "train.jsonl").read_text().splitlines()]
    prompts = [[{"role": "user", "content": row["question"] * times}] for row, times in zip(rows, (1, 40, 1), strict=True)]
    truth = {"style": "rule", "ground_truth": "4"}
    lines = [json.dumps({"data_source": "openai/gsm8k", "prompt": p, "reward_model": truth}) for p in prompts]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "verl.yaml").write_text("data: {filter_overlong_prompts: True, truncation: error}\n")
    called = call_command(
        main,
        *("train", "--verl", tmp_path / "verl.yaml", "--dry-run", *fill(project, "tool", tmp_path / "run")),
        *(f"data.train_files={tmp_path / 'rows.jsonl'}", "data.val_files=null", "data.max_prompt_length=500"),
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}",
    )
    assert called.code == 0, called.err
    assert '"name": "shout"' in called.out and "2 to train on" in called.out
    assert not (tmp_path / "run").exists()


def test_the_prepared_rows_are_the_documented_ones(project: Path):
    tool, talk = (pq.read_table(project / kind / "train.parquet").to_pylist()[1] for kind in ("tool", "interaction"))
    for row in (tool, talk):
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        assert row["data_source"] == "openai/gsm8k" and row["reward_model"] == {"style": "rule", "ground_truth": "3"}
        assert row["extra_info"]["index"] == 1 and row["extra_info"]["split"] == "train"
    asked = talk["prompt"][-1]["content"]
    assert asked.startswith("What is 1 + 2? ")
    assert talk["extra_info"]["interaction_kwargs"] == {"name": "gsm8k", "query": asked, "ground_truth": "3"}
    assert tool["extra_info"]["need_tools_kwargs"] is True
    assert tool["extra_info"]["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "3"}}}


def test_the_scripts_answer_for_options_that_they_cannot_serve(project: Path, tmp_path: Path):
    refused = run_script("gsm8k_multiturn_w_tool.py", "--hdfs_dir", "hdfs://x", out=tmp_path)
    assert refused.returncode == 2 and "copy the written folder yourself" in refused.stderr
