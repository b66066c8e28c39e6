"""Projects written for ms-swift train unchanged: from a command line in a script, and from a file of arguments."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from polyturn import compat
from polyturn.cli.main import main
from polyturn.core.trajectory import Trajectory
from polyturn.store.stored_run import open_store
from support.models import write_brief_model
from support.runs import call_command

LIMIT_S = 600
"""A limit for what hangs: a busy machine takes a minute to import what a run needs."""
pytestmark = pytest.mark.timeout(2 * LIMIT_S)

FILES = Path(__file__).parents[1] / "data" / "swift_plugins"
LAKE = """\
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
MEGATRON = """\
megatron rlhf --rlhf_type grpo --model model --dataset sums.jsonl --reward_funcs format --max_completion_length 6 \\
    --num_generations 4 --global_batch_size 8 --micro_batch_size 1 --train_iters 1 --lr 1e-3 --beta 0.0 \\
    --tensor_model_parallel_size 1 --recompute_granularity selective --finetune --no_save_optim --save out/megatron "$@"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, rows and plug-in files."""
    folder = tmp_path_factory.mktemp("swift_project")
    write_brief_model(folder / "model")
    rows = [{"messages": [{"role": "user", "content": "<placeholder>"}], "env_config": {"seed": k}} for k in range(4)]
    (folder / "frozen_lake.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sums = [{"messages": [{"role": "user", "content": f"{k}+1?"}], "solution": str(k + 1)} for k in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    for file in FILES.glob("*.py"):
        shutil.copy(file, folder)
    return folder


def run_script(project: Path, text: str) -> str:
    """Run a script of ms-swift's commands in a project; return its log."""
    (project / "run.sh").write_text(text)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    line = ["polyturn", "run-as", "swift", "--", "bash", "run.sh"]
    ended = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=project, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.*") if p.suffix != ".sh"}


def trained(run: Path) -> list[Trajectory]:
    return [t for t in open_store(run).trajectories() if t.reward is not None]


@pytest.mark.slow
def test_script_trains_and_leaves_the_projects_files_alone(project: Path) -> None:
    before = hashes(project)
    assert "vllm_server_pass_dataset: ignored" in run_script(project, LAKE)
    assert hashes(project) == before
    trajectories = trained(project / "out" / "lake")
    assert len(trajectories) == 16
    for trajectory in trajectories:
        assert trajectory.messages[0].text.startswith("Walk from P to G")
        assert set(trajectory.reward.info) == {"async_length", "gym_reward"}
    assert any(len(t.turns) > 1 for t in trajectories)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed (the extra megatron)")
def test_megatron_script_trains(project: Path) -> None:
    assert "recompute_granularity: ignored" in run_script(project, MEGATRON)
    assert len(trained(project / "out" / "megatron")) == 8


@pytest.fixture
def arguments(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a file of arguments, in the project's folder."""
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    values = {
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
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(values))
    yield tmp_path / "args.yaml"
    compat.uninstall("swift")


def test_arguments_in_a_file_train(arguments: Path) -> None:
    done = call_command(main, "train", "--swift", arguments)
    assert done.code == 0, done.err
    trajectories = trained(arguments.parent / "runs" / "tips")
    assert len(trajectories) == 8
    assert all(t.reward is not None and set(t.reward.info) == {"format", "accuracy"} for t in trajectories)


JUDGE = """\
from swift.rewards import ORM, orms
class Judged(ORM):
    def __init__(self, args=None, **kwargs):
        raise ConnectionError("the judge is not there")
orms["judged"] = Judged
"""


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("reward_funcs=[acuracy]", ["'acuracy'", "'accuracy'"]),
        ("multi_turn_scheduler=thinking_tip_scheduler", ["'thinking_tips_scheduler'"]),
        ("multi_turn_scheduler=react", ["schedulers/react.py:React"]),
        ("reward_funcs=[judged]", ["'judged'", "ConnectionError: the judge is not there"]),
        ("reward_funcs=[soft_overlong]", ["soft_cache_length"]),
    ],
)
def test_wrong_argument_ends_the_command_at_once(arguments: Path, override: str, names: list[str]) -> None:
    plugin = arguments.with_name("judged.py")
    plugin.write_text(JUDGE)
    more = [f"external_plugins=[{plugin}]"] if "judged" in override else []
    wrong = call_command(main, "train", "--swift", arguments, override, *more, "--dry-run")
    assert wrong.code == 2
    assert [name for name in names if name not in wrong.err] == []
