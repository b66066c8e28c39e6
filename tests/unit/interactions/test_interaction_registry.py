"""Interaction files: names, duplicates, what is missing, and where classes come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.interactions.registry import default_name, get_interaction_class, initialize_interactions_from_config

GSM8K = "polyturn.interactions.gsm8k.Gsm8kInteraction"
BASE = "polyturn.interactions.base.BaseInteraction"


def built(*items: dict) -> dict[str, BaseInteraction]:
    return initialize_interactions_from_config({"interaction": list(items)})


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("Gsm8kInteraction", "gsm8k"),
        ("BaseInteraction", "base"),
        ("CustomAgent", "customagent"),
        ("Interaction", "interaction"),
    ],
)
def test_the_default_name_is_the_class_in_lower_case_without_its_ending(class_name: str, name: str) -> None:
    assert default_name(class_name) == name


def test_a_yaml_file_gives_named_interactions_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "interactions.yaml"
    path.write_text(
        f"interaction:\n- name: verifier\n  class_name: {BASE}\n  config: {{mode: strict}}\n- class_name: {GSM8K}\n"
    )
    found = initialize_interactions_from_config(str(path))
    assert list(found) == ["verifier", "gsm8k"]
    assert found["verifier"].config == {"mode": "strict", "name": "verifier"}
    assert isinstance(found["gsm8k"], Gsm8kInteraction)
    assert all(partner.name == name for name, partner in found.items())


def test_a_json_file_with_tabs_works_too(tmp_path: Path) -> None:
    path = tmp_path / "interactions.json"
    path.write_text(json.dumps({"interaction": [{"class_name": GSM8K, "config": {}}]}, indent="\t"))
    assert list(initialize_interactions_from_config(path)) == ["gsm8k"]


def test_an_empty_list_gives_nothing() -> None:
    assert built() == {}


def test_a_missing_config_is_an_empty_one() -> None:
    assert built({"class_name": BASE})["base"].config == {"name": "base"}


def test_references_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTOR_URL", "http://tutor")
    config = {"url": "${oc.env:TUTOR_URL}"}
    assert built({"class_name": BASE, "config": config})["base"].config["url"] == "http://tutor"


def test_a_class_may_live_in_a_file_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from polyturn.interactions.base import BaseInteraction\nclass TutorInteraction(BaseInteraction):\n"
        "    async def generate_response(self, instance_id, messages, **kwargs):\n        return True, '', 1.0, {}\n"
    )
    path = tmp_path / "interactions.yaml"
    path.write_text("interaction:\n- class_name: mine.py:TutorInteraction\n")
    assert type(initialize_interactions_from_config(path)["tutor"]).__name__ == "TutorInteraction"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("async def respond(self, instance_id, messages, **kwargs): ...", "needs `generate_response`: did you mean that"),
        ("async def generate_response(self, messages): ...", "cannot be called as it is"),
        ("pass", "defines no `generate_response`"),
    ],
)
def test_a_class_that_would_leave_replies_to_its_base_is_refused(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"from polyturn.interactions.base import BaseInteraction\nclass Tutor(BaseInteraction):\n    {body}\n"
    )
    with pytest.raises(ConfigError, match=message):
        initialize_interactions_from_config({"interaction": [{"class_name": "mine.py:Tutor"}]}, base=tmp_path)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"class_name": GSM8K}, {"class_name": GSM8K}], "^Duplicate interaction name 'gsm8k' found"),
        ([{"config": {}}], r"interaction\[0\]: class_name is None"),
        (["gsm8k"], r"interaction\[0\]: an item must be a mapping"),
        ([{"class_name": GSM8K, "confg": {}}], "unknown key 'confg'.*'config'"),
        ([{"class_name": GSM8K, "config": 3}], "config must be a mapping, not 3"),
        ([{"class_name": "polyturn.interactions.gsm8k.Gsm8kInteracton"}], "'Gsm8kInteraction'"),
        ([{"class_name": "json.dumps"}], "must name an interaction class"),
        ([{"class_name": "builtins.int"}], "raised TypeError"),
    ],
)
def test_what_cannot_work_is_one_sentence(items: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        initialize_interactions_from_config({"interaction": items})


def test_a_missing_module_and_a_missing_attribute_are_the_standard_errors_too() -> None:
    with pytest.raises(ModuleNotFoundError):
        get_interaction_class("no_such_module.Thing")
    with pytest.raises(AttributeError):
        get_interaction_class("polyturn.interactions.base.Thing")


@pytest.mark.parametrize(
    "text", ["", "tools: []", "- a", "interaction: 3", "a: [", "interaction: [{class_name: a.B, config: {x: '${y}'}}]"]
)
def test_a_file_that_is_not_an_interaction_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "i.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"i\.yaml"):
        initialize_interactions_from_config(path)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        initialize_interactions_from_config(tmp_path / "none.yaml")
