"""Damage and hostile texts in a real browser: each affects only itself, and a sentence replaces it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.damaged_runs import FILES, HOSTILE, SHOWN, UNREADABLE, change_row, join_parts
from support.services import served_app
from support.viewer_runs import until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

DAMAGES = (
    "flipped", "steps as texts", "one id", "extremes", "a far step", "noise of metrics", "config's keys", "config's size",
    "alarms", "a link to labels", "lock", "long names",
)  # fmt: skip
TABS = ("curves", "trajectories", "distributions", "groups?split=*", "timeline", "about")
ADDRESSES = (
    "constructor", "__proto__", "nothing", "one", "one?id=g9/9", "one?id=g10/0&step=1e3", "one?id=g10/0&segment=99&start=9",
    "one?id=g10/0&token=9:9&colour=odd&show=odd", "compare", "compare?a=g10/0&b=g9/9", "why", "why?id=g9/9", "task",
    "task?task_id=odd", "trajectories?odd=1", "trajectories?offset=700", "trajectories?offset=-1", "trajectories?min_step=x",
    "trajectories?sort=odd", "trajectories?cols=odd", "trajectories?text=(&regex=1", "trajectories?where=drop table x",
    "groups?step=x", "groups?offset=99999999999999999999", "timeline?step=x", "timeline?step=99", "timeline?split=odd",
    "timeline?low=1e15&high=1000000000000000.2", "timeline?low=-1e308&high=1e308", "curves?low=-1e308&high=1e308",
    "curves?smooth=x", "curves?axis=odd", "curves?with=0,0,99,x", "curves?metric=((", "about?with=9",
    "distributions?split=odd",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run `good`, and one for each damage beside it."""
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(written / "second", folder / "good")
    join_parts(folder / "good")
    for number, name in enumerate(DAMAGES):
        FILES[name](shutil.copytree(folder / "good", folder / f"run{number}"))
    for name in ("odd", "row"):
        shutil.copytree(folder / "good", folder / name)
    for row, change in enumerate(SHOWN[name] for name in ("names", "numbers", "timings", "parts", "lengths")):
        change_row(folder / "odd", change, row)
    for row in (17, 11):
        change_row(folder / "row", UNREADABLE["no spans"], row)
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    from polyturn.viewer.app import create_app
    from polyturn.viewer.run_view import RunView

    names = ["good", "odd", "row", *(f"run{number}" for number in range(len(DAMAGES)))]
    with served_app(create_app([RunView(runs / name) for name in names])) as served:
        yield served


@pytest.fixture
def visit(browser, address: str) -> Iterator[object]:
    """Open an address and return the text of its page. A refused request may log an error on the console; nothing may crash.

    Pages of the same run are opened as by links, those of another run by a new load.
    """
    page = browser.new_page(viewport={"width": 390, "height": 800}, base_url=address)
    page.set_default_timeout(60_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))

    def opened(way: str) -> str:
        former, wanted = page.url.partition("#/")[2], way.partition("/")[0]
        if former.partition("/")[0] == wanted and former != way:
            page.evaluate("document.querySelector('main').replaceChildren()")
        else:
            page.goto("about:blank")
        page.goto(f"/#/{way}")
        until(page, "document.querySelector('main').children.length > 0")
        said: str = page.inner_text("main")
        for wrong in ("undefined", "[object", "native code", "\u202e", "\x1b"):
            assert wrong not in said, (way, said)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), way
        return said

    opened.page = page
    yield opened
    assert page.evaluate("window.pwned") is None and problems == []
    page.close()


def test_every_page_of_a_damaged_run_loads(visit):
    for number, name in enumerate(DAMAGES):
        for tab in TABS:
            visit(f"{number + 3}/{tab}")
            if name != "a link to labels" or tab != "trajectories":
                continue
            assert "labels.jsonl" in visit.page.inner_text("[role=alert]") and visit.page.locator("tbody tr").count() == 18
    visit("0/runs")
    assert visit.page.locator("tbody tr").count() == 3 + len(DAMAGES)


def test_hostile_names_are_text_on_every_page(visit):
    shown = HOSTILE.replace("\u202e", "\ufffd").replace("\x1b", "\ufffd")
    for tab in TABS:
        visit(f"1/{tab}")
    assert shown in visit("1/trajectories?cols=id,group,dropped,data_source")
    visit.page.locator("tbody tr", has_text="onerror").locator("td").nth(1).click()
    until(visit.page, "document.querySelector('main h2')?.textContent.includes('onerror')")
    visit.page.get_by_role("link", name="Why this advantage?").click()
    visit.page.wait_for_selector(".answer")
    assert shown in visit.page.inner_text("main h2")


def test_unknown_address_keeps_the_tabs(visit):
    for way in ADDRESSES:
        assert visit(f"0/{way}").strip(), way
        assert visit.page.locator("#tabs a").count() == 7
    for run in ("-1", "99", "x", ""):
        assert visit(f"{run}/curves").strip()
