"""Feeds damaged input to every reader of input: rows, tool calls, configs, HTTP, peers (MCP), people. Prints one JSON line.

    python benchmarks/fuzz.py [--cases 100000] [--seed 0] [--only SURFACE] [--case NUMBER]

A case is damaged valid input (`_corruption.py`), determined by its seed, surface and number: `--only SURFACE --case NUMBER`
repeats it alone, with the whole traceback. It fails if

    it crashes    it raises anything but an error of ours, a server answers 5xx, or a crash is logged
    it hangs      it takes longer than 2 seconds, or never ends
    it is wrong   the result breaks its contract: a call without its text, a row that cannot be written as JSON

The time of every parser on ten times as much text is measured too (`worst_growth`; times under 10 ms count as 10 ms, with the
garbage collector off). The exit code is 1 when anything failed, when growth passes 15, or when memory grew by more than 200 MB.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from _corruption import a_text, as_json, damaged, damaged_bytes, damaged_words
from _fuzz_services import CAME, services

from polyturn.core.errors import PolyturnError
from polyturn.core.serde import to_json
from polyturn.tokens.parsers import ParsedTurn, TurnParser, parsers
from support.parser_samples import PIECES, TOOLS, VARIANTS, WRITINGS, mutate

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 2.0
"""Limit of a case, in seconds of processor time; other processes do not count."""
WAIT_S = 15.0
"""Limit of the wait for a server's answer, in seconds."""
MAX_GROWTH_MB = 200.0
MAX_TIME_GROWTH = 15.0
SHARES = {
    "row": 20,
    "row_bytes": 8,
    "parquet": 3,
    "tool_call": 48,
    "native_config": 2,
    "override": 1,
    "verl_config": 1,
    "swift_config": 2,
    "rollout": 4,
    "sandbox": 3,
    "search": 2,
    "viewer": 2,
    "endpoint": 3,
    "head": 1,
    "mcp_server": 2,
    "mcp_stdio": 1,
    "mcp_http": 1,
    "desk": 1,
}
"""Surface -> weight of its share of all cases."""

ANSWERS: Counter[str] = Counter()
"""Kind of a server's answer -> number of answers."""

Case = Callable[[random.Random], Awaitable[None]]


class Broken(Exception):
    """A result breaks its contract."""


class Hung(BaseException):
    """A case took too long."""


# --- rows ----------------------------------------------------------------------------------------------------------------

NATIVE: dict[str, Any] = {
    "id": "t-1",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
    "ground_truth": "4",
    "data_source": "sums",
    "tools": ["calc"],
    "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}}},
    "interaction": {"name": "gsm8k", "ground_truth": "4"},
}
VERL: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "<image>2+2?"}],
    "images": [{"bytes": "iVBORw0KGgo=", "path": None}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "agent_name": "tool_agent",
    "extra_info": {
        "index": 0,
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}, "execute_kwargs": {}}},
        "interaction_kwargs": {"name": "gsm8k", "query": "2+2?", "ground_truth": "4"},
    },
}
SWIFT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function",
                                                             "function": {"name": "calc", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool_response", "content": "4", "tool_call_id": "a"},
        {"role": "assistant", "content": "4"},
    ],
    "solution": "4",
    "tools": json.dumps(TOOLS),
    "images": ["data:image/png;base64,iVBORw0KGgo="],
    "env_config": {"name": "grid", "seed": 3},
}  # fmt: skip
ROWS = (NATIVE, VERL, SWIFT)


