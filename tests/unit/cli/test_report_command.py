"""`polyturn report`: one page and one picture of runs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyturn.cli.main import app
from polyturn.core.errors import ConfigError, DataError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.training.observer import RunObserver
from polyturn.viewer.highlights import highlights
from polyturn.viewer.report import write_report
from polyturn.viewer.run_view import RunView
from support.refusals import refuses

HOSTILE = "<script>alert('x')</script><img src=//evil.example/x.png>"
CALL = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "4"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>'


async def group(id: str, says: list[str], *, asks: str = "What is 2+2?") -> TrajectoryGroup:
    context = scripted_context(says, tools=[Gsm8kTool({})], interactions={"gsm8k": Gsm8kInteraction({})})
    one = task(asks, id=id, interaction="gsm8k", ground_truth="4")
    return (await RolloutPool(context).run([GroupSpec(id=id, task=one, size=1)]))[0]


def begin(folder: Path, config: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)


async def record(folder: Path, *, success: float = 0.5) -> Path:
    said = {"good": ["#### 4"], "bad": ["#### 5"], "repaired": ["#### 5", "#### 4"], "broken": [BROKEN, "#### 4"]}
    begin(folder, f"train:\n  steps: {round(10 * success)}\nname: x\n")
    with RunObserver(folder, total_steps=3) as observer:
        for step in (1, 2, 3):
            groups = [await group(f"{name}-{step}", says) for name, says in said.items()] if step == 1 else []
            groups.append(await group(f"hostile-{step}", [f"{HOSTILE} #### 4"], asks=f"{HOSTILE} \x1b[31m\u202e?"))
            observer.on_step(step, {"rollout/success": success * step / 3, "reward/mean": float("nan")}, groups)
    return folder


class Page(HTMLParser):
    """The resources that a browser would load or run, and the data of the pages."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(text)
        self.answers = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        loads = ("src", "srcset") if tag == "a" else ("src", "srcset", "href")
        self.links += [v or "" for k, v in attrs if k in loads or k.startswith("on")]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)


def page_of(out: Path, *runs: Path) -> Page:
    return Page(write_report(runs, out / "report.html").read_text())


async def test_report_is_one_file_with_a_strict_policy(tmp_path: Path):
    text = write_report([await record(tmp_path / "one")], tmp_path / "report.html").read_text()
    page = Page(text)
    assert set(page.tags).isdisjoint({"img", "iframe", "object"}) and page.tags.count("script") == 2
    assert [link[:10] for link in page.links] == ["data:image"]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy and page.policy.startswith("default-src 'none'")
    assert "import " not in re.sub(r"//.*", "", page.scripts[1].partition("modules = {}")[2]), "every module is inside"
    assert "\x1b" not in text and "\u202e" not in text and HOSTILE not in text
    assert any(HOSTILE in json.dumps(answer) for name, answer in page.answers.items() if "trajectory" in name)


async def test_report_shows_highlights_once_each(tmp_path: Path):
    folder = await record(tmp_path / "one")
    found = {t.title: t for t in highlights(open_store(folder))}
    assert found["repaired"].record.trajectory.task.id == "repaired-1"
    assert found["broken tool call"].record.trajectory.task.id == "broken-1"
    assert found["worst"].record.trajectory.task.id == "bad-1"
    shown = [t.record.trajectory.id for t in highlights(open_store(folder))]
    assert len(shown) == len(set(shown)) == 7, "every one of them once"
    assert len(highlights(open_store(folder), 3)) == 3


async def test_two_runs_stand_side_by_side(tmp_path: Path):
    runs = [await record(tmp_path / name, success=s) for name, s in (("first", 0.5), ("second", 0.9))]
    answers = page_of(tmp_path, *runs).answers
    assert [one["name"] for one in answers["runs"]] == ["first", "second"]
    assert [answers[f"runs/{n}/overview"]["settings"]["train.steps"] for n in (0, 1)] == ["5", "9"]
    assert answers["runs/1/curves"]["rollout/success"]["y"][-1] == pytest.approx(0.9)
    tools = {tool["name"]: tool for tool in answers["runs/0/overview"]["tools"]}
    assert tools["no_such_tool"]["failed"] == 1 and list(tools["no_such_tool"]["errors"]) == ["unknown_tool"]
    assert answers["runs/0/overview"]["stop_reasons"].keys() <= {"stop", "env_done", "max_turns"}


