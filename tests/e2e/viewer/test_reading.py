"""Reading in a real browser: Markdown and code, two trajectories in step, a timeline, metrics that belong together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyturn.viewer.pages import STATIC
from support.viewer_runs import until, write_rich_run, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = pytest.mark.timeout(600)
PIXEL = "data:image/png;base64,"
TEXTS = "[...document.querySelectorAll('.sides .message:nth-child(2) > .text')]"
LONG = f"""{TEXTS}.forEach((text, side) => {{
  text.style.height = "20px";
  text.style.overflowY = "scroll";
  text.append("\\n line".repeat(100 * (side + 1)));
  text.style.whiteSpace = "pre-wrap";
}})"""
"""Makes the first message long on both sides, twice as long on the right."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_rich_run(folder / "first")
    for name in ("second", "growing"):
        write_run(folder / name)
    return folder


def test_markdown_code_and_pictures_are_laid_out_and_nothing_of_them_runs_or_loads(page, keep):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto("/#/0/one?id=g0/0&step=1&split=train&show=conversation")
    message = page.locator(".message.assistant").nth(1)
    assert message.locator(".heading").inner_text() == "# The plan" and message.locator("strong").inner_text() == "both"
    assert message.locator("li").all_inner_texts() == [
        "first this",
        "then <b>that</b>",
        "and [a trap](javascript:window.pwned=3)",
    ]
    assert message.locator("td").all_inner_texts() == ["Bonn", "336465"]
    assert message.locator(".code[data-language=python] .in-keyword").all_inner_texts() == ["def", "return"]
    assert message.locator("a[href^=http]").count() == 2, "the link, and the picture of elsewhere"
    assert message.locator("a[href^=http]").first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert "\x1b" not in message.inner_text() and "\u202e" not in message.inner_text()
    pictures = [one.get_attribute("src") for one in page.locator("main img").all()]
    assert all(source.startswith(PIXEL) for source in pictures)
    assert page.locator(".call .code").first.inner_text().replace("\n", "") == '{ "answer": "8"}'
    keep(page, "markdown")
    page.get_by_role("button", name="As written").click()
    page.wait_for_url("**raw=1")
    playwright.expect(message.locator(".text")).to_contain_text(
        "Look **both** up, then `add`: [docs](https://example.org/a)"
    )
    assert page.evaluate("window.pwned") is None and not [url for url in asked if "example.org" in url]


def test_no_pattern_of_markdown_repeats_without_a_bound():
    """So that it costs time in proportion to a text, whoever wrote it."""
    source = (STATIC / "markdown.js").read_text()
    patterns = re.findall(r"^const (?:INLINE|CODE) = /(.*)/g;$", source, re.M)
    assert len(patterns) == 2
    for pattern in patterns:
        without_escapes = re.sub(r"\\.", "", pattern)
        assert not re.search(r"[*+]|\{\d+,\}", re.sub(r"\[[^\]]*\]", "", without_escapes)), pattern
        long = [kind for kind, most in re.findall(r"(\[[^\]]*\])\{\d+,(\d+)\}", pattern) if int(most) > 2000]
        assert not [kind for kind in long for begins in "`*![" if re.fullmatch(kind, begins)], "it would be sought at each"


def test_every_text_of_a_page_goes_through_what_shows_control_characters():
    """`el`, `svg` and `say` of base.js; an element that is written to directly would obey them."""
    for path in STATIC.glob("*.js"):
        written = re.findall(
            r"\.(?:textContent|innerText|innerHTML|outerHTML|nodeValue|title) = (?!legible)|insertAdjacent", path.read_text()
        )
        assert path.name == "uplot.js" or not written, path.name


LAID_OUT = """async (text) => {
  const { rendered } = await import("/static/markdown.js"), { el } = await import("/static/base.js");
  const box = el("div", { class: "text rich" }, ...rendered(text));
  return [box.querySelectorAll("*").length, box.textContent];
}"""
MANY = [
    *("[a](https://x.y) ", "*a* ", "`a` ", "# a\n", "- a\n", "|a|\n|-|\n", "> a\n\n", "a\n\n", "```\na\n```\n"),
    "```\n" + "if a " * 19_000,
    "|a|b|\n|-|-|\n" + "|a|b|\n" * 15_000,
]


