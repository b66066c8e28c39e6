"""One suite for every tool that is shipped, and for a decorated function: ids, signatures, independence of episodes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

import polyturn
from polyturn.core.protocols import Tool
from polyturn.retrieval.index import build_index
from polyturn.retrieval.passages import Passage
from polyturn.tools.base import BaseTool
from polyturn.tools.geo3k import Geo3kTool
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.tools.result_shape import normalize
from polyturn.tools.sandbox import SandboxFusionTool
from polyturn.tools.search import SearchTool

SCHEMA = {"type": "function", "function": {"name": "base", "description": "d", "parameters": {"properties": {}}}}


@polyturn.tool
def check(answer: str) -> str:
    """Check an answer.

    Args:
        answer: The answer.
    """
    return answer


@functools.cache
def small_index() -> Path:
    folder = Path(tempfile.mkdtemp()) / "index"
    build_index([Passage(id="1", contents="Oslo\nOslo is a city.")], folder)
    return folder


NOWHERE = "http://127.0.0.1:9/"  # no server listens there; each tool that asks a service has to cope

TOOLS = {
    "base": lambda: BaseTool({}, SCHEMA),
    "gsm8k": lambda: Gsm8kTool({}),
    "geo3k": lambda: Geo3kTool({}),
    "search": lambda: SearchTool({"retrieval_service_url": NOWHERE, "max_retries": 1}),
    "search in process": lambda: SearchTool({"index": str(small_index())}),
    "sandbox": lambda: SandboxFusionTool({"sandbox_fusion_url": NOWHERE, "max_retries": 1}),
    "function": lambda: check,
}


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest) -> Any:
    return TOOLS[request.param]()


def test_tool_name_equals_its_schema(tool: Any) -> None:
    assert isinstance(tool, Tool)
    assert tool.schema["type"] == "function"
    assert tool.schema["function"]["name"] == tool.name
    assert tool.tool_schema.function.name == tool.name
    assert tool.get_openai_tool_schema().function.parameters.type == "object"


async def test_given_id_is_returned_or_a_new_one_made(tool: Any) -> None:
    given, response = await tool.create("episode-1")
    made = {(await tool.create())[0] for _ in range(2)}
    assert given == "episode-1"
    assert response.is_empty()
    assert len(made) == 2
    for instance_id in [given, *made]:
        assert await tool.release(instance_id) is None


async def test_every_method_takes_keys_of_the_row(tool: Any) -> None:
    instance_id, _ = await tool.create("e", ground_truth="72", anything=[1])
    outcome = normalize(await tool.execute(instance_id, {"answer": "72"}, anything=[1]))
    assert outcome.response.is_text_only()
    assert isinstance(await tool.calc_reward(instance_id, anything=[1]), float | None)
    await tool.release(instance_id, anything=[1])


async def test_base_class_accepts_every_call() -> None:
    tool = BaseTool({}, SCHEMA)
    response, reward, metrics = await tool.execute("e", {})
    assert (response.text, reward, metrics) == ("Updated the tool state.", 0.0, {})
    assert await tool.calc_reward("e") == 0.0
