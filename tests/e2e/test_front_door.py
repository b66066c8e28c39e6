"""`polyturn.train`, `polyturn.evaluate`, `polyturn.rollout` on a tiny model: in a script, in a running loop, resumed."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import polyturn
from polyturn.cli.main import main
from polyturn.infra.folder_lock import hold_folder
from polyturn.testing.tiny_models import tiny_tokenizer
from support.models import tiny_model
from support.runs import call_command

ROWS = [{"prompt": f"What is {i} + 1?", "ground_truth": str(i + 1), "secret": i} for i in range(4)]
HEARD: list[Any] = []


class Customer(polyturn.BaseInteraction):
    stateless = True

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        HEARD.append(kwargs["secret"])
        assert instance_id is not None
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        return False, "Say it again.", 0.5, {}


class GoesOn(polyturn.MultiTurnScheduler):
    """Continues a cut completion, such as those of a model with random weights."""

    stateless = True

    def check_finished(self, episode: Any, turn: Any) -> Any:
        return None


def price(item: str) -> str:
    """Say the price of an item.

    Args:
        item: The item.
    """
    return "3"


def reward(trajectory: polyturn.Trajectory) -> float:
    return float(trajectory.segments[0].token_ids.sum() % 5)


def given(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a run that takes seconds, with a new model."""
    tokenizer = tiny_tokenizer()
    small = {"steps": 2, "groups_per_step": 2, "group_size": 3, "max_turns": 2, "max_tokens_per_turn": 6}
    return {
        "model": tiny_model(tokenizer, hidden=16, layers=1),
        "tokenizer": tokenizer,
        "tasks": ROWS,
        "tools": [price],
        "interaction": Customer,
        "reward": reward,
        "scheduler": GoesOn,
        "out": str(folder),
        "num_threads": 1,
        "lr": 1e-3,
        **small,
        **changes,
    }


def test_run_from_objects_leaves_a_run_folder(tmp_path: Path) -> None:
    HEARD.clear()
    arguments = given(tmp_path, eval_tasks=ROWS[:2])
    before = {name: p.clone() for name, p in arguments["model"].named_parameters()}
    run = polyturn.train(**arguments)
    assert run.metrics["step"] == [0, 1, 2]
    assert all(value is not None for value in run.metrics["reward/mean"][1:])
    assert len(run.trajectories) == 2 * 2 * 3 + 2 * 2
    assert max(len(t.turns) for t in run.trajectories) == 2
    assert run.trajectories["g1/0"].same_as(next(t for t in run.trajectories if t.id == "g1/0"))
    assert set(HEARD) == {0, 1, 2, 3}, "the interaction is told the rest of the row"
    assert run.model() is arguments["model"]
    assert any(not (p == before[name]).all() for name, p in run.model().named_parameters())
    assert run.tokenizer().encode("red") == arguments["tokenizer"].encode("red")
    assert run.config["rollout"]["tools"]["functions"] == [f"<live {__name__}:price>"]
    assert run.config["rollout"]["scheduler"] == f"<live {__name__}:GoesOn>"
    assert run.config["train"]["steps"] == 2
    assert run.config["train"]["optim"]["lr"] == 1e-3
    assert "reward/mean" in run._repr_html_()
    assert "eval-greedy-1/0" in run.trajectories._repr_html_()