def test_a_text_becomes_no_more_elements_than_a_browser_lays_out_at_once_and_is_there_to_its_end(page):
    page.goto("/#/0/about")
    for some in MANY:
        count, shown = page.evaluate(LAID_OUT, some * (99_000 // len(some)) + " END")
        assert 4900 < count < 5100 and "END" in shown and "the rest stands as it was written" in shown, some[:20]
        count, shown = page.evaluate(LAID_OUT, some[:400])
        assert "the rest" not in shown
    count, shown = page.evaluate(LAID_OUT, f"[{'[1],[2],' * 12_000}3]")
    assert 4900 < count < 5100 and shown.endswith("3\n]")
    count, _ = page.evaluate(LAID_OUT, "|a" * 20_000 + "\n" + "|-" * 200 + "\n" + "|b" * 20_000)
    assert count < 10, "a rule with fewer cells than its head makes no table"


def test_a_page_of_long_messages_becomes_no_more_elements_than_one_can_hold(page):
    page.goto("/#/0/about")
    count, shown = page.evaluate(
        """async (text) => {
          const { message, wholePage } = await import("/static/one.js"), page = wholePage();
          const m = { role: "tool", text, reasoning: text, num_characters: text.length, turn: 0, media: [], tool_calls: [] };
          const made = [...Array(30).keys()].map(() => message(m, { page }));
          return [made.reduce((sum, one) => sum + one.querySelectorAll("*").length, 0), made.at(-1).textContent];
        }""",
        "*a* " * 20_000 + "END",
    )
    assert 50_000 < count < 61_000 and "END" in shown and "It stands as it was written" in shown


WOVEN = "a\u05d0" * 40_000


def test_a_text_that_changes_its_direction_too_often_stands_as_it_was_written(page):
    """A browser needs time that grows with the square of the changes; a text of two languages has far fewer."""
    page.goto("/#/0/about")
    for text in (WOVEN, f"`{'a' + WOVEN[:900]}` " * 90, f"> {WOVEN}"):
        assert page.evaluate(AS_WRITTEN, [text, None]) == 1, text[:20]
        assert page.evaluate(AS_WRITTEN, [text, f"b{text[1:]}"]) == 1, "compared with another one"
    for text in ("\u0634\u0643\u0631\u0627 " * 16_000, "\u05e9\u05dc\u05d5\u05dd and so on " * 6000, WOVEN[:9000]):
        assert page.evaluate(AS_WRITTEN, [text, None]) == 0, text[:20]


AS_WRITTEN = """async ([text, other]) => {
  const { rendered } = await import("/static/markdown.js"), { marked } = await import("/static/diff.js");
  const { el } = await import("/static/base.js");
  const box = el("div", {}, el("div", {}, ...(other ? marked(text, other, "+") : rendered(text))));
  return box.querySelectorAll(".as-written").length;
}"""


def test_a_row_with_more_cells_than_its_head_keeps_what_they_say(page):
    page.goto("/#/0/about")
    _, shown = page.evaluate(LAID_OUT, "|a|b|\n|-|-|\n|1|2|3|\n|4|\n|a|b|c|\n|-|-|\n")
    assert shown == "ab12|34ab|c--"
    assert page.evaluate(LAID_OUT, "|a|b|c|\n|-|-|\n") == [1, "|a|b|c|\n|-|-|"], "a rule has a cell for each of the head"


def test_marks_on_one_letter_are_bounded(page):
    """As in Unicode's stream-safe text; a browser needs minutes for thousands."""
    page.goto("/#/0/about")
    _, shown = page.evaluate(LAID_OUT, "a" + "\u0301" * 90_000 + "b" + "\u0301" * 30 + "c")
    assert shown == "a" + "\u0301" * 30 + "\ufffd" + "b" + "\u0301" * 30 + "c"


def test_two_trajectories_stand_turn_beside_turn_and_long_texts_scroll_together(page, keep):
    page.goto("/#/0/compare?a=g0/0&as=1&al=train&b=g1/0&bs=2&bl=train")
    playwright.expect(page.locator("main [role=status]")).to_contain_text("3 of 4 messages differ, the first in turn 0.")
    tops = page.evaluate(
        """[...document.querySelectorAll('.sides > section')].map((section) =>
             [...section.children].map((child) => Math.round(child.getBoundingClientRect().top)))"""
    )
    assert tops[0] == tops[1] and len(tops[0]) == 5, "a turn begins where the same turn begins beside it"
    page.get_by_role("button", name="next difference").click()
    assert page.locator(".sides .current").count() == 2
    page.keyboard.press("n")
    assert "no such message" in page.locator(".sides .current").nth(1).inner_text()
    keep(page, "in-step")
    page.evaluate(LONG)
    page.evaluate(f"(() => {{ const text = {TEXTS}[0]; text.scrollTop = text.scrollHeight; }})()")
    until(
        page, f"(() => {{ const text = {TEXTS}[1]; return text.scrollTop + text.clientHeight > text.scrollHeight - 3; }})()"
    )
    assert page.evaluate(f"{TEXTS}[1].scrollTop") > 0


def test_a_call_that_the_other_trajectory_does_not_make_is_marked_whole(page):
    page.goto("/#/0/about")
    marks = page.evaluate(
        """async (kind) => {
          const { message } = await import("/static/one.js");
          const m = { role: "assistant", text: "same", num_characters: 4, turn: 0, media: [] };
          const calls = [{ name: "add", arguments: "1 + 1", result: { text: "2", duration_s: 0 } }];
          const shown = message({ ...m, tool_calls: calls }, { other: { ...m, tool_calls: [] }, kind: "-" });
          return [...shown.querySelectorAll("del")].map((one) => one.textContent);
        }"""
    )
    assert marks == ["1 + 1", "2"]


def test_a_timeline_is_zoomed_and_its_axis_stays_in_view(page, keep):
    page.set_viewport_size({"width": 1000, "height": 360})
    page.goto("/#/1/timeline?step=2&split=train")
    axis = page.locator(".lanes-axis text")
    assert axis.first.text_content() == "0 s"
    box = page.locator(".lanes").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 30, steps=4)
    page.mouse.up()
    page.wait_for_url("**low=*")
    assert axis.first.text_content() != "0 s" and page.locator(".message").count() == 0, "to drag is not to open"
    page.mouse.wheel(0, 4000)
    head = page.locator("header").bounding_box()
    until(page, "scrollY > 0 || document.documentElement.scrollHeight <= innerHeight")
    assert page.locator(".lanes-axis").bounding_box()["y"] >= head["y"] + head["height"] - 2
    keep(page, "timeline-zoom")
    page.get_by_role("button", name="Zoom out").click()
    page.get_by_role("button", name="Show the whole step").click()
    assert axis.first.text_content() == "0 s" and "low=" not in page.url
    page.keyboard.press("Escape")
    page.locator(".lanes g").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant")


def test_metrics_that_belong_together_share_a_panel_and_the_machine_has_its_own(page, keep):
    page.goto("/#/0/curves")
    panel = page.get_by_role("region", name="Gradient norm, before and after clipping")
    playwright.expect(panel.locator(".legend span")).to_have_text(["loss/grad_norm", "loss/grad_norm_clipped"])
    series = "(name) => document.querySelector(`[aria-label='${name}'] .plot`).plot.data.map((a) => a.at(-1))"
    assert page.evaluate(series, "Gradient norm, before and after clipping") == [60, 1.0, 1.0]
    assert page.evaluate(series, "Stop reasons: trajectories of a step") == [60, 60.0, 30.0], "stacked: the sum is on top"
    for name in ("Processors and memory of the machine", "GPUs: time busy", "engine/queue", "engine/kv_use"):
        assert page.get_by_role("region", name=name).locator("canvas").count() == 1
    keep(page, "panels")
    page.get_by_role("button", name="system (4)").click()
    playwright.expect(page.locator(".chart")).to_have_count(2)
    page.wait_for_url("**metric=system*")


def test_tokens_can_be_coloured_by_the_entropy_of_the_policy(page):
    page.goto("/#/0/one?id=g0/0&step=1&split=train&show=tokens")
    page.select_option("select[aria-label='Colour tokens by']", "entropies")
    assert page.locator(".legend").inner_text().split("\n") == ["below 0.1 nats (certain)", "≥ 0.1", "≥ 0.5", "≥ 1.5"]
    page.locator(".tokens .s-sampled.heat3").last.click()
    assert "entropy of the policy (nats) 2" in page.inner_text(".side-panel").replace("\n", " ")


def test_a_difference_between_engine_and_trainer_that_is_rounding_has_no_colour(page):
    """On a scale that is the same in every trajectory, also where no difference is larger."""

    def answer(route) -> None:
        data = route.fetch().json()
        (segment,) = data["segments"]
        sampled = [t for t, engine in enumerate(segment["logprobs"]) if engine is not None]
        segment["policy_logprobs"] = [None if engine is None else engine - 1e-7 for engine in segment["logprobs"]]
        if "large=1" in page.url:
            segment["policy_logprobs"][sampled[0]] = segment["logprobs"][sampled[0]] - 2e-3
        route.fulfill(json=data)

    page.route("**/api/runs/0/trajectory?*", answer)
    way = "/#/0/one?id=g0/0&step=1&split=train&show=tokens&colour=difference"
    page.goto(way)
    page.wait_for_selector(".tokens .s-sampled.heat0")
    coloured = page.locator(".tokens [data-at]:is(.heat1, .heat2, .heat3, .heat-1, .heat-2, .heat-3)")
    assert coloured.count() == 0
    ground = "getComputedStyle(document.querySelector('.tokens .s-sampled.heat0')).backgroundColor"
    assert page.evaluate(ground) == "rgba(0, 0, 0, 0)"
    page.goto(f"{way}&large=1")
    playwright.expect(coloured).to_have_count(1)
    assert "heat1" in (coloured.get_attribute("class") or "")
