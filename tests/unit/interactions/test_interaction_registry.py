"""Interaction files: names, duplicates, missing parts, and where classes come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.interactions.registry import default_name, get_interaction_class, initialize_interactions_from_config
from support.refusals import refuses

GSM8K = "polyturn.interactions.gsm8k.Gsm8kInteraction"
BASE = "polyturn.interactions.base.BaseInteraction"


def built(*items: Any) -> dict[str, BaseInteraction]:
    return initialize_interactions_from_config({"interaction": list(items)})


def test_default_name_comes_from_the_class() -> None:
    names = {
        "Gsm8kInteraction": "gsm8k",
        "BaseInteraction": "base",
        "CustomAgent": "customagent",
        "Interaction": "interaction",
    }
    assert {name: default_name(name) for name in names} == names


def test_yaml_file_gives_named_interactions_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTOR_URL", "http://tutor")
    (tmp_path / "mine.py").write_text(
        "from polyturn.interactions.base import BaseInteraction\nclass TutorInteraction(BaseInteraction):\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n        return True, '', 1.0, {}\n"
    )
    path = tmp_path / "interactions.yaml"
    path.write_text(
        f"interaction:\n- name: verifier\n  class_name: {BASE}\n  config: {{url: '${{oc.env:TUTOR_URL}}'}}\n"
        f"- class_name: {GSM8K}\n- class_name: mine.py:TutorInteraction\n"
    )
    found = initialize_interactions_from_config(str(path))
    assert list(found) == ["verifier", "gsm8k", "tutor"]
    assert found["verifier"].config == {"url": "http://tutor", "name": "verifier"}
    assert isinstance(found["gsm8k"], Gsm8kInteraction)
    assert type(found["tutor"]).__name__ == "TutorInteraction"
    assert all(interaction.name == name for name, interaction in found.items())


def test_json_file_and_short_forms_work(tmp_path: Path) -> None:
    path = tmp_path / "interactions.json"
    path.write_text(json.dumps({"interaction": [{"class_name": GSM8K, "config": {}}]}, indent="\t"))
    assert list(initialize_interactions_from_config(path)) == ["gsm8k"]
    assert built() == {}
    assert built({"class_name": BASE})["base"].config == {"name": "base"}


@pytest.mark.parametrize(
    ("items", "key"),
    [
        ([{"class_name": GSM8K}, {"class_name": GSM8K}], "Duplicate interaction name 'gsm8k' found"),  # users match on it
        ([{"config": {}}], "interaction[0]: class_name is None"),
        (["gsm8k"], "interaction[0]"),
        ([{"class_name": GSM8K, "confg": {}}], "'confg'"),
        ([{"class_name": GSM8K, "config": 3}], "config must be a mapping, not 3"),
        ([{"class_name": "polyturn.interactions.gsm8k.Gsm8kInteracton"}], "'Gsm8kInteraction'"),
        ([{"class_name": "json.dumps"}], "json.dumps"),
        ([{"class_name": "builtins.int"}], "TypeError"),
    ],
)
def test_wrong_item_is_refused(items: list[Any], key: str) -> None:
    refuses(lambda: built(*items), ConfigError, key)


def test_missing_module_and_attribute_are_standard_errors_too() -> None:
    with pytest.raises(ModuleNotFoundError):
        get_interaction_class("no_such_module.Thing")
    with pytest.raises(AttributeError):
        get_interaction_class("polyturn.interactions.base.Thing")


@pytest.mark.parametrize(
    "text", ["", "tools: []", "- a", "interaction: 3", "a: [", "interaction: [{class_name: a.B, config: {x: '${y}'}}]", None]
)
def test_file_that_is_no_interaction_file_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "i.yaml"
    if text is not None:
        path.write_text(text)
    refuses(lambda: initialize_interactions_from_config(path), ConfigError, "i.yaml")
