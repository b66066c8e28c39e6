"""Tool files: classes and decorated functions, with and without a schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError
from polyturn.tools.base import BaseTool
from polyturn.tools.function import FunctionTool
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.tools.registry import initialize_tools_from_config

GSM8K = "polyturn.tools.gsm8k.Gsm8kTool"
MCP = "polyturn.tools.mcp.MCPBaseTool"
SCHEMA = {"type": "function", "function": {"name": "mine", "description": "d", "parameters": {}}}
FUNCTION_FILE = '''
import polyturn

@polyturn.tool
def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x
'''
CLASS_FILE = "from polyturn.tools.base import BaseTool\nclass Mine(BaseTool):\n    {body}\n"


def test_yaml_file_gives_tools_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION_FILE)
    path = tmp_path / "tools.yaml"
    path.write_text(
        f"""
tools:
  - class_name: {GSM8K}
    config: {{type: native, x: 1}}
    tool_schema:
      type: function
      function:
        name: check
        description: Check it.
        parameters:
          type: object
          properties: {{answer: {{type: string, description: the answer, minLength: 1}}}}
          required: [answer]
  - class_name: mine.py:double
  - class_name: {GSM8K}
"""
    )
    first, second, third = initialize_tools_from_config(path)
    assert isinstance(first, Gsm8kTool)
    assert (first.name, first.config) == ("check", {"type": "native", "x": 1})
    assert first.schema["function"]["parameters"]["properties"]["answer"]["minLength"] == 1
    assert isinstance(second, FunctionTool)
    assert second.name == "double"
    assert (third.name, third.config) == ("calc_gsm8k_reward", {}), "config and schema may be missing"


def test_function_with_a_schema_in_the_file_stays_stateful(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION_FILE.replace("polyturn.tool", "polyturn.tool(stateless=False)"))
    (tool,) = initialize_tools_from_config([{"class_name": "mine.py:double", "tool_schema": SCHEMA}], base=tmp_path)
    assert (tool.name, tool.stateless) == ("mine", False)


def test_class_may_bring_its_schema_without_a_file() -> None:
    class Mine(BaseTool):
        pass

    assert Mine({}, SCHEMA).name == "mine"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"class_name": GSM8K}, {"class_name": GSM8K}], "'calc_gsm8k_reward'"),
        ([{"config": {}}], r"tools\[0\]: class_name is None"),
        ([{"class_name": "polyturn.tools.base.BaseTool"}], "Tool schema is not set"),
        ([{"class_name": GSM8K, "tool_schema": {"type": "function"}}], r"tools\[0\].*function: Field required"),
        ([{"class_name": GSM8K, "config": {"type": "nativ"}}], "'nativ'.*'native'"),
        ([{"class_name": GSM8K, "config": {"type": "mcp"}}], "mcp_servers_config_path"),
        ([{"class_name": "json.dumps"}], "polyturn.tool"),
        ([{"class_name": "polyturn.tools.gsm8k.Gsm8kTol"}], "'Gsm8kTool'"),
        ([{"class_name": "typo.py:Mine", "tool_schema": SCHEMA}], "`execute`"),
        ([{"class_name": "short.py:Mine", "tool_schema": SCHEMA}], "execute"),
        ([{"class_name": "mine.py:double", "config": {"max_concurrency": 2}}], "'max_concurrency'"),
        ([{"class_name": GSM8K, "mcp": {"servers": {}}}], "type: mcp"),
        (
            [{"class_name": "polyturn.tools.mcp.MCPBaseTool", "config": {"type": "mcp"}, "tool_schema": SCHEMA}],
            "tool_schema",
        ),
    ],
)
def test_item_that_cannot_work_is_a_config_error(items: list, message: str, tmp_path: Path) -> None:
    body = "async def excute(self, instance_id, parameters, **kwargs): ..."
    (tmp_path / "typo.py").write_text(CLASS_FILE.format(body=body))
    (tmp_path / "short.py").write_text(CLASS_FILE.format(body="async def execute(self): ..."))
    (tmp_path / "mine.py").write_text(FUNCTION_FILE)
    with pytest.raises(ConfigError, match=message):
        initialize_tools_from_config({"tools": items}, base=tmp_path)
