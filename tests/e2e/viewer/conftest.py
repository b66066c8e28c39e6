"""One browser and one served viewer for each module of tests; pictures are kept.

Needs Chromium and playwright (`make browser`); skipped with that sentence where they are missing. Screenshots are kept under
POLYTURN_ARTEFACTS, or with the other temporary files of the test run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyturn.interactions.person import HumanQueue
from support.services import served_app
from support.viewer_runs import leave_a_question, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


SOON = "const later = setTimeout; window.setTimeout = (call, ms, ...given) => later(call, Math.min(ms, 200), ...given);"
"""What makes a page ask what is new five times a second, where it would every few."""


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for name in ("first", "second", "growing"):
        write_run(folder / name)
    return folder


@pytest.fixture(scope="module")
def runs(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the runs for this module, whose tests may add to them."""
    return shutil.copytree(written, tmp_path_factory.mktemp("runs"), dirs_exist_ok=True)


@pytest.fixture
def growing(runs: Path) -> Path:
    return runs / "growing"


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    from polyturn.viewer.app import create_app
    from polyturn.viewer.run_view import RunView

    shown = [RunView(runs / name) for name in ("first", "second", "growing")]

    def appeared() -> list[RunView]:
        if len(shown) == 4 or not (runs / "warming/sft_metrics.jsonl").exists():
            return []
        shown.append(RunView(runs / "warming"))
        return shown[3:]

    desk = HumanQueue(runs / "desk")
    leave_a_question(desk.folder)
    with served_app(create_app(list(shown), appeared=appeared, desk=desk)) as served:
        yield served


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed; run `make browser`")
    playwright.expect.set_options(timeout=60_000)
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])

        def new_page(**options: Any) -> Any:
            page = found.new_page(**options)
            page.add_init_script(SOON)
            return page

        yield SimpleNamespace(new_page=new_page)
        found.close()


@pytest.fixture
def page(browser, address: str) -> Iterator[object]:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, base_url=address)
    page.set_default_timeout(90_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert problems == []


@pytest.fixture
def keep(tmp_path: Path, request: pytest.FixtureRequest):
    folder = Path(os.environ.get("POLYTURN_ARTEFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)

    def screenshot(page, name: str) -> None:
        picture = folder / f"viewer-{name}.png"
        page.screenshot(path=str(picture))
        assert picture.stat().st_size > 5_000

    return screenshot
