"""Calls verl's shipped tools, or polyturn's under the same names, and writes facts about the results to a file.

    PYTHONPATH=UNPACKED_WHEEL python benchmarks/verl_sides.py verl facts.json        an environment in which verl works
    python benchmarks/verl_sides.py polyturn facts.json

Both sides make the same calls to scripted services. Facts are numbers, shapes, fields of requests and digests of texts, but
never a text of verl. verl's pools are Ray actors; here their functions run in threads.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Facts = dict[str, Any]


def passage(text: str) -> Facts:
    return {"document": {"contents": text}, "score": 0.5}


def program(run: Facts | None = None, *, compiled: Facts | None = None, status: str = "Success") -> Facts:
    return {"status": status, "message": "no room", "run_result": run, "compile_result": compiled}


def ended(stdout: str = "", stderr: str = "", *, code: int | None = 0, status: str = "Finished") -> Facts:
    return {"status": status, "return_code": code, "stdout": stdout, "stderr": stderr, "execution_time": 0.1}


PARIS = {"result": [[passage("Paris\nThe capital.\nOf France."), passage("Lyon\nA city.")]]}
ANSWERS: dict[str, Any] = {
    "one": PARIS,
    "two": {"result": [[passage("A\na")], [passage("B\nb"), passage("C\nc")]]},
    "titles": {"result": [[passage("only a title")]]},
    "unicode": {"result": [[passage("Zürich\n日本語 \u00a0x")]]},
    "none": {"result": []},
    "no passages": {"result": [[], []]},
    "no result": {"other": 1},
    "null": None,
    "other form": {"result": [[{"text": "x"}]]},
    "flat": {"result": [passage("A\na")]},
    "page": "<html>",
    "prints": program(ended("4\n")),
    "both": program(ended("out\n", "warning\n")),
    "nothing": program(ended()),
    "raises": program(ended("a\n", "ValueError\n", code=1), status="Failed"),
    "slow": program(ended("a\n", status="TimeLimitExceeded", code=None), status="Failed"),
    "compile error": program(compiled=ended("", "line 1\n", code=1), status="Failed"),
    "compile slow": program(compiled=ended(status="TimeLimitExceeded", code=None), status="Failed"),
    "compiled": program(ended("4\n"), compiled=ended("note\n")),
    "sandbox fails": program(status="SandboxError"),
}
SEARCHES: list[tuple[str, Facts]] = [
    *((case, {"query_list": ["x"]}) for case in ("one", "titles", "unicode", "none", "no passages", "no result", "null")),
    *((case, {"query_list": ["x"]}) for case in ("other form", "flat", "page", "400", "500", "busy", "late", "nobody")),
    ("two", {"query_list": ["a", "b"]}),
    *(("one", parameters) for parameters in ({}, {"query_list": []}, {"query_list": "x"}, {"query_list": [1, 2]})),
]
RUNS: list[tuple[str, Facts]] = [
    *((case, {"code": "x"}) for case in ("prints", "both", "nothing", "raises", "slow", "compile error", "compile slow")),
    *((case, {"code": "x"}) for case in ("compiled", "sandbox fails", "400", "500", "page", "nobody")),
    *(("prints", parameters) for parameters in ({}, {"code": 5}, {"code": "x", "language": "bash"})),
    *(("prints", {"code": "x", "timeout": timeout}) for timeout in (3, 99)),
]
ANSWERED: list[Facts] = [{"answer": a} for a in ("72", "#### 72", 72, "71", None, "72.", "1,000", ["72"], "x")] + [{}]


class Service:
    """A server that answers by the path of a request, and keeps the requests."""

    def __init__(self) -> None:
        requests = self.requests = []  # type: ignore[var-annotated]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                case = self.path[1:].replace("%20", " ")
                code = int(case) if case.isdigit() else 503 if case == "busy" and len(requests) < 3 else 200
                if case == "late":
                    time.sleep(1.0)
                answer = ANSWERS.get(case, PARIS if code == 200 else {})
                raw = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore a client that has disconnected."""

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, case: str) -> str:
        port = 9 if case == "nobody" else self.server.server_port
        return f"http://127.0.0.1:{port}/{case.replace(' ', '%20')}"

    def digest(self, text: str | None) -> str | None:
        """Return a digest of a text, without the server's port."""
        if text is None:
            return None
        return hashlib.sha256(text.replace(str(self.server.server_port), "").encode()).hexdigest()[:12]


