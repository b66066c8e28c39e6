"""Tools written in other forms are called in the form they have: what their authors wrote years apart runs alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from PIL import Image

from polyturn.core.messages import ToolCall
from polyturn.core.task import Task, ToolKwargs
from polyturn.core.trajectory import ToolResult
from polyturn.tools.base import BaseTool
from polyturn.tools.executor import ToolBox
from polyturn.tools.function import tool
from polyturn.tools.schema import ToolResponse

SCHEMA = {"type": "function", "function": {"name": "t", "parameters": {"properties": {"x": {"type": "string"}}}}}


async def use(tool: Any, *, arguments: dict[str, Any] | None = None) -> tuple[ToolResult, dict[str, float | None]]:
    box = ToolBox([tool])
    task = Task(id="t", prompt=(), tools_kwargs={"t": ToolKwargs(create_kwargs={"ground_truth": "5"})})
    async with box.session("e") as session:
        await session.start(task)
        (result,) = await session.call([ToolCall(id="c", name="t", arguments=arguments or {})])
        rewards = await session.finish()
    assert not box.live_ids
    return result, rewards


class Base(BaseTool):
    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema or SCHEMA)
        self.truth: dict[str, Any] = {}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return str(self.truth[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.truth[instance_id]


class Flat(Base):
    async def create(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any) -> Any:
        self.truth[str(instance_id)] = (ground_truth, sorted(kwargs))
        return instance_id


class Nested(Base):
    async def create(self, instance_id: str | None = None, create_kwargs: Any = None) -> Any:
        self.truth[str(instance_id)] = create_kwargs["ground_truth"]
        return instance_id, ToolResponse()


class LooksItUp(Base):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        self.truth[str(instance_id)] = kwargs.get("create_kwargs", {})["ground_truth"]
        return instance_id, ToolResponse()


class Plain(Base):
    def create(self, instance_id: str | None = None, create_kwargs: Any = None) -> Any:  # type: ignore[override]
        self.truth[str(instance_id)] = create_kwargs["ground_truth"]
        return None


@pytest.mark.parametrize(
    ("kind", "said"), [(Flat, "('5', [])"), (Nested, "5"), (LooksItUp, "5"), (Plain, "5")], ids=lambda v: str(v)
)
async def test_create_gets_the_rows_kwargs_as_it_takes_them(kind: type[Base], said: str) -> None:
    made = kind({})
    result, _ = await use(made)
    assert (result.content, result.error) == (said, None)
    assert made.truth == {}


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("text", "text"),
        (ToolResponse(text="text"), "text"),
        (("text", 0.5, {"hits": 1}), "text"),
        ((ToolResponse(text="text"), None, None), "text"),
        ({"text": "text"}, '{"text": "text"}'),
    ],
)
async def test_execute_may_return_any_form(returned: Any, text: str) -> None:
    class Returns(Flat):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return returned

    result, _ = await use(Returns({}))
    assert (result.content, result.error) == (text, None)


async def test_one_image_outside_a_list_is_a_list_of_one() -> None:
    class Camera(Flat):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return {"image": Image.new("RGB", (2, 2)), "text": "here"}, 0.0, {}

    result, _ = await use(Camera({}))
    assert len(result.content) == 2 and result.content[1] == {"type": "text", "text": "here"}


async def test_an_argument_that_the_tool_reads_may_be_missing_in_the_schema() -> None:
    class Slow(Flat):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return str(parameters.get("timeout", 30))

    result, _ = await use(Slow({}), arguments={"timeout": 5})
    assert (result.content, result.error) == ("5", None)
    result, _ = await use(Slow({}), arguments={"tiemout": 5})
    assert result.error == "schema"


async def test_a_tool_that_asks_for_the_episode_sees_it() -> None:
    class Looks(Flat):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            data = kwargs["agent_data"]
            count = data.extra_fields["count"] = data.extra_fields.get("count", 0) + 1
            said = [m["content"] for m in data.messages]
            return f"{data.request_id} {said} {count} {data.tool_rewards} {data.tools_kwargs['t']['create_kwargs']}", 0.5

    box = ToolBox([Looks({})])
    task = Task(id="t", prompt=(), tools_kwargs={"t": ToolKwargs(create_kwargs={"ground_truth": "5"})})
    async with box.session("e") as session:
        await session.start(task)
        call = [ToolCall(id="c", name="t")]
        texts = [(await session.call(call, messages=lambda: [{"content": "hi"}]))[0].content for _ in range(2)]
    assert texts == [
        "e ['hi'] 1 [] {'ground_truth': '5'}",
        "e ['hi'] 2 [0.5] {'ground_truth': '5'}",
    ]


async def test_calls_of_several_branches_at_once_each_see_their_own_conversation() -> None:
    class Looks(Flat):
        max_concurrency = 1

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            seen = [m["content"] for m in kwargs["agent_data"].messages]
            await asyncio.sleep(0)
            return str(seen)

    async with ToolBox([Looks({})]).session("e") as session:
        await session.start(Task(id="t", prompt=()))

        async def branch(name: str) -> Any:
            return (await session.call([ToolCall(id="c", name="t")], messages=lambda: [{"content": name}]))[0].content

        assert await asyncio.gather(branch("one"), branch("two"), branch("three")) == ["['one']", "['two']", "['three']"]


async def test_rewards_of_every_form(caplog: pytest.LogCaptureFixture) -> None:
    class NoId(Flat):
        async def calc_reward(self) -> float:  # type: ignore[override]
            return 0.25

    class Texts(Flat):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return ["what", "was found"]

    assert (await use(NoId({})))[1] == {"t": 0.25}
    assert (await use(Texts({})))[1] == {"t": None}
    assert [r.message for r in caplog.records] == [
        "tool 't': calc_reward returned a list of texts, which is no reward; none is counted"
    ]


def test_a_function_may_get_its_name_by_position() -> None:
    @tool("search")
    def look(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        return query

    assert (look.name, look("a")) == ("search", "a")
