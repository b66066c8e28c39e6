"""The report in a real browser: the viewer's pages from one file, with nothing served and nothing loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.viewer.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


def test_report_has_the_pages_of_its_runs_and_loads_nothing(page, runs: Path, tmp_path: Path, keep):
    path = write_report([runs / "first", runs / "second"], tmp_path / "report.html")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    playwright.expect(page.locator("main h2")).to_have_text("first and second")
    for said in ("Stop reasons", "calc_gsm8k_reward", "All settings are the same"):
        playwright.expect(page.locator("main")).to_contain_text(said)
    keep(page, "report")
    page.get_by_role("link", name="<u>evil</u>/0").click()
    playwright.expect(page.locator(".message.user .text")).to_contain_text("<script>window.pwned = 1</script>")
    page.click(".tokens .s-prompt >> nth=3")
    assert "Prompt: it comes from the task" in page.inner_text(".why")
    page.get_by_role("link", name="‹ back").click()
    page.get_by_role("link", name="why?").first.click()
    page.wait_for_selector(".formula")
    page.get_by_role("link", name="Curves").click()
    page.wait_for_selector(".plot canvas")
    assert page.inner_text(".legend").split() == ["first", "second"]
    assert page.evaluate("document.querySelector('.plot').plot.series.length") == 3, "the axis and two runs"
    keep(page, "report-curves")
    assert page.evaluate("window.pwned") is None and {url.partition(":")[0] for url in asked} <= {"file", "data"}
