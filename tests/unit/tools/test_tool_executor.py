"""ToolBox and ToolSession: failures are observations, answers come in call order, every create has one release (I9)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import polyturn
from polyturn.core.errors import ConfigError, DataError, LifecycleError, RewardError, RolloutError, ToolError
from polyturn.core.media import to_source
from polyturn.core.messages import Message, ToolCall
from polyturn.core.metrics import Mean, Sum, merge, reduce
from polyturn.core.task import Task, ToolKwargs
from polyturn.engines.virtual_time import run_virtual
from polyturn.tools import FromTask
from polyturn.tools.base import BaseTool
from polyturn.tools.executor import ToolBox, ToolStartError
from polyturn.tools.options import ToolOptions
from polyturn.tools.results import call_metrics
from polyturn.tools.schema import ToolResponse
from polyturn.tools.truncate import truncate


def task(*, tools: tuple[str, ...] | None = None, **kwargs: dict[str, Any]) -> Task:
    of = {name: ToolKwargs(**k) for name, k in kwargs.items()}
    return Task(id="t", prompt=(Message(role="user", content="?"),), tools=tools, tools_kwargs=of)


def lenient(*tools: str) -> Task:
    return dataclasses.replace(task(tools=tools), skips_unknown_tools=True)


def call(name: str, _id: str = "c0", **arguments: Any) -> ToolCall:
    return ToolCall(id=_id, name=name, arguments=arguments)


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {"additionalProperties": True}}}


class Recorder(BaseTool):
    """Does what each call's `do` says, and writes down its life."""

    def __init__(self, name: str = "rec") -> None:
        super().__init__({}, schema(name))
        self.begun: Counter[str] = Counter()
        self.created: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.seen: list[tuple[str, Any]] = []

    async def create(self, instance_id: str | None = None, do: str = "ok", **kwargs: Any) -> Any:
        self.seen.append(("create", kwargs))
        assert instance_id is not None
        self.begun[instance_id] += 1
        await act(do)
        self.created[instance_id] += 1
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.seen.append(("execute", kwargs))
        await act(parameters.get("do", "ok"))
        return parameters.get("say", "done"), parameters.get("reward"), {"hits": 2, "note": "x", "errors": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        self.seen.append(("calc_reward", kwargs))
        return kwargs.get("value", 0.5)

    async def release(self, instance_id: str, do: str = "ok", **kwargs: Any) -> None:
        self.released[instance_id] += 1
        await act(do)


class SyncRecorder(Recorder):
    """The same with plain functions."""

    def create(self, instance_id: str | None = None, do: str = "ok", **kwargs: Any) -> Any:  # type: ignore[override]
        assert instance_id is not None
        self.begun[instance_id] += 1
        act_sync(do)
        self.created[instance_id] += 1
        return instance_id

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        act_sync(parameters.get("do", "ok"))
        return parameters.get("say", "done")

    def calc_reward(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        return None

    def release(self, instance_id: str, do: str = "ok", **kwargs: Any) -> None:  # type: ignore[override]
        self.released[instance_id] += 1
        act_sync(do)


async def act(what: str) -> None:
    if what == "hang":
        await asyncio.sleep(3600)
    if what == "stubborn":
        for _ in range(2):
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
    if what == "cancel":
        raise asyncio.CancelledError
    act_sync("ok" if what == "hang" else what)


def act_sync(what: str) -> None:
    if what == "hang":
        time.sleep(0.05)
    if what == "raise":
        raise ValueError("broken\ninside")
    if what == "exit":
        raise SystemExit(3)
    if what == "close":
        raise GeneratorExit("closed")
    if what == "tell":
        raise ToolError("use another key")


async def answer(tool: Any, *calls: ToolCall, of: Task | None = None, **options: Any) -> tuple:
    box = ToolBox([tool], ToolOptions(**{"timeout_s": 5.0, **options}))
    async with box.session("e") as session:
        await session.start(of or task())
        return await session.call(calls)


@polyturn.tool
async def slow(say: str, wait: float = 0.0) -> str:
    """Wait and say.

    Args:
        say: What to say.
        wait: How long, in seconds.
    """
    await asyncio.sleep(wait)
    return say


def test_calls_run_in_parallel_and_are_answered_in_call_order() -> None:
    found = run_virtual(answer(slow, *(call("slow", f"c{i}", say=str(i), wait=3.0 - i) for i in range(3))))
    assert [(r.call_id, r.content, r.error) for r in found] == [("c0", "0", None), ("c1", "1", None), ("c2", "2", None)]
    assert [r.duration_s for r in found] == [3.0, 2.0, 1.0], "none waited for another"


@pytest.mark.parametrize(
    ("made", "kind", "text"),
    [
        (call("serach"), "unknown_tool", "there is no tool 'serach'. Available tools: 'rec'."),
        (ToolCall(id="c0", name="rec", error="arguments are not valid JSON"), "bad_json", "arguments are not valid JSON"),
        (ToolCall(id="c0", name="", error="no name"), "bad_json", "no name"),
        (call("rec", do="tell"), "tool_error", "use another key"),
        (call("rec", do="raise"), "exception", "ValueError: broken inside"),
        (call("rec", do="exit"), "exception", "RuntimeError: SystemExit: 3"),
        (call("rec", do="close"), "exception", "RuntimeError: GeneratorExit: closed"),
        (call("rec", do="cancel"), "exception", "RuntimeError: CancelledError: it was cancelled from within"),
        (call("rec", do="hang"), "timeout", "'rec' did not answer: it took longer than 0.05 s"),
    ],
)
async def test_every_failure_is_an_observation_of_one_form(made: ToolCall, kind: str, text: str) -> None:
    (result,) = await answer(Recorder(), made, timeout_s=0.05)
    assert (result.call_id, result.error, result.content) == ("c0", kind, f"Error ({kind}): {text}")
    assert result.reward is None


async def test_arguments_that_do_not_fit_the_schema_never_reach_the_tool() -> None:
    (result,) = await answer(slow, call("slow", wait="long"))
    assert (result.error, result.content) == ("schema", "Error (schema): the argument 'say' is missing (tool 'slow')")


async def test_one_failure_does_not_touch_the_other_calls() -> None:
    made = (call("rec", "a", do="raise"), call("rec", "b", say="fine"), call("nope", "c"), call("rec", "d", do="hang"))
    found = await answer(Recorder(), *made, timeout_s=0.05)
    assert [r.error for r in found] == ["exception", None, "unknown_tool", "timeout"]
    assert found[1].content == "fine"


async def test_calls_beyond_the_limit_are_reported_as_skipped() -> None:
    found = await answer(Recorder(), *(call("rec", f"c{i}") for i in range(4)), max_parallel_calls=2)
    assert [r.error for r in found] == [None, None, "skipped", "skipped"]
    assert [r.call_id for r in found] == ["c0", "c1", "c2", "c3"]
    assert "at most 2 calls a turn" in found[2].content


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "(truncated)...56789"), ("right", "01234...(truncated)"), ("middle", "012...(truncated)...89")],
)
async def test_long_text_is_cut_on_the_documented_side(side: Any, text: str) -> None:
    """left keeps the tail, right keeps the head; users rely on these marks."""
    (result,) = await answer(Recorder(), call("rec", say="0123456789"), max_result_chars=5, truncate_side=side)
    assert result.content == text


