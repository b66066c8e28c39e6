"""Which sampled tokens are trained: strategies by name, several at once, and what a scheduler decided itself stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.batching.loss_scale import SampledTurn, build_loss_scale, loss_scale
from polyturn.batching.samples import dropped_by_scale, to_samples
from polyturn.core.errors import AlignmentError, UnknownNameError
from polyturn.core.sample import TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers import MathTips, ThinkingTips
from polyturn.testing.episodes import scripted_context, task, tiny_codec


class Chats(MultiTurnScheduler):
    async def step(self, episode: Any, turn: Any) -> str | None:
        return "and?" if turn.index < 2 else None


class Mutes(Chats):
    async def on_turn_end(self, episode: Any, turn: Any) -> None:
        if turn.index == 1:
            episode.weigh(turn, 0.5)


async def play(says: Sequence[str], scheduler: Any) -> Trajectory:
    return await run_episode(scripted_context(list(says), scheduler=scheduler), task(ground_truth="42"), id="e")


def samples_of(t: Trajectory, name: str, *, base: Path | None = None) -> list[TrainSample]:
    scale = build_loss_scale(name, decode=tiny_codec().decode, base=base)
    return to_samples(group_of(t), temperature=1.0, loss_scale=scale)


def group_of(t: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id="g", task=t.task, trajectories=(t,))


def trained(sample: TrainSample) -> str:
    return tiny_codec().decode(sample.token_ids[sample.loss_weights > 0]).replace("<|im_end|>", "|")


async def test_the_default_trains_every_turn_wherever_it_ran() -> None:
    t = await play(["one", "two", "three"], Chats())
    assert build_loss_scale("default", decode=str) is None and build_loss_scale("all", decode=str) is None
    assert [trained(s) for s in samples_of(t, "default")] == ["one|two|three|"]


async def test_the_last_round_is_the_last_message_of_each_sample() -> None:
    t = await play(["one", "two", "three"], Chats())
    (sample,) = samples_of(t, "last_round")
    assert trained(sample) == "three|"
    dropped = dropped_by_scale([group_of(t)], [sample])["tokens/dropped_loss_scale"]
    assert dropped.total == t.num_sampled_tokens - sample.num_weighted  # type: ignore[union-attr]
    split = await play(["<think>a</think>41", "<think>b</think>\\boxed{42}"], ThinkingTips())
    assert [trained(s) for s in samples_of(split, "last_round")] == ["<think>a</think>41|", "<think>b</think>\\boxed{42}|"]


async def test_a_message_that_went_on_is_one_round() -> None:
    t = await play(["ab<answer>1</answer>", "cd"], MathTips(tip=" wait,"))
    assert [trained(s) for s in samples_of(t, "last_round")] == ["abcd|"]


async def test_what_a_scheduler_weighed_itself_stays() -> None:
    t = await play(["one", "two", "three"], Mutes())
    (sample,) = samples_of(t, "last_round")
    assert trained(sample) == "two|three|"
    assert set(sample.loss_weights[sample.turn_ids == 1].tolist()) == {0.0, 0.5}  # the observation weighs 0


@pytest.mark.parametrize("name", ["ignore_empty_think", "default+ignore_empty_think"])
async def test_reasoning_that_says_nothing_is_left_out(name: str) -> None:
    t = await play(["<think>\n\n</think>\n\nabc", "<think>x</think>é", "d"], Chats())
    (sample,) = samples_of(t, name)
    assert trained(sample) == "abc|<think>x</think>é|d|"


async def test_the_mark_that_opens_reasoning_is_left_out_at_the_beginning_of_a_turn_only() -> None:
    t = await play(["<think>\nabc</think>d", "x<think>y</think>"], Chats())
    (sample,) = samples_of(t, "ignore_think_prefix")
    assert trained(sample).startswith("abc</think>d|x<think>y</think>|")


async def test_strategies_of_ones_own_are_functions_of_the_turns_and_multiply(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import re\n"
        "def calls_twice(turns):\n"
        "    return [t.weights_of([(*m.span(), 2.0) for m in re.finditer('tw', t.text)]) for t in turns]\n"
    )
    t = await play(["two", "tw", "two"], Chats())
    (sample,) = samples_of(t, "last_round+mine.py:calls_twice", base=tmp_path)
    assert sample.loss_weights.max() == 2.0 and trained(sample) == "two|"
    assert np.all(sample.loss_weights[t.segments[0].sampled_mask == 0] == 0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda turns: [1.0], "gave weights for 1 turns; there are 3"),
        (lambda turns: [np.ones(9)] * 3, "gave the weights .* for the . tokens of turn 0 of trajectory 'e'"),
        (lambda turns: [1.0, "x", 1.0], r"raised ValueError: could not convert string to float: 'x'"),
        (lambda turns: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_loss_scale.py, line \d+\)"),
        (lambda turns: [1.0, 1.0, np.nan], "gave the weights nan for the . tokens of turn 2"),
        (lambda turns: [np.ones((len(t.ids), 1)) for t in turns], "gave the weights .* of turn 0"),
    ],
)
async def test_weights_that_do_not_fit_are_named(given: Any, says: str) -> None:
    name = f"test_{id(given)}"
    if name not in loss_scale:
        loss_scale.register(name)(given)
    t = await play(["one", "two", "three"], Chats())
    with pytest.raises(AlignmentError, match=says):
        samples_of(t, name)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"there is no 'last_rond'\. Did you mean 'last_round'"):
        build_loss_scale("last_rond", decode=str)


def test_tokens_that_share_a_character_still_know_where_they_begin() -> None:
    codec = tiny_codec()
    ids = np.array(codec.encode("aé€b"), np.int32)
    turn = SampledTurn(turn=None, ids=ids, is_last_round=True, decode=codec.decode)  # type: ignore[arg-type]
    assert len(turn.starts) == len(ids) and turn.starts == sorted(turn.starts)
    assert turn.weights_of([(turn.text.index("b"), len(turn.text), 0.0)]).tolist() == [1.0] * (len(ids) - 1) + [0.0]
