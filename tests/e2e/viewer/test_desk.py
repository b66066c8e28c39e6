"""The desk in a real browser: conversations wait, a person answers them, and the text of a model stays text.

Needs Chromium and playwright (`make browser`); skipped with that sentence where they are missing.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polyturn.interactions.person import HumanQueue, HumanReply
from support.services import served_app

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; run `make browser`"),
    pytest.mark.timeout(120),
]

HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>"


@pytest.fixture
def desk(tmp_path: Path) -> HumanQueue:
    return HumanQueue(tmp_path / "desk")


@pytest.fixture
def address(desk: HumanQueue) -> Iterator[str]:
    from polyturn.viewer.app import create_app

    with served_app(create_app([], desk=desk)) as served:
        yield served


def ask(desk: HumanQueue, name: str, text: str) -> HumanReply | None:
    talk = [{"role": "user", "content": "I need a table."}, {"role": "assistant", "content": text}]
    return asyncio.run(desk.ask(talk, about={"conversation": name, "goal": "Eat."}, deadline_s=110))


def test_person_answers_waiting_conversations(desk: HumanQueue, address: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as askers, playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 700}, base_url=address)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto("/")
        page.get_by_text("No conversation is waiting.").wait_for()
        first = askers.submit(ask, desk, "g0/0", HOSTILE)
        page.get_by_text(HOSTILE).first.wait_for()
        second = askers.submit(ask, desk, "g0/1", "For how many?")
        page.get_by_role("button", name=re.compile(r"g0.1 \d+ s left")).wait_for()
        page.get_by_label("Your answer, as the user").fill("That is no table.")
        page.wait_for_timeout(1500)
        assert page.get_by_label("Your answer, as the user").input_value() == "That is no table.", "what is written stays"
        page.screenshot(path=Path(os.environ.get("POLYTURN_ARTEFACTS", tmp_path)) / "desk.png")
        page.get_by_role("button", name="g0/1").click()
        assert page.get_by_label("Your answer, as the user").input_value() == ""
        page.get_by_role("button", name="g0/0").click()
        assert page.get_by_label("Your answer, as the user").input_value() == "That is no table.", "of each conversation"
        assert page.locator("#tabs a").all_inner_texts() == ["Answer"], "there is no run to look at"
        page.get_by_label("Score of the model's turn").fill("-0.5")
        page.get_by_role("button", name="Answer", exact=True).click()
        page.get_by_text("For how many?").last.wait_for()
        page.get_by_role("button", name="Answer", exact=True).click()
        page.get_by_role("button", name="End the conversation").click()
        page.get_by_text("No conversation is waiting.").wait_for()
        assert page.evaluate("window.pwned") is None
        browser.close()
        assert first.result(60) == HumanReply(text="That is no table.", score=-0.5)
        assert second.result(60) == HumanReply(text="", is_end=True)
        assert problems == []
