"""Secrets are planted in every setting that takes one, and looked for in all that a run writes and prints."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from polyturn.cli.main import main
from polyturn.core.errors import EngineError, RewardError
from polyturn.core.serde import to_json
from polyturn.engines.http_client import HttpClient
from polyturn.rewards.code import Sandbox
from polyturn.serving.client import RolloutClient
from polyturn.store.stored_run import open_store
from polyturn.tools.sandbox import SandboxFusionTool
from polyturn.tools.search import SearchTool
from support.runs import call_command, write_tiny_run

WRITTEN, OF_ENV, IN_URL, SENT = "planted-written-1f3a", "planted-env-77c2", "planted-url-90bd", "planted-sent-5e5e"
SECRETS = (WRITTEN, OF_ENV, IN_URL, SENT)


def test_run_writes_none_of_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLANTED_TOKEN", OF_ENV)
    config = write_tiny_run(tmp_path, num_tasks=2)
    settings = {"api_key": WRITTEN, "headers": {"Authorization": f"Bearer {WRITTEN}"}, "token": "${oc.env:PLANTED_TOKEN}",
                "url": f"https://me:{IN_URL}@host/x?token={IN_URL}"}  # fmt: skip
    text = config.read_text().replace("config: {}", f"config: {json.dumps(settings)}")
    assert WRITTEN in text
    config.write_text(text)
    called = call_command(main, "train", config, "train.steps=1", "train.groups_per_step=1", "warm_start.conversations=null")
    assert called.code == 0, called.err
    files = [p for p in (tmp_path / "runs").rglob("*") if p.is_file()]
    assert any(p.name == "config.yaml" for p in files) and len(files) > 3
    told = [called.out.encode(), called.err.encode(), *(p.read_bytes() for p in files)]
    (run,) = {p.parent for p in files if p.name == "config.yaml"}
    told += [json.dumps(to_json(t)).encode() for t in open_store(run).trajectories()]
    assert [secret for secret in SECRETS for one in told if secret.encode() in one] == []
    kept = (run / "config.yaml").read_text()
    assert "${oc.env:PLANTED_TOKEN}" in kept and "https://***@host/x?token=***" in kept


class Echo(BaseHTTPRequestHandler):
    """Refuses every request and quotes all of it, as some servers do."""

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self.rfile.read(length)
        body = f"bad key in {dict(self.headers)}".encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_clients_bring_their_token_and_never_repeat_it(echo: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICE_TOKEN", SENT)
    monkeypatch.setattr("polyturn.rewards.code.NUM_TRIES", 1)
    said = []
    code = SandboxFusionTool({"sandbox_fusion_url": echo, "token_env": "SERVICE_TOKEN", "max_retries": 1})
    search = SearchTool({"retrieval_service_url": echo, "token": SENT, "max_retries": 1})
    for tool, parameters in ((code, {"code": "1"}), (search, {"query_list": ["a"]})):
        instance, _ = await tool.create()
        answer, _, metrics = await tool.execute(instance, parameters)
        await tool.release(instance)
        said.append(f"{answer.text} {metrics}")
    with pytest.raises(EngineError) as refused:
        await RolloutClient(echo, token=SENT).infer_async([{"messages": []}])
    said.append(str(refused.value))
    link = HttpClient(echo, headers={"Authorization": f"Bearer {SENT}"})
    with pytest.raises(EngineError) as refused:
        await link.post("/x")
    await link.close()
    said.append(str(refused.value))
    sandbox = Sandbox(url=echo, token=SENT)
    with pytest.raises(RewardError) as unanswered:
        await asyncio.to_thread(sandbox.run, "1")
    assert "403" in str(unanswered.value) and SENT not in repr(sandbox) + str(unanswered.value)
    assert all("Bearer ***" in one for one in said), said
    assert [one for one in said if SENT in one] == []


def test_log_has_the_traceback_of_a_plugin_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # handlers of earlier commands hide other secrets
    monkeypatch.setenv("PLANTED_TOKEN", OF_ENV)
    (tmp_path / "bad.py").write_text(f"def worth(trajectory):\n    raise KeyError('no {OF_ENV}')\n")
    config = write_tiny_run(tmp_path, num_tasks=2)
    short = ("train.steps=1", "train.groups_per_step=1", "warm_start.conversations=null")
    called = call_command(main, "train", config, "reward.routes={tiny: bad.py:worth}", *short)
    (log,) = (tmp_path / "runs").rglob("log.txt")
    text = log.read_text()
    assert called.code != 0 and "Traceback" in text and 'bad.py", line 2, in worth' in text
    assert OF_ENV not in text and OF_ENV not in called.err
