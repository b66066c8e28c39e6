"""ReplayedUser: it repeats a recording, and a setting says how to go on at its end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import InteractionRef, Task
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.interactions.replayed_user import ReplayedUser
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.suites.interaction import check_interaction
from support.refusals import refuses

TURNS = ["And for four?", {"content": "Thanks.", "score": 1, "done": True}]


def told(**kwargs: Any) -> Task:
    return dataclasses.replace(task("A table.", data_source=None), interaction=InteractionRef(name="user", kwargs=kwargs))


async def play(turns: Any, *, num_turns: int = 4, **config: Any) -> Any:
    context = scripted_context(["a"], interactions={"user": ReplayedUser(config)}, limits=Limits(max_turns=num_turns))
    return await run_episode(context, told(turns=turns), id="e")


async def test_recorded_replies_and_scores_are_repeated() -> None:
    found = await play(TURNS)
    assert [m.text for m in found.messages if m.role == "user"] == ["A table.", "And for four?", "Thanks."]
    assert found.stop_reason is StopReason.ENV_DONE
    assert [t.scores["interaction"] for t in found.turns] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("at_end", "replies"),
    [
        ("end", ["Yes?", ""]),
        ("repeat", ["Yes?", "Yes?", "Yes?"]),
        ("Go on.", ["Yes?", "Go on.", "Go on."]),
        ("fail", ["Yes?"]),
    ],
)
async def test_end_of_a_recording_is_a_setting(at_end: str, replies: list[str]) -> None:
    found = await play(["Yes?"], num_turns=3, at_end=at_end)
    assert [t.observation[0].text for t in found.turns if t.observation] == replies
    assert found.is_failed == (at_end == "fail")


async def test_rows_name_recordings_of_a_file(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "A table."},
        {"role": "assistant", "content": "For two?"},
        {"role": "user", "content": [{"type": "text", "text": "For three."}]},
    ]
    lines = [{"id": "one", "turns": TURNS}, {"id": 2, "messages": talk}]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    entry = {
        "name": "user",
        "class_name": "polyturn.interactions.replayed_user.ReplayedUser",
        "config": {"file": "talks.jsonl"},
    }
    partner: Any = initialize_interactions_from_config({"interaction": [entry]}, base=tmp_path)["user"]
    context = scripted_context(["a"], interactions={"user": partner})
    found = await run_episode(context, told(recording=2), id="e")
    assert [t.observation[0].text for t in found.turns] == ["For three.", ""]
    refuses(lambda: partner.check_row({"recording": "two"}), DataError, "'two'")


async def test_replayed_user_keeps_the_contract() -> None:
    await check_interaction(ReplayedUser({"name": "user"}), turns=TURNS, says=["a", "b"])


def test_recording_may_contain_a_line_separator(tmp_path: Path) -> None:
    line = json.dumps({"id": "a", "turns": ["one\u2028two"]}, ensure_ascii=False)
    (tmp_path / "talks.jsonl").write_text(line, encoding="utf-8")
    ReplayedUser({"file": "talks.jsonl"}, base=tmp_path).check_row({"recording": "a"})
