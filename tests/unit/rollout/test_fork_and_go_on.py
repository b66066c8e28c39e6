"""Branches, other agents, and turns that continue a message: their tokens are trained once, and cut ones counted.

`tests/property/test_segment_invariants.py` checks the tokens of random edits, forks and cuts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyturn.build.checks import check_use
from polyturn.core.errors import LifecycleError, SchedulerError
from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import ToolCall
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids
from polyturn.testing.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tools.base import BaseTool
from support.parts import Steps, check_tokens
from support.refusals import refuses, refuses_later

TIP = " But wait, that is wrong:"


def owners(t: Trajectory) -> list[list[int]]:
    """The turns that were sampled into each segment."""
    return [[s.turn for s in seg.spans if s.source is SpanSource.SAMPLED] for seg in t.segments]


def sources(t: Trajectory, segment: int = 0) -> list[str]:
    return [s.source.value for s in t.segments[segment].spans if len(s)]


async def play(says: Any, scheduler: Any, **options: Any) -> Trajectory:
    """Run an episode and check its tokens."""
    context = scripted_context(says, scheduler=scheduler if isinstance(scheduler, MultiTurnScheduler) else Steps(scheduler))
    for name, value in options.items():
        setattr(context, name, value)
    t = await run_episode(context, task(data_source=None), id="e", seed=5)
    check_tokens(t)
    return t


async def test_addition_has_control_tokens_only_if_trusted() -> None:
    given = tiny_codec().encode("</think>")

    def end(episode: Any, turn: Any) -> Any:
        if turn.index == 3:
            return None
        addition, is_trusted = [("</think>", False), ("</think>", True), (given, False)][turn.index]
        return episode.go_on(addition, keep=2, is_trusted=is_trusted)

    t = await play(["one two three"], end)
    seen = [t.span(turn.spans[-1]).ids.tolist() for turn in t.turns[:3]]
    assert len(seen[0]) > 1
    assert seen[1] == seen[2] == given.tolist()
    assert tiny_codec().decode(seen[0]) == "</think>"


@pytest.mark.parametrize(("raw", "is_kept"), [("call an", True), ("call answer", False), ("", False)])
async def test_call_stays_if_its_text_does(raw: str, is_kept: bool) -> None:
    def cut(episode: Any, turn: Any) -> Any:
        if turn.index:
            return None
        turn.message = dataclasses.replace(turn.message, tool_calls=(ToolCall(id="c", name="f", raw=raw),))
        return episode.go_on(TIP, keep="call an")

    ids = turn_ids("call answer").tolist()
    assert not any(tiny_codec().decode(ids[:n]) == "call an" for n in range(len(ids))), "it ends inside a token"
    t = await play(["call answer", "x"], cut)
    assert [call.id for call in t.turns[0].message.tool_calls] == ["c"] * is_kept


async def test_weights_of_a_turn_are_for_its_kept_tokens() -> None:
    def mask(episode: Any, turn: Any) -> Any:
        if turn.index:
            return None
        reply = episode.go_on(TIP, keep=3)
        episode.weigh(turn, [1.0, 0.5, 0.0])
        return reply

    t = await run_episode(scripted_context(["one two three", "x"], scheduler=Steps(mask)), task(), id="e")
    assert t.span(t.turns[0].spans[0]).loss_weights.tolist() == [1.0, 0.5, 0.0]


REFUSES = "{%- for m in messages -%}{%- if m.role == 'nobody' -%}{{ raise_exception('who?') }}{%- endif -%}{%- endfor -%}"


@pytest.mark.parametrize(
    ("step", "key"),
    [
        (lambda e, t: e.go_on(TIP, keep="something else"), "'something else'"),
        (lambda e, t: e.go_on(TIP, keep=99), "99"),
        (lambda e, t: (e.go_on(TIP), "and a message")[1], "messages as well"),
        (lambda e, t: e.rewrite([]), "at least one message"),
        (lambda e, t: e.rewrite([{"role": "user", "content": "x"}], goes_on=True), "assistant message"),
        (lambda e, t: e.rewrite([{"role": "nobody"}]), "cannot be rendered"),
    ],
)
async def test_impossible_edit_fails_its_trajectory(step: Callable[[Any, Any], Any], key: str) -> None:
    context = scripted_context(["ab"], scheduler=Steps(step))
    context.codec = Codec(tiny_tokenizer(), chat_template=REFUSES + CHAT_TEMPLATE)
    t = await run_episode(context, task(), id="e")
    assert t.is_failed
    assert key in (t.error or "")


async def test_rewritten_message_goes_on_in_a_masked_segment() -> None:
    def change(episode: Any, turn: Any) -> Any:
        if turn.index:
            return None
        return episode.rewrite([*episode.task.prompt, {"role": "assistant", "content": "my own words,"}], goes_on=True)

    t = await play(["ab", " end"], change)
    assert owners(t) == [[0], [1]]
    assert sources(t, 1) == ["prompt", "sampled"]
    assert tiny_codec().decode(t.segments[1].token_ids).endswith("<|im_start|>assistant\nmy own words, end<|im_end|>")
    assert t.turns[1].message.text == "my own words, end"


class Tree(MultiTurnScheduler):
    """Two turns, then branches that go on by themselves at the same time."""

    def __init__(self, width: int = 3, *, at_once: bool = True) -> None:
        self.width, self.at_once = width, at_once

    async def run(self, episode: Episode) -> StopReason:
        await episode.prepare()
        episode.record(await episode.generate(), Reply.of("go on"))
        await episode.prepare()
        branches = [episode.fork() for _ in range(self.width)]
        if self.at_once:
            await self.run_forks(branches)
        else:
            for branch in branches:
                await super().run(branch)
        return StopReason.STOP

    def step(self, episode: Any, turn: Any) -> Any:
        return "once more" if len(episode.turns) < 3 else None


@pytest.mark.parametrize("at_once", [True, False])
async def test_branches_share_a_prefix_and_train_each_token_once(at_once: bool) -> None:
    engine = ScriptedEngine(lambda r: turn_ids(f"I am {r.session_id} {len(r.prompt_ids)}"), latency_s=0.001)
    t = await play([], Tree(at_once=at_once), engine=engine)
    assert sorted(turn.index for turn in t.turns) == list(range(1 + 3 * 2))
    assert [s.parent for s in t.segments[1:]] == [(0, t.segments[1].parent.length)] * 2
    assert sorted(map(len, owners(t))) == [2, 2, 3], "the first branch goes on in the segment of the trunk"
    for segment in t.segments:
        text = tiny_codec().decode(segment.token_ids)
        assert text.count("I am e ") == 1
        assert len(set(text.split("I am e#")[1:])) == 2
    assert engine.ended_sessions == ["e", "e#1", "e#2", "e#3"]
    assert t.metrics["num_forks"] == 3


async def test_failing_branch_ends_the_others_and_the_trajectory() -> None:
    waited: list[str] = []

    class OneFails(Tree):
        async def step(self, episode: Any, turn: Any) -> Any:
            if episode.id == "e#1":
                raise ValueError("this branch")
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                waited.append(episode.id)
                raise

    t = await run_episode(scripted_context(["x"], scheduler=OneFails()), task(), id="e")
    assert "ValueError: this branch" in (t.error or "")
    assert sorted(waited) == ["e#2", "e#3"]


async def test_ended_episode_generates_nothing() -> None:
    kept: list[Episode] = []

    def leak(episode: Any, turn: Any) -> None:
        kept.append(episode.fork())

    await run_episode(scripted_context(["x"], scheduler=Steps(leak)), task(), id="e")
    await refuses_later(lambda: kept[0].generate(), LifecycleError, "'e#1'")


@pytest.mark.parametrize(("name", "num_turns"), [("Tips", 2), ("Compact", 1), ("Tree", 4)])
async def test_schedulers_of_the_segments_page_run(name: str, num_turns: int) -> None:
    page = (Path(__file__).parents[3] / "docs/segments.md").read_text()
    names: dict[str, Any] = {"MultiTurnScheduler": MultiTurnScheduler}
    exec(page.split("```python")[1].split("```")[0], names)
    assert len((await play(["a <answer>1", "42"], names[name]())).turns) == num_turns


async def test_limits_hold_along_a_branch_and_seeds_differ() -> None:
    seeds: set[Any] = set()

    def says(request: Any) -> str:
        seeds.add(request.sampling.seed)
        return "hm"

    t = await play(says, Tree(2, at_once=False), limits=Limits(max_turns=2))
    assert len(t.turns) == len(seeds) == 3


class Branches(MultiTurnScheduler):
    """Forks behind the first turn in a given way, and speaks in both."""

    def __init__(self, fork: Callable[[Episode], Episode], answer: Callable[[Episode], Any]) -> None:
        self.fork, self.answer = fork, answer

    async def run(self, episode: Episode) -> StopReason:
        await episode.prepare()
        turn = await episode.generate()
        fork = self.fork(episode)
        episode.record(turn, self.answer(episode))
        for one in (fork, episode):
            if one is fork:
                fork.record(turn, Reply.of("and?"))
            await one.prepare()
            await one.generate()
        return StopReason.STOP


@pytest.mark.parametrize("fork", [lambda e: e.fork(at=e.mark()), lambda e: e.fork()], ids=["at a mark", "here"])
@pytest.mark.parametrize("is_closed", [False, True])
async def test_fork_closes_a_cut_turn_as_its_episode_does(fork: Callable[[Episode], Episode], is_closed: bool) -> None:
    """The template's end of turn, which a cut completion lacks, is written in both."""
    prompts: list[str] = []

    def says(request: GenerateRequest) -> Any:
        prompts.append(tiny_codec().decode(request.prompt_ids))
        return turn_ids("one two", is_closed=is_closed)

    await play([], Branches(fork, lambda episode: Reply.of("and?")), engine=ScriptedEngine(says))
    _, forked, trunk = prompts
    assert forked == trunk
    assert forked.endswith("one two<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")