async def test_report_counts_the_metrics_that_it_leaves_out(tmp_path: Path):
    folder = await record(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, **{f"mine/{number}": number for number in range(70)}}) + "\n")
    metrics = page_of(tmp_path, folder).answers["runs/0/metrics"]
    assert len(metrics["names"]) == 60 and metrics["num_left_out"] == len(RunView(folder).metrics()["names"]) - 60 >= 10


async def test_report_names_damage_and_shows_the_rest(tmp_path: Path):
    folder = await record(tmp_path / "one")
    (folder / "trajectories" / "part-00000.parquet").write_bytes(b"half")
    (folder / "config.yaml").unlink()
    answers = page_of(tmp_path, folder).answers
    assert "part-00000.parquet was skipped" in answers["runs"][0]["problems"][0]
    assert answers["runs/0/overview"]["config_problem"] == "the run has no config.yaml"
    assert len(answers["runs/0/curves"]["rollout/success"]["y"]) == 3
    (tmp_path / "empty").mkdir()
    refuses(
        lambda: write_report([tmp_path / "empty"], tmp_path / "report.html"), DataError, "no metrics and no trajectories"
    )
    refuses(lambda: write_report([tmp_path / "nowhere"], tmp_path / "report.html"), DataError, "there is no folder")


async def test_report_writes_a_page_or_a_picture(tmp_path: Path):
    runs = [str(await record(tmp_path / name)) for name in ("a", "b")]
    page, picture = tmp_path / "out" / "r.html", tmp_path / "out" / "c.png"
    assert CliRunner().invoke(app, ["report", *runs, "-o", str(page)]).exit_code == 0
    assert CliRunner().invoke(app, ["report", *runs, "--metric", "rollout/*", "-o", str(picture)]).exit_code == 0
    assert page.is_file() and picture.read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, ["report", *runs, "--metric", "rollout/sucess", "-o", str(picture)])
    assert isinstance(wrong.exception, DataError) and "rollout/success" in str(wrong.exception)
    never = CliRunner().invoke(app, ["report", *runs, "--metric", "reward/mean", "-o", str(picture)])  # NaN at every step
    assert isinstance(never.exception, DataError) and str(never.exception).count("reward/mean") == 1


async def test_report_takes_a_folder_of_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("a", "b"):
        await record(tmp_path / "runs" / name)
    (tmp_path / "runs" / "empty" / "trajectories").mkdir(parents=True)
    page, picture = tmp_path / "r.html", tmp_path / "c.png"
    assert CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "-o", str(page)]).exit_code == 0
    assert {one["name"] for one in Page(page.read_text()).answers["runs"]} == {"a", "b", "empty"}
    words = ["report", str(tmp_path / "runs"), "--metric", "rollout/success", "-o", str(picture)]
    assert CliRunner().invoke(app, words).exit_code == 0 and picture.is_file()
    assert [message for message in caplog.messages if "no curve" in message and "runs/empty" in message]


def test_before_is_the_evaluation_of_step_zero_only(tmp_path: Path):
    begin(tmp_path / "run", "name: x\n")
    lines = [{"step": 0, "eval/greedy/success": 0.1}, {"step": 15, "eval/greedy/success": 0.8, "eval/late/success": 0.9}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = page_of(tmp_path, tmp_path / "run").answers["runs/0/overview"]["before_after"]
    assert found == {"greedy: success": "0.100 → 0.800", "late: success": "- → 0.900"}


def test_report_refuses_options_that_it_would_ignore(tmp_path: Path):
    for words, key in ((("-o", "page.png"), "page.png"), (("-n", "3", "--metric", "reward/mean"), "-n")):
        called = CliRunner().invoke(app, ["report", str(tmp_path), *words])
        assert isinstance(called.exception, ConfigError) and key in str(called.exception)
