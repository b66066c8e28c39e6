"""Branches, other agents, and a turn that continues the same message: what is trained, and what is dropped and counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.core.errors import LifecycleError, SchedulerError
from polyturn.core.generation import FinishReason, GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import SpanSource, Trajectory
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, task, tiny_codec, turn_ids
from polyturn.testing.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from polyturn.tokens.codec import Codec

TIP = " But wait, that is wrong:"


def owners(t: Trajectory) -> list[list[int]]:
    """The turns that were sampled into each segment."""
    return [[s.turn for s in seg.spans if s.source is SpanSource.SAMPLED] for seg in t.segments]


def sources(t: Trajectory, segment: int = 0) -> list[str]:
    return [s.source.value for s in t.segments[segment].spans if len(s)]


def check(t: Trajectory) -> None:
    """Every sampled token that was not cut has its weight in one segment, and its replays weigh nothing."""
    assert not t.is_failed, t.error
    weighted = sum(int((s.loss_weights > 0).sum()) for s in t.segments)
    assert weighted == t.num_sampled_tokens == t.metrics["sampled_tokens"] - t.metrics.get("dropped_cut", 0)
    for segment in t.segments:
        assert np.array_equal(segment.loss_weights > 0, segment.sampled_mask)
        if segment.parent is not None:
            shared = t.segments[segment.parent.segment].token_ids[: segment.parent.length]
            assert np.array_equal(segment.token_ids[: len(shared)], shared)


# Going on in the same message.


class Tips(MultiTurnScheduler):
    """A wrong answer is cut away and the same message goes on behind a tip, once."""

    def step(self, episode: Any, turn: Any) -> Any:
        if turn.said_before or "42" in turn.text:
            return None
        return episode.go_on(TIP, keep=turn.text.split("<answer>")[0].split("</think>")[0])


async def test_a_tip_continues_the_message_and_what_was_cut_is_dropped_and_counted():
    said = "ab</think>41<answer>41</answer>"
    context = scripted_context([said, " 42"], scheduler=Tips())
    t = await run_episode(context, task(data_source=None), id="e")
    check(t)
    assert len(t.segments) == 1 and sources(t) == ["prompt", "sampled", "observation", "sampled"]
    assert t.metrics["dropped_cut"] == len(turn_ids(said)) - len(tiny_codec().encode("ab"))
    text = tiny_codec().decode(t.segments[0].token_ids)
    assert text.endswith(f"<|im_start|>assistant\nab{TIP} 42<|im_end|>")
    assert t.turns[0].message.text == "ab" and t.turns[1].message.text == f"ab{TIP} 42"
    assert t.turns[0].is_continued and not t.turns[1].is_continued
    assert [m.text for m in t.messages[1:]] == [f"ab{TIP} 42"], "the conversation has one assistant message"


async def test_without_a_cut_only_the_token_that_ended_the_turn_is_dropped():
    context = scripted_context(["abc", " 42"], scheduler=Tips())
    t = await run_episode(context, task(data_source=None), id="e")
    check(t)
    assert t.metrics["dropped_cut"] == 1


async def test_a_cut_inside_a_token_drops_the_token_and_shows_the_rest_of_its_text():
    class Cuts(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Any:
            return episode.go_on("!", keep="apples and boo") if turn.index == 0 else None

    context = scripted_context(["apples and books", "end"], scheduler=Cuts())
    t = await run_episode(context, task(data_source=None), id="e")
    check(t)
    kept = t.span(t.turns[0].spans[0])
    assert "apples and boo".startswith(tiny_codec().decode(kept.ids)) and len(kept) < len(turn_ids("apples and books"))
    assert tiny_codec().decode(t.segments[0].token_ids).endswith("apples and boo!end<|im_end|>")


async def test_ids_and_a_number_of_tokens_may_be_given_and_control_tokens_only_by_leave():
    given = tiny_codec().encode("</think>")

    class Ends(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Any:
            if turn.index == 3:
                return None
            addition, is_trusted = [("</think>", False), ("</think>", True), (given, False)][turn.index]
            return episode.go_on(addition, keep=2, is_trusted=is_trusted)

    context = scripted_context(["one two three"], scheduler=Ends())
    t = await run_episode(context, task(data_source=None), id="e")
    check(t)
    seen = [t.span(turn.spans[-1]).ids.tolist() for turn in t.turns[:3]]
    assert len(seen[0]) > 1 and seen[1] == seen[2] == given.tolist()
    assert tiny_codec().decode(seen[0]) == "</think>", "environment text cannot speak in control tokens"


async def test_weights_of_a_turn_are_for_the_tokens_that_are_kept():
    class Masks(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Any:
            if turn.index:
                return None
            reply = episode.go_on(TIP, keep=3)
            episode.weigh(turn, [1.0, 0.5, 0.0])
            return reply

    t = await run_episode(scripted_context(["one two three", "x"], scheduler=Masks()), task(), id="e")
    assert t.span(t.turns[0].spans[0]).loss_weights.tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda e, t: e.go_on(TIP, keep="something else"), "the turn cannot keep 'something else'"),
        (lambda e, t: e.go_on(TIP, keep=99), "a completion of 3 tokens cannot keep 99 of them"),
        (lambda e, t: (e.go_on(TIP), "and a message")[1], "cannot answer it with messages as well"),
    ],
)
async def test_what_cannot_go_on_is_named(how, says):
    class Wrong(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Any:
            return how(episode, turn)

    t = await run_episode(scripted_context(["ab"], scheduler=Wrong()), task(), id="e")
    assert t.is_failed and says in (t.error or "")


async def test_a_text_that_a_step_changes_opens_a_segment_in_which_it_is_masked():
    class Changes(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Any:
            if turn.index:
                return None
            return episode.rewrite([*episode.task.prompt, {"role": "assistant", "content": "my own words,"}], goes_on=True)

    t = await run_episode(scripted_context(["ab", " end"], scheduler=Changes()), task(data_source=None), id="e")
    check(t)
    assert owners(t) == [[0], [1]] and sources(t, 1) == ["prompt", "sampled"]
    assert tiny_codec().decode(t.segments[1].token_ids).endswith("<|im_start|>assistant\nmy own words, end<|im_end|>")
    assert t.turns[1].message.text == "my own words, end"


@pytest.mark.parametrize(
    ("messages", "goes_on", "says"),
    [
        ([], False, "a history needs at least one message"),
        (
            [{"role": "user", "content": "x"}],
            True,
            "only an assistant message without calls, behind other messages, can go on",
        ),
        ([{"role": "nobody"}], False, "the history that the scheduler wrote cannot be rendered: the chat template"),
    ],
)
async def test_a_history_that_cannot_be_shown_fails_its_trajectory_by_name(messages, goes_on, says):
    class Edits(MultiTurnScheduler):
        def step(self, episode: Any, turn: Any) -> Any:
            return episode.rewrite(messages, goes_on=goes_on)

    context = scripted_context(["ab"], scheduler=Edits())
    refuses = (
        "{%- for m in messages -%}{%- if m.role == 'nobody' -%}{{ raise_exception('who?') }}{%- endif -%}{%- endfor -%}"
    )
    context.codec = Codec(tiny_tokenizer(), chat_template=refuses + CHAT_TEMPLATE)
    t = await run_episode(context, task(), id="e")
    assert t.is_failed and says in (t.error or "")


# Forks.


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
async def test_branches_share_a_prefix_and_train_each_sampled_token_once(at_once):
    context = scripted_context(lambda r: f"I am {r.session_id} {len(r.prompt_ids)}", scheduler=Tree(at_once=at_once))
    context.engine._latency_s = 0.001  # type: ignore[attr-defined]
    t = await run_episode(context, task(data_source=None), id="e")
    check(t)
    assert len(t.turns) == 1 + 3 * 2 and sorted(turn.index for turn in t.turns) == list(range(7))
    assert len(t.segments) == 3 and [s.parent for s in t.segments[1:]] == [(0, t.segments[1].parent.length)] * 2
    assert sorted(len(turns) for turns in owners(t)) == [2, 2, 3], "the first branch goes on in the segment of the trunk"
    for number, segment in enumerate(t.segments, start=1):
        text = tiny_codec().decode(segment.token_ids)
        assert f"I am e#{number}" in text or at_once
        assert text.count("I am e ") == 1 and len(set(text.split("I am e#")[1:])) == 2
    assert context.engine.ended_sessions == ["e", "e#1", "e#2", "e#3"]  # type: ignore[attr-defined]
    assert t.metrics["num_forks"] == 3


async def test_a_branch_that_fails_ends_the_others_and_the_trajectory():
    waited: list[str] = []

    class OneFails(Tree):
        async def step(self, episode: Any, turn: Any) -> Any:
            if episode.id == "e#1":
                raise ValueError("this branch")
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                waited.append(episode.id)
                raise

    t = await run_episode(scripted_context(["x"], scheduler=OneFails()), task(), id="e")
    assert (t.error or "").startswith("SchedulerError: the scheduler's step raised ValueError: this branch")
    assert sorted(waited) == ["e#2", "e#3"]


async def test_nothing_is_generated_for_an_episode_that_has_ended():
    kept: list[Episode] = []

    class Leaks(MultiTurnScheduler):
        async def step(self, episode: Any, turn: Any) -> None:
            kept.append(episode.fork())

    await run_episode(scripted_context(["x"], scheduler=Leaks()), task(), id="e")
    with pytest.raises(LifecycleError, match="episode 'e#1' has ended; nothing can be generated for it any more"):
        await kept[0].generate()


@pytest.mark.parametrize("name", ["Tips", "Compact", "Tree"])
async def test_the_schedulers_of_the_documentation_run(name):
    """docs/segments.md shows these."""
    page = (Path(__file__).parents[3] / "docs/segments.md").read_text()
    names: dict[str, Any] = {"MultiTurnScheduler": MultiTurnScheduler}
    exec(page.split("```python")[1].split("```")[0], names)
    context = scripted_context(["a <answer>1", "42"], scheduler=names[name]())
    t = await run_episode(context, task(data_source=None), id="e")
    check(t)
    assert len(t.turns) == {"Tips": 2, "Compact": 1, "Tree": 4}[name]


async def test_limits_hold_along_a_branch_and_seeds_differ_between_branches():
    seeds: list[Any] = []

    def says(request: Any) -> str:
        seeds.append(request.sampling.seed)
        return "hm"

    context = scripted_context(says, scheduler=Tree(2, at_once=False), limits=Limits(max_turns=2))
    t = await run_episode(context, task(data_source=None), id="e", seed=5)
    check(t)
    assert len(t.turns) == 1 + 2 * 1 and len(set(seeds)) == 3


class Asks(MultiTurnScheduler):
    """A critic with a history of its own reads each answer."""

    async def step(self, episode: Episode, turn: Any) -> Any:
        if turn.index > 2:
            return None
        critic = episode.fork(agent="critic", messages=[{"role": "user", "content": f"Judge: {turn.text}"}])
        await critic.prepare()
        return (await critic.generate()).text


async def test_another_agent_has_segments_of_its_own_that_remember_where_it_was_called():
    context = scripted_context(lambda r: "fine" if "#" in r.session_id else "an answer", scheduler=Asks())
    t = await run_episode(context, task(data_source=None), id="e")
    check(t)
    assert [s.agent for s in t.segments] == ["assistant", "critic", "critic"]
    assert owners(t) == [[0, 2, 4], [1], [3]]
    assert t.segments[1].parent is not None and t.segments[1].parent.segment == 0
    critic = tiny_codec().decode(t.segments[1].token_ids)
    assert "Judge: an answer" in critic and critic.endswith("fine<|im_end|>") and "2+2" not in critic


async def test_an_agent_that_goes_on_where_it_was_stays_in_its_segment():
    class Again(MultiTurnScheduler):
        async def step(self, episode: Episode, turn: Any) -> Any:
            if turn.index:
                return None
            critic = episode.fork(agent="critic", messages=[{"role": "user", "content": "Judge."}])
            for _ in range(2):
                await critic.prepare()
                critic.record(await critic.generate(), Reply.of("Sure?"))
            return "go on"

    t = await run_episode(scripted_context(["x"], scheduler=Again()), task(data_source=None), id="e")
    check(t)
    assert owners(t) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("at_mark", [False, True])
@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
async def test_a_fork_closes_a_turn_that_was_cut_as_its_episode_does(finish, at_mark):
    """The template's end of turn, which a cut completion lacks, belongs to what follows: in a fork as in the trunk."""

    class ForksBehindTheTurn(MultiTurnScheduler):
        async def run(self, episode: Episode) -> StopReason:
            await episode.prepare()
            turn = await episode.generate()
            fork = episode.fork(at=episode.mark()) if at_mark else episode.fork()
            for one in (fork, episode):
                one.record(turn, Reply.of("and?"))
                await one.prepare()
                await one.generate()
            return StopReason.STOP

    prompts: list[str] = []

    def says(request: GenerateRequest) -> Any:
        prompts.append(tiny_codec().decode(request.prompt_ids))
        return turn_ids("one two", is_closed=finish is FinishReason.STOP)

    context = scripted_context([], scheduler=ForksBehindTheTurn())
    context.engine = ScriptedEngine(says)
    t = await run_episode(context, task(data_source=None), id="e")
    check(t)
    _, fork, trunk = prompts
    assert fork == trunk and fork.endswith("one two<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")