def prepare(side: str) -> None:
    """Install polyturn as `verl`, or prepare verl itself to run without Ray and without pauses between tries."""
    if side == "polyturn":
        import polyturn.compat

        polyturn.compat.install("verl")
        return
    import verl.tools.sandbox_fusion_tools as sandbox
    import verl.tools.search_tool as search
    import verl.tools.utils.search_r1_like_utils as search_utils
    import verl.utils.reward_score.sandbox_fusion.utils as sandbox_utils

    threads = ThreadPoolExecutor(4)

    def run(function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(threads, function, *args)

    pool = SimpleNamespace(execute=SimpleNamespace(remote=run))
    search.init_search_execution_pool = sandbox.init_execution_pool = lambda **_: pool
    search_utils.INITIAL_RETRY_DELAY = sandbox_utils.INITIAL_RETRY_DELAY = 0.01


async def called(tool: Any, id: str, parameters: Facts, service: Service) -> Facts:
    """Return the facts of one call."""
    response, reward, metrics = await tool.execute(id, parameters)
    facts = {k: v if k != "api_request_error" else v is not None for k, v in (metrics or {}).items()}
    return {"text": service.digest(response.text), "reward": repr(reward), "metrics": facts}


@contextmanager
def raises(facts: Facts, what: str) -> Iterator[None]:
    """Record which of the usual exceptions the block raises."""
    facts[what] = "nothing"
    try:
        yield
    except (KeyError, ValueError, AssertionError) as problem:
        facts[what] = next(kind.__name__ for kind in (KeyError, ValueError, AssertionError) if isinstance(problem, kind))


async def tools(service: Service) -> Facts:
    """Return the facts of the tools."""
    from verl.tools.gsm8k_tool import Gsm8kTool
    from verl.tools.sandbox_fusion_tools import SandboxFusionTool
    from verl.tools.schemas import OpenAIFunctionToolSchema
    from verl.tools.search_tool import SearchTool

    function = {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}, "required": []}}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    results: Facts = {}
    for name, cls, key, calls in (
        ("search", SearchTool, "retrieval_service_url", SEARCHES),
        ("sandbox", SandboxFusionTool, "sandbox_fusion_url", RUNS),
    ):
        for case, parameters in calls:
            service.requests.clear()
            tool = cls({key: service.url(case), "retry_delay": 0.01, "timeout": 0.3 if case == "late" else 30}, schema)
            id, response = await tool.create("id", ground_truth="72")
            facts = await called(tool, id, parameters, service)
            facts |= {
                "id": id,
                "says_nothing": response.is_empty(),
                "tries": len(service.requests),
                "asked": service.requests[:1],
            }
            results[f"{name} {case} {json.dumps(parameters)}"] = facts
            results[f"{name} calc_reward"] = type(await tool.calc_reward(id)).__name__
            await tool.release(id)
        with raises(results, f"{name} released twice"):
            await tool.release(id)
        with raises(results, f"{name} without a URL"):
            cls({}, schema)
    gsm8k = Gsm8kTool({}, schema)
    for parameters in ANSWERED:
        id, _ = await gsm8k.create(None, ground_truth="72")
        twice = [await called(gsm8k, id, parameters, service) for _ in range(2)]
        results[f"gsm8k {json.dumps(parameters)}"] = [*twice, await gsm8k.calc_reward(id)]
        await gsm8k.release(id)
    return results


def names() -> Facts:
    """Return the members of the enumerations that users compare values with."""
    from verl.experimental.agent_loop.tool_agent_loop import AgentState
    from verl.workers.rollout import schemas

    kinds = (AgentState, *(getattr(schemas, f"{n}Enum") for n in ("AsyncRolloutRequestState", "FinishReasonType")))
    kinds = (*kinds, schemas.TokenizationSanityCheckModeEnum)
    return {f"names {kind.__name__}": {one.name: one.value for one in kind} for kind in kinds}


def main() -> None:
    """Write the facts of a side to a file."""
    side, out = sys.argv[1:]
    prepare(side)
    facts = asyncio.run(tools(Service())) | names()
    as_json = functools.partial(json.dumps, sort_keys=True, ensure_ascii=False)
    lines = (f" {as_json(call)}: {as_json(facts[call])}" for call in sorted(facts))
    Path(out).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
