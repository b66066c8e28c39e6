"""Interaction files, settings and rows: names, duplicates, the source of classes, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, DataError
from polyturn.core.generation import SamplingParams
from polyturn.interactions.base import BaseInteraction
from polyturn.interactions.gsm8k import Gsm8kInteraction
from polyturn.interactions.human_user import HumanUser
from polyturn.interactions.registry import default_name, get_interaction_class, initialize_interactions_from_config
from polyturn.interactions.replayed_user import ReplayedUser
from polyturn.interactions.simulated_user import SimulatedUser
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


@pytest.mark.parametrize("class_name", ["Customer", "gone.py:Customer", "json:Customer", "json:dumps"])
def test_wrong_class_is_refused_with_its_key(tmp_path: Path, class_name: str) -> None:
    items = [{"class_name": GSM8K}, {"class_name": class_name}]
    key = "rollout.interactions: interaction[1].class_name"
    refuses(lambda: initialize_interactions_from_config(items, base=tmp_path), ConfigError, key, class_name.split(":")[0])


def test_missing_module_and_attribute_are_standard_errors_too() -> None:
    with pytest.raises(ModuleNotFoundError):
        get_interaction_class("no_such_module.Thing")
    with pytest.raises(AttributeError):
        get_interaction_class("polyturn.interactions.base.Thing")


@pytest.mark.parametrize(
    "text", ["", "tools: []", "- a", "interaction: 3", "a: [", "interaction: [{class_name: a.B, config: {x: '${y}'}}]", None]
)
def test_file_that_is_not_an_interaction_file_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "i.yaml"
    if text is not None:
        path.write_text(text)
    refuses(lambda: initialize_interactions_from_config(path), ConfigError, "i.yaml")


MODEL = {"base_url": "http://h/v1", "model": "m"}
POLICIES: Any = {"guest": SimpleNamespace(name="guest", sampling=SamplingParams())}

SETTINGS: list[tuple[Any, dict[str, Any], str]] = [
    (HumanUser, {"at": "phone"}, "at is 'phone'"),
    (HumanUser, {"at": "desk"}, "at: desk"),
    (HumanUser, {"desk": "d"}, "at: desk"),
    (HumanUser, {"deadline_s": 0}, "deadline_s is 0"),
    (HumanUser, {"on_deadline": ""}, "on_deadline"),
    (HumanUser, {"score": "x"}, "score is 'x'"),
    (HumanUser, {"deadline": 5}, "'deadline'"),
    (HumanUser, {"at": "desk", "desk": "/proc/none"}, "/proc/none"),
    (ReplayedUser, {"at_ends": "end"}, "'at_ends'"),
    (ReplayedUser, {"file": "none.jsonl"}, "none.jsonl"),
    (SimulatedUser, {"model": "m"}, "base_url is None"),
    (SimulatedUser, {"base_url": "http://h/v1"}, "model is None"),
    (SimulatedUser, {"base_url": "h:80", "model": "m"}, "'h:80'"),
    (SimulatedUser, {**MODEL, "api_key": "sk"}, "api_key"),
    (SimulatedUser, {**MODEL, "api_key_env": "NOT_SET_X"}, "'NOT_SET_X'"),
    (SimulatedUser, {**MODEL, "api_key_env": 3}, "api_key_env is 3"),
    (SimulatedUser, {**MODEL, "persna": "x"}, "'persona'"),
    (SimulatedUser, {**MODEL, "max_calls": 0}, "max_calls is 0"),
    (SimulatedUser, {**MODEL, "max_tokens": 1.5}, "max_tokens is 1.5"),
    (SimulatedUser, {**MODEL, "temperature": "hot"}, "temperature is 'hot'"),
    (SimulatedUser, {**MODEL, "top_p": 2}, "top_p is 2"),
    (SimulatedUser, {**MODEL, "extra": [1]}, "extra"),
    (SimulatedUser, {**MODEL, "done_score": "x"}, "done_score is 'x'"),
    (SimulatedUser, {**MODEL, "persona": 3}, "persona is 3"),
    (SimulatedUser, {**MODEL, "train": True}, "model: policy"),
    (SimulatedUser, {**MODEL, "agent": "assistant"}, "agent"),
    (SimulatedUser, {**MODEL, "cache": "/proc/none/c.sqlite"}, "/proc/none"),
    (SimulatedUser, {"model": "policy", "temperature": -1}, "temperature is -1"),
    (SimulatedUser, {"model": "policy", "base_url": "http://h/v1"}, "base_url"),
    (SimulatedUser, {"model": "policy", "train": True, "temperature": 0.5}, "temperature"),
    (SimulatedUser, {"policy": "other"}, "'other'"),
    (SimulatedUser, {"policy": "guest", "train": True}, "'guest'"),
    (SimulatedUser, {"policy": "guest", "base_url": "http://h/v1"}, "base_url"),
    (SimulatedUser, {"policy": "guest", "model": "policy"}, "model"),
]


@pytest.mark.parametrize(("kind", "settings", "key"), SETTINGS)
def test_wrong_setting_is_refused(kind: Any, settings: dict[str, Any], key: str) -> None:
    more = {"policies": POLICIES} if "policy" in settings else {}
    refuses(lambda: kind(settings, **more), ConfigError, key)


@pytest.mark.parametrize(
    ("interaction", "row", "key"),
    [
        (ReplayedUser({}), {}, "[]"),
        (ReplayedUser({}), {"turns": []}, "turns"),
        (ReplayedUser({}), {"turns": "Yes."}, "turns"),
        (ReplayedUser({}), {"turns": [3]}, "reply 0: 3"),
        (ReplayedUser({}), {"turns": [{"content": "a", "scor": 1}]}, "'scor'"),
        (ReplayedUser({}), {"turns": [{"content": "a", "score": "good"}]}, "'good'"),
        (SimulatedUser(MODEL), {"name": "user"}, "['name']"),
        (SimulatedUser({**MODEL, "instructions": "In {city}: {goal}"}), {"goal": "Eat."}, "'city'"),
    ],
)
def test_wrong_row_is_refused(interaction: Any, row: dict[str, Any], key: str) -> None:
    refuses(lambda: interaction.check_row(row), DataError, key)
    SimulatedUser({**MODEL, "goal": "Eat."}).check_row({"name": "user"})


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("{", "line 1"),
        ('{"turns": ["a"]}', "`id`"),
        ('{"id": 1, "turns": ["a"]}\n{"id": "1", "turns": ["a"]}', "twice"),
        ('{"id": 1, "messages": [{"role": "user", "content": "a"}]}', "replies"),
    ],
)
def test_wrong_file_of_recordings_is_refused(lines: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text(lines)
    refuses(lambda: ReplayedUser({"file": "talks.jsonl"}, base=tmp_path), ConfigError, key)


def test_missing_endpoint_and_terminal_are_refused_at_the_start() -> None:
    refuses(
        lambda: SimulatedUser({"base_url": "http://127.0.0.1:9/v1", "model": "m"}).check_setup(),
        ConfigError,
        "127.0.0.1:9/v1",
    )
    refuses(lambda: HumanUser({"name": "human"}).check_setup(), ConfigError, "desk")