async def test_a_cut_leaves_what_a_fork_has_in_its_context():
    class CutsBehindAFork(MultiTurnScheduler):
        async def run(self, episode: Episode) -> StopReason:
            await episode.prepare()
            turn = await episode.generate()
            fork = episode.fork()
            episode.record(turn, episode.go_on(TIP, keep=1))
            for one in (episode, fork):
                if one is fork:
                    fork.record(turn, Reply.of("and?"))
                await one.prepare()
                await one.generate()
            return StopReason.STOP

    t = await run_episode(scripted_context(["one two"], scheduler=CutsBehindAFork()), task(data_source=None), id="e")
    check(t)
    assert "dropped_cut" not in t.metrics and len(t.segments) == 2
    assert t.segments[1].parent is not None and t.segments[1].parent.length == len(t.segments[0].spans[0]) + 1


async def test_a_fork_needs_a_prompt_and_another_agent_messages():
    episode = Episode(scripted_context(["x"]), task(), id="e")
    with pytest.raises(LifecycleError, match="cannot be forked before it has a prompt; call `prepare` first"):
        episode.fork()
    await episode.prepare()
    with pytest.raises(SchedulerError, match="the agent 'critic' needs messages of its own"):
        episode.fork(agent="critic")
    await episode.resources.close()
