"""The tools of an episode: failures become observations, answers keep their order, each create has one release.

That creates and releases pair up whatever goes wrong (I9) is tested in tests/property/test_rollout_invariants.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polyturn.core.errors import ConfigError, DataError, LifecycleError, RewardError, RolloutError
from polyturn.core.media import to_source
from polyturn.core.messages import ToolCall
from polyturn.core.metrics import Mean, Sum, merge, reduce
from polyturn.core.task import Task
from polyturn.tools.episode_tools import EpisodeTools, ToolStartError
from polyturn.tools.options import ToolOptions
from polyturn.tools.results import call_metrics
from polyturn.tools.schema import ToolResponse
from polyturn.tools.toolbox import Toolbox
from polyturn.tools.truncate import truncate
from support.refusals import refuses, refuses_later
from support.tools_parts import Answers, Obeys, PlainObeys, call, task_with
from support.virtual_time import run_virtual

LATE_S = 0.02
"""The deadline of a tool that never answers; tools that answer have the box's, a minute."""


async def answer(*tools: Any, calls: Any, of: Task | None = None, late: str = "", **options: Any) -> tuple:
    """Return the results of calls in one episode; `late` names the tool whose calls have the short deadline."""
    box = Toolbox(tools, ToolOptions(**{"timeout_s": 60.0, **options}))
    async with EpisodeTools(box, "e") as session:
        await session.start(of or task_with())
        if late:
            box.bounded[late].timeout_s = LATE_S
        return await session.call(calls)


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_calls_run_in_parallel_and_keep_their_order() -> None:
    found = run_virtual(answer(Obeys(), calls=[call("rec", f"c{i}", say=str(i), wait_s=3.0 - i) for i in range(3)]))
    assert [(r.call_id, r.content, r.error) for r in found] == [("c0", "0", None), ("c1", "1", None), ("c2", "2", None)]
    assert [r.duration_s for r in found] == [3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("made", "kind", "text"),
    [
        (call("serach"), "unknown_tool", "'serach'"),
        (ToolCall(id="c0", name="rec", error="arguments are not valid JSON"), "bad_json", "arguments are not valid JSON"),
        (call("rec", do="refuse"), "tool_error", "use another key"),
        (call("rec", do="raise"), "exception", "ValueError: broken inside"),
        (call("rec", do="exit"), "exception", "SystemExit: 3"),
        (call("rec", do="close"), "exception", "GeneratorExit: closed"),
        (call("rec", do="cancel"), "exception", "CancelledError"),
        (call("rec", do="hang"), "timeout", "'rec'"),
    ],
)
async def test_failure_is_an_observation(made: ToolCall, kind: str, text: str) -> None:
    (result,) = await answer(Obeys(), calls=[made], late="rec" if kind == "timeout" else "")
    assert (result.call_id, result.error, result.reward) == ("c0", kind, None)
    assert result.content.startswith(f"Error ({kind}): ")
    assert text in result.content
    assert "\n" not in result.content


async def test_calls_beyond_the_limit_are_skipped() -> None:
    found = await answer(Obeys(), calls=[call("rec", f"c{i}") for i in range(4)], max_parallel_calls=2)
    assert [(r.call_id, r.error) for r in found] == [("c0", None), ("c1", None), ("c2", "skipped"), ("c3", "skipped")]


async def test_tool_cannot_change_the_recorded_call() -> None:
    class Greedy(Obeys):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            parameters["list"].append(1)
            return "x"

    made = call("rec", list=[])
    await answer(Greedy(), calls=[made])
    assert made.arguments == {"list": []}


async def test_plain_methods_run_in_threads_one_at_a_time() -> None:
    class Counts(PlainObeys):
        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
            assert lock.acquire(blocking=False), "another call runs"
            try:
                return threading.current_thread() is threading.main_thread()
            finally:
                lock.release()

    lock, tool = threading.Lock(), Counts()
    found = await answer(tool, calls=[call("rec", f"c{i}") for i in range(4)])
    assert [r.content for r in found] == ["False"] * 4
    assert dict(tool.released) == {"e": 1}


async def test_metrics_count_calls_errors_and_measurements() -> None:
    found = await answer(Obeys(), calls=[call("rec", reward=0.5), call("rec", do="raise"), call("made_up_name")])
    metrics = merge(call_metrics(result) for result in found)
    assert found[0].reward == 0.5
    assert metrics["tool/rec/calls"] == Sum(2)
    assert metrics["tool/rec/errors"] == Mean(1.0, 2)
    assert metrics["tool/rec/error_exception"] == metrics["tool/unknown/error_unknown_tool"] == Sum(1)
    assert metrics["tool/rec/hits"] == Mean(2.0, 1)
    assert metrics["tool/rec/own_errors"] == Mean(1.0, 1)
    assert isinstance(metrics["tool/rec/time_s"], Mean)
    assert reduce(metrics)["tool/unknown/errors"] == 1.0
    assert not any("made_up" in name or "note" in name for name in metrics), "a model's words name no metric"


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "(truncated)...56789"), ("right", "01234...(truncated)"), ("middle", "012...(truncated)...89")],
)
async def test_long_result_is_cut_on_the_documented_side(side: Any, text: str) -> None:
    """`left` keeps the tail and `right` keeps the head; users rely on these marks."""
    (result,) = await answer(Answers("0123456789"), calls=[call("tool")], max_result_chars=5, truncate_side=side)
    assert result.content == text


