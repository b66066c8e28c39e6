"""What keeps one tool from holding up the others: breakers, limits on calls at once, results cut to size."""

from __future__ import annotations

import asyncio
import tracemalloc
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyturn
from polyturn.core.errors import ConfigError, ToolConnectionError, ToolError, ToolTimeoutError
from polyturn.core.messages import Message, ToolCall
from polyturn.core.task import Task
from polyturn.engines.virtual_time import run_virtual
from polyturn.testing.episodes import tiny_codec
from polyturn.tools.base import BaseTool
from polyturn.tools.breaker import Breaker, BreakerSettings
from polyturn.tools.concurrency import ConcurrencyLimits, FairLimit
from polyturn.tools.executor import ToolBox
from polyturn.tools.options import ToolOptions
from polyturn.tools.result_shape import MAX_DATA, MAX_DEPTH, MAX_MEDIUM
from polyturn.tools.results import call_metrics
from polyturn.tools.schema import ToolResponse
from polyturn.tools.truncate import ResultLimit, truncate, truncate_tokens

TASK = Task(id="t", prompt=(Message(role="user", content="?"),))
SETTINGS = BreakerSettings(failures=3, cooldown_s=10.0, max_cooldown_s=40.0)


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="c", name=tool, arguments=arguments)


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {"additionalProperties": True}}}


class Obeys(BaseTool):
    """Does what a call says."""

    def __init__(self, config: dict[str, Any] | None = None, *, name: str = "tool") -> None:
        super().__init__(config or {}, schema(name))
        self.num_asked = self.num_running = self.most_running = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.num_asked += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(parameters.get("wait_s", 0))
        finally:
            self.num_running -= 1
        if (problem := parameters.get("raise")) is not None:
            raise problem
        return parameters.get("say", "fine")


async def ask(box: ToolBox, *calls: ToolCall, episode: str = "e") -> tuple:
    async with box.session(episode) as session:
        await session.start(TASK)
        return await session.call(calls)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def broken(clock: Clock) -> Breaker:
    breaker = Breaker("tool", SETTINGS, clock=clock)
    for episode in ("a", "b", "a"):
        assert breaker.admit() is None
        breaker.failed(episode)
    return breaker


# ---- the breaker ----------------------------------------------------------------------------------------------------


def test_failures_in_a_row_open_the_breaker_and_one_call_that_is_answered_closes_it():
    clock = Clock()
    breaker = broken(clock)
    assert breaker.admit() == 10.0
    clock.now = 10.0
    assert breaker.admit() is None, "one call may try"
    assert breaker.admit() == 10.0, "the others do not"
    breaker.answered()
    assert breaker.admit() is None
    assert not breaker.is_open


def test_the_cooldown_doubles_up_to_its_limit():
    clock = Clock()
    breaker = broken(clock)
    seen = []
    for _ in range(4):
        clock.now += breaker.admit() or 0.0
        assert breaker.admit() is None
        breaker.failed("a")
        seen.append(breaker.admit())
    assert seen == [20.0, 40.0, 40.0, 40.0]
    assert breaker.num_opened == 5


def test_an_answer_between_failures_starts_the_count_again():
    breaker = Breaker("tool", SETTINGS)
    for episode in ("a", "b"):
        breaker.failed(episode)
    breaker.answered()
    for episode in ("a", "b"):
        breaker.failed(episode)
    assert not breaker.is_open


def test_calls_that_break_off_together_are_one_failure():
    """A server that dies takes all calls with it that it was answering; that says no more than one call would."""
    clock = Clock()
    breaker = Breaker("tool", SETTINGS, clock=clock)
    for now in (1.0, 2.0, 3.0):
        assert not breaker.is_open
        clock.now = now
        for episode in "abcdefgh":
            breaker.failed(episode, began=now - 0.5)
    assert breaker.is_open