@given(text=st.text(max_size=40), n=st.integers(0, 45), side=st.sampled_from(["left", "right", "middle"]))
def test_cutting_keeps_exactly_so_many_characters(text: str, n: int, side: Any) -> None:
    cut = truncate(text, max_chars=n, side=side)
    if len(text) <= n:
        assert cut == text
    else:
        mark = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}[side]
        assert len(cut) == n + len(mark)
        assert mark in cut


async def test_images_become_parts_before_the_text() -> None:
    picture = Image.new("RGB", (2, 2), "red")
    (result,) = await answer(Recorder(), call("rec", say=ToolResponse(text="look", image=[picture])))
    assert result.content == ({"type": "image", "image": to_source("image", picture)}, {"type": "text", "text": "look"})


async def test_an_image_that_cannot_be_read_is_told_to_the_model() -> None:
    (result,) = await answer(Recorder(), call("rec", say=ToolResponse(image=["no/such.png"])))
    assert result.error == "exception" and "the file 'no/such.png' cannot be read" in result.content


async def test_the_row_reaches_each_point_of_a_tools_life() -> None:
    tool = Recorder()
    box = ToolBox([tool])
    row = task(
        rec={
            "create_kwargs": {"a": 1, "method": "x", "name": "y"},
            "execute_kwargs": {"b": 2},
            "calc_reward_kwargs": {"value": 0.25},
            "release_kwargs": {"d": 4},
        }
    )
    async with box.session("e") as session:
        await session.start(row)
        await session.call([call("rec")])
        assert await session.finish() == {"rec": 0.25}
    assert tool.seen == [
        ("create", {"a": 1, "method": "x", "name": "y"}),
        ("execute", {"b": 2}),
        ("calc_reward", {"value": 0.25}),
    ]
    assert (dict(tool.created), dict(tool.released)) == ({"e": 1}, {"e": 1})


