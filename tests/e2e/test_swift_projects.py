"""Projects written for ms-swift train here as they are: their command line in a script, their arguments in a file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from polyturn import compat
from polyturn.cli.main import main
from polyturn.compat.swift.args.document import argument_table
from polyturn.core.trajectory import Trajectory
from polyturn.store.stored_run import open_store
from support.models import write_brief_model
from support.runs import call_command

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "data" / "swift_plugins"

SCRIPT = """\
NPROC_PER_NODE=1 \\
swift rlhf \\
    --rlhf_type grpo --model model --train_type full \\
    --external_plugins frozen_lake_plugin.py plugin.py \\
    --dataset frozen_lake.jsonl --multi_turn_scheduler gym_scheduler --use_gym_env true --gym_env frozen_lake \\
    --reward_funcs async_length --reward_weights 0.1 1 \\
    --max_turns 3 --max_completion_length 8 --num_generations 4 --per_device_train_batch_size 8 --beta 0.0 \\
    --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_pass_dataset true \\
    --learning_rate 1e-3 --max_steps 2 --output_dir out/lake --logging_steps 1 --report_to tensorboard "$@"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows and plug-in files, as its owner left it."""
    folder = tmp_path_factory.mktemp("swift_project")
    write_brief_model(folder / "model")
    rows = [{"messages": [{"role": "user", "content": "<placeholder>"}], "env_config": {"seed": k}} for k in range(4)]
    (folder / "frozen_lake.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sums = [{"messages": [{"role": "user", "content": f"{k}+1?"}], "solution": str(k + 1)} for k in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    for file in FILES.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "run.sh").write_text(SCRIPT)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.*") if p.is_file()}


def trained(run: Path) -> list[Trajectory]:
    return [t for t in open_store(run).trajectories() if t.reward is not None]


@pytest.mark.slow
def test_a_script_runs_as_it_is_and_leaves_its_files_alone(project: Path) -> None:
    before = hashes(project)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    line = ["polyturn", "run-as", "swift", "--", "bash", "run.sh"]
    ended = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=project, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "vllm_server_pass_dataset: ignored: all columns of a row always arrive in data_dict" in ended.stderr
    assert hashes(project) == before
    trajectories = trained(project / "out" / "lake")
    assert len(trajectories) == 16
    for trajectory in trajectories:
        assert trajectory.messages[0].text.startswith("Walk from P to G")
        assert trajectory.reward is not None and set(trajectory.reward.info) == {"async_length", "gym_reward"}
    assert any(len(t.turns) > 1 for t in trajectories)


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed (the extra megatron)")
def test_a_script_of_megatron_runs_as_it_is(project: Path, tmp_path: Path) -> None:
    script = tmp_path / "megatron.sh"
    arguments = (
        "--rlhf_type grpo --model model --dataset sums.jsonl --reward_funcs format --max_completion_length 6 "
        "--num_generations 4 --global_batch_size 8 --micro_batch_size 1 --train_iters 1 --lr 1e-3 --beta 0.0 "
        "--tensor_model_parallel_size 1 --recompute_granularity selective --finetune --no_save_optim"
    )
    script.write_text(f'megatron rlhf {arguments} --save {tmp_path}/out/run "$@"\n')
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    line = ["polyturn", "run-as", "swift", "--", "bash", str(script)]
    ended = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=project, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "recompute_granularity: ignored: it changes speed and memory" in ended.stderr
    assert len(trained(tmp_path / "out" / "run")) == 8


def test_arguments_in_a_file_train_and_a_wrong_name_is_told_at_once(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = {
        "rlhf_type": "grpo",
        "model": "model",
        "dataset": ["sums.jsonl"],
        "reward_funcs": ["format", "accuracy"],
        "multi_turn_scheduler": "thinking_tips_scheduler",
        "max_turns": 2,
        "max_completion_length": 6,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "loss_scale": "last_round",
        "output_dir": str(tmp_path / "runs" / "tips"),
    }
    file = tmp_path / "args.yaml"
    file.write_text(yaml.safe_dump(arguments))
    wrong = call_command(main, "train", "--swift", file, "reward_funcs=[acuracy]")
    assert wrong.code == 2 and "orms: there is no 'acuracy'. Did you mean 'accuracy'" in wrong.err
    wrong = call_command(main, "train", "--swift", file, "multi_turn_scheduler=thinking_tip_scheduler")
    assert wrong.code == 2 and "Did you mean 'thinking_tips_scheduler'" in wrong.err
    judge = tmp_path / "judged.py"
    judge.write_text(
        "import urllib.request\nfrom swift.rewards import ORM, orms\n"
        "class Judged(ORM):\n    def __init__(self, args=None, **kwargs):\n"
        "        urllib.request.urlopen('http://127.0.0.1:1/v1/models', timeout=5)\n"
        "orms['judged'] = Judged\n"
    )
    wrong = call_command(main, "train", "--swift", file, "reward_funcs=[judged]", f"external_plugins=[{judge}]", "--dry-run")
    assert wrong.code == 2 and "the reward function 'judged' cannot be made: URLError: " in wrong.err
    wrong = call_command(main, "train", "--swift", file, "reward_funcs=[soft_overlong]", "--dry-run")
    assert wrong.code == 2 and "soft_cache_length must be set when using soft overlong rewards" in wrong.err
    done = call_command(main, "train", "--swift", file)
    assert done.code == 0, done.err
    trajectories = trained(tmp_path / "runs" / "tips")
    assert len(trajectories) == 8
    assert all(t.reward is not None and set(t.reward.info) == {"format", "accuracy"} for t in trajectories)
    compat.uninstall("swift")


def test_the_page_of_arguments_is_made_from_the_table() -> None:
    assert (ROOT / "docs" / "migrate" / "swift-args.md").read_text() == argument_table()
