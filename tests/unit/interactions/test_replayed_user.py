"""ReplayedUser: what was recorded is said again, and what happens at the end of a recording is a setting."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from polyturn.core.errors import ConfigError, DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import InteractionRef, Task
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.interactions.replayed_user import ReplayedUser
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.suites.interaction import check_interaction

TURNS = ["And for four?", {"content": "Thanks.", "score": 1, "done": True}]


def told(**kwargs: Any) -> Task:
    return dataclasses.replace(task("A table.", data_source=None), interaction=InteractionRef(name="user", kwargs=kwargs))


async def play(turns: Any, *, num_turns: int = 4, **config: Any) -> Any:
    context = scripted_context(["a"], interactions={"user": ReplayedUser(config)}, limits=Limits(max_turns=num_turns))
    return await run_episode(context, told(turns=turns), id="e")


async def test_it_says_what_was_said_and_scores_what_was_scored() -> None:
    found = await play(TURNS)
    assert [m.text for m in found.messages if m.role == "user"] == ["A table.", "And for four?", "Thanks."]
    assert found.stop_reason is StopReason.ENV_DONE
    assert [t.scores["interaction"] for t in found.turns] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("at_end", "said"),
    [("end", ["Yes?", ""]), ("repeat", ["Yes?", "Yes?", "Yes?"]), ("Go on.", ["Yes?", "Go on.", "Go on."])],
)
async def test_what_happens_when_the_recording_is_over_is_a_setting(at_end: str, said: list[str]) -> None:
    found = await play(["Yes?"], num_turns=3, at_end=at_end)
    assert [t.observation[0].text for t in found.turns if t.observation] == said


async def test_a_recording_that_is_over_can_be_an_error() -> None:
    found = await play(["Yes?"], at_end="fail")
    assert found.is_failed and "the recording has 1 replies and one more was asked for" in str(found.error)


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
    with pytest.raises(DataError, match="no recording 'two' in its file, which has 2"):
        partner.check_row({"recording": "two"})


async def test_it_keeps_the_contract_of_interactions() -> None:
    await check_interaction(ReplayedUser({"name": "user"}), turns=TURNS, says=["a", "b"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, r"has nothing to say: the row's interaction kwargs have \[\]"),
        ({"turns": []}, "is no list of replies"),
        ({"turns": "Yes."}, "is no list of replies"),
        ({"turns": [3]}, "reply 0: 3 is neither a text nor a mapping"),
        ({"turns": [{"content": "a", "scor": 1}]}, "a reply has no 'scor'"),
        ({"turns": [{"content": "a", "score": "good"}]}, "the score is 'good'"),
    ],
)
def test_a_row_that_cannot_be_replayed_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        ReplayedUser({}).check_row(row)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1 is no JSON"),
        ('{"turns": ["a"]}', "give an `id` and its `turns`"),
        ('{"id": 1, "turns": ["a"]}\n{"id": "1", "turns": ["a"]}', "stands there twice"),
        ('{"id": 1, "messages": [{"role": "user", "content": "a"}]}', "is no list of replies"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=said):
        ReplayedUser({"file": "talks.jsonl"}, base=tmp_path)


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no setting 'at_ends'"):
        ReplayedUser({"at_ends": "end"})
    with pytest.raises(ConfigError, match="cannot be read"):
        ReplayedUser({"file": "none.jsonl"}, base=tmp_path)