async def test_a_function_gets_its_hidden_parameter_through_the_box() -> None:
    @polyturn.tool
    def look_up(key: str, table: Annotated[dict, FromTask]) -> str:
        """Look a key up.

        Args:
            key: The key.
        """
        return table[key]

    row = task(look_up={"create_kwargs": {"table": {"a": "x"}}})
    found = await answer(look_up, call("look_up", key="a"), call("look_up", key="b"), of=row)
    assert [(r.content, r.error) for r in found] == [("x", None), ("Error (exception): KeyError: 'b'", "exception")]
    with pytest.raises(ToolStartError, match="'table'"):
        await answer(look_up, call("look_up", key="a"))


async def test_the_id_that_create_returns_is_the_one_used() -> None:
    class Own(Recorder):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            return "own", ToolResponse(text="welcome")

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return instance_id

    tool = Own()
    box = ToolBox([tool])
    async with box.session("e") as session:
        (greeting,) = await session.start(task())
        assert (greeting.name, greeting.content) == ("rec", "welcome")
        assert (await session.call([call("rec")]))[0].content == "own"
        async with box.session("f") as other:
            with pytest.raises(ToolStartError, match="'own', which another live episode uses"):
                await other.start(task())
        assert not tool.released
    assert dict(tool.released) == {"own": 1}
    assert box.live_ids == set()


async def test_a_create_that_returns_nothing_keeps_the_episodes_id() -> None:
    class Silent(Recorder):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            return None

    tool = Silent()
    await answer(tool, call("rec"))
    assert dict(tool.released) == {"e": 1}


def test_a_name_that_the_task_skips_is_left_out_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    box = ToolBox([Recorder("one"), Recorder("two")])
    for _ in range(3):
        assert box.select(lenient("gone", "two")) == ("two",)
    assert box.select(lenient("gone")) == ()
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "the tool 'gone', named by tasks such as 't', is not configured"
    ]
    with pytest.raises(DataError, match="task 't': it needs tools"):
        box.select(dataclasses.replace(lenient("gone"), needs_tools=True))


async def test_only_the_tools_that_the_task_selects_are_created_and_callable() -> None:
    one, two = Recorder("one"), Recorder("two")
    box = ToolBox([one, two])
    row = task(tools=("two",))
    async with box.session("e") as session:
        await session.start(row)
        found = await session.call([call("one"), call("two")])
        assert [s["function"]["name"] for s in session.schemas] == ["two"]
    assert [r.error for r in found] == ["unknown_tool", None]
    assert (dict(one.created), dict(two.created)) == ({}, {"e": 1})
    assert [s["function"]["name"] for s in box.schemas_of(task())] == ["one", "two"]
    with pytest.raises(DataError, match=r"task 't': the tool 'tow' is not configured.*'two'"):
        box.schemas_of(task(tools=("tow",)))


