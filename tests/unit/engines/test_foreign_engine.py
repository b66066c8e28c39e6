"""A plug-in engine is contained: whatever it raises or returns, the caller gets an `EngineError`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyturn.cli.main import main
from polyturn.core.arrays import ids_array
from polyturn.core.errors import EngineError, EngineLostError, RolloutError
from polyturn.core.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines import foreign
from polyturn.engines.base import BaseEngine
from polyturn.engines.foreign import ForeignEngine
from support.refusals import refuses, refuses_later
from support.runs import call_command, write_tiny_run

HERE = "test_foreign_engine.py"
REQUEST = GenerateRequest(request_id="r", session_id="s", prompt_ids=ids_array([1]), sampling=SamplingParams(max_tokens=4))


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def completion(ids: Any = (3, 4), logprobs: Any = (-0.5, 0.0), reason: Any = "stop") -> Completion:
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason=reason)


class Odd(BaseEngine):
    """Calls `act` in every method."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(logprobs=True)

    async def generate(self, request: GenerateRequest) -> Completion:
        found: Completion = self.act()
        return found

    async def abort(self, request_id: str) -> None:
        self.act()

    async def end_session(self, session_id: str) -> None:
        self.act()

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        self.act()

    def read_metrics(self) -> Mapping[str, float]:
        found: Mapping[str, float] = self.act()
        return found

    async def close(self) -> None:
        self.act()


class Bare:
    """Its properties have invalid values."""

    capabilities, busy_s = None, "long"


def contained(act: Callable[[], Any]) -> ForeignEngine:
    return of(Odd(act))


def of(engine: Any, *, timeout_s: float = 60.0) -> ForeignEngine:
    return ForeignEngine(engine, vocab_size=8, timeout_s=timeout_s)


def raising(problem: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise problem

    return act


CALLS: dict[str, Callable[[ForeignEngine], Any]] = {
    "generate": lambda engine: engine.generate(REQUEST),
    "abort": lambda engine: engine.abort("r"),
    "end_session": lambda engine: engine.end_session("s"),
    "update_weights": lambda engine: engine.update_weights(3, weights={}),
}


@pytest.mark.parametrize(
    ("name", "problem", "words"),
    [
        ("generate", SystemExit(3), "SystemExit: 3"),
        ("end_session", asyncio.CancelledError(), "CancelledError"),
        ("update_weights", asyncio.CancelledError(), "CancelledError"),
        ("generate", GeneratorExit(), "GeneratorExit"),
        ("generate", StopIteration(), "RuntimeError"),
        ("update_weights", TimeoutError("late"), "TimeoutError: late"),
        ("abort", ValueError("plain"), "ValueError: plain"),
        ("generate", Silent(), "Silent: (its message cannot be read: ValueError)"),
    ],
)
async def test_exception_of_an_engine_names_class_method_and_line(name: str, problem: BaseException, words: str):
    with pytest.raises(EngineError, match=rf"^the engine Odd: {name} raised ") as caught:
        await CALLS[name](contained(raising(problem)))
    assert words in str(caught.value)
    assert "CancelledError" in words or f"({HERE}, line" in str(caught.value)


async def test_engine_error_passes_unchanged():
    await refuses_later(lambda: contained(raising(EngineLostError("gone"))).generate(REQUEST), EngineLostError, "gone")


def test_interrupt_passes():
    with pytest.raises(KeyboardInterrupt):
        contained(lambda: signal.raise_signal(signal.SIGINT)).read_metrics()


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_cancellation_of_the_caller_passes(is_dropped: bool):
    asked = asyncio.Event()

    class Waits(Odd):
        async def generate(self, request: GenerateRequest) -> Completion:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    task = asyncio.create_task(of(Waits(completion)).generate(REQUEST))
    await asked.wait()
    if is_dropped:
        (asking,) = asyncio.all_tasks() - {task, asyncio.current_task()}
        asking.get_coro().close()  # type: ignore[union-attr]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("lets_itself_be_cancelled", [True, False])
async def test_hanging_call_fails_at_its_deadline(
    name: str, lets_itself_be_cancelled: bool, monkeypatch: pytest.MonkeyPatch
):
    over = asyncio.Event()

    async def hangs(self: Odd, *args: Any, **kwargs: Any) -> Any:
        while not over.is_set():
            with contextlib.nullcontext() if lets_itself_be_cancelled else contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    monkeypatch.setattr(Odd, name, hangs)
    engine = of(Odd(completion), timeout_s=0.01)
    engine.bounded.max_abandoned = 0
    with pytest.raises(EngineError, match=rf"Odd: {name}: .*0.01 s.*engine.timeout_s"):
        await CALLS[name](engine)
    if not lets_itself_be_cancelled:
        await refuses_later(lambda: engine.generate(REQUEST), RolloutError, "Odd")
        await engine.close()
    over.set()


async def test_engine_that_cancels_its_caller_fails_alone():
    class Cancels(Odd):
        async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
            task = asyncio.current_task()
            task.cancel()
            await asyncio.sleep(0)

    await refuses_later(lambda: CALLS["update_weights"](of(Cancels(completion))), EngineError, "Cancels: update_weights")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: None, "None"),
        (lambda: SimpleNamespace(token_ids=[3]), "namespace(token_ids=[3])"),
        (lambda: completion(logprobs=(-1.0,)), "AlignmentError"),
        (lambda: completion(reason="bored"), "'bored'"),
        (lambda: completion(logprobs=(-1.0, np.nan)), "logprob nan"),
        (lambda: completion(logprobs=(0.7, -1.0)), "logprob 0.7"),
        (lambda: completion(logprobs=None), "no logprobs"),
        (lambda: completion(ids=(3, 8)), "token id 8"),
        (lambda: completion(ids=(-1, 3)), "token id -1"),
        (lambda: completion(ids=[3] * 5, logprobs=[-1.0] * 5), "5 tokens"),
    ],
)
async def test_wrong_completion_is_refused(act: Callable[[], Any], words: str):
    with pytest.raises(EngineError, match=r"^the engine Odd: generate ") as caught:
        await contained(act).generate(REQUEST)
    assert words in str(caught.value)


