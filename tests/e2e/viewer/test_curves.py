"""Curves in a real browser: long runs thinned and zoomed, axes, scales, and the values behind smoothed ones."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from support.viewer_runs import until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

STEPS = 5000
DATA = "() => document.querySelector('.plot').plot.data.map((a) => [...a])"


def write_long_run(folder: Path) -> None:
    """Write metrics of many steps, a spike of one step among them, and an evaluation every hundred."""
    folder.mkdir()
    lines = [
        {"step": s, "reward/mean": 9.0 if s == 3333 else s / STEPS, "loss/grad_norm": 10.0 ** -(s % 7), "time/step_s": 2.0}
        | {"policy/approx_kl": 0.0}
        | ({"eval/greedy/success": s / STEPS} if s % 100 == 0 else {})
        | ({"policy/entropy": 1.5} if s == 50 else {})
        | ({f"mine/{i}": 1.0 for i in range(70)} if s == 1 else {})
        for s in range(1, STEPS + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("name: long\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("first", "second", "growing"):
        write_long_run(folder / name)
    return folder


@pytest.fixture
def drawn(page):
    """Open the curves of an address; return the data of the first chart: [x, then y for each curve]."""

    def open_curves(query: str) -> list[list[float | None]]:
        page.goto("about:blank")
        page.goto(f"/#/0/curves?{query}")
        page.wait_for_selector(".plot canvas")
        found: list[list[float | None]] = page.evaluate(DATA)
        return found

    return open_curves


def test_long_run_is_thinned_and_zooming_shows_every_step(page, drawn, keep):
    x, y = drawn("metric=reward/mean")
    assert len(x) <= 1200 and max(y) == 9.0 and x[-1] == STEPS
    assert "Mean total reward of the scored trajectories." in page.inner_text(".chart")
    keep(page, "curves-long")
    box = page.locator(".plot .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_url("**low=*")
    until(page, "document.querySelector('.plot').plot.data[0].length < 600")
    x, y = page.evaluate(DATA)
    assert [b - a for a, b in itertools.pairwise(x)] == [1] * (len(x) - 1) and 2900 < x[0] < 3100 < x[-1] < 3600
    assert 3333 in x
    page.get_by_role("button", name="Reset zoom").click()
    until(page, "document.querySelector('.plot').plot.data[0].at(-1) === 5000")
    assert "low=" not in page.url


def test_page_says_how_many_metrics_it_leaves_out(page, drawn):
    drawn("metric=mine/")
    assert "60 of 70 metrics are shown" in page.inner_text(".charts")
    assert page.locator(".chart").count() == 60
    drawn("metric=mine/1")
    assert "metrics are shown" not in page.inner_text(".charts")


def test_axis_and_scale_are_in_the_address(page, drawn):
    x, _ = drawn("metric=reward/mean&axis=time")
    assert x[-1] == 2.0 * STEPS
    drawn("metric=grad_norm")
    page.get_by_label("log scale").check()
    until(page, "document.querySelector('.plot').plot.scales.y.distr === 3")
    page.get_by_label("Over").select_option("time")
    until(page, "document.querySelector('.plot').plot.data[0].at(-1) === 10000")
    assert "log=1" in page.url and "axis=time" in page.url
