"""The viewer in a real browser: a person's way through a run, a hostile trajectory, the keyboard, accessibility."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.viewer.report import write_report
from support.cases import each
from support.viewer_runs import PAGES

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


def test_visitor_reads_why_a_token_was_masked(page, keep):
    page.goto("/#/0/trajectories")
    page.wait_for_selector("tbody tr")
    page.select_option("select[name=split]", "train")
    playwright.expect(page.locator("tbody tr")).to_have_count(18)
    page.fill("input[name=min_step]", "3")
    page.click("button[type=submit]")
    playwright.expect(page.locator("tbody tr")).to_have_count(6)
    keep(page, "table")

    page.click("tbody tr:has-text('g30/1') td:nth-child(2)")  # the first click
    page.wait_for_selector(".tokens .s-masked")
    page.click(".tokens .s-masked >> nth=0")  # the second
    assert "every member of its group had the same reward" in page.inner_text(".why")
    page.click(".tokens .s-observation >> nth=2")
    assert "Observation: the tool calc_gsm8k_reward wrote it" in page.inner_text(".why")
    page.click(".tokens .s-prompt >> nth=2")
    assert "Prompt: it comes from the task" in page.inner_text(".why")
    keep(page, "trajectory")


def test_trajectories_and_runs_stand_side_by_side(page, keep):
    page.goto("/#/0/trajectories?split=train")
    page.wait_for_selector("tbody tr")
    for row in (1, 2):
        page.check(f"tbody tr:nth-child({row}) input")
    page.click("text=Compare the two marked")
    page.wait_for_selector(".sides")
    assert page.locator(".sides > section").count() == 2
    assert "Both conversations are the same." in page.inner_text("[role=status] >> nth=1")
    keep(page, "compare")
    page.goto("/#/0/curves?with=1")
    page.wait_for_selector(".chart canvas")
    assert page.inner_text(".legend").split() == ["first", "second"]
    assert page.evaluate("document.querySelector('.plot').plot.series.length") == 3, "the axis and two runs"
    keep(page, "curves")


def test_groups_and_timeline_lead_to_trajectories(page, keep):
    page.goto("/#/0/groups?split=train")
    page.wait_for_selector("tbody tr")
    assert page.locator("tbody tr").count() == 9
    page.click("tbody tr:first-child td:first-child")
    playwright.expect(page.locator("tbody tr")).to_have_count(2)
    page.goto("/#/0/timeline?step=2&split=train")
    page.wait_for_selector("svg g[role=link]")
    assert page.locator("svg g[role=link]").count() == 6
    keep(page, "timeline")
    page.click("svg g[role=link] text >> nth=0")  # the middle of a lane may be empty
    page.wait_for_selector(".message.assistant")


def test_environment_text_never_runs(page, keep):
    page.goto("/#/0/trajectories?split=eval/hostile")
    page.wait_for_selector("tbody tr")
    page.click("tbody tr td:nth-child(2)")
    page.wait_for_selector(".message.user")
    shown = page.inner_text(".message.user .text")
    assert shown.startswith("<script>window.pwned = 1</script><img src=x")
    assert "the first 100000 of" in page.inner_text(".message.user")
    assert page.evaluate("window.pwned") is None
    assert page.locator("main script, main img, main iframe").count() == 0
    for part in (".tokens", ".message.user .text", ".message.assistant .text"):
        assert "\x1b" not in page.inner_text(part) and "\u202e" not in page.inner_text(part), part
    page.goto("/#/0/about")
    page.wait_for_selector("pre")
    assert "<b>run</b>" in page.inner_text("pre")
    keep(page, "hostile")


def test_keyboard_reaches_everything(page):
    page.goto("/#/0/curves")
    page.wait_for_selector(".chart")
    page.keyboard.press("3")
    page.wait_for_selector("tbody tr")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.dataset.at") == "1"
    page.keyboard.press("c")
    assert page.locator("tbody input:checked").count() == 1
    page.keyboard.press("Enter")
    page.wait_for_selector(".tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "position 1 of segment 1" in page.inner_text(".side-panel").replace("\n", " ")
    page.keyboard.press("Escape")
    page.wait_for_selector("tbody tr")
    page.keyboard.press("?")
    assert page.is_visible("dialog")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", each(2, (1280, 390)))
def test_every_page_is_accessible(browser, address: str, runs: Path, tmp_path: Path, width: int):
    """Contrast is also checked in the dark."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed; run `make browser`")
    page = browser.new_page(viewport={"width": width, "height": 800}, base_url=address)
    report = write_report([runs / "first", runs / "second"], tmp_path / "report.html").as_uri()
    ways = {f"/#/0/{way}": ready for way, ready in PAGES.items()}
    for way, ready in (ways | {report: "section table", "/#/0/nothing?a": ".chart", "/#/9/curves": "[role=alert]"}).items():
        page.goto(way)
        page.wait_for_selector(ready)
        for scheme, rules in (("light", None), ("dark", {"runOnly": ["color-contrast"]})):
            page.emulate_media(color_scheme=scheme)
            found = axe.Axe().run(page, options=rules).response["violations"]
            assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found] == [], (way, scheme)
    page.close()


def test_growing_run_is_followed_without_a_reload(page, runs: Path):
    page.goto("/#/0/curves")
    page.wait_for_selector(".chart")
    playwright.expect(page.locator("#live")).to_contain_text("step 3")
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 0.9}\n')
    playwright.expect(page.locator("#live")).to_contain_text("step 4")
    playwright.expect(page.get_by_role("img", name="0.9 at step 4")).to_have_count(1)


def test_tokens_beyond_the_first_page_can_be_linked(page):
    """The hostile prompt has more than 20,000 of them."""
    page.goto("/#/0/one?id=<u>evil</u>/0&step=3&split=eval/hostile&show=tokens")
    page.wait_for_selector(".tokens span")
    page.click("text=tokens after ›")
    page.wait_for_selector("text=/tokens 20000–/")
    page.click(".tokens [data-at] >> nth=5")
    assert "position 20005" in page.inner_text(".side-panel").replace("\n", " ")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector(".tokens .chosen")
    assert "position 20005" in page.inner_text(".side-panel").replace("\n", " ")


def test_refused_filter_leaves_the_form(browser, address: str):
    page = browser.new_page(base_url=address)  # a refused request is an error on the console
    page.set_default_timeout(90_000)
    page.goto("/#/0/trajectories?split=train")
    page.wait_for_selector("tbody tr")
    page.fill("input[name=where]", "num_tokens >")
    page.click("button[type=submit]")
    page.wait_for_selector(".refused")
    assert page.input_value("input[name=where]") == "num_tokens >" and page.locator("tbody tr").count() == 18
    page.fill("input[name=where]", "num_tokens > 0")
    page.click("button[type=submit]")
    playwright.expect(page.locator(".refused")).to_have_count(0)
    page.close()
