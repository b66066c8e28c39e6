"""The viewer in a real browser: a person's way through a run, a hostile trajectory, the keyboard, accessibility.

Needs Chromium and playwright (`make browser`); skipped with that sentence where they are missing. Screenshots are kept under
POLYTURN_ARTEFACTS, or with the other temporary files of the test run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polyturn.core.trajectory import TrajectoryGroup
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.rollout.group import GroupSpec
from polyturn.rollout.pool import RolloutPool
from polyturn.store.parquet_store import ParquetStore
from polyturn.store.schema import Trained
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.tiny import tiny_tokenizer
from polyturn.tools.gsm8k import Gsm8kTool

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; run `make browser`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; run `make browser`"),
    pytest.mark.timeout(180),
]

CALL = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "8"}}\n</tool_call>'
HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\x1b[31mred\x1b[0m \u202eright to left "


def write_run(folder: Path) -> None:
    """Write three steps of real episodes with a scripted model, one of them hostile, and metrics."""
    says = [CALL, "#### 8", "#### 4"]
    context = scripted_context(says, tools=[Gsm8kTool({})], interactions={"gsm8k": Gsm8kInteraction({})})
    with ParquetStore(folder) as store:
        for step in (1, 2, 3):
            specs = [
                GroupSpec(id=f"g{step}{i}", task=task(f"What is 2+2 ({i})?", id=f"t{i}", interaction="gsm8k"), size=2)
                for i in range(3)
            ]
            for group in asyncio.run(RolloutPool(context).run(specs)):
                trained = {t.id: made(t.num_sampled_tokens) for t in group.trajectories[:1]}
                trained |= {t.id: Trained(dropped="zero_variance") for t in group.trajectories[1:]}
                store.add(group, step=step, split="train", trained=trained)
            store.flush()
        store.add(hostile_group(), step=3, split="eval/hostile")
    lines = [
        {"step": s, "reward/mean": 0.1 * s, "eval/greedy/success": 0.2 * s, "rollout/turns": 3 - 0.1 * s} for s in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("name: <b>run</b>\n")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")


def made(count: int) -> Trained:
    return Trained(advantages=np.linspace(-1, 1, count), policy_logprobs=np.full(count, -0.5, np.float32))


def hostile_group() -> TrajectoryGroup:
    five_megabytes = HOSTILE * (5_000_000 // len(HOSTILE))
    hostile = task(five_megabytes, id="<b>t</b>", data_source="<i>x</i>", ground_truth="4")
    context = scripted_context([HOSTILE], rewards={"<i>x</i>": lambda trajectory: 1.0})
    spec = GroupSpec(id="<u>evil</u>", task=hostile, size=1)
    (group,) = asyncio.run(RolloutPool(context).run([spec]))
    return group


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("first", "second"):
        write_run(folder / name)
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    import uvicorn

    from polyturn.serving.address import bind
    from polyturn.viewer.app import create_app
    from polyturn.viewer.run_view import RunView

    bound = bind("127.0.0.1", 0)
    app = create_app([RunView(runs / "first"), RunView(runs / "second")])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[object]:
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser, address: str) -> Iterator[object]:
    page = browser.new_page(viewport={"width": 1280, "height": 800}, base_url=address)
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
    page.wait_for_selector(".chart svg path.c1")
    assert page.inner_text(".legend").split() == ["first", "second"]
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
    assert "\x1b" not in page.inner_text(".tokens") and "\u202e" not in page.inner_text(".tokens")
    page.goto("/#/0/about")
    page.wait_for_selector("pre")
    assert "<b>run</b>" in page.inner_text("pre")
    keep(page, "hostile")


def test_everything_can_be_reached_with_the_keyboard(page):
    page.goto("/#/0/curves")
    page.wait_for_selector(".chart")
    page.keyboard.press("2")
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_and_contrast_hold_on_every_page(browser, address: str, scheme: str):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed; run `make browser`")
    page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme, base_url=address)
    ways = {"curves": ".chart", "trajectories": "tbody tr", "groups": "tbody tr", "timeline?step=2&split=train": "svg g",
            "one?id=g30/1&step=3&split=train": ".tokens span", "about": "pre"}  # fmt: skip
    for way, ready in ways.items():
        page.goto(f"/#/0/{way}")
        page.wait_for_selector(ready)
        found = axe.Axe().run(page).response["violations"]
        assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found] == [], way
    page.close()


def test_a_narrow_screen_needs_no_scrolling_sideways(browser, address: str, keep):
    page = browser.new_page(viewport={"width": 380, "height": 760}, base_url=address)
    for way, ready in {"trajectories": "tbody tr", "one?id=g30/1&step=3&split=train": ".tokens span"}.items():
        page.goto(f"/#/0/{way}")
        page.wait_for_selector(ready)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        keep(page, f"narrow-{re.sub('[^a-z].*', '', way)}")
    page.close()


def test_a_run_that_goes_on_is_followed_without_a_reload(page, runs: Path):
    page.goto("/#/0/curves")
    page.wait_for_selector(".chart")
    playwright.expect(page.locator("#live")).to_contain_text("step 3", timeout=8000)
    with (runs / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 0.9}\n')
    playwright.expect(page.locator("#live")).to_contain_text("step 4", timeout=8000)
    playwright.expect(page.locator(".chart title").filter(has_text="0.9 at step 4")).to_have_count(1)
