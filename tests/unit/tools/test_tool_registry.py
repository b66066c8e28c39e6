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

def plain(x: int) -> int:
    return x
'''


def built(*items: dict) -> list[BaseTool]:
    return initialize_tools_from_config({"tools": list(items)})


def test_a_yaml_file_gives_tools_in_its_order(tmp_path: Path) -> None:
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
"""
    )
    first, second = initialize_tools_from_config(path)
    assert isinstance(first, Gsm8kTool)
    assert (first.name, first.config) == ("check", {"type": "native", "x": 1})
    assert first.schema["function"]["parameters"]["properties"]["answer"]["minLength"] == 1
    assert isinstance(second, FunctionTool)
    assert second.name == "double"


def test_config_and_schema_may_be_missing() -> None:
    (tool,) = built({"class_name": GSM8K})
    assert (tool.name, tool.config) == ("calc_gsm8k_reward", {})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"class_name": GSM8K}, {"class_name": GSM8K}], "^Duplicate tool name 'calc_gsm8k_reward' found"),
        ([{"config": {}}], r"tools\[0\]: class_name is None"),
        ([{"class_name": "polyturn.tools.base.BaseTool"}], "Tool schema is not set!"),
        ([{"class_name": GSM8K, "tool_schema": {"type": "function"}}], r"tools\[0\].*function: Field required"),
        ([{"class_name": GSM8K, "config": {"type": "nativ"}}], "'nativ'.*'native'"),
        ([{"class_name": GSM8K, "config": {"type": "mcp"}}], "needs mcp: .mcp_servers_config_path"),
        ([{"class_name": "json.dumps"}], "decorated with @polyturn.tool"),
        ([{"class_name": "polyturn.tools.gsm8k.Gsm8kTol"}], "'Gsm8kTool'"),
    ],
)
def test_what_cannot_work_is_one_sentence(items: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        initialize_tools_from_config({"tools": items})


def test_a_class_may_bring_its_schema_without_a_file() -> None:
    class Mine(BaseTool):
        pass

    assert Mine({}, SCHEMA).name == "mine"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("async def excute(self, instance_id, parameters, **kwargs): ...", "needs `execute`: did you mean that"),
        ("async def execute(self): ...", "cannot be called as it is"),
    ],
)
def test_a_class_that_would_leave_calls_to_its_base_is_refused(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"from polyturn.tools.base import BaseTool\nclass Mine(BaseTool):\n    {body}\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=message):
        initialize_tools_from_config({"tools": [{"class_name": "mine.py:Mine", "tool_schema": SCHEMA}]}, base=tmp_path)
