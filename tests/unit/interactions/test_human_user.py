"""HumanUser, the desk and the terminal: answers, deadlines, second answers, closed terminals, odd input."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
import pytest

from polyturn.cli.view import open_desk, run_terminal
from polyturn.core.errors import DataError
from polyturn.core.lifecycle import StopReason
from polyturn.core.task import InteractionRef, Task
from polyturn.core.trajectory import Trajectory
from polyturn.interactions.human_user import HumanUser
from polyturn.interactions.person import HumanQueue, HumanReply, Terminal, read_answer
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.auth import ServerRules
from polyturn.testing.episodes import scripted_context, task
from polyturn.viewer.app import create_app
from support.refusals import refuses


def one() -> Task:
    ref = InteractionRef(name="human", kwargs={"name": "human", "goal": "Eat."})
    return dataclasses.replace(task("A table.", data_source=None), interaction=ref)


async def play(human: HumanUser, *, id: str = "e") -> Trajectory:
    context = scripted_context(["<think>Hm.</think>For two?", "Done."], interactions={"human": human})
    return await run_episode(context, one(), id=id)


class Keyboard:
    """A pipe that is typed into."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.reader: TextIO = os.fdopen(reading, "r", buffering=1)
        self.writer: TextIO = os.fdopen(writing, "w", buffering=1)
        self.screen = io.StringIO()
        self.terminal = Terminal(self.reader, self.screen)


@pytest.fixture
def keyboard() -> Iterator[Keyboard]:
    made = Keyboard()
    yield made
    made.reader.close()
    made.writer.close()