async def test_good_completion_passes_unchanged():
    given = completion(logprobs=(-np.inf, 1e-6))
    assert await contained(lambda: given).generate(REQUEST) is given
    assert given.finish_reason is FinishReason.STOP


def test_wrong_properties_and_metrics_are_refused():
    bare = of(Bare())
    with pytest.raises(EngineError, match="Bare: capabilities returned None"):
        _ = bare.capabilities
    with pytest.raises(EngineError, match=r"Bare: busy_s raised ValueError.*'long'"):
        _ = bare.busy_s
    refuses(
        lambda: contained(lambda: {"engine/x": "much"}).read_metrics(),
        EngineError,
        "Odd: read_metrics raised ValueError",
        "'much'",
    )
    refuses(lambda: contained(raising(SystemExit(3))).read_metrics(), EngineError, "SystemExit: 3")
    assert contained(lambda: {"engine/x": 2}).read_metrics() == {"engine/x": 2.0}


@pytest.mark.parametrize(("act", "words"), [(raising(ValueError("no")), "Odd: load raised ValueError: no"), (int, "is 0")])
def test_wrong_load_is_a_warning_and_read_once(act: Callable[[], Any], words: str, caplog: pytest.LogCaptureFixture):
    class Odd(Bare):
        load = property(lambda self: act())

    engine = of(Odd())
    assert [engine.load, engine.load] == [None, None]
    assert [words in record.getMessage() for record in caplog.records] == [True]


async def test_close_that_fails_or_hangs_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    class Stays(Odd):
        async def close(self) -> None:
            await asyncio.Event().wait()

    await contained(raising(SystemExit(3))).close()
    monkeypatch.setattr(foreign, "CLOSE_S", 0.001)
    await of(Stays(completion)).close()
    first, second = (record.getMessage() for record in caplog.records)
    assert "SystemExit: 3" in first
    assert "Stays: close" in second


ENGINE = """
import asyncio
import numpy as np
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.protocols import EngineCapabilities
from polyturn.engines.base import BaseEngine


class Leaves(BaseEngine):
    def __init__(self, setup, *, when):
        super().__init__()
        self.when, self.num, self.version = when, 0, 0
        if when == "init":
            raise SystemExit(3)

    @property
    def capabilities(self):
        return EngineCapabilities(logprobs=True, shares_weights=True, shares_loop=True)

    async def generate(self, request):
        self.num += 1
        if self.when == "generate" and self.num > 3:
            raise asyncio.CancelledError
        ids = np.arange(4, dtype=np.int32) + 10 + self.num % 7
        return Completion(token_ids=ids, logprobs=np.full(4, -5.0), finish_reason=FinishReason.LENGTH)

    async def abort(self, request_id):
        pass

    async def update_weights(self, version, *, weights=None):
        if self.when == "update_weights":
            raise SystemExit(3)
"""

SMALL = ("warm_start.conversations=null", "train.steps=1", "train.group_size=2", "evaluation.data=null")


@pytest.mark.parametrize(
    ("when", "code", "words"),
    [
        ("init", 2, "'leaving.py:Leaves' cannot be made; it raised SystemExit: 3 (leaving.py, line 14)"),
        ("generate", 0, "the engine Leaves: generate raised RuntimeError: CancelledError"),
        ("update_weights", 2, "the engine Leaves: update_weights raised RuntimeError: SystemExit: 3 (leaving.py, line 32)"),
    ],
)
def test_run_reports_the_failure_of_its_engine(tmp_path: Path, when: str, code: int, words: str):
    config = write_tiny_run(tmp_path)
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith("engine:")))
    (tmp_path / "leaving.py").write_text(ENGINE)
    engine = f"engine={{kind: 'leaving.py:Leaves', kwargs: {{when: {when}}}}}"
    called = call_command(main, "train", config, engine, *SMALL)
    assert called.code == code and words in called.err, called.err
