"""Settings, rows and files of the shipped interactions: a wrong one is refused with its key or value."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, DataError
from polyturn.core.generation import SamplingParams
from polyturn.interactions.human_user import HumanUser
from polyturn.interactions.replayed_user import ReplayedUser
from polyturn.interactions.simulated_user import SimulatedUser
from support.refusals import refuses

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
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9/v1"):
        SimulatedUser({"base_url": "http://127.0.0.1:9/v1", "model": "m"}).check_setup()
    refuses(lambda: HumanUser({"name": "human"}).check_setup(), ConfigError, "desk")