async def waiting(desk: HumanQueue, count: int = 1) -> list[dict[str, Any]]:
    async with asyncio.timeout(120):
        while len(found := desk.waiting()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def test_person_answers_at_a_desk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    human = HumanUser({"name": "human", "at": "desk", "desk": "desk"}, base=tmp_path)
    desk, running = open_desk(tmp_path / "desk"), asyncio.create_task(play(human))
    (paper,) = await waiting(desk)
    assert paper["messages"] == [{"role": "user", "content": "A table."}, {"role": "assistant", "content": "For two?"}]
    assert paper["about"] == {"conversation": "e", "goal": "Eat."}
    desk.answer(paper["ticket"], HumanReply(text="For four.", score=0.5))
    refuses(lambda: desk.answer(paper["ticket"], HumanReply(text="For five.")), DataError, "no longer waiting")
    (paper,) = list(await waiting(desk))
    desk.answer(paper["ticket"], HumanReply(text="", is_end=True, score=1.0))
    found = await running
    assert found.stop_reason is StopReason.ENV_DONE and found.error is None
    assert [t.observation[0].text for t in found.turns] == ["For four.", ""]
    assert [t.scores["interaction"] for t in found.turns] == [0.5, 1.0]
    assert not list((tmp_path / "desk").rglob("*.json")), "nothing is left behind"
    (record,) = [r for r in caplog.records if r.name == "polyturn.interactions.human_user"]
    assert f"polyturn view --desk {tmp_path / 'desk'}" in record.getMessage()


@pytest.mark.parametrize(("on_deadline", "reply"), [("end", ""), ("Well?", "Well?"), ("fail", None)])
async def test_late_person_ends_continues_or_fails(on_deadline: str, reply: str | None, tmp_path: Path) -> None:
    config = {"at": "desk", "desk": "desk", "deadline_s": 0.1, "on_deadline": on_deadline}
    found = await play(HumanUser(config, base=tmp_path))
    assert found.is_failed == (reply is None)
    if reply is not None:
        assert found.turns[0].observation[0].text == reply
        assert found.turns[0].info["user_stop"] == "deadline"
    assert not list((tmp_path / "desk").rglob("*.json"))


async def test_unreadable_answer_is_not_thrown_away(tmp_path: Path) -> None:
    desk = HumanQueue(tmp_path)
    asking = asyncio.create_task(desk.ask([{"role": "user", "content": "Hi."}], about={}, deadline_s=120.0))
    (paper,) = await waiting(desk)
    place = tmp_path / "answers" / f"{paper['ticket']}.json"
    place.mkdir()
    await asyncio.sleep(0.3)
    assert place.exists() and not asking.done()
    place.rmdir()
    desk.answer(paper["ticket"], HumanReply(text="yes"))
    assert await asking == HumanReply(text="yes")


async def test_half_of_a_character_is_shown_as_a_question_mark(tmp_path: Path) -> None:
    desk = HumanQueue(tmp_path)
    asking = asyncio.create_task(
        desk.ask([{"role": "user", "content": "a\ud800"}], about={"goal": "\ud800"}, deadline_s=120)
    )
    (paper,) = await waiting(desk)
    assert paper["about"] == {"goal": "?"} and paper["messages"] == [{"role": "user", "content": "a?"}]
    desk.answer(paper["ticket"], HumanReply(text="yes"))
    await asking


async def test_cancelled_episode_leaves_the_desk(tmp_path: Path) -> None:
    desk = HumanQueue(tmp_path / "desk")
    running = asyncio.create_task(play(HumanUser({"at": "desk", "desk": "desk"}, base=tmp_path)))
    await waiting(desk)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert desk.waiting() == [] and not list((tmp_path / "desk").rglob("*.json"))


async def test_person_answers_conversations_in_the_terminal(keyboard: Keyboard) -> None:
    human = HumanUser({"name": "human"}, terminal=keyboard.terminal)
    keyboard.writer.write("\nFor four.\n/end 0.5 Thanks.\n/score\n/what\n/score 0.2 No.\n/end\n")
    found = await asyncio.gather(play(human, id="a"), play(human, id="b"))
    said = sorted(t.observation[0].text for one in found for t in one.turns)
    assert said == ["", "For four.", "No.", "Thanks."]
    shown = keyboard.screen.getvalue()
    assert "empty" in shown
    assert "'/what'" in shown
    assert "Hm." not in shown
    assert "[assistant] For two?" in shown and "goal: Eat." in shown


async def test_text_of_a_model_cannot_move_the_cursor(keyboard: Keyboard) -> None:
    keyboard.writer.write("Yes.\n")
    ask = [{"role": "assistant", "content": "\x1b[2Jgone\r\x9b31m"}]
    answer = await asyncio.to_thread(keyboard.terminal.ask, ask, about={}, deadline_s=120)
    assert answer == HumanReply(text="Yes.") and not {"\x1b", "\r", "\x9b"} & set(keyboard.screen.getvalue())


async def test_closed_terminal_fails_the_trajectory(keyboard: Keyboard) -> None:
    keyboard.writer.close()
    found = await play(HumanUser({"name": "human"}, terminal=keyboard.terminal))
    assert found.is_failed and "closed" in str(found.error)


async def test_late_line_does_not_answer_the_next_question(keyboard: Keyboard) -> None:
    found = await play(HumanUser({"deadline_s": 0.2}, terminal=keyboard.terminal))
    assert found.turns[0].info["user_stop"] == "deadline" and "The time is over." in keyboard.screen.getvalue()


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("Yes.\n", HumanReply(text="Yes.")),
        ("/end", HumanReply(text="", is_end=True)),
        ("/end Bye now.", HumanReply(text="Bye now.", is_end=True)),
        ("/end 0.5 Bye.", HumanReply(text="Bye.", is_end=True, score=0.5)),
        ("/score -1 No.", HumanReply(text="No.", score=-1.0)),
    ],
)
def test_lines_are_answers_and_commands(line: str, answer: HumanReply) -> None:
    assert read_answer(line) == answer


@pytest.mark.parametrize("line", ["", "/score", "/score x", "/score 1", "/what", "/end nan", "/score inf a"])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(DataError):
        read_answer(line)


