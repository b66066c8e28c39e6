"""Damage and hostile texts in a real browser: each costs itself alone, with a sentence in its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.damaged_runs import FILES, HOSTILE, LONG, SHOWN, UNREADABLE, change_row, join_parts
from support.services import served_app
from support.viewer_runs import add_step, until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
pytestmark = pytest.mark.timeout(600)

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
    """Open an address and return what stands there; that a request is refused is an error on the console, a crash is not.

    The pages of one run are opened as by links, those of another run as if they were the first.
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


def test_every_page_of_a_damaged_run_stands_and_the_runs_beside_it_too(visit):
    for number, name in enumerate(DAMAGES):
        for tab in TABS:
            visit(f"{number + 3}/{tab}")
            if name != "a link to labels" or tab != "trajectories":
                continue
            assert "labels.jsonl" in visit.page.inner_text("[role=alert]") and visit.page.locator("tbody tr").count() == 18
    visit("0/runs")
    assert visit.page.locator("tbody tr").count() == 3 + len(DAMAGES)


def test_hostile_names_and_numbers_are_text_on_every_page(visit):
    shown = HOSTILE.replace("\u202e", "\ufffd").replace("\x1b", "\ufffd")
    for tab in TABS:
        visit(f"1/{tab}")
    assert shown in visit("1/trajectories?cols=id,group,dropped,data_source")
    visit.page.locator("tbody tr", has_text="onerror").locator("td").nth(1).click()
    until(visit.page, "document.querySelector('main h2')?.textContent.includes('onerror')")
    visit.page.get_by_role("link", name="Why this advantage?").click()
    visit.page.wait_for_selector(".answer")
    assert shown in visit.page.inner_text("main h2")


def test_long_names_widen_no_page(visit):
    """Metrics, ids, tools, parts of a reward: on their own pages, beside another run, and where they are filters."""
    names = f"{DAMAGES.index('long names') + 3}/curves"
    for way in (names, f"{names}?metric=stop", f"0/curves?with={names.partition('/')[0]}"):
        visit(way)
        playwright.expect(visit.page.locator(".chart")).not_to_have_count(0)
        assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), way
    assert visit.page.locator("nav .facet").count() > 10
    known = f"id={LONG}&step=1&split=train"
    for page in ("one", "why", "task"):
        assert "cannot" not in visit(f"1/{page}?{known}&task_id={LONG}")
    visit(f"1/compare?a={LONG}&as=1&al=train&b=g32/0&bs=3&bl=train")
    assert "x" * 1000 in visit(f"1/trajectories?group={LONG}&cols=id,group,dropped,data_source,error,task_id")


def test_a_trajectory_that_cannot_be_read_leaves_the_one_beside_it(visit):
    """The last member of the last step, and one of the step before."""
    assert "cannot be read" in visit("2/one?id=g32/1&step=3&split=train"), "row 17"
    said = visit("2/compare?a=g32/0&as=3&al=train&b=g32/1&bs=3&bl=train")
    assert "One of them cannot be shown." in said and "cannot be read" in said and "Trajectory g32/0" in said
    assert "step 3, 3 of 3" in visit("2/task?task_id=t2&split=train")
    visit.page.get_by_label("Trajectory of the step").select_option(index=1)
    until(visit.page, "document.querySelector('main').textContent.includes('cannot be read')")
    visit("2/about")
    visit.page.get_by_text("Highlights").click()
    visit.page.wait_for_selector("table[aria-label=Highlights] tbody tr")


def test_an_address_that_means_nothing_is_told_and_leaves_the_way_back(visit):
    for way in ADDRESSES:
        assert visit(f"0/{way}").strip(), way
        assert visit.page.locator("#tabs a").count() == 7
    for run in ("-1", "99", "x", ""):
        assert visit(f"{run}/curves").strip()


def test_filters_that_the_form_has_no_field_for_act_stay_and_can_be_taken_back(visit):
    assert "dropped zero_variance ×" in visit("0/trajectories?dropped=zero_variance&min_num_tokens=1&task_id=t1&text=(1)?")
    visit.page.get_by_label("errors only").check()
    visit.page.wait_for_url("**errors=1**")
    for part in ("dropped=zero_variance", "min_num_tokens=1", "task_id=t1", "text=%281%29%3F"):
        assert part in visit.page.url
    visit.page.get_by_label("errors only").uncheck()
    playwright.expect(visit.page.locator("tbody tr")).to_have_count(3)
    visit.page.get_by_role("link", name="dropped zero_variance ×").click()
    playwright.expect(visit.page.locator("tbody tr")).to_have_count(6)
    visit("0/groups")
    visit.page.select_option("select[name=split]", label="all")
    visit.page.wait_for_url("**split=***")
    assert visit.page.locator("select[name=split] option:checked").inner_text() == "all"


def test_notes_without_a_label_and_labels_of_hostile_text_filter_the_table(visit, runs: Path):
    said = [("g30/0", HOSTILE, ""), ("g30/1", "", "Copies <b>the</b> test"), ("g31/0", "odd", "fine")]
    lines = [{"id": id, "step": 3, "split": "train", "label": label, "note": note} for id, label, note in said]
    (runs / "good/labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": "half')
    visit("0/trajectories")
    visit.page.get_by_role("link", name="any label or note").click()
    playwright.expect(visit.page.locator("tbody tr")).to_have_count(3)
    visit.page.get_by_label("Note", exact=True).fill("the TEST copies")
    visit.page.keyboard.press("Enter")
    playwright.expect(visit.page.locator("tbody tr")).to_have_count(1)
    visit("0/one?id=g30/0&step=3&split=train")
    visit.page.get_by_label("Label", exact=True).fill("again")
    visit.page.get_by_role("button", name="Save").click()
    visit.page.get_by_text("saved beside the run").wait_for()
    visit("0/trajectories?label=again")
    playwright.expect(visit.page.locator("tbody tr")).to_have_count(1)


def test_a_task_is_followed_and_charts_that_are_drawn_again_leave_nothing_behind(visit, runs: Path):
    add_step(runs / "good", 4)
    assert "step 4, 1 of 1" in visit("0/task?task_id=more")
    add_step(runs / "good", 5)
    playwright.expect(visit.page.locator("main [role=status]")).to_contain_text("step 4, 1 of 2")
    visit("0/curves")
    for step in (5, 6):
        with (runs / "good/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "reward/mean": step}) + "\n")
        playwright.expect(visit.page.get_by_role("img", name=f"at step {step}")).to_have_count(1)
    until(visit.page, "uPlot.sync('curves').plots.length === document.querySelectorAll('.plot canvas').length")
