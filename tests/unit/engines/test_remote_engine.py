"""The decisions of the clients of servers, against a small real server that follows a script. tests/contract tests real
engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from polyturn.core.errors import EngineBusyError, EngineError, EngineGoneError, EngineLostError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.core.protocols import EngineLoad
from polyturn.engines.base import MeanOverTime
from polyturn.engines.dialect import HttpCall
from polyturn.engines.http_client import HttpClient
from polyturn.engines.launcher import LaunchSpec
from polyturn.engines.options import ServerOptions
from polyturn.engines.pool import EnginePool
from polyturn.engines.remote import FOREIGN_VERSION, RemoteEngine
from polyturn.engines.request_limits import ServedModel, read_ids, read_logprobs
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.supervisor import ServerSupervisor
from polyturn.engines.vllm import VllmEngine
from polyturn.engines.weights.folder import WeightFolder, WrittenWeights
from polyturn.engines.weights.transfer import WeightTransfer
from support.echo_server import EchoEngine
from support.refusals import refuses, refuses_later
from support.services import Handler, serving


class Echo(EchoEngine):
    """Speaks to a server that answers with one token, and says each part of an update."""

    def _call(self, request: GenerateRequest, wire_id: str) -> HttpCall:
        return HttpCall("/generate", {"ids": request.prompt_ids, "id": wire_id})

    def _read(self, request: GenerateRequest, reply: Any) -> Completion:
        return super()._read(request, {"tag": "", "pid": 0, "bytes": 0, **reply})

    async def _abort(self, wire_id: str) -> None:
        await self._post("/abort", {"id": wire_id})

    async def _pause(self) -> None:
        await self._post("/pause")

    async def _loaded(self) -> None:
        await self._post("/loaded")

    async def _forget(self) -> None:
        await self._post("/forget")

    async def _resume(self) -> None:
        await self._post("/resume")


@contextlib.asynccontextmanager
async def echo(handler: Handler, kind: type[Echo] = Echo, *, max_context: int | None = None, **options: Any) -> Any:
    """Yield a client of a server that answers with `handler`."""
    async with serving(handler) as url:
        engine = kind(url, ServedModel(vocab_size=10, max_context=max_context), **options)
        try:
            yield engine
        finally:
            await engine.close()


def ask(name: str = "r", **options: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, session_id=name, prompt_ids=[1, 2], **{"sampling": SamplingParams(max_tokens=4)} | options
    )


def answering(*statuses: int, asked: list[str] | None = None) -> Handler:
    """Answer with each status once, then with the last one again and again."""
    left = list(statuses)

    async def handle(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(request.path)
        if request.path != "/generate":
            return web.json_response({})
        status = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response({"token": 7}, status=status)

    return handle


@pytest.mark.parametrize(
    ("status", "error"), [(400, EngineError), (500, EngineLostError), (502, EngineLostError), (503, EngineBusyError)]
)
async def test_status_decides_the_error(status: int, error: type[EngineError]) -> None:
    async with serving(answering(status)) as url:
        link = HttpClient(url)
        with pytest.raises(EngineError, match=f"answered {status}") as caught:
            await link.post("/generate")
        assert type(caught.value) is error
        await link.close()


async def test_full_server_is_asked_again() -> None:
    async with echo(answering(503, 429, 200)) as engine:
        assert (await engine.generate(ask())).token_ids.tolist() == [7]
        assert engine.num_busy == 2


async def test_server_that_stays_full_is_lost() -> None:
    async with echo(answering(503)) as engine:
        engine._busy_limit_s = 0.2
        await refuses_later(lambda: engine.generate(ask()), EngineLostError, "answered 503")


async def test_request_at_a_full_server_ends_at_its_deadline() -> None:
    async with echo(answering(503)) as engine:
        late = await engine.generate(ask(deadline=asyncio.get_running_loop().time() + 0.02))
        assert (len(late.token_ids), late.finish_reason) == (0, FinishReason.ABORT)


async def test_request_that_waits_for_the_weights_ends_when_asked(tmp_path: Path) -> None:
    is_loading, may_load, asked = asyncio.Event(), asyncio.Event(), list[str]()

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/load":
            is_loading.set()
            await may_load.wait()
        return web.json_response({"token": 7})

    async with echo(handle) as engine:
        update = asyncio.create_task(engine.update_weights(1, weights=WrittenWeights(tmp_path)))
        await is_loading.wait()
        late = asyncio.create_task(engine.generate(ask("late", deadline=asyncio.get_running_loop().time())))
        aborted = asyncio.create_task(engine.generate(ask("aborted")))
        while "aborted" not in engine._live:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.abort("aborted")
        done, _ = await asyncio.wait({late, aborted}, timeout=60)
        may_load.set()
        await update
        assert done == {late, aborted}
        assert {task.result().finish_reason for task in done} == {FinishReason.ABORT} and "/generate" not in asked


async def test_hanging_server_is_given_up_for_all_requests() -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.json_response({})

    async with echo(silent, options=ServerOptions(kind="vllm", health_s=0.1)) as engine:
        asked = [asyncio.create_task(engine.generate(ask(f"r{i}"))) for i in range(3)]
        for task in asked:
            with pytest.raises(EngineLostError, match="accepts requests and does not answer them"):
                await task


async def test_server_that_does_not_answer_is_not_back() -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.json_response({})

    async with serving(silent) as url:
        engine = VllmEngine(url, ServedModel(vocab_size=10), options=ServerOptions(kind="vllm", health_s=0.1))
        await refuses_later(engine.revive, EngineLostError, url, "within 0.1 s")
        await engine.close()


class Unhealthy:
    """The supervisor of a running server that fails its health checks; counts the restarts."""

    num_restarts = 0

    def __init__(self, url: str) -> None:
        self.url, self.server = url, self

    async def start(self) -> Unhealthy:
        return self

    async def again(self, why: str) -> Unhealthy:
        self.num_restarts += 1
        return self

    async def is_dead(self) -> bool:
        return False

    async def stop(self) -> None:
        pass


async def test_restart_and_update_end_the_silence_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("polyturn.engines.remote.time", SimpleNamespace(monotonic=lambda: clock.now))

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({}, status=500 if request.path == "/health" else 200)

    async with serving(handle) as url:
        supervisor = Unhealthy(url)
        engine = Echo(url, ServedModel(vocab_size=10), supervisor=supervisor)  # type: ignore[arg-type]
        num_restarts = []
        for now in (0.0, 61.0, 62.0):
            clock.now = now
            await refuses_later(engine.revive, EngineLostError, "/health answered 500")
            num_restarts.append(supervisor.num_restarts)
        await engine.update_weights(1, weights=WrittenWeights(tmp_path))
        clock.now = 1000.0
        await refuses_later(engine.revive, EngineLostError, "/health answered 500")
        await engine.close()
    assert [*num_restarts, supervisor.num_restarts] == [0, 1, 1, 1]


class Starting:
    """A supervisor whose server starts once `may_start` is set; counts the starts and those that are broken off."""

    num_restarts, server = 0, None

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_asked, self.may_start = asyncio.Event(), asyncio.Event()
        self.num_starts = self.num_broken = 0

    async def start(self) -> Starting:
        self.num_starts += 1
        self.is_asked.set()
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.num_broken += 1
            raise
        return self

    async def stop(self) -> None:
        pass


async def test_aborted_and_late_requests_do_not_wait_for_the_start() -> None:
    async with serving(answering(200)) as url:
        supervisor = Starting(url)
        engine = Echo("", ServedModel(vocab_size=10), supervisor=supervisor)  # type: ignore[arg-type]
        soon = asyncio.get_running_loop().time() + 0.05
        first, late, last = (
            asyncio.create_task(engine.generate(ask(name, deadline=soon if name == "late" else None)))
            for name in ("first", "late", "last")
        )
        await supervisor.is_asked.wait()
        await engine.abort("first")
        done, _ = await asyncio.wait({first, late}, timeout=60)
        assert done == {first, late} and {task.result().finish_reason for task in done} == {FinishReason.ABORT}
        assert not last.done()
        supervisor.may_start.set()
        assert (await last).token_ids.tolist() == [7]
        assert (supervisor.num_starts, supervisor.num_broken) == (1, 0)
        await engine.close()


async def test_close_breaks_off_the_start_and_fails_its_requests() -> None:
    supervisor = Starting("http://127.0.0.1:9")
    engine = Echo("", ServedModel(vocab_size=10), supervisor=supervisor)  # type: ignore[arg-type]
    waiting = asyncio.create_task(engine.generate(ask()))
    updating = asyncio.create_task(engine.update_weights(0))
    await supervisor.is_asked.wait()
    async with asyncio.timeout(60):
        await engine.close()
    for task in (waiting, updating):
        await refuses_later(lambda task=task: task, EngineError, "closed")  # type: ignore[misc]
    assert (supervisor.num_starts, supervisor.num_broken) == (1, 1)


async def test_close_aborts_live_requests_and_leaves_nothing_behind() -> None:
    asked, aborted = list[str](), list[str]()

    async def handle(request: web.Request) -> web.Response:
        name = (await request.json())["id"]
        (aborted if request.path == "/abort" else asked).append(name)
        if request.path == "/generate":
            await asyncio.Event().wait()
        return web.json_response({})

    async with serving(handle) as url:
        engine = Echo(url, ServedModel(vocab_size=10), options=ServerOptions(kind="vllm", max_in_flight=2))
        running, cancelled, waiting = (asyncio.create_task(engine.generate(ask(f"r{i}"))) for i in range(3))
        while len(asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cancelled.cancel()
        await engine.close()
        for task in (running, waiting):
            await refuses_later(lambda task=task: task, EngineError, "closed")  # type: ignore[misc]
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert sorted(aborted) == sorted(asked) and len(asked) == 2
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "polyturn-echo"]
        assert engine._link._client._session is None


async def test_request_without_a_slot_ends_when_asked() -> None:
    may_answer = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/generate":
            await may_answer.wait()
        return web.json_response({"token": 7})

    async with echo(handle, options=ServerOptions(kind="vllm", max_in_flight=1)) as engine:
        soon = asyncio.get_running_loop().time() + 0.05
        first, aborted, late, last = (
            asyncio.create_task(engine.generate(ask(name, deadline=soon if name == "late" else None)))
            for name in ("first", "aborted", "late", "last")
        )
        await asyncio.sleep(0.01)
        await engine.abort("aborted")
        done, _ = await asyncio.wait({aborted, late}, timeout=60)
        assert done == {aborted, late} and {task.result().finish_reason for task in done} == {FinishReason.ABORT}
        may_answer.set()
        assert [(await task).token_ids.tolist() for task in (first, last)] == [[7], [7]]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> ServerOptions:
    """Look at a server every 50 ms, and let each answer take a minute."""
    monkeypatch.setattr("polyturn.engines.remote.LOOK_SHARE", 0.05 / 60)
    return ServerOptions(kind="vllm", health_s=60.0)


async def test_slow_healthy_server_is_waited_for(patient: ServerOptions) -> None:
    asked, is_trusted = itertools.count(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        if request.path == "/generate":
            await is_trusted.wait()
        elif next(asked) == 4:
            is_trusted.set()
        return web.json_response({"token": 7})

    async with echo(slow, options=patient) as engine:
        assert (await engine.generate(ask())).token_ids.tolist() == [7]


VLLM_METRICS = """# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1.0
"""


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_load_of_a_server_is_read(kind: type[RemoteEngine]) -> None:
    """vLLM in its metrics, SGLang under /v1/loads; a pool adds up waiting requests and takes the mean use."""

    async def tell(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            return web.Response(text=VLLM_METRICS)
        ranks = [{"num_waiting_reqs": 3, "token_usage": 0.5}, {"num_waiting_reqs": 1, "token_usage": 1.0}]
        return web.json_response({"loads": ranks})

    async with serving(tell) as url:
        engine = kind(url, ServedModel(vocab_size=10))
        engine._loads += [await engine._read_load(), None]
        pool = EnginePool([engine])
        found = pool.read_metrics()
        assert (found["engine/queue"], found["engine/kv_use"]) == (pytest.approx(4.0), 0.75)
        assert "engine/kv_use" not in pool.read_metrics() and engine.read_metrics() == {}
        await pool.close()


async def test_load_is_read_while_requests_run(patient: ServerOptions) -> None:
    """A server whose load cannot be read still answers."""
    is_seen = asyncio.Event()

    class Loaded(Echo):
        async def _read_load(self) -> EngineLoad | None:
            if self._loads:
                is_seen.set()
                raise EngineError("404")
            return EngineLoad(2.0, 0.25)

    async def slow(request: web.Request) -> web.Response:
        if request.path == "/generate":
            await is_seen.wait()
            seen.append(pool.load)
        return web.json_response({"token": 7})

    seen: list[EngineLoad] = []
    async with echo(slow, Loaded, options=patient) as engine:
        pool = EnginePool([engine])
        assert (await engine.generate(ask())).token_ids.tolist() == [7]
        assert seen == [EngineLoad(2.0, 0.25)] and pool.load == EngineLoad(0.0, 0.0)
        assert engine.read_metrics() == {"engine/queue": 2.0, "engine/kv_use": 0.25}


async def test_server_with_a_load_of_another_form_is_healthy() -> None:
    async def tell(request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 1}]})

    async with serving(tell) as url:
        engine = SglangEngine(url, ServedModel(vocab_size=10))
        await engine.look()
        await engine.close()


async def test_context_of_the_server_bounds_prompts() -> None:
    async with echo(answering(200), max_context=100) as engine:
        with pytest.raises(EngineError, match="prompt plus completion may have 64"):
            await engine.generate(GenerateRequest(request_id="r", session_id="r", prompt_ids=[1] * 70))


def running(version: str, *, backend: str | None = None) -> Handler:
    """Answer as a running vLLM server of a version, with a transfer of weights or without."""
    config = {
        "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
        "aux_output_config": {"enable_return_routed_experts": False},
        "weight_transfer_config": None if backend is None else {"backend": backend},
    }

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": config, "world_size": 1, "version": version, "success": True})

    return handle


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_address_of_another_service_is_refused(kind: type[RemoteEngine]) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html></html>", content_type="text/html")

    async with serving(page) as url:
        engine = kind(url, ServedModel(vocab_size=10))
        await refuses_later(lambda: engine.generate(ask()), EngineError, url, "engine.kind")
        await engine.close()


async def test_temperature_that_vllm_would_raise_is_refused() -> None:
    async with serving(running(VllmEngine.tested_version)) as url:
        engine = VllmEngine(url, ServedModel(vocab_size=10))
        for cold in (0.009, 1e-5):
            request = ask(sampling=SamplingParams(temperature=cold))
            await refuses_later(lambda request=request: engine.generate(request), EngineError, f"{cold:g}", "0.01")
        bodies = [engine._call(ask(sampling=SamplingParams(temperature=t)), "r").body for t in (0.0, 0.01)]
        assert [body["sampling_params"]["temperature"] for body in bodies] == [0.0, 0.01]
        await engine.close()


async def test_answer_of_another_form_is_refused() -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"output_ids": [7], "meta_info": {"finish_reason": None}})

    async with serving(handle) as url:
        engine = SglangEngine(url, ServedModel(vocab_size=10))
        await refuses_later(lambda: engine.generate(ask()), EngineError, url, "invalid sglang reply")
        await engine.close()


@pytest.mark.parametrize("backend", [None, "nccl"])
async def test_server_without_the_transfer_is_told_its_flag(backend: str | None) -> None:
    async def open_link(transport: Any, servers: Any, weights: Any) -> Any:
        raise AssertionError

    async with serving(running("0.32.0", backend=backend)) as url:
        transfer = WeightTransfer("gloo", open_link)
        engine = VllmEngine(url, ServedModel(vocab_size=10), transfer=transfer)
        words = ("engine.weights", url, "--weight-transfer-config.backend gloo", backend or "no weight transfer")
        await refuses_later(lambda: engine.update_weights(0, weights={"w": torch.ones(1)}), EngineError, *words)
        await engine.close()


@pytest.mark.parametrize(("version", "warns"), [("0.31.2", True), (VllmEngine.tested_version, False)])
async def test_running_server_of_an_untested_version_warns(
    version: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(running(version)) as url:
        engine = VllmEngine(url, ServedModel(vocab_size=10))
        await engine.update_weights(0)
        await engine.close()
    assert warns is (f"runs vllm {version}, and polyturn is tested with {VllmEngine.tested_version}" in caplog.text)


async def test_banned_id_is_sampled_anew() -> None:
    answers = iter([7, 3, 3, 5])
    prompts: list[list[int]] = []

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/generate":
            prompts.append((await request.json())["ids"])
        return web.json_response({"token": next(answers) if request.path == "/generate" else 0})

    async with echo(handle) as engine:
        first = await engine.generate(ask(sampling=SamplingParams(max_tokens=4, banned_token_ids=(3,))))
        second = await engine.generate(ask(sampling=SamplingParams(max_tokens=4, banned_token_ids=(3,))))
    assert [first.token_ids.tolist(), second.token_ids.tolist()] == [[7], [5]]
    assert prompts == [prompts[0]] * 4  # the next prompt has no discarded token


async def test_model_that_samples_only_banned_ids_fails() -> None:
    async with echo(answering(200)) as engine:  # it answers 7
        with pytest.raises(EngineError, match="sampled the banned id 7 16 times in a row"):
            await engine.generate(ask(sampling=SamplingParams(banned_token_ids=(7,))))


async def test_failed_load_leaves_the_server_at_work(tmp_path: Path) -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"token": 7}, status=400 if request.path == "/load" else 200)

    async with echo(handle) as engine:
        await refuses_later(
            lambda: engine.update_weights(1, weights=WrittenWeights(tmp_path)), EngineError, "/load answered 400"
        )
        assert asked == ["/pause", "/load", "/resume"]
        assert (await engine.generate(ask())).token_ids.tolist() == [7]


@pytest.mark.parametrize("failing", ["/load", "/loaded"])
async def test_weights_of_a_failed_update_lose_their_name(failing: str, tmp_path: Path) -> None:
    """The server may have the new weights: it did not answer, or failed after loading them."""
    names: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/rename":
            names.append((await request.json())["tag"])
        return web.json_response({"token": 7}, status=500 if request.path == failing else 200)

    async with echo(handle) as engine:
        await refuses_later(
            lambda: engine.update_weights(1, weights=WrittenWeights(tmp_path)), EngineLostError, f"{failing} answered 500"
        )
        assert [engine.version_of(name) for name in names] == [FOREIGN_VERSION]


def test_only_weights_of_this_client_have_a_version() -> None:
    engine, other = (Echo("http://127.0.0.1:9", ServedModel(vocab_size=10)) for _ in range(2))
    assert engine.version_of("default") == 0  # nothing was sent: the weights of the server are unknown
    engine._updates = 1
    assert engine.version_of(engine.tag(5)) == 5
    assert engine.version_of("default") == engine.version_of(other.tag(5)) == engine.version_of("5") == FOREIGN_VERSION


SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_server_is_restarted_a_bounded_number_of_times() -> None:
    supervisor = ServerSupervisor(
        LaunchSpec(command=(sys.executable, "-c", SERVE, "{port}"), stop_timeout_s=2), max_restarts=1
    )
    first = await supervisor.start()
    assert await supervisor.start() is first
    second = await supervisor.again("it died")
    assert not first.is_alive and second.is_alive
    with pytest.raises(EngineGoneError, match=r"it died, and the server has been restarted 1 time already.*max_restarts"):
        await supervisor.again("it died")
    await supervisor.stop()
    assert not second.is_alive


async def test_weights_are_written_once_for_all_servers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folders: list[str] = []
    there: list[list[str]] = []

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/load":
            folders.append((await request.json())["folder"])
        return web.json_response({"token": 7})

    def look() -> None:
        there.append(sorted(path.parent.name for path in tmp_path.rglob("model.safetensors")))

    async with serving(handle) as url:
        pool = EnginePool(
            [Echo(url, ServedModel(vocab_size=10)) for _ in range(3)], files=WeightFolder(tmp_path, root=tmp_path)
        )
        for version in (1, 2):
            await pool.update_weights(version, weights={"w": torch.ones(2)})
            look()
        await pool.close()
        look()
    assert [folder[-8:] for folder in folders] == ["00000000"] * 3 + ["00000001"] * 3
    assert there == [["00000000"], ["00000001"], []]


def test_queue_is_its_mean_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr("polyturn.engines.base.time.perf_counter", lambda: next(now))
    waiting = MeanOverTime()
    waiting.set(2)
    waiting.set(0)
    assert waiting.read() == pytest.approx(2 * 3 / 5)
    assert waiting.read() == 0


@pytest.mark.parametrize(
    "values", [[100], [-1], [5.5], [2**40], [2**80], [None], ["7"], [True], [[1, 2]], [1] * 5, 7], ids=repr
)
def test_ids_that_cannot_be_right_are_refused(values: Any) -> None:
    refuses(lambda: read_ids(values, vocab_size=100, max_tokens=4), ValueError, "token")


@pytest.mark.parametrize("values", [[None], [0.5], [float("nan")], [float("inf")], ["-1"], [[-1.0]], [-0.1, None]], ids=repr)
def test_logprobs_that_cannot_be_right_are_refused(values: Any) -> None:
    refuses(lambda: read_logprobs(values), ValueError, "log-probabilit")


def test_right_answers_are_read_as_they_are() -> None:
    ids = read_ids([0, 99], vocab_size=100, max_tokens=4)
    assert (ids.tolist(), ids.dtype) == ([0, 99], "int32")
    assert read_ids(None, vocab_size=100, max_tokens=4).tolist() == []
    assert read_logprobs([-1.5, 0, -9999.0]).tolist() == [-1.5, 0.0, -9999.0]
    assert read_logprobs([]).dtype == "float32"
