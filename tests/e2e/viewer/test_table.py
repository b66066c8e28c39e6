"""The table in a real browser: words in what was said, kinds, columns, labels, and files of what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.viewer_runs import add_step

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = pytest.mark.timeout(300)


def test_words_kinds_and_columns_narrow_the_table_and_stand_in_the_address(page, keep, tmp_path: Path):
    page.goto("/#/0/trajectories")
    playwright.expect(page.locator("tbody tr")).to_have_count(19)
    page.get_by_placeholder("words in what was said").fill("calc_gsm8k_reward|window.pwned")
    page.get_by_label("regular expression").check()
    page.get_by_role("button", name="Filter").click()
    playwright.expect(page.locator("tbody tr")).to_have_count(1)  # arguments and messages, not the names of tools
    page.get_by_label("regular expression").uncheck()  # takes effect at once
    playwright.expect(page.locator("tbody tr")).to_have_count(0)
    page.get_by_placeholder("words in what was said").fill("2+2 (1)")
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


def test_training_stands_before_the_evaluations_of_its_step(page):
    page.goto("/#/0/trajectories")
    playwright.expect(page.locator("tbody tr")).to_have_count(19)
    keys = page.locator("tbody tr").evaluate_all("rows => rows.map((row) => row.dataset.key)")
    shown = [" ".join(key.split()[-2:]) for key in keys]
    assert shown == [*["3 train"] * 6, "3 eval/hostile", *["2 train"] * 6, *["1 train"] * 6]


def test_a_table_that_goes_on_beside_its_frame_says_so(page):
    """Its right side is as bright as the rest only where nothing is cut off there."""
    page.goto("/#/0/trajectories")
    page.wait_for_selector("tbody tr")
    ground = page.evaluate("getComputedStyle(document.querySelector('.scroll')).backgroundAttachment")
    assert ground == "local, local, scroll, scroll"


def test_a_label_is_given_on_the_page_of_a_trajectory_and_filters_the_table(page, runs: Path, keep):
    page.goto("/#/0/one?id=g30/0&step=3&split=train")
    page.get_by_label("Label", exact=True).fill("<b>odd</b>")
    page.get_by_label("Note", exact=True).fill("calls the tool twice")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("saved beside the run").wait_for()
    assert json.loads((runs / "first/labels.jsonl").read_text())["note"] == "calls the tool twice"
    keep(page, "label")
    page.goto("/#/0/trajectories")
    page.get_by_role("link", name="<b>odd</b>", exact=True).click()
    playwright.expect(page.locator("tbody tr")).to_have_count(1)
    assert "<b>odd</b>" in page.inner_text("tbody")


def test_what_is_typed_while_the_table_is_read_again_stays_with_its_focus(page):
    """A changed box reloads the table; the answer is held back until more is typed."""
    page.goto("/#/0/trajectories")
    playwright.expect(page.locator("tbody tr")).to_have_count(19)
    held: list[playwright.Route] = []
    page.route("**/api/runs/0/trajectories?*errors=1*", lambda route: held.append(route))
    page.get_by_text("Columns", exact=True).click()
    page.get_by_label("errors only").check()
    box = page.get_by_placeholder("words in what was said")
    box.press_sequentially("refnd")
    box.press("ArrowLeft")
    box.press("ArrowLeft")
    (route,) = held
    route.continue_()
    playwright.expect(page.locator("tbody tr")).to_have_count(0)
    assert box.input_value() == "refnd" and page.evaluate("document.activeElement.selectionStart") == 3
    box.press_sequentially("u")
    assert box.input_value() == "refund" and page.locator("details.picker[open]").count() == 1
    page.get_by_role("button", name="Reset").click()
    playwright.expect(page.locator("tbody tr")).to_have_count(19)
    assert box.input_value() == ""


def test_a_range_of_steps_is_chosen_among_the_kinds_and_stands_in_the_address(page, growing: Path, keep):
    for step in range(4, 15):
        add_step(growing, step)
    page.goto("/#/2/trajectories")
    page.locator(".facets", has_text="Step").get_by_role("link", name="13 – 14 (4)").click()
    page.wait_for_url("**min_step=13&max_step=14")
    playwright.expect(page.locator("tbody tr")).to_have_count(4)
    assert page.input_value("input[name=min_step]") == "13"
    page.goto("/#/2/trajectories?min_step=12.5")
    playwright.expect(page.locator("tbody tr")).to_have_count(4)
    keep(page, "range")
    page.get_by_role("link", name="step from 12.5 ×").click()
    playwright.expect(page.locator("tbody tr")).to_have_count(40)