def rows(folder: Path) -> dict[str, Case]:
    """Return the cases of rows, from a file to the prompt's tokens."""
    from polyturn.data.dataset import TaskDataset
    from polyturn.testing.episodes import scripted_context

    encoder = scripted_context(["four"]).encoder_listing(())
    path = folder / "rows.jsonl"

    def read(file: Path) -> None:
        for task in TaskDataset.open(file, split="train"):
            try:
                text = json.dumps(to_json(task))
            except PolyturnError:
                continue
            if not text:
                raise Broken("a task without a record")
            encoder.start(task.prompt)

    async def row(rng: random.Random) -> None:
        path.write_bytes(as_json(damaged(rng.choice(ROWS), rng), rng) + b"\n")
        read(path)

    async def row_bytes(rng: random.Random) -> None:
        whole = b"\n".join(as_json(rng.choice(ROWS), rng) for _ in range(rng.randrange(1, 4)))
        path.write_bytes(damaged_bytes(whole, rng))
        read(path)

    async def parquet(rng: random.Random) -> None:
        file = folder / "rows.parquet"
        records = [damaged(rng.choice(ROWS), rng) for _ in range(rng.randrange(1, 4))]
        columns = {name: [r.get(name) if isinstance(r, dict) else r for r in records] for name in {*NATIVE, *VERL, *SWIFT}}
        table: dict[str, Any] = {}
        for name, values in columns.items():
            try:
                table[name] = pa.array(values)
            except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError):
                table[name] = pa.array([repr(v)[:200].encode("ascii", "replace") for v in values], pa.binary())
        try:
            pq.write_table(pa.table(table), file)
        except (pa.ArrowException, OverflowError):
            return  # parquet cannot store such a row, so none comes from a file
        if rng.random() < 0.3:
            file.write_bytes(damaged_bytes(file.read_bytes(), rng))
        read(file)

    return {"row": row, "row_bytes": row_bytes, "parquet": parquet}


# --- tool calls -----------------------------------------------------------------------------------------------------------


def families() -> dict[str, TurnParser]:
    """Return one parser of each family under its first name."""
    by_name: dict[str, TurnParser] = {}
    for name in parsers:
        family = parsers.resolve(name)
        if issubclass(family, TurnParser) and family not in map(type, by_name.values()):
            by_name[name] = family(calls_in_reasoning=True)
    return by_name


def problem_of(turn: ParsedTurn) -> str | None:
    """Return a parsed turn's violation of the contract of parsers; None if there is none."""
    if len({c.id for c in turn.tool_calls}) < len(turn.tool_calls):
        return "ids are not unique"
    for call in turn.tool_calls:
        if not call.raw:
            return "a call without its text"
        if not call.name and not call.error:
            return "a broken call without a reason"
        try:
            json.dumps(dict(call.arguments), allow_nan=False)
        except (TypeError, ValueError) as problem:
            return f"arguments that are not JSON ({problem})"
    return None


def calls() -> dict[str, Case]:
    """Return the cases of tool calls: damaged turns, parsed by their own parser or another."""
    by_name = families()
    seeds = [(name, text) for name, text in (*WRITINGS.items(), *VARIANTS)]
    by_family: dict[Any, TurnParser] = {type(parser): parser for parser in by_name.values()}

    async def tool_call(rng: random.Random) -> None:
        name, text = rng.choice(seeds)
        family = parsers.resolve(name)
        parser = by_family.get(family) if rng.random() < 0.9 else rng.choice(list(by_name.values()))
        turn = (parser or rng.choice(list(by_name.values()))).parse(mutate(text, rng), tools=TOOLS)
        if (problem := problem_of(turn)) is not None:
            raise Broken(problem)

    return {"tool_call": tool_call}


OPENERS = (
    *("", "<tool_call>f<arg_key>k</arg_key><arg_value>", "<tool_call><function=f><parameter=a>"),
    *('<minimax:tool_call><invoke name="f"><parameter name="a">', "<|python_start|>[f(a='", "[TOOL_CALLS][", '{"name": "'),
    "<think>",
)