@pytest.fixture
def client(tmp_path: Path) -> httpx.AsyncClient:
    app = create_app([], desk=HumanQueue(tmp_path / "desk"))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:7870")


async def test_page_shows_waiting_conversations_and_takes_answers(client: httpx.AsyncClient, tmp_path: Path) -> None:
    desk = HumanQueue(tmp_path / "desk")
    attack = {"role": "assistant", "content": "<script>alert(1)</script>"}
    asking = asyncio.create_task(desk.ask([attack], about={"goal": "Eat."}, deadline_s=120))
    await waiting(desk)
    (paper,) = (await client.get("/api/waiting")).json()
    assert paper["messages"] == [attack]
    for path in ("/", "/static/answer.js", "/static/style.css"):
        page = await client.get(path)
        assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    assert "innerHTML" not in (await client.get("/static/answer.js")).text
    sent = await client.post("/api/answer", json={"ticket": paper["ticket"], "text": "Four.", "score": 1})
    assert sent.status_code == 200 and (await asking) == HumanReply(text="Four.", score=1.0)
    again = await client.post("/api/answer", json={"ticket": paper["ticket"], "text": "Five."})
    assert again.status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        {"ticket": "../../etc/passwd", "text": "a"},
        {"ticket": "x", "text": ""},
        {"ticket": "x", "text": "a", "score": "high"},
        {"ticket": "x", "text": ["a"]},
        {"ticket": {}, "text": "a" * 200_000},
        [1],
    ],
)
async def test_page_refuses_wrong_answers(body: Any, client: httpx.AsyncClient) -> None:
    sent = await client.post("/api/answer", json=body)
    assert sent.status_code == 422
    assert sent.json()["detail"]


async def test_other_sites_and_strangers_may_not_answer(client: httpx.AsyncClient, tmp_path: Path) -> None:
    body = json.dumps({"ticket": "x", "text": "a"})
    assert (await client.post("/api/answer", content=body, headers={"origin": "http://evil.example"})).status_code == 403
    assert (await client.get("/api/waiting", headers={"host": "evil.example"})).status_code == 421
    rules = ServerRules(token="a-long-token", is_loopback=False)
    app = create_app([], desk=HumanQueue(tmp_path / "desk"), rules=rules)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://h:1") as strange:
        assert (await strange.get("/api/waiting")).status_code == 401
        assert (await strange.get("/api/waiting", headers={"authorization": "Bearer a-long-token"})).status_code == 200


async def test_desk_waits_for_a_run_that_begins_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk = open_desk(tmp_path / "desk")
    shown = capsys.readouterr().out
    assert desk.waiting() == [] and f"desk: {tmp_path / 'desk'}" in shown
    asking = asyncio.create_task(HumanQueue(tmp_path / "desk").ask([], about={}, deadline_s=120))
    (paper,) = await waiting(desk)
    desk.answer(paper["ticket"], HumanReply(text="Four."))
    assert (await asking) == HumanReply(text="Four.")
    open_desk(tmp_path / "desk")
    assert capsys.readouterr().out == ""


async def test_desk_can_be_answered_in_another_terminal(keyboard: Keyboard, tmp_path: Path) -> None:
    desk = HumanQueue(tmp_path / "desk")
    asking = asyncio.create_task(desk.ask([{"role": "assistant", "content": "For two?"}], about={}, deadline_s=120))
    await waiting(desk)
    keyboard.writer.write("Four.\n")
    await asyncio.to_thread(run_terminal, tmp_path / "desk", terminal=keyboard.terminal, num=1)
    assert (await asking) == HumanReply(text="Four.")


def test_expired_conversation_is_cleared_away(tmp_path: Path) -> None:
    desk = HumanQueue(tmp_path / "desk")
    old = {"ticket": "a", "about": {}, "since": 0.0, "until": time.time() - 100, "messages": []}
    (tmp_path / "desk/waiting/a.json").write_text(json.dumps(old))
    assert desk.waiting() == [] and not list((tmp_path / "desk").rglob("*.json"))