def test_calls_that_are_late_while_another_is_answered_are_slow_by_themselves():
    clock = Clock()
    breaker = Breaker("tool", SETTINGS, clock=clock)
    for round in range(4):
        began, clock.now = clock.now, clock.now + 30.0
        breaker.answered()  # somebody else's call, made and answered meanwhile
        clock.now += 30.0
        for episode in "abcdefgh":
            assert breaker.admit() is None, round
            breaker.failed(episode, began=began, is_late=True)
    began, clock.now = clock.now + 1.0, clock.now + 61.0
    for episode in "abc":
        breaker.failed(episode, began=began, is_late=True)
    assert breaker.is_open, "nobody was answered for a minute"


def test_one_episode_alone_cannot_open_it():
    breaker = Breaker("tool", SETTINGS)
    for _ in range(20):
        breaker.failed("a")
    assert not breaker.is_open
    breaker.failed("b")
    assert breaker.is_open


def test_a_trial_that_is_cancelled_leaves_the_next_one_to_another_call():
    clock = Clock()
    breaker = broken(clock)
    clock.now = 10.0
    assert breaker.admit() is None
    breaker.left()
    assert breaker.admit() is None


def test_zero_failures_turn_it_off_and_senseless_settings_are_refused():
    breaker = Breaker("tool", BreakerSettings(failures=0))
    for episode in "abcdefghijkl":
        breaker.failed(episode)
    assert breaker.admit() is None
    with pytest.raises(ConfigError, match="max_cooldown_s 1 cannot work"):
        BreakerSettings(cooldown_s=2.0, max_cooldown_s=1.0)


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (ToolConnectionError("the server is gone"), "connection"),
        (ConnectionResetError("reset"), "connection"),
        (ToolTimeoutError("no answer"), "timeout"),
        (TimeoutError("slow"), "timeout"),
    ],
)
async def test_a_tool_that_is_gone_is_not_asked_any_more(problem: Exception, kind: str):
    tool = Obeys()
    box = ToolBox([tool], ToolOptions(breaker=BreakerSettings(failures=2, cooldown_s=60.0)))
    seen = [(await ask(box, call("tool", **{"raise": problem}), episode=f"e{i}"))[0] for i in range(4)]
    assert [r.error for r in seen] == [kind, kind, "circuit_open", "circuit_open"]
    assert tool.num_asked == 2
    assert seen[2].content == (
        "Error (circuit_open): 'tool' does not work at the moment and was not asked; try again in 60 s"
    )


@pytest.mark.parametrize(
    "made",
    [call("tool", **{"raise": ToolError("no such key")}), call("tool", **{"raise": KeyError("b")}), call("nope")],
)
async def test_what_a_policy_writes_never_opens_it(made: ToolCall):
    """Else a policy could switch off the tool that charges it."""
    tool = Obeys()
    box = ToolBox([tool], ToolOptions(breaker=BreakerSettings(failures=1, min_episodes=1)))
    for i in range(5):
        await ask(box, made, episode=f"e{i}")
    assert (await ask(box, call("tool")))[0].content == "fine"


@pytest.mark.parametrize("told", [{"unavailable": True}, {"failure": "connection"}])
async def test_a_tool_may_say_in_its_metrics_that_its_service_is_gone(told: dict[str, Any]):
    class Says(Obeys):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "Search error: unreachable", None, told

    box = ToolBox([Says()], ToolOptions(breaker=BreakerSettings(failures=2)))
    seen = [(await ask(box, call("tool"), episode=f"e{i}"))[0] for i in range(3)]
    assert [r.error for r in seen] == ["connection", "connection", "circuit_open"]
    assert seen[0].content == "Search error: unreachable", "in the tool's own words"
    assert call_metrics(seen[0])["tool/tool/error_connection"].value == 1


@pytest.mark.parametrize("told", ["unknown_tool", "circuit_open", "no kind", 1.0, None])
async def test_a_tool_tells_only_failures_that_are_its_own(told: Any):
    class Says(Obeys):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "fine", None, {"failure": told}

    assert (await ask(ToolBox([Says()]), call("tool")))[0].error is None


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_a_tools_calls_wait_for_their_turn_and_the_wait_is_not_part_of_the_deadline():
    tool = Obeys({"max_concurrency": 1})
    box = ToolBox([tool], ToolOptions(timeout_s=5.0))
    found = run_virtual(ask(box, *[call("tool", wait_s=2.0) for _ in range(4)]))
    assert [r.error for r in found] == [None] * 4
    assert tool.most_running == 1
    assert sorted(r.metrics["waited_s"] for r in found) == [0.0, 2.0, 4.0, 6.0]


