"""Reading in a real browser: Markdown and code, long texts, two trajectories in step."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.viewer_runs import until, write_rich_run, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
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


def test_markdown_is_laid_out_and_nothing_runs_or_loads(page, keep):
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


def test_long_text_becomes_a_bounded_number_of_elements(page):
    page.goto("/#/0/about")
    for some in MANY:
        count, shown = page.evaluate(LAID_OUT, some * (99_000 // len(some)) + " END")
        assert 4900 < count < 5100 and "END" in shown and "the rest is plain text" in shown, some[:20]
        count, shown = page.evaluate(LAID_OUT, some[:400])
        assert "the rest" not in shown
    count, shown = page.evaluate(LAID_OUT, f"[{'[1],[2],' * 12_000}3]")
    assert 4900 < count < 5100 and shown.endswith("3\n]")
    count, _ = page.evaluate(LAID_OUT, "|a" * 20_000 + "\n" + "|-" * 200 + "\n" + "|b" * 20_000)
    assert count < 10, "a rule with fewer cells than its head makes no table"


def test_compared_trajectories_scroll_together(page, keep):
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


AS_WRITTEN = """async ([text, other]) => {
  const { rendered } = await import("/static/markdown.js"), { marked } = await import("/static/diff.js");
  const { el } = await import("/static/base.js");
  const box = el("div", {}, el("div", {}, ...(other ? marked(text, other, "+") : rendered(text))));
  return box.querySelectorAll(".as-written").length;
}"""
LONG_PAGE = """async (text) => {
  const { message, wholePage } = await import("/static/one.js"), page = wholePage();
  const m = { role: "tool", text, reasoning: text, num_characters: text.length, turn: 0, media: [], tool_calls: [] };
  const made = [...Array(30).keys()].map(() => message(m, { page }));
  return made.reduce((sum, one) => sum + one.querySelectorAll("*").length, 0);
}"""
WOVEN = "a\u05d0" * 40_000


def test_text_that_takes_a_browser_minutes_is_bounded(page):
    """Many elements on one page, thousands of marks on one letter, and a direction that changes with every letter."""
    page.goto("/#/0/about")
    assert 50_000 < page.evaluate(LONG_PAGE, "*a* " * 20_000) < 61_000
    _, shown = page.evaluate(LAID_OUT, "a" + "\u0301" * 90_000 + "b")
    assert shown == "a" + "\u0301" * 30 + "\ufffd" + "b", "as in Unicode's stream-safe text"
    for text in (WOVEN, f"`{'a' + WOVEN[:900]}` " * 90, f"> {WOVEN}"):
        assert page.evaluate(AS_WRITTEN, [text, None]) == 1, text[:20]
        assert page.evaluate(AS_WRITTEN, [text, f"b{text[1:]}"]) == 1, "compared with another one"
    assert page.evaluate(AS_WRITTEN, ["\u05e9\u05dc\u05d5\u05dd and so on " * 6000, None]) == 0