@given(text=st.text(max_size=40), n=st.integers(0, 45), side=st.sampled_from(["left", "right", "middle"]))
def test_cut_keeps_exactly_so_many_characters(text: str, n: int, side: Any) -> None:
    cut = truncate(text, max_chars=n, side=side)
    if len(text) <= n:
        assert cut == text
    else:
        mark = {"left": "(truncated)...", "right": "...(truncated)", "middle": "...(truncated)..."}[side]
        assert len(cut) == n + len(mark)
        assert mark in cut


async def test_images_come_before_the_text() -> None:
    picture = Image.new("RGB", (2, 2), "red")
    (result,) = await answer(Answers(ToolResponse(text="look", image=[picture])), calls=[call("tool")])
    assert result.content == ({"type": "image", "image": to_source("image", picture)}, {"type": "text", "text": "look"})
    (result,) = await answer(Answers(ToolResponse(image=["no/such.png"])), calls=[call("tool")])
    assert (result.error, "'no/such.png'" in result.content) == ("exception", True)


# ---- an episode's tools ---------------------------------------------------------------------------------------------


async def test_row_kwargs_reach_each_point_of_a_tools_life() -> None:
    tool = Obeys()
    row = task_with(
        rec={
            "create_kwargs": {"a": 1, "method": "x", "name": "y"},
            "execute_kwargs": {"b": 2},
            "calc_reward_kwargs": {"value": 0.25},
            "release_kwargs": {"d": 4},
        }
    )
    async with EpisodeTools(Toolbox([tool]), "e") as session:
        await session.start(row)
        await session.call([call("rec")])
        assert await session.finish() == {"rec": 0.25}
    assert tool.kwargs == [
        ("create", {"a": 1, "method": "x", "name": "y"}),
        ("execute", {"b": 2}),
        ("calc_reward", {"value": 0.25}),
    ]
    assert (dict(tool.created), dict(tool.released)) == ({"e": 1}, {"e": 1})


async def test_id_that_create_returns_is_used() -> None:
    class Own(Obeys):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            return "own", ToolResponse(text="welcome")

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return instance_id

    tool = Own()
    box = Toolbox([tool])
    async with EpisodeTools(box, "e") as session:
        (greeting,) = await session.start(task_with())
        assert (greeting.name, greeting.content) == ("rec", "welcome")
        assert (await session.call([call("rec")]))[0].content == "own"
        async with EpisodeTools(box, "f") as other:
            await refuses_later(lambda: other.start(task_with()), ToolStartError, "'own'")
        assert not tool.released, "the id belongs to the first episode"
    assert dict(tool.released) == {"own": 1}
    assert box.live_ids == set()


async def test_only_selected_tools_are_created_and_callable() -> None:
    one, two = Obeys("one"), Obeys("two")
    box = Toolbox([one, two])
    async with EpisodeTools(box, "e") as session:
        await session.start(task_with(tools=("two",)))
        found = await session.call([call("one"), call("two")])
        assert [s["function"]["name"] for s in session.schemas] == ["two"]
    assert [r.error for r in found] == ["unknown_tool", None]
    assert (dict(one.created), dict(two.created)) == ({}, {"e": 1})
    assert [s["function"]["name"] for s in box.schemas_of(task_with())] == ["one", "two"]
    refuses(lambda: box.schemas_of(task_with(tools=("tow",))), DataError, "'tow'", "'two'")


def test_tool_name_that_a_task_may_skip_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def lenient(*tools: str) -> Task:
        return dataclasses.replace(task_with(tools=tools), skips_unknown_tools=True)

    box = Toolbox([Obeys("one"), Obeys("two")])
    for _ in range(3):
        assert box.select(lenient("gone", "two")) == ("two",)
    assert box.select(lenient("gone")) == ()
    assert len(caplog.records) == 1
    refuses(lambda: box.select(dataclasses.replace(lenient("gone"), needs_tools=True)), DataError, "'t'")


async def test_session_is_used_in_order() -> None:
    session = EpisodeTools(Toolbox([Obeys()]), "e")
    with pytest.raises(LifecycleError):
        await session.call([call("rec")])
    await session.start(task_with())
    with pytest.raises(LifecycleError):
        await session.start(task_with())
    await session.finish()
    with pytest.raises(LifecycleError):
        await session.finish()
    await session.close()
    with pytest.raises(LifecycleError):
        await session.call([call("rec")])


