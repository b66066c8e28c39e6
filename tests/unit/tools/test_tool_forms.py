"""Tools written in other forms are called in the form that they have."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from PIL import Image

from polyturn.core.messages import ToolCall
from polyturn.core.task import Task, ToolKwargs
from polyturn.core.trajectory import ToolResult
from polyturn.tools.base import BaseTool
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.function import tool
from polyturn.tools.schema import ToolResponse
from polyturn.tools.toolbox import Toolbox
from support.tools_parts import Answers, call

SCHEMA = {"type": "function", "function": {"name": "t", "parameters": {"properties": {"x": {"type": "string"}}}}}
ROW = Task(id="t", prompt=(), tools_kwargs={"t": ToolKwargs(create_kwargs={"ground_truth": "5"})})


async def use(tool: Any, *, arguments: dict[str, Any] | None = None) -> tuple[ToolResult, dict[str, float | None]]:
    box = Toolbox([tool])
    async with EpisodeTools(box, "e") as session:
        await session.start(ROW)
        (result,) = await session.call([ToolCall(id="c", name="t", arguments=arguments or {})])
        rewards = await session.finish()
    assert not box.live_ids
    return result, rewards


class Base(BaseTool):
    """Answers with the ground truth of its row."""

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
    reads = frozenset({"create_kwargs"})

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
async def test_create_gets_the_row_kwargs_as_it_takes_them(kind: type[Base], said: str) -> None:
    made = kind({})
    result, _ = await use(made)
    assert (result.content, result.error) == (said, None)
    assert made.truth == {}


async def test_one_image_outside_a_list_is_a_list_of_one() -> None:
    result, _ = await use(Answers(({"image": Image.new("RGB", (2, 2)), "text": "here"}, 0.0, {}), name="t"))
    assert len(result.content) == 2
    assert result.content[1] == {"type": "text", "text": "here"}


async def test_argument_that_the_tool_declares_need_not_be_in_the_schema() -> None:
    class Slow(Flat):
        reads = frozenset({"timeout"})

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return str(parameters.get("timeout", 30))

    result, _ = await use(Slow({}), arguments={"timeout": 5})
    assert (result.content, result.error) == ("5", None)
    result, _ = await use(Slow({}), arguments={"tiemout": 5})
    assert result.error == "schema"


class Looks(Base):
    """Returns the data that it gets of its episode, and counts its calls there."""

    max_concurrency = 1
    reads = frozenset({"agent_data"})

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Keep nothing."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        data = kwargs["agent_data"]
        count = data.extra_fields["count"] = data.extra_fields.get("count", 0) + 1
        texts = [m["content"] for m in data.messages]
        await asyncio.sleep(0)
        return f"{texts} {count} {data.request_id} {data.tool_rewards} {data.tools_kwargs['t']['create_kwargs']}", 0.5


async def test_tool_that_takes_agent_data_sees_its_episode() -> None:
    async with EpisodeTools(Toolbox([Looks({})]), "e") as session:
        await session.start(ROW)
        texts = [(await session.call([call("t")], messages=lambda: [{"content": "hi"}]))[0].content for _ in range(2)]
    assert texts == ["['hi'] 1 e [] {'ground_truth': '5'}", "['hi'] 2 e [0.5] {'ground_truth': '5'}"]


async def test_branches_at_once_each_see_their_own_conversation() -> None:
    async with EpisodeTools(Toolbox([Looks({})]), "e") as session:
        await session.start(ROW)

        async def branch(name: str) -> Any:
            return (await session.call([call("t")], messages=lambda: [{"content": name}]))[0].content

        texts = await asyncio.gather(branch("one"), branch("two"), branch("three"))
    assert [text.split()[0] for text in texts] == ["['one']", "['two']", "['three']"]


async def test_calc_reward_may_have_any_form(caplog: pytest.LogCaptureFixture) -> None:
    class NoId(Flat):
        async def calc_reward(self) -> float:  # type: ignore[override]
            return 0.25

    class Texts(Flat):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return ["what", "was found"]

    assert (await use(NoId({})))[1] == {"t": 0.25}
    assert (await use(Texts({})))[1] == {"t": None}
    assert ["'t': calc_reward" in r.message for r in caplog.records] == [True]


def test_function_may_get_its_name_by_position() -> None:
    @tool("search")
    def look(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        return query

    assert (look.name, look("a")) == ("search", "a")
