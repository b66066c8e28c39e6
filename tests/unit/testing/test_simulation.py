"""Simulated rollouts: the real pool and the real episodes, the same numbers on every machine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import typer

from polyturn.cli.main import app
from polyturn.core.errors import ConfigError, UnknownNameError
from polyturn.engines.calibrate import save
from polyturn.engines.simulated import Speed
from polyturn.testing.simulation import ORACLE, draw, simulate
from polyturn.testing.workload import Workload, shipped

PINNED = ((175, 1235, 488), [25.803421, 37.911242])
SMALL = Workload(name="small", tasks=6, group=4, replicas=2, slots=4, turns=3, turn_tokens=60)


def test_shipped_workloads_can_be_read() -> None:
    assert len(shipped()) == 8
    assert all(Workload.load(name).name == name for name in shipped())


def test_workload_is_the_same_on_every_machine() -> None:
    """Results are compared by its name, so that its episodes never change."""
    plan = Workload.load("swe_like").plans()["g0/0"]
    assert (plan.lengths[:3], [round(wait, 6) for wait in plan.waits[:2]]) == PINNED


def test_simulation_gives_the_same_numbers_every_time() -> None:
    first, second = simulate(SMALL), simulate(SMALL)
    assert first == second


@pytest.mark.parametrize("policy", ["fifo", "least_loaded", "longest_first", ORACLE])
def test_no_policy_beats_the_lower_bound(policy: str) -> None:
    result = simulate(SMALL, policy=policy)
    assert 0 < result.efficiency <= 1
    assert result.turns == sum(len(plan.lengths) for plan in SMALL.plans().values())


def test_lower_bound_is_longest_episode_or_best_rate() -> None:
    alone = dataclasses.replace(SMALL, giant=(2, 5000), tool_s=1.0)
    assert alone.lower_bound_s(replicas=2) == pytest.approx(10_000 * 0.00812 + 1.0)
    total = sum(sum(plan.lengths) for plan in SMALL.plans().values())
    assert SMALL.lower_bound_s(replicas=1) == pytest.approx(total * (0.008 + 4 * 0.00012) / 4)


def test_prediction_comes_near_the_oracle() -> None:
    """What `longest_first` is for, on the workload where order matters most."""
    workload = Workload.load("heavy_short_tools")
    known, predicted, fifo = (simulate(workload, policy=p).makespan_s for p in (ORACLE, "longest_first", "fifo"))
    assert predicted <= known / 0.95
    assert predicted < fifo


def test_timeline_is_drawn(tmp_path: Path) -> None:
    draw(simulate(SMALL), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_command_prints_its_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("tasks: 2\ngroup: 2\nreplicas: 1\nslots: 2\nturns: 2\nturn_tokens: 20\n")
    app(["simulate", str(path), "--policy", "fifo", "--policy", "longest_first"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "mine: 4 episodes" in out
    assert "efficiency" in out
    assert "longest_first" in out


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="swe_like"):
        Workload.load("swe_lik")
    path = tmp_path / "mine.yaml"
    path.write_text("taks: 2\n")
    with pytest.raises(ConfigError, match="tasks"):
        Workload.load(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "tasks is missing"),
        ("[1, 2]", "must hold keys with values, and it holds a list"),
        ("tasks: many\ngroup: 2\nreplicas: 1\nslots: 2", "tasks is 'many'"),
        ("tasks: 2\ngroup: 2\nreplicas: 1\nslots: -2", "slots of the workload mine is -2; at least 1"),
        ("tasks: 2\ngroup: 2\nreplicas: 1\nslots: 2\nturn_tokens: .nan", "turn_tokens of the workload mine is nan"),
        ("tasks: 2\ngroup: 2\nreplicas: 1\nslots: 2\ngiant: 5", "giant is 5"),
        ("tasks: 2\nslot: 2", "there is no 'slot'. Did you mean 'slots'"),
        ("{a: [", "line 2: this is not YAML"),
    ],
)
def test_wrong_workload_is_one_sentence(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match=complaint):
        Workload.load(str(path))


def test_command_simulates_at_a_measured_speed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "tasks: 1\ngroup: 1\nreplicas: 1\nslots: 2\nturns: 1\nturn_tokens: 100\nturn_sigma: 0\n"
    )
    save(Speed(step_s=1.0, per_sequence_s=0.0), tmp_path / "slow.yaml")
    app(["simulate", str(tmp_path / "mine.yaml"), "--speed", str(tmp_path / "slow.yaml")], standalone_mode=False)
    assert float(capsys.readouterr().out.split("lower bound")[1].split()[0]) > 20


def test_command_needs_a_workload_or_a_server() -> None:
    with pytest.raises(typer.BadParameter, match="WORKLOAD"):
        app(["simulate"], standalone_mode=False)
    with pytest.raises(UnknownNameError, match="vllm"):
        app(["simulate", "--fit", "http://127.0.0.1:1", "--engine", "vlm"], standalone_mode=False)


def test_guide_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "engines.md").read_text(encoding="utf-8")
    workload, shown = guide.split("`mine.yaml`:")[1].split("```")[1:4:2]
    command, _, printed = shown.strip().partition("\n")
    (tmp_path / "mine.yaml").write_text(workload.removeprefix("yaml\n"))
    monkeypatch.chdir(tmp_path)
    app(args=command.removeprefix("$ polyturn ").split(), standalone_mode=False)
    assert capsys.readouterr().out.strip() == printed
    assert set(shipped()) <= set(re.findall(r"`(\w+)`", guide))