@pytest.mark.parametrize(
    ("tools", "options", "message"),
    [
        ([Obeys(), Obeys()], {}, "'rec'"),
        ([], {"timeout_s": 0}, "timeout_s is 0"),
        ([], {"max_parallel_calls": 0}, "max_parallel_calls is 0"),
        ([], {"truncate_side": "top"}, "truncate_side is 'top'"),
        ([], {"max_result_tokens": 5}, "max_result_tokens is 5"),
        ([Obeys()], {"max_concurrency": {"rec": 0}}, "max_concurrency"),
        ([Obeys()], {"max_concurrency": {"tol": 1}}, "max_concurrency"),
        ([Obeys(config={"max_concurrency": "two"})], {}, "max_concurrency of rec is 'two'"),
    ],
)
def test_options_that_cannot_work_are_config_errors(tools: list, options: dict, message: str) -> None:
    refuses(lambda: Toolbox(tools, ToolOptions(**options)), ConfigError, message)


# ---- create, reward and release -------------------------------------------------------------------------------------


@pytest.mark.parametrize("do", ["raise", "hang", "cancel", "refuse"])
async def test_failing_create_ends_the_episode_and_releases_all(do: str) -> None:
    good, bad = Obeys("good"), Obeys("bad")
    box = Toolbox([good, bad], ToolOptions(timeout_s=60.0))
    if do == "hang":
        box.bounded["bad"].timeout_s = LATE_S
    async with EpisodeTools(box, "e") as session:
        await refuses_later(
            lambda: session.start(task_with(bad={"create_kwargs": {"do": do}})), ToolStartError, "'bad'", "'e'"
        )
    assert good.created == good.released
    assert dict(bad.released) == {"e": 1}, "it may have taken something on its way"


@pytest.mark.parametrize("value", [float("nan"), "much", [1]])
async def test_reward_that_is_not_a_number_is_an_error(value: Any) -> None:
    tool = Obeys()
    async with EpisodeTools(Toolbox([tool]), "e") as session:
        await session.start(task_with(rec={"calc_reward_kwargs": {"value": value}}))
        await refuses_later(
            lambda: session.call([call("rec", reward=value), call("rec")]), RewardError, "'rec'", "step reward"
        )
        await refuses_later(lambda: session.finish(), RewardError, "'rec'", "calc_reward")
    assert dict(tool.released) == {"e": 1}


async def test_failing_release_is_returned_and_never_raised() -> None:
    one, two = Obeys("one"), Obeys("two")
    box = Toolbox([one, two], ToolOptions(timeout_s=60.0))
    box.bounded["two"].timeout_s = LATE_S
    session = EpisodeTools(box, "e")
    await session.start(task_with(one={"release_kwargs": {"do": "raise"}}, two={"release_kwargs": {"do": "hang"}}))
    problems = await session.close()
    assert len(problems) == 2
    assert any("'one'" in p and "ValueError: broken inside" in p for p in problems)
    assert await session.close() == problems
    assert (dict(one.released), dict(two.released)) == ({"e": 1}, {"e": 1})


async def test_calls_past_their_deadline_are_counted_and_capped() -> None:
    tool = PlainObeys()
    box = Toolbox([tool], ToolOptions(timeout_s=60.0))
    box.max_abandoned = 1
    try:
        async with EpisodeTools(box, "e") as session:
            await session.start(task_with())
            box.bounded["rec"].timeout_s = LATE_S
            for _ in range(2):
                assert (await session.call([call("rec", do="hang")]))[0].error == "timeout"
            assert box.num_abandoned == 2
            await refuses_later(lambda: session.call([call("rec")]), RolloutError, "'rec'")
            box.bounded["rec"].timeout_s = 60.0
    finally:
        tool.gate.set()


async def test_cancellation_is_passed_on_after_the_release() -> None:
    tool = Obeys()

    async def episode() -> None:
        async with EpisodeTools(Toolbox([tool]), "e") as session:
            await session.start(task_with(rec={"release_kwargs": {"do": "stubborn"}}))
            await session.call([call("rec", do="hang"), call("rec", do="hang")])

    running = asyncio.create_task(episode())
    while tool.num_running < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()  # a second cancellation changes nothing
    with pytest.raises(asyncio.CancelledError):
        await running
    assert dict(tool.released) == {"e": 1}


@pytest.mark.parametrize("kind", [Obeys, PlainObeys])
async def test_create_that_ends_after_its_episode_is_released(kind: type[Obeys]) -> None:
    tool = kind()
    box = Toolbox([tool], ToolOptions(timeout_s=60.0))
    session = EpisodeTools(box, "e")
    starting = asyncio.create_task(session.start(task_with(rec={"create_kwargs": {"do": "hang"}})))
    while not tool.begun:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await session.close()
    starting.cancel()
    await asyncio.wait({starting})
    if isinstance(tool, PlainObeys):
        tool.gate.set()
    while box.num_abandoned or box.late:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert dict(tool.released) == {"e": 1}
