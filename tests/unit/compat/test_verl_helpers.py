"""Helpers of verl that tools and rewards of users' projects import: buckets, pools, searches, MCP servers."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from polyturn.compat.verl import hdfs_io, math_dapo
from polyturn.compat.verl.agent_loop_utils import get_event_loop
from polyturn.compat.verl.base_tool import BaseTool
from polyturn.compat.verl.configs import AlgoConfig, omega_conf_to_dataclass
from polyturn.compat.verl.import_utils import deprecated
from polyturn.compat.verl.limited import AsyncTokenBucket, TokenBucket
from polyturn.compat.verl.mcp_clients import MCPClientManager
from polyturn.compat.verl.reward_manager import parallel_compute_score_async
from polyturn.compat.verl.sandbox_fusion_tools import PoolMode, SandboxFusionTool, init_execution_pool
from polyturn.compat.verl.search_r1_like_utils import perform_single_search_batch
from polyturn.core.errors import ConfigError, UnknownNameError
from polyturn.tools.schema import ToolResponse
from support.refusals import refuses, refuses_later

pytestmark = pytest.mark.timeout(300)  # servers and processes have to start


class Answers(BaseHTTPRequestHandler):
    """Answers a search for "gone" with an error, and a program with its own text."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("queries") == ["gone"]:
            self.send_error(404)
            return
        docs = [[{"document": {"contents": f"{q}\ntext"}}] for q in asked.get("queries", ()) if q != "nothing"]
        body: dict[str, Any] = {"result": docs}
        if "code" in asked:
            body = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": asked["code"]}}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def url() -> Any:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_search_of_several_queries_is_one_text(url: str) -> None:
    text, known = perform_single_search_batch(url, ["a", "b"], concurrent_semaphore=threading.Semaphore(1))
    assert json.loads(text) == {"result": "Doc 1 (Title: a)\ntext\n---\nDoc 1 (Title: b)\ntext"}
    assert (known["status"], known["total_results"], known["query_count"]) == ("success", 2, 2)
    assert perform_single_search_batch(url, ["nothing"])[1]["status"] == "no_results"
    text, known = perform_single_search_batch(url, ["gone"])
    assert known["status"] == "api_error" and "404" in text and known["api_request_error"].startswith("API Call Failed: ")


async def test_own_tool_runs_code_in_its_pool(url: str) -> None:
    class Retool(SandboxFusionTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            code = f"print({parameters['code']})"
            return await self.execution_pool.execute.remote(self.execute_code, instance_id, code, 60, "python"), 0.5, {}

    schema = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": {"type": "object"}}}
    tool = Retool({"sandbox_fusion_url": url, "num_workers": 3, "rate_limit": 2}, schema)
    answers = await asyncio.gather(*(tool.execute("i", {"code": n}) for n in range(4)))
    assert answers == [(ToolResponse(text=f"print({n})"), 0.5, {}) for n in range(4)]
    nowhere = Retool({"sandbox_fusion_url": "http://127.0.0.1:1/run_code"}, schema)
    assert "no answer" in (nowhere.execute_code("i", "1", 1).text or "")
    assert await init_execution_pool(2).ping.remote()
    refuses(lambda: init_execution_pool(2, mode=PoolMode.ProcessMode), NotImplementedError, "threads")


async def test_token_bucket_may_owe_tokens() -> None:
    bucket = AsyncTokenBucket(rate_limit=1000.0)
    for tokens in (400.0, 600.0, 1500.0, 1.0):
        await bucket.acquire(tokens)
    assert bucket.tokens < 1000.0 and bucket.last_update is not None
    asked = TokenBucket(1e-9)
    asked.tokens = 2.0
    asked.max_tokens = 2.0
    assert [asked.acquire() for _ in range(3)] == [True, True, False]


SCORES = """
def score(task, completion, reference, extra_info):
    if completion == "raise":
        raise ValueError("no number")
    return (completion == reference, extra_info) if task == "tuple" else {"score": 0.5}
"""


async def test_scores_are_computed_in_processes_and_pass_errors_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scores.py").write_text(SCORES)  # a separate file, which processes import quickly
    monkeypatch.syspath_prepend(tmp_path)
    score = importlib.import_module("own_scores").score
    found = await parallel_compute_score_async(score, ["a", "b"], ["a", "c"], ["tuple", "dict"], num_processes=1)
    assert found == [1.0, 0.5]
    await refuses_later(
        lambda: parallel_compute_score_async(score, ["raise"], ["a"], ["dict"], num_processes=1), ValueError, "no number"
    )


async def test_mcp_servers_are_asked_by_tool(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    server = tmp_path / "server.py"
    server.write_text(
        "from mcp.server import MCPServer\napp = MCPServer('s')\n"
        "@app.tool()\ndef twice(text: str) -> str:\n    'Say it twice.'\n    return text * 2\n"
        "@app.tool()\ndef other() -> str:\n    'Nothing.'\n    return ''\napp.run()\n"
    )

    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"s": {"command": sys.executable, "args": [str(server)]}}}))
    manager = MCPClientManager()
    await manager.initialize(file, rate_limit=100)
    await manager.initialize(tmp_path / "gone.json")
    assert [s["function"]["name"] for s in await manager.fetch_tool_schemas(["twice"])] == ["twice"]
    result = await manager.call_tool("twice", {"text": "ab"}, timeout=200)
    assert "abab" in str(result.content)
    await refuses_later(
        lambda: manager.call_tool("other", {}, timeout=1), UnknownNameError, "no MCP server has a tool 'other'"
    )
    await manager.get_client_with_tool_name("twice").close_now()


