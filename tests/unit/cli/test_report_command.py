"""`polyturn report` and `polyturn plot`: one page and one picture of what became of runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyturn.cli.main import app
from polyturn.core.errors import DataError
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.group import GroupSpec
from polyturn.rollout.pool import RolloutPool
from polyturn.store.stored_run import open_store
from polyturn.testing.episodes import scripted_context, task
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.training.observer import RunObserver
from polyturn.viewer.highlights import telling
from polyturn.viewer.report import write_report
from polyturn.viewer.svg import curve

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
    """What a browser would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "srcset") or k.startswith("on")]


async def test_the_page_stands_alone_and_text_of_the_environment_stays_text(tmp_path: Path):
    text = write_report([await record(tmp_path / "one")], tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.tags.isdisjoint({"script", "img", "link", "iframe", "object"}) and page.links == []
    assert "default-src &#x27;none&#x27;" in text and "url(" not in text and "@import" not in text
    assert "\x1b" not in text and "\u202e" not in text
    assert {"svg", "polyline", "details", "table"} <= page.tags


async def test_it_shows_the_telling_ones_with_why(tmp_path: Path):
    folder = await record(tmp_path / "one")
    found = {t.title: t for t in telling(open_store(folder))}
    assert found["repaired"].record.trajectory.task.id == "repaired-1"
    assert found["broken tool call"].record.trajectory.task.id == "broken-1"
    assert found["worst"].record.trajectory.task.id == "bad-1"
    shown = [t.record.trajectory.id for t in telling(open_store(folder))]
    assert len(shown) == len(set(shown)) == 7, "every one of them once"
    assert len(telling(open_store(folder), 3)) == 3


async def test_two_runs_share_charts_and_have_a_column_each(tmp_path: Path):
    runs = [await record(tmp_path / name, success=s) for name, s in (("first", 0.5), ("second", 0.9))]
    text = write_report(runs, tmp_path / "report.html").read_text()
    assert text.count('<th scope="col">first</th><th scope="col">second</th>') >= 4
    assert "Settings that differ" in text and re.search(r"train\.steps</th><td>5</td><td>9</td>", text)
    assert ">name</th>" not in text, "what is equal is not shown"
    assert "no_such_tool: unknown_tool" in text or "unknown_tool" in text


async def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path):
    folder = await record(tmp_path / "one")
    (folder / "trajectories" / "part-00000.parquet").write_bytes(b"half")
    (folder / "config.yaml").unlink()
    text = write_report([folder], tmp_path / "report.html").read_text()
    assert "part-00000.parquet is damaged" in text and "it has no config.yaml" in text and "<polyline" in text
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no metrics and no trajectories"):
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    with pytest.raises(DataError, match="there is no folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


def test_a_chart_without_a_finite_point_is_left_out_and_a_flat_one_is_drawn():
    assert curve({"a": [(1, float("nan"))]}, title="a") == ""
    assert "nan" not in curve({"a": [(1, 0.5), (2, 0.5)]}, title="a")
    assert 'aria-label="a: a from 0.5 to 0.7"' in curve({"a": [(1, 0.5), (2, 0.7)]}, title="a")


async def test_the_commands_write_what_they_say(tmp_path: Path):
    runs = [str(await record(tmp_path / name)) for name in ("a", "b")]
    page, picture = tmp_path / "out" / "r.html", tmp_path / "out" / "c.png"
    assert CliRunner().invoke(app, ["report", *runs, "-o", str(page)]).exit_code == 0
    assert CliRunner().invoke(app, ["plot", *runs, "--metric", "rollout/*", "-o", str(picture)]).exit_code == 0
    assert page.is_file() and picture.read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, ["plot", *runs, "--metric", "rollout/sucess", "-o", str(picture)])
    assert isinstance(wrong.exception, DataError) and "rollout/success" in str(wrong.exception)


def test_before_is_the_evaluation_before_any_update_and_no_later_one(tmp_path: Path):
    begin(tmp_path / "run", "name: x\n")
    lines = [{"step": 0, "eval/greedy/success": 0.1}, {"step": 15, "eval/greedy/success": 0.8, "eval/late/success": 0.9}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "<td>0.100 → 0.800</td>" in text and "<td>- → 0.900</td>" in text
