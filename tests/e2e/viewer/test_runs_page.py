"""The page of runs in a real browser: running, dead and new ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.core.errors import RewardError
from polyturn.infra.folder_lock import hold_folder
from polyturn.store.run_folders import RESOLVED_HEAD

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def test_runs_that_start_and_die_show_without_a_reload(page, growing: Path, keep):
    (growing / "config.yaml").write_text("train: {steps: 9}\n")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="growing", exact=True))
    held = hold_folder(growing)
    held.__enter__()
    (growing / "metrics.jsonl").touch()  # the run may have been written long ago
    page.goto("/")
    playwright.expect(row.locator("td").nth(1)).to_have_text("running")
    playwright.expect(row.locator("td").nth(2)).to_have_text("3 of 9")
    held.__exit__(RewardError, RewardError("the judge <b>broke</b>"), None)
    playwright.expect(row.locator("td").nth(1)).to_have_text("died")
    playwright.expect(row).to_contain_text("RewardError: the judge <b>broke</b>")
    folder = growing.parent / "warming"
    folder.mkdir()
    (folder / "config.yaml").write_text(RESOLVED_HEAD)
    (folder / "sft_metrics.jsonl").write_text('{"step": 1, "loss/sft": 2.5}\n')
    playwright.expect(page.locator("tbody tr")).to_have_count(4)
    keep(page, "runs")
    row.get_by_role("link", name="growing", exact=True).click()
    page.wait_for_url("**#/2/curves")
    playwright.expect(page.get_by_role("alert")).to_contain_text("The run died: RewardError: the judge <b>broke</b>.")
