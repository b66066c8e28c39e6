"""Interaction and tool files as verl's documents print them are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from polyturn.core.errors import ConfigError
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.tools.gsm8k import Gsm8kTool
from polyturn.tools.registry import initialize_tools_from_config

SINGLE = """
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""
SEVERAL = """
interaction:
  - class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
  - name: "custom_solver"
    class_name: "custom.interactions.CustomInteraction"
    config:
      solver_type: "advanced"
      timeout: 30
  - name: "code_verifier"
    class_name: "verl.interactions.base.BaseInteraction"
    config:
      verification_mode: "strict"
"""
TOOL = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config: CONFIG
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Scores an answer."
        parameters:
          type: "object"
          properties:
            answer: {type: "string", description: "The answer."}
          required: ["answer"]
"""
TRANSLATED = """
工具:
      - 类名: ""
        配置: {}
        工具模式:
"""
CUSTOM = """
from verl.interactions.base import BaseInteraction


class CustomInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self.solver_type = config["solver_type"]

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 1.0, {}
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project's own package `custom` on the import path."""
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "__init__.py").touch()
    (tmp_path / "custom" / "interactions.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))


FORMS = ["yaml", "text of a path", "json", "mapping", "omegaconf"]


def written(text: str, form: str, folder: Path) -> Any:
    """Return a file's content as a path to YAML or JSON, as the text of a path, or as a mapping of two kinds."""
    data = yaml.safe_load(text)
    (folder / "f.yaml").write_text(text)
    (folder / "f.json").write_text(json.dumps(data))
    path = folder / "f.yaml"
    forms = {"yaml": path, "text of a path": str(path), "json": folder / "f.json", "mapping": data}
    return OmegaConf.create(data) if form == "omegaconf" else forms[form]


@pytest.mark.parametrize("form", FORMS)
def test_interaction_file_is_read_in_every_form(form: str, tmp_path: Path):
    found = initialize_interactions_from_config(written(SINGLE, form, tmp_path))
    assert list(found) == ["gsm8k"]
    assert isinstance(found["gsm8k"], Gsm8kInteraction)


def test_several_interactions_keep_their_configs(tmp_path: Path, custom: None):
    found = initialize_interactions_from_config(written(SEVERAL, "yaml", tmp_path))
    assert list(found) == ["gsm8k", "custom_solver", "code_verifier"], "the first is named by its class"
    assert found["custom_solver"].solver_type == "advanced"  # type: ignore[attr-defined]
    assert found["custom_solver"].config == {"solver_type": "advanced", "timeout": 30, "name": "custom_solver"}
    assert found["code_verifier"].config["verification_mode"] == "strict"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", ["    config: {type: native}\n", "    config: null\n", ""])
def test_tool_file_is_read_in_every_form(config: str, form: str, tmp_path: Path):
    (tool,) = initialize_tools_from_config(written(TOOL.replace("    config: CONFIG\n", config), form, tmp_path))
    assert isinstance(tool, Gsm8kTool)
    assert tool.name == "calc_gsm8k_reward"
    assert tool.schema["function"]["description"] == "Scores an answer."


@pytest.mark.parametrize("form", ["yaml", "json", "mapping"])
def test_translated_keys_are_refused_with_the_english_ones(form: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        initialize_tools_from_config(written(TRANSLATED, form, tmp_path))
    assert [k for k in ("'tools'", "'class_name'", "'config'", "'tool_schema'") if k not in str(refused.value)] == []
    with pytest.raises(ConfigError, match=r"'类名'.*'class_name'"):
        initialize_interactions_from_config({"interaction": [{"类名": "x.Y", "config": {}}]})
