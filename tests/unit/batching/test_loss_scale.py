"""Strategies that choose the trained tokens: by name, combined, and never against the weights of a scheduler."""

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
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from support.example_schedulers import MathTips, ThinkingTips
from support.refusals import refuses


class Chats(MultiTurnScheduler):
    """Answers twice; can set the weight of the second turn."""

    def __init__(self, weight: float | None = None) -> None:
        self.weight = weight

    async def step(self, episode: Any, turn: Any) -> str | None:
        return "and?" if turn.index < 2 else None

    async def on_turn_end(self, episode: Any, turn: Any) -> None:
        if turn.index == 1 and self.weight is not None:
            episode.weigh(turn, self.weight)


async def play(says: Sequence[str], scheduler: Any) -> Trajectory:
    return await run_episode(scripted_context(list(says), scheduler=scheduler), task(ground_truth="42"), id="e")


def samples_of(t: Trajectory, name: str, *, base: Path | None = None) -> list[TrainSample]:
    scale = build_loss_scale(name, decode=tiny_codec().decode, base=base)
    return to_samples(group_of(t), temperature=1.0, loss_scale=scale)


def group_of(t: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id="g", task=t.task, trajectories=(t,))


def trained(sample: TrainSample) -> str:
    return tiny_codec().decode(sample.token_ids[sample.loss_weights > 0]).replace("<|im_end|>", "|")


async def test_default_trains_every_turn() -> None:
    t = await play(["one", "two", "three"], Chats())
    assert build_loss_scale("default", decode=str) is None and build_loss_scale("all", decode=str) is None
    assert [trained(s) for s in samples_of(t, "default")] == ["one|two|three|"]


async def test_last_round_is_the_last_message_of_each_sample() -> None:
    t = await play(["one", "two", "three"], Chats())
    (sample,) = samples_of(t, "last_round")
    assert trained(sample) == "three|"
    dropped = dropped_by_scale([group_of(t)], [sample])["tokens/dropped_loss_scale"]
    assert dropped.total == t.num_sampled_tokens - sample.num_weighted  # type: ignore[union-attr]
    split = await play(["<think>a</think>41", "<think>b</think>\\boxed{42}"], ThinkingTips())
    assert [trained(s) for s in samples_of(split, "last_round")] == ["<think>a</think>41|", "<think>b</think>\\boxed{42}|"]


async def test_continued_message_is_one_round() -> None:
    t = await play(["ab<answer>1</answer>", "cd"], MathTips(tip=" wait,"))
    assert [trained(s) for s in samples_of(t, "last_round")] == ["abcd|"]


async def test_weights_of_a_scheduler_stay() -> None:
    t = await play(["one", "two", "three"], Chats(0.5))
    (sample,) = samples_of(t, "last_round")
    assert trained(sample) == "two|three|"
    assert set(sample.loss_weights[sample.turn_ids == 1].tolist()) == {0.0, 0.5}  # the observation weighs 0


@pytest.mark.parametrize("name", ["ignore_empty_think", "default+ignore_empty_think"])
async def test_empty_reasoning_is_left_out(name: str) -> None:
    t = await play(["<think>\n\n</think>\n\nabc", "<think>x</think>é<think></think>", "</think>\n\nd"], Chats())
    (sample,) = samples_of(t, name)
    assert trained(sample) == "abc|<think>x</think>é<think></think>|d|"


async def test_opening_tag_of_reasoning_is_left_out() -> None:
    t = await play(["<think>\nabc</think>d", "x<think>y</think>"], Chats())
    (sample,) = samples_of(t, "ignore_think_prefix")
    assert trained(sample).startswith("abc</think>d|x<think>y</think>|")


async def test_own_strategy_is_a_function_of_turns_and_multiplies(tmp_path: Path) -> None:
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
    ("strategy", "key"),
    [
        (lambda turns: [1.0], "1 turns"),
        (lambda turns: [np.ones(9)] * 3, "turn 0 of trajectory 'e'"),
        (lambda turns: [1.0, "x", 1.0], "ValueError"),
        (lambda turns: 1 / 0, r"ZeroDivisionError: .*test_loss_scale\.py"),
        (lambda turns: [1.0, 1.0, np.nan], "nan .* turn 2"),
        (lambda turns: [np.ones((len(t.ids), 1)) for t in turns], "turn 0"),
    ],
)
async def test_wrong_weights_of_a_strategy_are_refused(strategy: Any, key: str) -> None:
    name = f"test_{id(strategy)}"
    if name not in loss_scale:
        loss_scale.register(name)(strategy)
    t = await play(["one", "two", "three"], Chats())
    with pytest.raises(AlignmentError, match=key):
        samples_of(t, name)


def test_unknown_strategy_comes_with_the_nearest() -> None:
    refuses(lambda: build_loss_scale("last_rond", decode=str), UnknownNameError, "'last_rond'", "'last_round'")


def test_tokens_that_share_a_character_have_their_starts() -> None:
    codec = tiny_codec()
    ids = np.array(codec.encode("aé€b"), np.int32)
    turn = SampledTurn(turn=None, ids=ids, is_last_round=True, decode=codec.decode)  # type: ignore[arg-type]
    assert len(turn.starts) == len(ids) and turn.starts == sorted(turn.starts)
    assert turn.weights_of([(turn.text.index("b"), len(turn.text), 0.0)]).tolist() == [1.0] * (len(ids) - 1) + [0.0]


def test_starts_of_tokens_decode_each_token_a_few_times() -> None:
    codec, decoded = tiny_codec(), list[int]()
    ids = np.array(codec.encode("模型说话，调用工具。🙂" * 40), np.int32)

    def decode(some: Any) -> str:
        decoded.append(len(some))
        return codec.decode(some)

    turn = SampledTurn(turn=None, ids=ids, is_last_round=True, decode=decode)  # type: ignore[arg-type]
    assert len(turn.starts) == len(ids)
    assert sum(decoded) < 20 * len(ids)