def growth() -> tuple[float, float]:
    """Return the worst ratio over all parsers of the time for ten times the text, and the longest time in seconds."""
    worst, longest = 0.0, 0.0
    for parser in families().values():
        for opener in OPENERS:
            for piece in PIECES:
                short, long = (opener + piece * (length // len(piece)) for length in (20_000, 200_000))
                seconds = min(_seconds(parser, long) for _ in range(2))
                worst = max(worst, seconds / max(min(_seconds(parser, short) for _ in range(2)), 0.01))
                longest = max(longest, seconds)
    return worst, longest


def _seconds(parser: TurnParser, text: str) -> float:
    gc.disable()  # its cost depends on all objects of the process
    start = time.process_time()
    parser.parse(text, tools=TOOLS)
    seconds = time.process_time() - start
    gc.enable()
    return seconds


# --- configurations --------------------------------------------------------------------------------------------------------

OVERRIDES = (
    *("train.steps=3", "rollout.limits.max_turns=4", "model.path=tiny", "engine={num_slots: 8}", "name=x", "plugins=[a.py]"),
    *("train.optim.lr=1e-4", "evaluation.sets.greedy.sampling.temperature=0", "data.train.kwargs.seed=${seed}"),
)
OF_VERL = (
    *(
        "data.train_batch_size=4",
        "actor_rollout_ref.model.path=tiny",
        "trainer.total_epochs=1",
        "algorithm.adv_estimator=grpo",
    ),
    *("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.kl_loss_coef=0.01"),
    *("data.max_response_length=64", "data.train_files=[a.parquet]", "++trainer.x=1", "~trainer.logger"),
)
OF_SWIFT = (
    *("--model", "tiny", "--reward_funcs", "accuracy", "format", "--use_vllm", "true", "--num_generations", "8"),
    *("--max_turns", "3", "--dataset", "a.jsonl", "--learning_rate", "1e-6", "--external_plugins", "p.py", "--beta", "0.0"),
)


def configs(folder: Path) -> dict[str, Case]:
    """Return the cases of configurations, in our keys and in those of two other libraries."""
    from polyturn.compat.swift.args.arguments import parse, read, rollout_to_native, to_native
    from polyturn.compat.verl_config.compose import compose_file, compose_name
    from polyturn.compat.verl_config.translate import translate
    from polyturn.config.load import load_config, load_values
    from polyturn.config.models import RunConfig
    from polyturn.config.translate.paths import absolute

    examples = [
        yaml.safe_load((ROOT / f"{n}/config.yaml").read_text())
        for n in ("examples/quickstart", "tests/data/projects/thinking_tips")
    ]
    of_verl = yaml.safe_load((ROOT / "tests/data/verl_project/quickstart/config.yaml").read_text())
    of_swift = {"model": "tiny", "reward_funcs": ["accuracy", "format"], "num_generations": 8, "dataset": ["a.jsonl"],
                "max_turns": 3, "learning_rate": 1e-6, "external_plugins": ["p.py"], "use_vllm": True, "beta": 0.0}  # fmt: skip
    path = folder / "config.yaml"

    def some(of: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
        """Return a few of the sections, and the required one."""
        return {k: v for k, v in of.items() if k == "model" or rng.random() < 0.3}

    def write(value: Any, rng: random.Random) -> None:
        text = yaml.safe_dump(value, allow_unicode=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        path.write_bytes(damaged_bytes(text, rng) if rng.random() < 0.4 else text)

    async def native_config(rng: random.Random) -> None:
        write(_yamlable(damaged(some(rng.choice(examples), rng), rng)), rng)
        load_config(RunConfig, path)

    async def override(rng: random.Random) -> None:
        load_config(RunConfig, None, damaged_words(OVERRIDES, rng, a_text), defaults=some(rng.choice(examples), rng))

    async def verl_config(rng: random.Random) -> None:
        words = damaged_words(OF_VERL, rng, a_text)
        if rng.random() < 0.5:
            write(_yamlable(damaged(of_verl, rng)), rng)
            tree = compose_file(path, words[: rng.randrange(3)])
        else:
            tree = compose_name("ppo_trainer", folder=None, overrides=words)
        translation = translate(tree)
        load_values(RunConfig, absolute(translation, folder=folder), origin=translation.origin)

    async def swift_config(rng: random.Random) -> None:
        words = damaged_words(OF_SWIFT, rng, a_text)
        kind = rng.randrange(3)
        if kind == 0:
            write(_yamlable(damaged(of_swift, rng)), rng)
            translation = to_native(read(path))
        else:
            translation = to_native(parse(words)) if kind == 1 else rollout_to_native(words)
        native = absolute(translation, folder=folder)
        native.pop("serve", None)
        load_values(RunConfig, native, origin=translation.origin)

    return {"native_config": native_config, "override": override, "verl_config": verl_config, "swift_config": swift_config}


def _yamlable(value: Any) -> Any:
    """Return data that can be written as YAML."""
    if isinstance(value, Mapping):
        return {str(k).encode("utf-8", "replace").decode(): _yamlable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_yamlable(v) for v in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


# --- servers ----------------------------------------------------------------------------------------------------------------

PATHS = ("/", "/health", "/infer/", "/run_code", "/retrieve", "/update_weights/", "/probe/", "/init_communicator/",
         "/update_named_param/", "/api/runs",
         "/api/runs/0/trajectories", "/api/runs/0/trajectory", "/api/runs/0/groups", "/api/runs/0/timeline",
         "/api/runs/0/metrics", "/api/runs/0/config", "/static/app.js", "/v1/models", "/episodes")  # fmt: skip
QUERIES = ("", "version=1", "since=0", "step=1&split=train", "id=g1/0&step=1", "sort=reward&desc=1&limit=10&offset=0",
           "min_reward=0.5&where=reward < 1", "text=a&errors=1", "where=1=1; drop table x", "token=x")  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "calc", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ],
    "tools": list(TOOLS),
    "tool_choice": "auto",
    "temperature": 0.7,
    "max_tokens": 16,
    "n": 1,
    "stop": ["x"],
    "seed": 1,
    "stream": False,
    "logprobs": True,
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 16,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find", "input": {"query": "a"}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]}],
        },
    ],
    "tools": [{"name": "find", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
    "stop_sequences": ["x"],
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ],
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
    "max_output_tokens": 16,
    "previous_response_id": None,
}
BODIES: dict[str, dict[str, Any]] = {
    "/infer/": {
        "infer_requests": [
            {"messages": [{"role": "user", "content": "2+2?"}], "data_dict": {"solution": "4", "env_config": {"name": "g"}},
             "uuid": "a", "images": ["data:image/png;base64,AAAA"], "tools": list(TOOLS)},
        ],
        "request_config": {"temperature": 1.0, "max_tokens": 8, "seed": 3, "top_p": 1.0, "top_k": 5},
        "timeout_s": 1.0,
    },
    "/run_code": {"code": "1", "language": "python", "stdin": "", "run_timeout": 5, "files": {"a": "YQ=="}, "fetch_files": ["a"]},
    "/retrieve": {"queries": ["Oslo", "where is Rome"], "topk": 2, "return_scores": True},
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/episodes": {"metadata": {"task": "t"}, "seed": 1},
}  # fmt: skip


def head_of(rng: random.Random, *, path: str, length: int) -> tuple[str, str, list[tuple[bytes, bytes]]]:
    """Return the method, the target and the headers of a request, mostly right ones."""
    method = "POST" if rng.random() < 0.9 or length else rng.choice(("GET", "PUT", "HEAD", "OPTIONS", "\x7f", "get"))
    query = rng.choice(QUERIES)
    if rng.random() < 0.3:
        query = quote((damaged_words([query], rng, a_text) or [""])[0][:300], safe="=&", errors="replace")
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    if rng.random() < 0.1:
        name = rng.choice((b"host", b"origin", b"authorization", b"content-length", b"content-type", b"cookie", b"x-api-key",
                           b"content-encoding", b"transfer-encoding", b"expect", b"range"))  # fmt: skip
        value = a_text(rng)[:200].encode("utf-8", "replace").translate(None, b"\r\n\x00")
        headers = [h for h in headers if h[0] != name] + [(name, value)]
    return method, f"{path}?{query}" if query else path, headers


async def ask_asgi(app: Any, rng: random.Random, path: str, body: bytes, *, method: str | None = None) -> int:
    """Send a request to an ASGI application as a server would, and return the status; 0 if it did not answer."""
    drawn_method, target, headers = head_of(rng, path=path, length=len(body))
    plain, _, query = target.partition("?")
    pieces = [body[i : i + 700] for i in range(0, len(body), 700)] if rng.random() < 0.2 else [body]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.sleep(0)
            return {"type": "http.disconnect"}
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method or drawn_method, "path": plain,
             "raw_path": plain.encode("utf-8", "replace"), "query_string": query.encode("utf-8", "replace"), "headers": headers,
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http", "root_path": "", "state": {}}  # fmt: skip
    await app(scope, receive, send)
    return statuses[0] if statuses else 0


def body_of(path: str, rng: random.Random) -> bytes:
    """Return a damaged body for a path."""
    valid = BODIES.get(path) or rng.choice(list(BODIES.values()))
    value = damaged(valid, rng)
    body = as_json(value, rng)
    return damaged_bytes(body, rng) if rng.random() < 0.2 else body


def check(status: int) -> None:
    """Count an answer, and fail the case if the server crashed."""
    ANSWERS[f"{status // 100}xx" if status else "closed"] += 1
    if status >= 500 and status not in (501, 503):
        raise Broken(f"the server answered {status}")


@asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[dict[str, Case]]:
    """Yield the cases of all servers; the endpoint and a uvicorn server listen on real sockets."""
    import torch
    import uvicorn

    from polyturn.sandbox.python.limits import RunResult
    from polyturn.serving import RolloutService
    from polyturn.serving import app as rollout_app
    from polyturn.serving import sandbox as sandbox_app
    from polyturn.serving.auth import ServerRules
    from polyturn.serving.listen import bind, http_config
    from polyturn.serving.openai.endpoint import EndpointOptions
    from polyturn.serving.openai.hosted_episodes import OpenAIService
    from polyturn.testing.episodes import scripted_context
    from polyturn.viewer import app as viewer_app
    from polyturn.viewer.run_view import RunView

    class Runs(sandbox_app.SandboxService):
        """Runs no program: only the request is damaged."""

        def __init__(self) -> None:
            pass

        async def run(self, request: sandbox_app.Program) -> RunResult:
            request.model_dump_json()
            return RunResult(status="ok", exit_code=0, is_alive=True)

    rules = ServerRules(max_body_bytes=1 << 20)
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": NaN}\n{"step":\n')
    service = RolloutService(scripted_context(["four"]), deadline_s=1.0)
    apps: dict[str, tuple[Any, tuple[str, ...]]] = {
        "rollout": (
            rollout_app.create_app(service, model=torch.nn.Linear(1, 1), rules=rules),
            tuple(p for p in PATHS[:11]) + ("/infer/",) * 20,
        ),
        "sandbox": (sandbox_app.create_app(Runs(), rules=rules), ("/run_code",) * 9 + PATHS),
        "viewer": (viewer_app.create_app([RunView(folder / "run")], rules=rules), PATHS),
    }
    stack = AsyncExitStack()
    try:
        from polyturn.retrieval.index import SearchIndex, build_index
        from polyturn.retrieval.passages import Passage
        from polyturn.retrieval.searcher import Searcher
        from polyturn.serving import search as search_app

        build_index([Passage(id=n, contents=f"{n}\n{n} is a city.") for n in ("Oslo", "Rome")], folder / "index")
        searcher = Searcher(SearchIndex.open(folder / "index"))
        searcher.open()
        stack.push_async_callback(searcher.close)
        apps["search"] = (search_app.create_app(searcher, rules=rules), ("/retrieve",) * 9 + PATHS)
    except ModuleNotFoundError as missing:
        print(f"search is left out: {missing.name} is not installed", file=sys.stderr)

    def of(app: Any, paths: tuple[str, ...], name: str) -> Case:
        async def case(rng: random.Random) -> None:
            path = rng.choice(paths)
            if rng.random() < 0.05:
                path = "/" + a_text(rng)[:100].lstrip("/")
            reads = name == "viewer"
            body = b"" if reads else body_of(path, rng)
            check(await ask_asgi(app, rng, path, body, method="GET" if reads and rng.random() < 0.95 else None))

        return case

    openai = OpenAIService(scripted_context(["four"]), EndpointOptions(rules=rules), max_episodes=1 << 30, idle_s=5.0)
    bound, until = bind("127.0.0.1", 0), asyncio.Event()
    running = asyncio.create_task(openai.serve(bound, until, grace_s=0.1))
    plain, plain_bound = apps["sandbox"][0], bind("127.0.0.1", 0)
    server = uvicorn.Server(http_config(plain, rules))
    plainly = asyncio.create_task(server.serve(sockets=[plain_bound]))
    ports = {"endpoint": bound.getsockname()[1], "plain": plain_bound.getsockname()[1]}
    chats = [p for p in BODIES if p.startswith(("/v1/", "/episodes"))]

    async def endpoint(rng: random.Random) -> None:
        path = rng.choice(chats)
        body = body_of(path, rng)
        method, target, headers = head_of(rng, path=path, length=len(body))
        line = f"{method} {quote(target, safe='/?=&%')} HTTP/1.1\r\n".encode("latin-1", "replace")
        head = line + b"".join(k + b": " + v + b"\r\n" for k, v in headers) + b"connection: close\r\n\r\n"
        status = await ask_socket(ports["endpoint"], head + body)
        check(status)

    async def head(rng: random.Random) -> None:
        body = body_of("/run_code", rng)[:2000]
        lines = [b"POST /run_code HTTP/1.1", b"Host: localhost", b"Content-Length: " + str(len(body)).encode()]
        text = damaged_bytes(b"\r\n".join(lines) + b"\r\nConnection: close\r\n\r\n", rng) + body
        check(await ask_socket(ports[rng.choice(("endpoint", "plain"))], text, may_close=True))

    cases = {name: of(app, paths, name) for name, (app, paths) in apps.items()}
    try:
        yield {**cases, "endpoint": endpoint, "head": head}
    finally:
        until.set()
        server.should_exit = True
        await asyncio.gather(running, plainly)
        await service.stop(0.0)
        await stack.aclose()


async def ask_socket(port: int, data: bytes, *, may_close: bool = False) -> int:
    """Send bytes to a server, and return the status; 0 if it closed the connection instead."""
    connection = socket.socket()
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(connection, ("127.0.0.1", port))
        try:
            await loop.sock_sendall(connection, data)
            if may_close:
                connection.shutdown(socket.SHUT_WR)
            answer = await loop.sock_recv(connection, 4096)
        except (ConnectionResetError, BrokenPipeError):
            return 0
        words = answer.split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    finally:
        connection.close()


# --- running ----------------------------------------------------------------------------------------------------------------


class Crashes(logging.Handler):
    """A log handler that collects crashes that are logged instead of raised."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Record errors that are not polyturn's own."""
        is_of_sdk = record.name.partition(".")[0] in ("mcp", "client")  # an SDK reports input that it cannot read
        problem = record.exc_info[1] if record.exc_info and not is_of_sdk else None
        if problem is not None and not isinstance(problem, PolyturnError | asyncio.CancelledError):
            self.errors.append(problem)


ACCEPTED = Exception("the damaged input was accepted or answered")


def _too_late(number: int, frame: Any) -> None:
    raise Hung


async def run_case(case: Case, rng: random.Random, crashes: Crashes) -> BaseException | None:
    """Run one case; return its failure, None if an error of ours rejected the input, or ACCEPTED."""
    crashes.errors.clear()
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * DEADLINE_S)
    start = time.process_time()
    try:
        async with asyncio.timeout(WAIT_S):
            await case(rng)
        is_accepted = True
    except PolyturnError:
        is_accepted = False
    except Hung as problem:
        return problem
    except Exception as problem:
        return Hung(f"no answer within {WAIT_S:g} s") if isinstance(problem, TimeoutError) else problem
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if time.process_time() - start > DEADLINE_S:
        return Hung(f"it took {time.process_time() - start:.1f} s")
    return crashes.errors[0] if crashes.errors else ACCEPTED if is_accepted else None


async def fuzz(cases: int, *, seed: int, only: str | None = None, number: int | None = None) -> dict[str, Any]:
    """Run cases and return the counts; each failure is printed on stderr with the command to repeat it."""
    crashes = Crashes()
    logging.getLogger().addHandler(crashes)
    signal.signal(signal.SIGVTALRM, _too_late)
    failed: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    hangs, num_failures, accepted = 0, 0, 0
    ANSWERS.clear()
    CAME.clear()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        others = services(folder, ask_socket=ask_socket, ask_asgi=ask_asgi, check=check)
        async with servers(folder) as own, others as more:
            surfaces: dict[str, Case] = {**rows(folder), **calls(), **configs(folder), **own, **more}
            chosen = [n for n in SHARES if n in surfaces and only in (None, n)]
            total = sum(SHARES[n] for n in chosen)
            for surface in chosen if number is None else ():  # imports and first builds are not measured
                for index in range(max(1, min(20, cases // 100))):
                    await run_case(surfaces[surface], random.Random(f"{surface}/{index}"), crashes)
            gc.collect()
            before = _rss_mb()
            for surface in chosen:
                numbers = range(max(1, cases * SHARES[surface] // total)) if number is None else [number]
                start = time.monotonic()
                for index in numbers:
                    problem = await run_case(surfaces[surface], random.Random(f"{seed}/{surface}/{index}"), crashes)
                    counts[surface] += 1
                    accepted += problem is ACCEPTED
                    if problem is None or problem is ACCEPTED:
                        continue
                    failed[surface] += 1
                    hangs += isinstance(problem, Hung)
                    num_failures += 1
                    if num_failures <= 30 or number is not None:
                        last = traceback.extract_tb(problem.__traceback__)[-1:]
                        where = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in last)
                        print(f"--only {surface} --case {index} --seed {seed}: {problem!r:.200}{where}", file=sys.stderr)
                    if number is not None:
                        traceback.print_exception(problem)
                seconds[surface] = round(time.monotonic() - start, 1)  # type: ignore[assignment]
            gc.collect()
            after = _rss_mb()
    logging.getLogger().removeHandler(crashes)
    return {
        "cases": counts.total(),
        "surfaces": len(counts),
        "crashes": failed.total() - hangs,
        "hangs": hangs,
        "accepted": accepted,
        "answers": dict(ANSWERS),
        "calls": dict(CAME),
        "failed": dict(failed),
        "seconds": dict(seconds),
        "grown_mb": round(max(0.0, after - before), 1),
    }


def _rss_mb() -> float:
    text = Path("/proc/self/status")
    if not text.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return float(text.read_text().split("VmRSS:")[1].split()[0]) / 1024


def main() -> int:
    """Run the cases and print the JSON line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=list(SHARES))
    options.add_argument("--case", type=int)
    args = options.parse_args()
    logging.getLogger("polyturn").setLevel(logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.lastResort = None
    result = asyncio.run(fuzz(args.cases, seed=args.seed, only=args.only, number=args.case))
    if args.only is None:
        worst, longest = growth()
        result |= {"parsers": len(families()), "worst_growth": round(worst, 2), "longest_200k_chars_s": round(longest, 4)}
    print(json.dumps(result))
    is_bad = result["crashes"] or result["hangs"] or result["grown_mb"] > MAX_GROWTH_MB
    return 1 if is_bad or result.get("worst_growth", 0) > MAX_TIME_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
