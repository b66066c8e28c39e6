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
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
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
UNNAMED = """
interaction:
  - class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
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


def in_every_form(text: str, folder: Path) -> list[Any]:
    """Return a file's content as YAML and JSON files, as a path and as text of one, and as mappings of two kinds."""
    data = yaml.safe_load(text)
    (folder / "f.yaml").write_text(text)
    (folder / "f.json").write_text(json.dumps(data))
    return [folder / "f.yaml", str(folder / "f.yaml"), folder / "f.json", data, OmegaConf.create(data)]


def test_a_single_interaction_in_every_form(tmp_path: Path):
    for form in in_every_form(SINGLE, tmp_path):
        found = initialize_interactions_from_config(form)
        assert list(found) == ["gsm8k"] and isinstance(found["gsm8k"], Gsm8kInteraction)


def test_several_interactions_with_their_configs(tmp_path: Path, custom: None):
    found = initialize_interactions_from_config(in_every_form(SEVERAL, tmp_path)[0])
    assert list(found) == ["gsm8k", "custom_solver", "code_verifier"]
    assert found["custom_solver"].solver_type == "advanced"  # type: ignore[attr-defined]
    assert found["custom_solver"].config == {"solver_type": "advanced", "timeout": 30, "name": "custom_solver"}
    assert found["code_verifier"].config["verification_mode"] == "strict"


def test_a_name_that_is_not_given_comes_from_the_class():
    assert list(initialize_interactions_from_config(yaml.safe_load(UNNAMED))) == ["gsm8k"]


@pytest.mark.parametrize("config", ["{type: native}", "{}", "null"])
def test_a_tool_in_every_form_is_native_unless_it_says_otherwise(config: str, tmp_path: Path):
    for form in in_every_form(TOOL.replace("CONFIG", config), tmp_path):
        (tool,) = initialize_tools_from_config(form)
        assert isinstance(tool, Gsm8kTool) and tool.name == "calc_gsm8k_reward"
        assert tool.schema["function"]["description"] == "Scores an answer."


def test_a_tool_may_have_no_config_at_all(tmp_path: Path):
    text = TOOL.replace("    config: CONFIG\n", "")
    (tool,) = initialize_tools_from_config(in_every_form(text, tmp_path)[0])
    assert isinstance(tool, Gsm8kTool)


def test_translated_keys_are_refused_with_the_english_ones(tmp_path: Path):
    for form in in_every_form(TRANSLATED, tmp_path)[:4]:
        with pytest.raises(ConfigError) as refused:
            initialize_tools_from_config(form)
        for english in ("'tools'", "'class_name'", "'config'", "'tool_schema'"):
            assert english in str(refused.value)


def test_one_translated_key_in_an_item_is_enough():
    with pytest.raises(ConfigError, match="'类名' is 'class_name'"):
        initialize_interactions_from_config({"interaction": [{"类名": "x.Y", "config": {}}]})