def test_tools_of_one_host_share_its_limit():
    one = Obeys({"url": "http://h:1/a"}, name="one")
    two = Obeys({"service": "http://h:1/b"}, name="two")
    other = Obeys({"url": "http://else/"}, name="other")
    box = ToolBox([one, two, other], ToolOptions(max_per_host=1))
    found = run_virtual(ask(box, call("one", wait_s=2.0), call("two", wait_s=2.0), call("other", wait_s=2.0)))
    assert [r.metrics["waited_s"] for r in found] == [0.0, 2.0, 0.0]


async def test_episodes_take_turns():
    limit, served = FairLimit(1), []

    async def use(owner: str) -> None:
        await limit.acquire(owner)
        served.append(owner)
        await asyncio.sleep(0)
        limit.release()

    await limit.acquire("first")
    many = [asyncio.create_task(use("greedy")) for _ in range(4)]
    await asyncio.sleep(0)
    many += [asyncio.create_task(use("modest")) for _ in range(2)]
    await asyncio.sleep(0)
    assert limit.num_waiting == 6
    limit.release()
    await asyncio.gather(*many)
    assert served == ["greedy", "modest", "greedy", "modest", "greedy", "greedy"]


async def test_a_call_that_is_cancelled_while_it_waits_leaves_its_place():
    limits = ConcurrencyLimits(of_tools={"t": 1}, hosts={"t": None})

    async def use() -> None:
        async with limits.turn("t", owner="e"):
            await asyncio.sleep(0.01)

    first, second, third = (asyncio.create_task(use()) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await third
    with pytest.raises(asyncio.CancelledError):
        await second
    await first
    async with asyncio.timeout(1), limits.turn("t", owner="e"):
        pass


@pytest.mark.parametrize("options", [{"max_concurrency": {"tool": 0}}, {"max_concurrency": {"tol": 1}}])
def test_a_limit_that_cannot_work_is_refused(options: dict[str, Any]):
    with pytest.raises(ConfigError, match="max_concurrency"):
        ToolBox([Obeys()], ToolOptions(**options))
    with pytest.raises(ConfigError, match="max_concurrency of tool is 'two'"):
        ToolBox([Obeys({"max_concurrency": "two"})])


# ---- results cut to size --------------------------------------------------------------------------------------------


@given(text=st.text(min_size=30, max_size=200), n=st.integers(0, 25), side=st.sampled_from(["left", "right", "middle"]))
def test_a_cut_by_tokens_keeps_at_most_so_many_and_is_text(text: str, n: int, side: Any):
    codec = tiny_codec()
    cut = ResultLimit(max_tokens=n, side=side, codec=codec).cut(text)
    cut.encode()
    for part in cut.split("(truncated)"):
        assert len(codec.token_spans(part.strip("."))) <= n + 2 or cut == text


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_cut_by_tokens_keeps_the_documented_side(side: Any):
    codec = tiny_codec()
    text = " ".join(str(i) for i in range(3000))
    cut = truncate_tokens(text, max_tokens=60, side=side, codec=codec)
    kept = cut.replace("...(truncated)...", "").replace("(truncated)...", "").replace("...(truncated)", "")
    assert 50 <= len(codec.token_spans(kept)) <= 61
    assert cut.startswith("0 1 2") == (side != "left")
    assert cut.endswith("2998 2999") == (side != "right")


@given(marks=st.integers(1, 5), at=st.integers(0, 12), side=st.sampled_from(["left", "right", "middle"]))
def test_a_cut_never_parts_a_character_from_its_marks(marks: int, at: int, side: Any):
    text = ("e" + "\u0301" * marks) * 12
    cut = truncate(text, max_chars=at, side=side)
    for part in cut.split("(truncated)"):
        whole = part.strip(".")
        assert not whole or (not unicodedata.combining(whole[0]) and len(whole) % (marks + 1) == 0)


def test_a_cut_leaves_no_half_of_a_control_token():
    codec = tiny_codec()
    for n in range(3, 40):
        cut = truncate("ab<|im_end|>cd" * 4, max_chars=n, side="right", codec=codec)
        assert cut.replace("<|im_end|>", "").removesuffix("...(truncated)").strip("abcd") == ""


async def test_halves_of_a_pair_and_zeros_reach_the_model_as_text():
    (result,) = await ask(ToolBox([Obeys()]), call("tool", say="a\ud83d\ude00b\ud800c\x00"))
    assert result.content == "a\U0001f600b\ufffdc\x00"


async def test_a_hundred_megabytes_cost_no_copy():
    answer = "x" * 100_000_000

    @polyturn.tool
    async def huge() -> str:
        """Answer too much."""
        return answer

    box = ToolBox([huge], ToolOptions(max_result_tokens=64), codec=tiny_codec())
    tracemalloc.start()
    try:
        (result,) = await ask(box, call("huge"))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 10_000_000
    assert len(result.content) < 8300 and result.error is None
    assert result.metrics["cut_chars"] > 99_000_000


@pytest.mark.parametrize(
    "answer",
    [
        {"rows": ["x" * (MAX_DATA + 1)]},
        b"x" * (MAX_DATA + 1),
        ToolResponse(image=["data:image/png;base64," + "A" * MAX_MEDIUM]),
    ],
)
async def test_what_would_take_too_long_to_write_out_is_refused(answer: Any):
    class Big(Obeys):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return answer

    (result,) = await ask(ToolBox([Big()]), call("tool"))
    assert result.error == "too_large"
    assert "at most" in result.content


class Level(list[Any]):
    """A list that counts how many of its kind are looked into."""

    num_seen = 0

    def __iter__(self) -> Any:
        Level.num_seen += 1
        return super().__iter__()


def nested(depth: int) -> Any:
    value = Level()
    for _ in range(depth - 1):
        value = Level([value])
    return value


@pytest.mark.parametrize(("depth", "error"), [(MAX_DEPTH, None), (MAX_DEPTH + 1, "too_large"), (100_000, "too_large")])
async def test_what_is_nested_too_deep_is_refused_before_it_is_gone_through(depth: int, error: str | None):
    class Deep(Obeys):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return answer

    answer, Level.num_seen = nested(depth), 0
    (result,) = await ask(ToolBox([Deep()]), call("tool"))
    assert 1 < Level.num_seen <= 2 * MAX_DEPTH, "once to see how deep it is, once to write it out"
    assert result.error == error
    assert error is None or f"nested more than {MAX_DEPTH} deep" in result.content


async def test_an_answer_that_holds_itself_is_refused():
    class Round(Obeys):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            answer: dict[str, Any] = {}
            answer["self"] = answer
            return answer

    (result,) = await ask(ToolBox([Round()]), call("tool"))
    assert result.error == "too_large"


def test_tokens_without_a_tokenizer_are_refused():
    with pytest.raises(ConfigError, match="max_result_tokens is 5 and there is no tokenizer"):
        ToolBox([], ToolOptions(max_result_tokens=5))


def nested_schema(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}}
    return found


def round_itself() -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": {}}
    found["properties"] |= {"a": found, "b": found}
    return found


@pytest.mark.parametrize("parameters", [nested_schema(40), nested_schema(5000), round_itself()], ids=["40", "5000", "round"])
def test_a_schema_that_is_nested_without_end_is_refused_in_a_sentence(parameters: dict[str, Any]) -> None:
    class Deep(BaseTool):
        def __init__(self) -> None:
            super().__init__({}, schema("t") | {"function": schema("t")["function"] | {"parameters": parameters}})

    with pytest.raises(ConfigError, match=r"the tool 't' has a schema that no prompt can show: it .*; write it flatter"):
        ToolBox([Deep()])
