"""The table in a real browser: text search, kinds, columns, labels, and exported files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def test_filters_and_columns_are_in_the_address(page, keep, tmp_path: Path):
    page.goto("/#/0/trajectories")
    playwright.expect(page.locator("tbody tr")).to_have_count(19)
    page.get_by_placeholder("words in any text").fill("calc_gsm8k_reward|window.pwned")
    page.get_by_label("regular expression").check()
    page.get_by_role("button", name="Filter").click()
    playwright.expect(page.locator("tbody tr")).to_have_count(1)  # arguments and messages, not the names of tools
    page.get_by_label("regular expression").uncheck()  # takes effect at once
    playwright.expect(page.locator("tbody tr")).to_have_count(0)
    page.get_by_placeholder("words in any text").fill("2+2 (1)")
    page.get_by_role("button", name="Filter").click()
    playwright.expect(page.locator("tbody tr")).to_have_count(6)
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("link", name="train (18)").click()
    page.wait_for_url("**split=train")
    playwright.expect(page.locator("tbody tr")).to_have_count(18)
    page.get_by_text("Columns", exact=True).click()
    page.get_by_label("trained tokens").check()
    page.wait_for_url("**cols=*")
    playwright.expect(page.locator("thead")).to_contain_text("trained tokens")
    keep(page, "table-kinds")
    with page.expect_download() as saved:
        page.get_by_role("link", name="jsonl").click()
    path = tmp_path / "saved.jsonl"
    saved.value.save_as(path)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 18


def test_label_is_saved_and_filters_the_table(page, runs: Path, keep):
    page.goto("/#/0/one?id=g30/0&step=3&split=train")
    page.get_by_label("Label", exact=True).fill("<b>odd</b>")
    page.get_by_label("Note", exact=True).fill("calls the tool twice")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("saved in the run's folder").wait_for()
    assert json.loads((runs / "first/labels.jsonl").read_text())["note"] == "calls the tool twice"
    keep(page, "label")
    page.goto("/#/0/trajectories")
    page.get_by_role("link", name="<b>odd</b>", exact=True).click()
    playwright.expect(page.locator("tbody tr")).to_have_count(1)
    assert "<b>odd</b>" in page.inner_text("tbody")
