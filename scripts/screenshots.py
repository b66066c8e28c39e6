"""Creates the screenshots of the documentation from a trained run: python scripts/screenshots.py RUN

The viewer is served as in `polyturn view` and opened in headless Chromium (`make browser` installs it and playwright). The
shown trajectory is one of the last step that got feedback on a wrong answer, called a tool and was right in the end, in a
group whose members differ; `--trajectory`, `--split` and `--step` select another. An image has at most 150 KB.

    docs/images/trajectory-light.webp, trajectory-dark.webp, curves.webp, curve.webp
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import uvicorn
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import polyturn
from polyturn.serving.listen import bind
from polyturn.viewer.app import create_app
from polyturn.viewer.run_view import RunView

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MAX_BYTES = 150_000


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Serve the viewer of `run` while the block runs, and yield its address."""
    bound = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app([RunView(run)]), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def keep(picture: bytes, name: str) -> None:
    """Write `picture` as WebP, at the best quality that stays below MAX_BYTES."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for quality in (90, 80, 70, 55, 40):
        out = io.BytesIO()
        image.save(out, "webp", quality=quality, method=6)
        if out.tell() < MAX_BYTES:
            break
    (IMAGES / f"{name}.webp").write_bytes(out.getvalue())
    print(f"{name}.webp  {image.width}x{image.height}  {out.tell() // 1000} KB")


def telling(run: Path, *, split: str, step: int | None) -> dict[str, object]:
    """Return the query of the trajectory to show: a corrected one, if possible with a tool call."""
    store = polyturn.Run(run).select(split=split)
    steps = set(store.table(["step"])["step"].to_pylist())
    if not steps or (step is not None and step not in steps):
        raise SystemExit(f"{run} has no trajectories of {split!r} at step {step}; choose others with --split and --step")
    at = max(steps) if step is None else step

    def earned(t: polyturn.Trajectory) -> float:
        return t.reward.total if t.reward is not None else 0.0

    def interest(candidates: tuple[bool, polyturn.Trajectory]) -> tuple[bool, float, bool, int]:
        is_mixed, t = candidates
        called = any(turn.tool_results for turn in t.turns)
        return is_mixed, earned(t) * (len(t.turns) > 1), called, len(t.turns)

    groups = list(store.groups(step=at))
    candidates = [(len({earned(t) for t in g.trajectories}) > 1, t) for g in groups for t in g.trajectories]
    return {"id": max(candidates, key=interest)[1].id, "split": split, "step": at}


def photograph(browser: Browser, address: str, path: str, ready: str, *, scheme: str, click: str | None = None) -> bytes:
    """Return a screenshot of a page of the viewer, taken when the element `ready` exists and nothing moves."""
    page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=1.5, color_scheme=scheme)
    page.goto(f"{address}/#/0/{path}")
    page.wait_for_selector(ready)
    if click is not None:
        page.click(click)
    page.wait_for_timeout(400)
    picture = page.screenshot()
    page.close()
    return bytes(picture)


def main() -> None:
    """Create all screenshots of a run."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("run", type=Path, metavar="RUN")
    arguments.add_argument("--trajectory", help="the id of the trajectory to show")
    arguments.add_argument("--split", default="train")
    arguments.add_argument("--step", type=int)
    read = arguments.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("Chromium is not installed; run `make browser`")
    which = telling(read.run, split=read.split, step=read.step)
    if read.trajectory is not None:
        which["id"] = read.trajectory
    IMAGES.mkdir(parents=True, exist_ok=True)
    with served(read.run) as address, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        one = f"one?{urlencode(which)}"
        for scheme in ("light", "dark"):
            seen = photograph(browser, address, one, ".tokens span", scheme=scheme, click=".tokens .s-sampled >> nth=8")
            keep(seen, f"trajectory-{scheme}")
        keep(photograph(browser, address, "curves", ".chart canvas", scheme="light"), "curves")
        browser.close()
    if (curve := read.run / "curve.png").is_file():
        keep(curve.read_bytes(), "curve")


if __name__ == "__main__":
    main()
