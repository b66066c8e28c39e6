"""Every page on a desktop and a telephone, light and dark: nothing is cut off, covered or a letter wide.

Pictures of all pages are kept. The test compares structure: the boxes of neighbouring elements.
"""

from __future__ import annotations

import pytest

from support.viewer_runs import PAGES

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

PARENTS = "header, main, .bar, .facets, .charts, .chart, main section, .sides, .three, .pager"
TEXTS = "p, h2, h3, a, button, label, summary, td, th, .text, dd"
FAULTS = """([parents, texts]) => {
  const found = [], box = (e) => e.getBoundingClientRect();
  const name = (e) => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`;
  const isShown = (e) => box(e).width > 0 && box(e).height > 0 && getComputedStyle(e).position === "static";
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`the page is ${wide} wide`);
  for (const parent of document.querySelectorAll(parents)) {
    const parts = [...parent.children].filter(isShown);
    parts.forEach((a, i) => parts.slice(i + 1).forEach((b) => {
      const [p, q] = [box(a), box(b)];
      const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (across > 2 && down > 2) found.push(`${name(a)} covers ${name(b)}`);
    }));
  }
  for (const e of document.querySelector("main").querySelectorAll(texts)) {
    const size = parseFloat(getComputedStyle(e).fontSize), letters = Math.min(e.textContent.trim().length, 3);
    const isNarrow = box(e).width < letters * size * 0.4 && box(e).height > 2.5 * size;
    if (isShown(e) && isNarrow) found.push(`${name(e)} is ${box(e).width} wide`);
  }
  return found;
}"""


def faults(page) -> list[str]:
    found: list[str] = page.evaluate(FAULTS, [PARENTS, TEXTS])
    return found


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_is_cut_off_or_covered(browser, address: str, keep, width: int):
    page = browser.new_page(viewport={"width": width, "height": 900}, base_url=address)
    page.set_default_timeout(90_000)
    for way, ready in PAGES.items():
        page.goto(f"/#/0/{way}")
        page.wait_for_selector(ready)
        assert faults(page) == [], way
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            keep(page, f"{width}-{scheme}-{way.partition('?')[0]}")
    if width < 800:
        page.goto("/#/0/one?id=g30/1&step=3&split=train")
        page.wait_for_selector(".tokens span")
        for part in (".message.assistant", ".tokens", ".side-panel"):
            assert page.locator(part).first.bounding_box()["width"] > 0.9 * width - 40, part
    page.close()
