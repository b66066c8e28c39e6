"""The viewer in a real browser: a person's way through a run, a hostile trajectory, the keyboard, accessibility."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.store.run_folders import RESOLVED_HEAD
from polyturn.viewer.report import write_report
from support.cases import each
from support.viewer_runs import PAGES, add_step

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = pytest.mark.timeout(180)


def test_a_visitor_filters_opens_a_trajectory_and_reads_why_a_token_was_masked_in_two_clicks(page, keep):
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
    assert "Prompt: the task wrote it" in page.inner_text(".why")
    keep(page, "trajectory")


def test_a_trajectory_is_read_from_its_top_and_the_table_is_there_where_it_was_left(browser, address: str):
    page = browser.new_page(viewport={"width": 390, "height": 500}, base_url=address)
    page.goto("/#/1/trajectories")
    last = page.locator("tbody tr").nth(17)
    playwright.expect(page.locator("#live")).not_to_be_empty()  # it may take a line of the header
    page.evaluate("addEventListener('click', () => (window.left = scrollY), true)")
    back = page.get_by_role("link", name="back")
    for leave in (page.go_back, lambda: page.keyboard.press("Escape"), back.click):
        last.locator("td").nth(1).click()
        page.wait_for_selector(".tokens")
        assert page.evaluate("scrollY") == 0
        place = page.evaluate("left")
        leave()
        playwright.expect(last).to_be_in_viewport()
        assert page.evaluate("scrollY") == place > 500
        playwright.expect(last).to_be_focused()
    page.close()


def test_a_trained_token_says_everything_that_is_known_about_it(page):
    page.goto("/#/0/one?id=g30/0&step=3&split=train")
    page.wait_for_selector(".tokens .s-sampled")
    page.click(".tokens .s-sampled >> nth=0")
    said = page.inner_text(".side-panel")
    for label in (
        "Sampled and trained.",
        "log-probability, engine",
        "log-probability, trainer",
        "-0.5",
        "advantage",
        "-1",
        "turn",
        "policy version",
        "reward",
    ):
        assert label in said
    page.select_option("select[aria-label='Colour tokens by']", "advantages")
    assert page.locator(".tokens .heat3").count() > 0 and page.locator(".tokens .heat-3").count() > 0


def test_the_table_leads_to_why_an_advantage_is_what_it_is_in_one_click(page, keep):
    page.goto("/#/0/trajectories?split=train")
    page.get_by_label("why this advantage of g30/0?").click()
    page.wait_for_selector(".formula")
    said = page.inner_text(".answer")
    assert "grpo: A = (r − mean) / (std + eps)" in said and "A = (0.95 − 0.95) / (0 + 1e-06) = 0" in said
    assert page.locator(".group-strip a").count() == 2 and "tool_step" in page.inner_text("main")
    keep(page, "why")
    page.get_by_role("row", name="g30/1").get_by_role("link", name="g30/1").click()
    playwright.expect(page.locator(".answer")).to_contain_text("every member of its group had the same reward")
    page.get_by_role("link", name="the task t0 over training").click()
    playwright.expect(page.locator("main")).to_contain_text("All 6 trajectories")


def test_two_trajectories_and_two_runs_stand_side_by_side(page, keep):
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


def test_groups_and_the_timeline_lead_to_their_trajectories(page, keep):
    page.goto("/#/0/groups?split=train")
    page.wait_for_selector("tbody tr")
    assert page.locator("tbody tr").count() == 9
    page.click("tbody tr:first-child td:first-child")
    playwright.expect(page.locator("tbody tr")).to_have_count(2)
    page.goto("/#/0/timeline?step=2&split=train")
    page.wait_for_selector("svg g[role=link]")
    assert page.locator("svg g[role=link]").count() == 6
    keep(page, "timeline")
    page.click("svg g[role=link] >> nth=0")
    page.wait_for_selector(".message.assistant")


def test_text_of_the_environment_is_shown_as_text_and_never_runs(page, keep):
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


def test_everything_can_be_reached_with_the_keyboard(page):
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
def test_labels_and_contrast_hold_on_every_page(browser, address: str, runs: Path, tmp_path: Path, width: int):
    """In the dark, what depends on colours."""
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


def test_a_run_that_goes_on_is_followed_without_a_reload(page, runs: Path):
    page.goto("/#/0/curves")
    page.wait_for_selector(".chart")
    playwright.expect(page.locator("#live")).to_contain_text("step 3", timeout=8000)
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 0.9}\n')
    playwright.expect(page.locator("#live")).to_contain_text("step 4", timeout=8000)
    playwright.expect(page.get_by_role("img", name="0.9 at step 4")).to_have_count(1)


def test_every_page_of_a_run_follows_it_and_keeps_what_is_being_typed(page, growing: Path):
    """The table, the groups, the run, and a run that begins; a filter that is half written stays."""
    page.goto("/#/2/trajectories")
    playwright.expect(page.locator("tbody tr")).to_have_count(18)
    page.fill("input[name=min_step]", "2")
    add_step(growing, 4)
    playwright.expect(page.locator("#live")).to_contain_text("20 trajectories")
    assert page.input_value("input[name=min_step]") == "2" and page.locator("tbody tr").count() == 18
    page.click("button[type=submit]")
    playwright.expect(page.locator("tbody tr")).to_have_count(14)
    page.locator("tbody tr").nth(3).focus()
    chosen = page.evaluate("document.activeElement.dataset.key")
    add_step(growing, 5)
    playwright.expect(page.locator("tbody tr")).to_have_count(16)
    assert page.evaluate("document.activeElement.dataset.key") == chosen
    page.goto("/#/2/groups?split=train")
    playwright.expect(page.locator("tbody tr")).to_have_count(11)
    add_step(growing, 6)
    playwright.expect(page.locator("tbody tr")).to_have_count(12)
    page.goto("/#/2/about")
    playwright.expect(page.get_by_role("table", name="Summary")).to_contain_text("24")
    add_step(growing, 7)
    playwright.expect(page.get_by_role("table", name="Summary")).to_contain_text("26")
    page.goto("/#/2/timeline")
    step = page.locator("input[name=step]")
    playwright.expect(step).to_have_value("7")
    page.evaluate("document.activeElement.blur()")
    add_step(growing, 8)
    playwright.expect(step).to_have_value("8")
    page.goto("/#/2/distributions")
    columns = page.get_by_role("region", name="Turns").locator(".heat-map g")
    playwright.expect(columns).to_have_count(8)
    add_step(growing, 9)
    playwright.expect(columns).to_have_count(9)


def test_a_warm_start_is_followed_before_the_run_has_metrics_of_its_own(page, growing: Path):
    """Its loss is drawn, and no alarm stands over a run that is well; the run itself appears without a reload."""
    page.goto("/#/0/curves")
    folder = growing.parent / "warming"
    folder.mkdir()
    (folder / "config.yaml").write_text(RESOLVED_HEAD)
    (folder / "sft_metrics.jsonl").write_text('{"step": 1, "loss/sft": 2.5}\n')
    playwright.expect(page.locator("#run option")).to_have_count(4)
    page.select_option("#run", "3")
    playwright.expect(page.locator(".chart h2")).to_have_text(["warm_start/loss/sft"])  # a list is waited for
    assert page.locator("[role=alert]").count() == 0
    with (folder / "sft_metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss/sft": 1.5}\n')
    playwright.expect(page.get_by_role("img", name="1.5 at step 2")).to_have_count(1)


def test_a_token_that_no_loss_saw_has_the_weight_0(page):
    page.goto("/#/0/one?id=g30/1&step=3&split=train")
    page.click(".tokens .s-masked >> nth=0")
    said = page.inner_text(".side-panel").replace("\n", " ")
    assert "Sampled, not trained" in said and "weight in the loss 0" in said and "weight that it was recorded with 1" in said
    page.goto("about:blank")
    page.goto("/#/0/one?id=<u>evil</u>/0&step=3&split=eval/hostile")
    page.click(".message.assistant >> text=its tokens")  # behind the first 20,000
    page.wait_for_selector(".tokens .s-masked.chosen")
    said = page.inner_text(".side-panel").replace("\n", " ")
    assert "Sampled in an evaluation" in said and "weight in the loss 0" in said
    assert page.locator(".tokens .s-sampled").count() == 0


def test_tokens_beyond_the_first_page_can_be_opened_and_linked(page):
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


def test_a_filter_that_cannot_be_understood_leaves_the_form(browser, address: str):
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


def test_tabs_and_keys_keep_filters_and_colours(page):
    page.goto("/#/0/trajectories?split=train&min_step=2")
    page.wait_for_selector("tbody tr")
    page.click("tbody tr:has-text('g30/0') td:nth-child(2)")
    page.wait_for_selector(".tokens")
    page.select_option("select[aria-label='Colour tokens by']", "difference")
    page.wait_for_selector(".legend i.heat3")
    assert "≥ 0.1" in page.inner_text(".legend >> nth=0")
    page.keyboard.press("n")
    page.wait_for_url("**colour=difference")
    page.keyboard.press("Escape")
    page.wait_for_url("**trajectories?split=train&min_step=2")
    page.click("text=Curves")
    page.wait_for_selector(".chart")
    page.click("text=Trajectories")
    page.wait_for_url("**trajectories?split=train&min_step=2")
