"""What changed, in a real browser: one task over training, and words that differ between trajectories and turns."""

from __future__ import annotations

import pytest

from support.viewer_runs import until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = pytest.mark.timeout(300)


def test_a_slider_goes_over_the_steps_at_which_a_task_was_tried(page, keep):
    page.goto("/#/0/one?id=g30/0&step=3&split=train")
    page.get_by_role("link", name="This task over training").click()
    status = page.locator("main [role=status]")
    playwright.expect(status).to_contain_text("step 3, 3 of 3; marked is what differs from g20/0 at step 2")
    assert page.locator(".plot canvas").count() == 1
    page.get_by_label("Step", exact=True).focus()
    page.keyboard.press("ArrowLeft")
    playwright.expect(status).to_contain_text("step 2, 2 of 3")
    page.wait_for_url("**step=2**")
    page.get_by_label("Trajectory of the step").select_option(index=1)
    playwright.expect(page.locator("main h2").nth(1)).to_have_text("Trajectory g20/1")
    keep(page, "task")


def test_words_that_differ_are_marked_between_trajectories_and_between_turns(page, keep):
    page.goto("/#/0/compare?a=g30/0&as=3&al=train&b=g31/0&bs=3&bl=train")
    page.wait_for_selector(".sides ins")
    assert page.locator(".sides > section:first-child del").all_inner_texts() == ["0"], "one number of the question"
    assert page.locator(".sides > section:last-child ins").all_inner_texts() == ["1"]
    keep(page, "words")
    page.goto("/#/0/one?id=g30/1&step=3&split=train&show=conversation")
    page.get_by_role("button", name="Changes since the turn before").click()
    page.wait_for_url("**changes=1**")
    until(page, "document.querySelectorAll('.message.assistant ins').length > 0")
    assert "4" in page.locator(".message.assistant ins").all_inner_texts()