async def test_metrics_count_calls_errors_time_and_what_tools_measure() -> None:
    box = ToolBox([Recorder()])
    async with box.session("e") as session:
        await session.start(task())
        found = await session.call([call("rec", reward=0.5), call("rec", do="raise"), call("made_up_name")])
    metrics = merge(call_metrics(result) for result in found)
    assert found[0].reward == 0.5
    assert metrics["tool/rec/calls"] == Sum(2)
    assert metrics["tool/rec/errors"] == Mean(1.0, 2)
    assert metrics["tool/rec/error_exception"] == metrics["tool/unknown/error_unknown_tool"] == Sum(1)
    assert metrics["tool/rec/hits"] == Mean(2.0, 1)
    assert metrics["tool/rec/own_errors"] == Mean(1.0, 1)
    assert isinstance(metrics["tool/rec/time_s"], Mean)
    assert reduce(metrics)["tool/unknown/errors"] == 1.0
    assert not any("made_up" in name or "note" in name for name in metrics)


async def test_a_tool_cannot_change_the_recorded_call() -> None:
    class Greedy(Recorder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            parameters["list"].append(1)
            return "x"

    made = call("rec", list=[])
    await answer(Greedy(), made)
    assert made.arguments == {"list": []}


async def test_plain_methods_run_in_threads_one_at_a_time() -> None:
    class Counting(SyncRecorder):
        running, most = 0, 0

        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
            self.running += 1
            self.most = max(self.most, self.running)
            time.sleep(0.01)
            self.running -= 1
            return threading.current_thread() is threading.main_thread()

    tool = Counting()
    found = await answer(tool, *(call("rec", f"c{i}") for i in range(4)))
    assert [r.content for r in found] == ["False"] * 4
    assert tool.most == 1
    assert dict(tool.released) == {"e": 1}


@pytest.mark.parametrize("do", ["raise", "hang", "cancel", "tell"])
async def test_a_create_that_fails_ends_the_episode_and_releases_the_others(do: str) -> None:
    good, bad = Recorder("good"), Recorder("bad")
    box = ToolBox([good, bad], ToolOptions(timeout_s=0.05))
    async with box.session("e") as session:
        with pytest.raises(ToolStartError, match="'bad': create failed for episode 'e'"):
            await session.start(task(bad={"create_kwargs": {"do": do}}))
    assert good.created == good.released
    assert dict(bad.released) == {"e": 1}, "it may have taken something on its way"


@pytest.mark.parametrize("value", [float("nan"), "much", [1]])
async def test_a_reward_that_is_no_number_is_an_error(value: Any) -> None:
    tool = Recorder()
    box = ToolBox([tool])
    async with box.session("e") as session:
        await session.start(task(rec={"calc_reward_kwargs": {"value": value}}))
        with pytest.raises(RewardError, match=r"'rec'.*step reward"):
            await session.call([call("rec", reward=value), call("rec")])
        with pytest.raises(RewardError, match=r"'rec'.*calc_reward"):
            await session.finish()
    assert dict(tool.released) == {"e": 1}


async def test_a_failing_release_is_returned_never_raised() -> None:
    one, two = Recorder("one"), Recorder("two")
    box = ToolBox([one, two], ToolOptions(timeout_s=0.05))
    session = box.session("e")
    await session.start(task(one={"release_kwargs": {"do": "raise"}}, two={"release_kwargs": {"do": "hang"}}))
    problems = await session.close()
    assert len(problems) == 2
    assert any("'one': release failed for episode 'e': ValueError: broken inside" in p for p in problems)
    assert await session.close() == problems
    assert (dict(one.released), dict(two.released)) == ({"e": 1}, {"e": 1})


async def test_a_session_is_used_in_order() -> None:
    box = ToolBox([Recorder()])
    session = box.session("e")
    with pytest.raises(LifecycleError):
        await session.call([call("rec")])
    await session.start(task())
    with pytest.raises(LifecycleError):
        await session.start(task())
    await session.finish()
    with pytest.raises(LifecycleError):
        await session.finish()
    await session.close()
    with pytest.raises(LifecycleError):
        await session.call([call("rec")])


async def test_calls_that_outlive_their_deadline_are_counted_and_capped() -> None:
    class Stuck(SyncRecorder):
        gate = threading.Event()

        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
            self.gate.wait(10)

    tool = Stuck()
    box = ToolBox([tool])
    box.max_abandoned = 1
    try:
        async with box.session("e") as session:
            await session.start(task())
            box.bounded["rec"].timeout_s = 0.02
            for _ in range(2):
                assert (await session.call([call("rec")]))[0].error == "timeout"
            assert box.num_abandoned == 2
            with pytest.raises(RolloutError, match="2 tool calls still run past their deadline, most of them in 'rec'"):
                await session.call([call("rec")])
    finally:
        tool.gate.set()


async def test_a_cancellation_is_passed_on_after_the_release() -> None:
    tool = Recorder()
    box = ToolBox([tool])

    async def episode() -> None:
        async with box.session("e") as session:
            await session.start(task(rec={"release_kwargs": {"do": "stubborn"}}))
            await session.call([call("rec", do="hang"), call("rec", do="hang")])

    running = asyncio.create_task(episode())
    await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()  # impatience changes nothing
    with pytest.raises(asyncio.CancelledError):
        await running
    assert dict(tool.released) == {"e": 1}


async def test_a_plain_create_that_comes_back_after_the_end_is_released() -> None:
    tool = SyncRecorder()
    box = ToolBox([tool], ToolOptions(timeout_s=0.02))
    async with box.session("e") as session:
        with pytest.raises(ToolStartError):
            await session.start(task(rec={"create_kwargs": {"do": "hang"}}))
    async with asyncio.timeout(30):
        while box.num_abandoned or tool.created != tool.released:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    # On a machine so busy that the create's thread never had its turn, it never began, and there is nothing to release.
    assert dict(tool.released) in ({"e": 1}, {})


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        ([Recorder(), Recorder()], {}, "Duplicate tool name 'rec' found"),
        ([], {"timeout_s": 0}, "timeout_s is 0"),
        ([], {"max_parallel_calls": 0}, "max_parallel_calls is 0"),
        ([], {"truncate_side": "top"}, "truncate_side is 'top'"),
    ],
)
def test_a_box_that_cannot_work_is_a_config_error(tools: list, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolBox(tools, ToolOptions(**options))


DO = st.sampled_from(["ok", "ok", "raise", "hang", "stubborn", "cancel", "exit", "tell"])


@given(
    creates=st.lists(DO, min_size=2, max_size=2),
    turns=st.lists(st.lists(st.tuples(st.sampled_from(["a", "s", "no"]), DO), max_size=3), max_size=3),
    releases=st.lists(DO, min_size=2, max_size=2),
    cancel_after=st.sampled_from([None, 0.0, 0.001, 0.005, 0.02]),
    is_patient=st.booleans(),
)
def test_every_create_has_exactly_one_release(
    creates: list[str], turns: list[list[tuple[str, str]]], releases: list[str], cancel_after: float | None, is_patient: bool
) -> None:
    """I9, under failures, time-outs and cancellation, for async and plain tools."""
    first, second = Recorder("a"), SyncRecorder("s")
    box = ToolBox([first, second], ToolOptions(timeout_s=0.02))
    row = task(
        a={"create_kwargs": {"do": creates[0]}, "release_kwargs": {"do": releases[0]}},
        s={"create_kwargs": {"do": creates[1]}, "release_kwargs": {"do": releases[1]}},
    )

    async def episode() -> None:
        async with box.session("e") as session:
            await session.start(row)
            for turn in turns:
                found = await session.call([call(name, f"c{i}", do=do) for i, (name, do) in enumerate(turn)])
                assert [r.call_id for r in found] == [f"c{i}" for i in range(len(turn))]
            await session.finish()

    async def run() -> None:
        running = asyncio.create_task(episode())
        if cancel_after is not None:
            await asyncio.sleep(cancel_after)
            running.cancel()
            if not is_patient:
                await asyncio.sleep(0)
                running.cancel()
        with contextlib.suppress(asyncio.CancelledError, ToolStartError, RewardError):  # on a busy machine all may be late
            await running
        quiet = 0
        while quiet < 3:  # what was left behind ends, and what it made is released
            await asyncio.sleep(0.002)
            quiet = 0 if box.num_abandoned or box.late else quiet + 1

    asyncio.run(run())
    for tool in (first, second):
        assert tool.created <= tool.released <= tool.begun <= Counter({"e": 1})
    assert box.live_ids == set()
