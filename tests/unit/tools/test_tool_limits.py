"""One tool must not hold up the others: circuit breakers, limits of concurrent calls, results cut to size."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyturn
from polyturn.core.errors import ConfigError, ToolConnectionError, ToolError, ToolTimeoutError
from polyturn.core.messages import ToolCall
from polyturn.testing.episodes import tiny_codec
from polyturn.tools.base import BaseTool
from polyturn.tools.breaker import Breaker, BreakerSettings
from polyturn.tools.concurrency import ConcurrencyLimits
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.options import ToolOptions
from polyturn.tools.result_shape import MAX_DATA, MAX_MEDIUM
from polyturn.tools.results import call_metrics
from polyturn.tools.schema import ToolResponse
from polyturn.tools.toolbox import Toolbox
from polyturn.tools.truncate import ResultLimit, truncate, truncate_tokens
from support.refusals import refuses
from support.tools_parts import TASK, Answers, Obeys, call, schema
from support.virtual_time import run_virtual

SETTINGS = BreakerSettings(failures=3, cooldown_s=10.0, max_cooldown_s=40.0)


async def ask(box: Toolbox, *calls: ToolCall, episode: str = "e") -> tuple:
    async with EpisodeTools(box, episode) as session:
        await session.start(TASK)
        return await session.call(calls)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker("tool", SETTINGS, clock=clock)
    for _ in range(3):
        assert breaker.admit() is None
        breaker.failed(began=clock.now)
    return breaker


# ---- breakers -------------------------------------------------------------------------------------------------------


def test_breaker_opens_after_failures_and_closes_after_an_answer():
    clock = Clock()
    breaker = opened(clock)
    assert breaker.admit() == 10.0
    clock.now = 10.0
    assert breaker.admit() is None
    breaker.answered()
    breaker.failed(began=clock.now)
    assert breaker.admit() is None


def test_cooldown_doubles_up_to_its_limit():
    clock = Clock()
    breaker = opened(clock)
    seen = []
    for _ in range(4):
        clock.now += breaker.admit() or 0.0
        assert breaker.admit() is None
        breaker.failed(began=clock.now)
        seen.append(breaker.admit())
    assert seen == [20.0, 40.0, 40.0, 40.0]


def test_calls_that_break_off_together_are_one_failure():
    """A server that dies ends all of its running calls at once, which is one failure."""
    clock = Clock()
    breaker = Breaker("tool", SETTINGS, clock=clock)
    for now in (1.0, 2.0, 3.0):
        assert breaker.admit() is None
        clock.now = now
        for _ in range(8):
            breaker.failed(began=now - 0.5)
    assert breaker.admit() == 10.0


def test_failures_count_only_while_no_other_call_is_answered():
    clock = Clock()
    breaker = Breaker("tool", SETTINGS, clock=clock)
    for _ in range(4):
        began, clock.now = clock.now, clock.now + 30.0
        breaker.answered()  # another call, made and answered meanwhile
        clock.now += 30.0
        for _ in range(8):
            breaker.failed(began=began)
    assert breaker.admit() is None


def test_zero_failures_turn_a_breaker_off():
    clock = Clock()
    breaker = Breaker("tool", BreakerSettings(failures=0), clock=clock)
    for _ in range(12):
        breaker.failed(began=clock.now)
    assert breaker.admit() is None
    refuses(lambda: BreakerSettings(cooldown_s=2.0, max_cooldown_s=1.0), ConfigError, "max_cooldown_s 1")


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (ToolConnectionError("the server is gone"), "connection"),
        (ConnectionResetError("reset"), "connection"),
        (ToolTimeoutError("no answer"), "timeout"),
        (TimeoutError("slow"), "timeout"),
    ],
)
async def test_tool_that_is_gone_is_not_asked_any_more(problem: Exception, kind: str):
    tool = Obeys()
    box = Toolbox([tool], ToolOptions(breaker=BreakerSettings(failures=2, cooldown_s=60.0)))
    seen = [(await ask(box, call("rec", error=problem), episode=f"e{i}"))[0] for i in range(4)]
    assert [r.error for r in seen] == [kind, kind, "circuit_open", "circuit_open"]
    assert tool.num_asked == 2
    assert "60 s" in seen[2].content


@pytest.mark.parametrize(
    "made", [call("rec", error=ToolError("no such key")), call("rec", error=KeyError("b")), call("nope")]
)
async def test_policy_cannot_open_a_breaker(made: ToolCall):
    """Otherwise a policy could switch off the tool that charges it."""
    box = Toolbox([Obeys()], ToolOptions(breaker=BreakerSettings(failures=1)))
    for i in range(5):
        await ask(box, made, episode=f"e{i}")
    assert (await ask(box, call("rec")))[0].error is None


@pytest.mark.parametrize("metrics", [{"unavailable": True}, {"failure": "connection"}])
async def test_tool_may_report_its_service_gone_in_its_metrics(metrics: dict[str, Any]):
    box = Toolbox([Answers(("Search error: unreachable", None, metrics))], ToolOptions(breaker=BreakerSettings(failures=2)))
    seen = [(await ask(box, call("tool"), episode=f"e{i}"))[0] for i in range(3)]
    assert [r.error for r in seen] == ["connection", "connection", "circuit_open"]
    assert seen[0].content == "Search error: unreachable", "in the tool's own words"
    assert call_metrics(seen[0])["tool/tool/error_connection"].value == 1


@pytest.mark.parametrize("kind", ["unknown_tool", "circuit_open", "no kind", 1.0, None])
async def test_tool_cannot_report_failures_that_are_not_its_own(kind: Any):
    assert (await ask(Toolbox([Answers(("fine", None, {"failure": kind}))]), call("tool")))[0].error is None


# ---- concurrent calls -----------------------------------------------------------------------------------------------


def test_wait_for_a_turn_is_not_part_of_the_deadline():
    tool = Obeys(config={"max_concurrency": 1})
    box = Toolbox([tool], ToolOptions(timeout_s=5.0))
    found = run_virtual(ask(box, *[call("rec", wait_s=2.0) for _ in range(4)]))
    assert [r.error for r in found] == [None] * 4
    assert tool.most_running == 1
    assert sorted(r.metrics["waited_s"] for r in found) == [0.0, 2.0, 4.0, 6.0]


def test_tools_of_one_host_share_its_limit():
    one = Obeys("one", {"url": "http://h:1/a"})
    two = Obeys("two", {"service": "http://h:1/b"})
    other = Obeys("other", {"url": "http://else/"})
    box = Toolbox([one, two, other], ToolOptions(max_per_host=1))
    found = run_virtual(ask(box, call("one", wait_s=2.0), call("two", wait_s=2.0), call("other", wait_s=2.0)))
    assert [r.metrics["waited_s"] for r in found] == [0.0, 2.0, 0.0]


async def test_call_cancelled_while_it_waits_frees_its_turn():
    limits, gate = ConcurrencyLimits(of_tools={"t": 1}, hosts={"t": None}), asyncio.Event()

    async def use() -> None:
        async with limits.turn("t"):
            await gate.wait()

    first, second, third = (asyncio.create_task(use()) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    gate.set()
    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await second
    async with asyncio.timeout(30), limits.turn("t"):
        pass


# ---- results cut to size --------------------------------------------------------------------------------------------


@given(text=st.text(min_size=30, max_size=200), n=st.integers(0, 25), side=st.sampled_from(["left", "right", "middle"]))
def test_cut_by_tokens_keeps_at_most_so_many(text: str, n: int, side: Any):
    codec = tiny_codec()
    cut = ResultLimit(max_tokens=n, side=side, codec=codec).cut(text)
    cut.encode()
    for part in cut.split("(truncated)"):
        assert len(codec.token_spans(part.strip("."))) <= n + 2 or cut == text


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_cut_by_tokens_keeps_the_documented_side(side: Any):
    codec = tiny_codec()
    text = " ".join(str(i) for i in range(3000))
    cut = truncate_tokens(text, max_tokens=60, side=side, codec=codec)
    kept = cut.replace("...(truncated)...", "").replace("(truncated)...", "").replace("...(truncated)", "")
    assert 50 <= len(codec.token_spans(kept)) <= 61
    assert cut.startswith("0 1 2") == (side != "left")
    assert cut.endswith("2998 2999") == (side != "right")


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("num_cut", [0, 1, 13, 17, 18])
async def test_short_cut_is_counted_too(side: Any, num_cut: int):
    text = "".join(str(i % 10) for i in range(100))
    box = Toolbox([Answers(text)], ToolOptions(max_result_chars=100 - num_cut, truncate_side=side))
    (result,) = await ask(box, call("tool"))
    assert result.metrics.get("cut_chars", 0) == num_cut
    assert ("(truncated)" in result.content) == (num_cut > 0)


async def test_cut_of_an_error_is_counted():
    @polyturn.tool
    async def fails() -> str:
        """Fail with many words."""
        raise ToolError("x" * 500)

    (result,) = await ask(Toolbox([fails], ToolOptions(max_result_chars=100)), call("fails"))
    assert result.error == "tool_error" and result.metrics["cut_chars"] > 400


async def test_joined_surrogates_are_not_a_cut():
    (result,) = await ask(Toolbox([Answers("a\ud83d\ude00b")], ToolOptions(max_result_chars=100)), call("tool"))
    assert result.metrics == {}


def test_stricter_of_two_limits_applies_to_a_short_cut():
    text = "x" * 20
    cut = ResultLimit(max_chars=19, max_tokens=1000, side="right", codec=tiny_codec()).cut(text)
    assert cut == "x" * 19 + "...(truncated)"


def test_windows_that_meet_keep_the_text(monkeypatch: pytest.MonkeyPatch):
    codec, text = tiny_codec(), "x" * 2500
    monkeypatch.setattr(
        type(codec), "token_spans", lambda _, part: [(at, min(at + 200, len(part))) for at in range(0, len(part), 200)]
    )
    assert truncate_tokens(text, max_tokens=20, codec=codec) == text


def test_cut_leaves_no_half_of_a_control_token():
    codec = tiny_codec()
    for n in range(3, 40):
        cut = truncate("ab<|im_end|>cd" * 4, max_chars=n, side="right", codec=codec)
        assert cut.replace("<|im_end|>", "").removesuffix("...(truncated)").strip("abcd") == ""


async def test_lone_surrogates_and_zeros_reach_the_model_as_text():
    (result,) = await ask(Toolbox([Answers("a\ud83d\ude00b\ud800c\x00")]), call("tool"))
    assert result.content == "a\U0001f600b\ufffdc\x00"


async def test_hundred_megabytes_are_cut_without_a_copy():
    text = "x" * 100_000_000

    @polyturn.tool
    async def huge() -> str:
        """Answer too much."""
        return text

    box = Toolbox([huge], ToolOptions(max_result_tokens=64), codec=tiny_codec())
    tracemalloc.start()
    try:
        (result,) = await ask(box, call("huge"))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 10_000_000
    assert len(result.content) < 8300
    assert result.error is None
    assert result.metrics["cut_chars"] > 99_000_000


def nested(depth: int) -> Any:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(("depth", "error"), [(100, None), (100_000, "too_large")])
async def test_result_that_is_nested_too_deep_is_refused(depth: int, error: str | None):
    (result,) = await ask(Toolbox([Answers(nested(depth))]), call("tool"))
    assert result.error == error


def _holds_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    "answer",
    [
        {"rows": ["x" * (MAX_DATA + 1)]},
        b"x" * (MAX_DATA + 1),
        ToolResponse(image=["data:image/png;base64," + "A" * MAX_MEDIUM]),
        _holds_itself(),
    ],
    ids=["rows", "bytes", "image", "holds itself"],
)
async def test_result_that_takes_too_long_to_write_out_is_refused(answer: Any):
    assert (await ask(Toolbox([Answers(answer)]), call("tool")))[0].error == "too_large"


def nested_schema(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}}
    return found


def endless_schema() -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": {}}
    found["properties"] |= {"a": found, "b": found}
    return found


@pytest.mark.parametrize(
    "parameters", [nested_schema(40), nested_schema(5000), endless_schema()], ids=["40", "5000", "round"]
)
def test_schema_nested_too_deep_is_refused(parameters: dict[str, Any]) -> None:
    class Deep(BaseTool):
        def __init__(self) -> None:
            super().__init__({}, schema("t", parameters))

    refuses(lambda: Toolbox([Deep()]), ConfigError, "'t'")
