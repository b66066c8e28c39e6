"""Three interactions at once, rows that choose one each, and an order of tasks that changes the mix by epoch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.core.trajectory import Trajectory
from polyturn.infra.plugins import import_attr
from polyturn.store.stored_run import open_store
from support.runs import call_command

CONFIG = Path(__file__).parents[1] / "data" / "projects" / "curriculum" / "config.yaml"
STEPS = ["basic_math"] * 5 + ["advanced_math"] * 5 + ["competition_math"] * 3
PER_STEP = 2


def train(folder: Path, *arguments: str) -> None:
    called = call_command(
        main,
        *("train", CONFIG, f"out={folder}", "num_threads=1"),
        *("data.train.kwargs.num_per_stage=2", f"train.groups_per_step={PER_STEP}", "train.group_size=2"),
        *("model.init.hidden_size=16", "model.init.num_hidden_layers=1", "model.init.intermediate_size=32"),
        *("rollout.limits.max_tokens_per_turn=4", "engine.num_slots=8"),
        *arguments,
    )
    assert called.code == 0, called.err


def interactions_by_step(trajectories: Iterable[Trajectory]) -> list[set[str]]:
    """Return which interactions spoke in each step, by the numbers of its groups."""
    found: dict[int, set[str]] = {}
    for t in trajectories:
        assert t.task.interaction is not None and not t.is_failed
        found.setdefault(int(t.id.partition("/")[0].removeprefix("g")) // PER_STEP, set()).add(t.task.interaction.name)
    return [found[step] for step in sorted(found)]


def test_mix_of_interactions_follows_the_epochs(tmp_path: Path):
    train(tmp_path, "train.epochs=7")
    train(tmp_path, "train.epochs=13", "--resume")
    run = tmp_path / "curriculum"
    assert (run / "checkpoints" / "step-000013").is_dir()
    assert interactions_by_step(open_store(run).trajectories(split="train")) == [{name} for name in STEPS]


@pytest.mark.parametrize(
    ("name", "said", "ends", "words"),
    [
        ("AdvancedMathInteraction", "#### 9", False, "The right answer is smaller."),
        ("AdvancedMathInteraction", "#### 5", False, "The right answer is larger."),
        ("AdvancedMathInteraction", "#### 8", True, "correct"),
        ("CompetitionMathInteraction", "#### 9", True, "incorrect"),
    ],
)
async def test_example_users_differ_in_patience(name: str, said: str, ends: bool, words: str):
    interaction = import_attr(f"{CONFIG.parent / 'pipeline.py'}:{name}")({"allow_hints": True})
    await interaction.start_interaction("e", ground_truth="8")
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    ended, answer, score, _ = await interaction.generate_response("e", messages, ground_truth="8")
    assert ended is ends and words in answer and score == float(said == "#### 8")