def test_run_resumes_with_its_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if another run has its name, which contains a folder."""
    (tmp_path / "shop" / "mine").mkdir(parents=True)
    run = polyturn.train(**given(tmp_path, name="shop/mine"))
    assert run.config["name"] == "shop/mine-2"
    more = run.resume(steps=3)
    told = [said.partition("another setting: ")[2] for said in caplog.messages if "another setting" in said]
    assert told == ["train.steps: 2 -> 3"], "other rows, functions or models would be said too"
    assert more.folder == run.folder
    assert "resumed with another setting: train.steps: 2 -> 3" in (run.folder / "log.txt").read_text()
    assert more.metrics["step"] == [1, 2, 3]
    assert len(more.trajectories) == 3 * 2 * 3
    last = polyturn.train(**given(tmp_path, name=run.config["name"], steps=4, resume=True))
    assert (last.folder, last.metrics["step"]) == (run.folder, [1, 2, 3, 4])


def test_new_run_leaves_a_taken_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    steps = polyturn.steps(**given(tmp_path, name="mine", steps=1, resume="auto"))
    for _ in steps:
        with hold_folder(tmp_path / "mine"):
            pass
    assert steps.run.folder.name == "mine-2"


def test_run_serves_as_a_model(tmp_path: Path) -> None:
    run = polyturn.train(**given(tmp_path, steps=1))
    newest = run.folder / "checkpoints" / "step-000001" / "model"
    arguments = {**given(tmp_path), "model": run}
    assert polyturn.evaluate(**arguments).config["model"]["path"] == str(newest)
    assert len(polyturn.rollout(**arguments, num_tasks=1).trajectories) == 1 * 3


def test_command_line_names_objects_it_cannot_resume_with(tmp_path: Path) -> None:
    run = polyturn.train(**given(tmp_path, name="mine", steps=1))
    stored = str(run.folder / "config.yaml")
    called = call_command(main, "train", stored, "--resume")
    assert called.code == 2
    assert re.search(r"rollout.scheduler is '<live [^>]+>'", called.err)
    assert "polyturn.train(…, resume=True)" in called.err


@pytest.mark.parametrize("ranks", [{}, pytest.param({"ranks": 2}, marks=pytest.mark.cluster)])
def test_training_works_in_a_running_loop(tmp_path: Path, ranks: dict[str, int]) -> None:
    async def cell() -> polyturn.Run:
        return polyturn.train(**given(tmp_path, steps=1, **ranks))

    assert asyncio.run(cell()).metrics["step"] == [1]


def test_evaluation_and_rollout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = given(tmp_path)
    evaluated = polyturn.evaluate(**arguments)
    assert evaluated.reports["greedy"].report.num_trajectories == len(ROWS)
    assert len(evaluated.trajectories) == len(ROWS)
    rolled = polyturn.rollout(**{**arguments, "num_tasks": 3, "group_size": 2})
    assert len(rolled.trajectories) == 6 and "fewer than" not in caplog.text

    async def awaited() -> polyturn.Run:
        return await polyturn.rollout(**{**arguments, "num_tasks": len(ROWS) + 1, "group_size": 1})

    assert len(asyncio.run(awaited()).trajectories) == len(ROWS), "one who awaits what is done has it all the same"
    assert f"has {len(ROWS)} tasks, fewer than the requested {len(ROWS) + 1}" in caplog.text


class Interrupts(Customer):
    """Interrupts the cell in the middle of its first episode."""

    async def generate_response(self, instance_id: str, messages: list[Any], **kwargs: Any) -> tuple[bool, str, float, Any]:
        if not HEARD:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        HEARD.append("begun")
        await asyncio.sleep(20)
        HEARD.append("ended")
        return True, "", 0.0, {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        return instance_id


@pytest.mark.parametrize("call", [polyturn.evaluate, polyturn.rollout])
def test_interrupt_in_a_running_loop_cancels_the_episodes(tmp_path: Path, call: Any) -> None:
    async def cell() -> polyturn.Run:
        run: polyturn.Run = call(**given(tmp_path, interaction=Interrupts))
        return run

    HEARD.clear()
    former, loop = signal.signal(signal.SIGINT, signal.default_int_handler), asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):  # not `asyncio.run`, which handles SIGINT: a notebook's loop does not
            loop.run_until_complete(cell())
    finally:
        signal.signal(signal.SIGINT, former)
        loop.close()
    assert set(HEARD) == {"begun"}


def test_run_from_a_folder_a_file_and_a_base_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = given(tmp_path / "runs")
    arguments.pop("model").save_pretrained(tmp_path / "model")
    arguments.pop("tokenizer").save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "base.yaml").write_text("train: {group_size: 5, groups_per_step: 1}\nname: based\n")
    monkeypatch.chdir(tmp_path)
    for name in ("tasks", "group_size", "groups_per_step"):
        del arguments[name]
    run = polyturn.train("model", "rows.jsonl", config="base.yaml", **arguments)
    assert run.folder.name == "based"
    assert len(run.trajectories) == 2 * 5
    assert run.config["data"]["train"]["files"] == str(tmp_path / "rows.jsonl")


def test_steps_train_on_what_the_body_sets(tmp_path: Path) -> None:
    arguments = given(tmp_path, steps=3, groups_per_step=4)
    weights = {name: p.clone() for name, p in arguments["model"].named_parameters()}

    def is_same() -> bool:
        return all((p == weights[name]).all() for name, p in arguments["model"].named_parameters())

    steps = polyturn.steps(**arguments)
    seen = []
    for step in steps:
        assert len(step.trajectories) == 12
        assert step.samples
        assert "loss/total" not in step.metrics
        assert is_same() == (step.number == 1), "the step is not taken before its body has run"
        if step.number == 1:
            step.advantages = [3 * a for a in step.advantages]
        if step.number == 2:
            step.samples = []
            weights |= {name: p.clone() for name, p in arguments["model"].named_parameters()}
            step.update()
            assert is_same(), "nothing was left to train on"
            weights |= {name: p + 1 for name, p in arguments["model"].named_parameters()}
        if step.number == 3:
            step.groups = step.groups[:2]
            assert step.update()["buffer/groups"] == 2
        seen.append(step.number)
    assert seen == [1, 2, 3]
    run = steps.run
    assert run.metrics["step"] == [1, 2, 3]
    assert run.model() is arguments["model"]
    trained = run.record("g0/0").trained.advantages
    assert trained is None or abs(trained).max() > 2, "the record holds what was trained on"


def test_loop_over_steps_left_early_leaves_a_checkpoint(tmp_path: Path) -> None:
    arguments = given(tmp_path, steps=5)
    for step in polyturn.steps(**arguments):
        if step.number == 2:
            break
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
    with pytest.raises(polyturn.PolyturnError, match="not finished"):
        _ = polyturn.steps(**arguments).run
    more = polyturn.train(**{**arguments, "steps": 3, "resume": True})
    assert more.metrics["step"] == [1, 2, 3]


def test_show_prints_a_run_and_a_trajectory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = polyturn.train(**given(tmp_path, steps=1))
    run.show()
    run.show("g0/0")
    shown = capsys.readouterr().out
    assert "reward/mean" in shown
    assert "What is" in shown
    assert "g0/0: " in shown


def test_frozen_objects_stay_frozen(tmp_path: Path) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    polyturn.train(**given(tmp_path, steps=1))
    assert gc.get_freeze_count() > 0.9 * frozen > 0, "all objects that are still referenced"


ON_RANKS = {
    "train": "run = polyturn.train(**given)\n",
    "steps": "steps = polyturn.steps(**given)\n"
    "for step in steps:\n"
    "    step.advantages = [3 * a for a in step.advantages]\n"
    "    assert step.update()['loss/grad_norm'] > 0\n"
    "run = steps.run\n",
}


@pytest.mark.slow  # it starts four processes
@pytest.mark.parametrize("how", ON_RANKS)
def test_one_process_of_torchrun_trains_on_ranks(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
        f"import pathlib, polyturn, {Path(__file__).stem} as front\n"
        f"given = front.given(pathlib.Path({str(tmp_path)!r}), steps=1, ranks=2)\n"
        f"{ON_RANKS[how]}print('returned', run.metrics['step'], flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("returned [1]") == 1


def test_callback_hears_every_step_and_its_error_ends_the_run(tmp_path: Path) -> None:
    heard: list[tuple[int, float]] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        heard.append((step, metrics["reward/mean"]))
        if step == 2:
            raise ValueError("enough")

    with pytest.raises(polyturn.PolyturnError, match=r"on_step.* step 2.*ValueError: enough"):
        polyturn.train(**given(tmp_path, steps=3, name="told", on_step=on_step))
    assert [step for step, _ in heard] == [1, 2]
    assert list(polyturn.Run(tmp_path / "told").metrics["reward/mean"]) == [mean for _, mean in heard]