def test_dapo_scorer_can_be_taken_apart() -> None:
    assert (
        math_dapo.verify("so Answer: $7$", "7")
        == (True, "7")
        == math_dapo.is_correct_minerva("Answer: 7", r"\boxed{7}", True)
    )
    assert math_dapo.verify(r"\boxed{8}", "7", strict_box_verify=True) == (False, "8")
    assert math_dapo.is_correct_strict_box(r"\boxed{7}" + "x" * 120, "7") == (-1, None)
    assert math_dapo.remove_boxed(math_dapo.last_boxed_only_string(r"a \boxed{7} b") or "") == "7"


def test_files_are_copied_on_this_machine_alone(tmp_path: Path) -> None:
    assert hdfs_io.copy_to_local("Qwen/Qwen3-4B", use_shm=False) == "Qwen/Qwen3-4B" and hdfs_io.is_non_local("hdfs://x")
    assert hdfs_io.local_mkdir_safe(str(tmp_path / "a")) == str(tmp_path / "a") and (tmp_path / "a").is_dir()
    hdfs_io.makedirs(str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "b" / "f").write_text("x")
    hdfs_io.copy(str(tmp_path / "a"), str(tmp_path / "c"))
    assert hdfs_io.exists(str(tmp_path / "c" / "b" / "f"))
    assert not hdfs_io.exists(str(tmp_path / "d"))
    for function, path in ((hdfs_io.copy_to_local, "hdfs://x/y"), (hdfs_io.makedirs, "hdfs://host/a")):
        with pytest.raises(ConfigError, match="HDFS"):
            function(path)


@dataclass
class Mine:
    a: int = 1
    b: str = "x"


def test_config_becomes_the_object_of_its_class() -> None:
    assert (
        omega_conf_to_dataclass(OmegaConf.create({"a": 2}), Mine) == Mine(2) and omega_conf_to_dataclass({}, Mine) == Mine()
    )
    assert omega_conf_to_dataclass({"_target_": f"{__name__}.Mine", "b": "y"}) == Mine(b="y")
    for config, cls in (({"a": 1}, None), ({"a": 1}, dict)):
        with pytest.raises(ConfigError):
            omega_conf_to_dataclass(config, cls)


def test_small_helpers_of_projects() -> None:
    @deprecated("new")
    def old(x: int) -> int:
        return x + 1

    @deprecated()
    class Old:
        def __init__(self, x: int) -> None:
            self.x = x

    with pytest.warns(FutureWarning, match=r"old is deprecated\. Please use 'new' instead\."):
        assert old(1) == 2
    with pytest.warns(FutureWarning, match=r"Old is deprecated\.$"):
        assert isinstance(made := Old(3), Old) and made.x == 3
    loop = get_event_loop()

    async def own() -> bool:
        return get_event_loop() is loop

    try:
        assert loop.run_until_complete(own()), "the one that runs, where one does"
    finally:
        loop.close()
    assert AlgoConfig(gamma=0.5).get("gamma") == 0.5 and AlgoConfig().norm_adv_by_std_in_grpo


def test_tool_declares_the_names_that_its_code_looks_up() -> None:
    class Mine(BaseTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            return kwargs.get("create_kwargs", {})

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return kwargs["agent_data"], [parameters.get(name) for name in ("timeout", "stdin")]

    assert {"create_kwargs", "agent_data", "timeout", "stdin"} <= Mine.reads