async def test_cut_leaves_the_tokens_of_a_fork() -> None:
    t = await play(["one two"], Branches(lambda episode: episode.fork(), lambda episode: episode.go_on(TIP, keep=1)))
    assert "dropped_cut" not in t.metrics
    assert len(t.segments) == 2


class TakesUp(MultiTurnScheduler):
    """Plays two turns, then goes on behind the first one, twice with the same words."""

    async def run(self, episode: Episode) -> StopReason:
        await episode.prepare()
        first = await episode.generate()
        mark = episode.mark()
        await self.say(episode, first, "One.")
        for text in ("Two.", "One."):
            await self.say(episode.fork(at=mark), first, text)
        return StopReason.STOP

    async def say(self, episode: Episode, turn: Any, text: str) -> None:
        episode.record(turn, Reply.of(text))
        await episode.prepare()
        await episode.generate()
        assert episode.turns[0] is turn
        assert len(episode.turns) == 2


async def test_fork_at_an_earlier_mark_replays_its_tokens() -> None:
    t = await play(["four"], TakesUp())
    assert (len(t.segments), len(t.turns)) == (3, 4)
    lengths = []
    for branch in t.segments[1:]:
        assert branch.parent.segment == 0
        lengths.append(branch.parent.length)
        assert branch.loss_weights.sum() == len(turn_ids("four"))
    assert lengths[1] > lengths[0], "the same words are shared, too"


