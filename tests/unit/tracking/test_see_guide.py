"""docs/guides/see.md runs as it stands."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyturn.build.training import build_trackers
from polyturn.config.config_source import ConfigSource
from polyturn.config.models import RunConfig
from polyturn.rollout.pool import GroupSpec, RolloutPool
from polyturn.testing.episodes import scripted_context, task
from polyturn.tracking.manager import tracker_spec
from polyturn.training.observer import AlsoRecord, RunObserver

PAGE = (Path(__file__).parents[3] / "docs/guides/see.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CONFIG = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def place(folder: Path, **keys: Any) -> ConfigSource:
    model = {"init": {"model_type": "qwen3"}, "tokenizer": "x"}
    return ConfigSource(config=RunConfig(model=model, **keys), base=folder)  # type: ignore[arg-type]


async def test_the_notebook_reads_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    groups = await RolloutPool(scripted_context(["#### 4"])).run([GroupSpec(id="g0", task=task(), size=2)])
    with RunObserver(tmp_path / "runs" / "mine", total_steps=1) as observer:
        observer.on_step(1, {"rollout/success": 1.0}, groups)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(CODE[0], names)
    assert len(names["late"]) == 0 and names["by_stop"].to_pylist() == [{"stop_reason": "stop", "n": 2}]
    assert [turn.message.text for turn in names["one"].turns] == ["#### 4"]


def test_the_configs_mean_what_the_page_says(tmp_path: Path):
    settings = place(tmp_path, **CONFIG[0]).config.store
    assert (settings.share, settings.max_gb) == (0.25, 20)
    known = [entry if isinstance(entry, str) else entry["name"] for entry in CONFIG[1]["tracking"]]
    named = re.findall(r"^\| `(\w+)` \| `polyturn\[(\w+)\]`", PAGE, re.MULTILINE)
    assert [name for name, _ in named] == known and all(name == extra for name, extra in named)
    config = place(tmp_path, **CONFIG[1]).config
    assert [t if isinstance(t, str) else (t.name, t.samples) for t in config.tracking][:2] == ["tensorboard", ("wandb", 8)]
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    (spec,) = build_trackers(place(tmp_path, tracking=["tensorboard"]))
    assert (spec.name, spec.samples) == ("tensorboard", 4)


def test_the_tracker_of_ones_own_sends_what_it_says(tmp_path: Path):
    (tmp_path / "tracker.py").write_text(CODE[1])
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    spec = tracker_spec("tracker.py:Webhook", base=tmp_path, url=f"http://127.0.0.1:{server.server_port}")
    with RunObserver(tmp_path / "mine", total_steps=1, also=AlsoRecord(trackers=[spec])) as observer:
        observer.on_step(3, {"rollout/success": 0.5}, [])
    server.shutdown()
    server.server_close()
    assert got == [b'{"run": "mine", "step": 3, "success": 0.5}']