async def test_fork_needs_a_prompt_and_another_agent_messages() -> None:
    episode = Episode(scripted_context(["x"]), task(), id="e")
    refuses(lambda: episode.fork(), LifecycleError, "`prepare`")
    await episode.prepare()
    refuses(lambda: episode.fork(agent="critic"), SchedulerError, "'critic'")
    await episode.resources.close()


SCHEMA = {
    "type": "function",
    "function": {"name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
NOTE = '<tool_call>\n{"name": "note", "arguments": {"text": "%s"}}\n</tool_call>'


class Notes(BaseTool):
    """Keeps notes, and can be restored."""

    def __init__(self) -> None:
        super().__init__({"type": "native"}, SCHEMA)
        self.notes: dict[str, list[str]] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None and instance_id not in self.notes
        self.notes[instance_id] = []
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.notes[instance_id].append(parameters["text"])
        return " ".join(self.notes[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.notes[instance_id]

    async def snapshot(self, instance_id: str) -> Any:
        return self.notes[instance_id]

    async def restore(self, instance_id: str, state: Any) -> None:
        self.notes[instance_id] = state


class Stateless(Notes):
    stateless = True
    snapshot = None  # type: ignore[assignment]
    restore = None  # type: ignore[assignment]


class Forks(MultiTurnScheduler):
    """Takes a note, then goes on in two ways, one after the other, each of which takes a note."""

    forks = True

    async def run(self, episode: Any) -> StopReason:
        await episode.prepare()
        turn = await episode.generate()
        episode.record(turn, await episode.call_tools(turn))
        for fork in (episode.fork(), episode.fork()):
            await self.run_forks([fork])
        return StopReason.STOP


def says(request: Any) -> str:
    """Take a note that names the fork and the turn."""
    conversation, _, turn = request.request_id.rpartition("/")
    return NOTE % f"{conversation.partition('#')[2] or 'root'}.{turn}" if int(turn) < 2 else "done"


async def test_forks_see_the_calls_of_one_another() -> None:
    tool = Notes()
    context = scripted_context(says, tools=[tool], scheduler=Forks())
    found = await run_episode(context, task(tools=("note",)), id="e")
    assert found.error is None, found.error
    shown = [str(turn.tool_results[0].content) for turn in found.turns if turn.tool_results]
    assert shown == ["root.0", "root.0 1.1", "root.0 1.1 2.1"]
    assert tool.notes == {}


@pytest.mark.parametrize(("tool", "is_named"), [(Notes(), True), (Stateless(), False)])
def test_run_names_tools_whose_state_forks_share(tool: Notes, is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    summary = type("Summary", (), {"num_tasks": 1, "interactions": {}, "num_with_tools": 1, "unknown_tools": {}})
    with caplog.at_level(logging.WARNING):
        check_use(scripted_context(["x"], tools=[tool], scheduler=Forks()), {"train": summary})  # type: ignore[dict-item]
    assert ("'note'" in caplog.text) is is_named


@pytest.mark.parametrize("is_pinned", [False, True], ids=["alone", "with a fork"])
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("call an", None, "call an B"),  # ends inside a token
        ("call an", "call a", "call a B"),
        ("call an", "call an", "call an B"),
        (None, "call an", "call an B"),
        (3, None, 3),
        (3, 2, 2),
        (None, None, "call answer B"),
    ],
)
async def test_second_go_on_replaces_the_first_one(first: Any, second: Any, text: Any, is_pinned: bool) -> None:
    def twice(episode: Any, turn: Any) -> Any:
        if turn.index:
            return None
        if is_pinned:
            episode.fork()
        episode.go_on(" A", keep=first)
        return episode.go_on(" B", keep=second)

    text = tiny_codec().decode(turn_ids("call answer")[:text]) + " B" if isinstance(text, int) else text
    t = await play(["call answer", "x"], twice)
    assert t.error is None, t.error
    assert tiny_codec().decode(t.segments[-1].token_ids).endswith(f"assistant\n{text}x<|im_end|>")
    assert t.turns[1].message.text == f"{text}x"
    (addition,) = t.turns[0].observation
    assert text.endswith(addition.text)


@pytest.mark.parametrize(("first", "second", "key"), [(2, 3, "3"), ("call", "call an", "'call an'"), ("", 1, "1")])
async def test_second_go_on_cannot_keep_what_is_cut(first: Any, second: Any, key: str) -> None:
    def twice(episode: Any, turn: Any) -> Any:
        episode.go_on(keep=first)
        return episode.go_on(keep=second)

    context = scripted_context(["call answer", "x"], scheduler=Steps(twice))
    t = await run_episode(context, task(data_source=None), id="e")
    assert t.error is not None and t.error.startswith("SchedulerError") and "cannot keep" in t.error and key in t.error


async def test_message_goes_on_if_its_agent_is_named_later() -> None:
    class Solver(MultiTurnScheduler):
        async def on_trajectory_start(self, episode: Any) -> None:
            episode.rewrite([*episode.messages, {"role": "assistant", "content": "It is"}], goes_on=True)
            episode.play_as("solver")

    t = await play([" four"], Solver())
    assert t.messages[-1].text == "It is four" and t.segments[0].agent == "solver"
