"""I1 to I4 of segments: whatever is edited, forked, cut or continued, each sampled token is trained exactly once.

Three levels: the builder under random moves; whole episodes whose scheduler edits, forks, cuts and calls other agents, with
templates that keep and that drop reasoning; and the gradient of a real model, which does not see where a trajectory was cut.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyturn.algorithms.advantages import assign_advantages, grpo
from polyturn.algorithms.aggregate import MODES, SEGMENT_WEIGHTS, loss_coefs
from polyturn.algorithms.options import AlgorithmOptions, AverageOptions
from polyturn.batching.layout import LayoutSettings
from polyturn.batching.samples import to_samples
from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.generation import Completion, FinishReason, GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.sample import TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import Segment, SpanSource, Trajectory, TrajectoryGroup
from polyturn.engines.scripted import ScriptedEngine
from polyturn.rollout.episode import Episode
from polyturn.rollout.limits import Limits
from polyturn.rollout.run_episode import run_episode
from polyturn.rollout.scheduler import MultiTurnScheduler, Reply
from polyturn.testing.episodes import scripted_context, task, turn_ids
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tokens.codec import Codec
from polyturn.tokens.train import CHAT_TEMPLATE
from polyturn.training.loss_terms import LossSettings
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from support.invariants import check_invariants, sampled_turns
from support.models import in_float64, tiny_model

torch.set_num_threads(1)
TASK = Task(id="t", prompt=())


def completion(ids: list[int]) -> Completion:
    versions = ((0, 1),) if len(ids) < 2 else ((0, 1), (1, 2))
    logprobs = -np.array(ids, np.float32) / 1000
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, policy_versions=versions)


def trajectory(segments: tuple[Segment, ...], id: str = "0", reward: float = 0.0) -> Trajectory:
    return Trajectory(
        id=id, task=TASK, segments=segments, turns=(), stop_reason=StopReason.STOP, reward=Reward(total=reward)
    )


# The builder.

MOVES = ["sample", "sample", "observe", "rewrite", "continue", "fork", "agent", "cut"]


@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 7), st.integers(1, 4)), max_size=24))
def test_builder_keeps_every_sampled_token_once(moves: list[tuple[str, int, int]]) -> None:
    """Ids are all different, so that a token can be followed; the model of the builder is what each place has seen."""
    fresh = iter(range(1, 100_000))
    builder = TrajectoryBuilder()
    builder.open(first := [next(fresh)])
    places: list[tuple[TrajectoryBuilder, list[int]]] = [(builder, first)]
    last: dict[int, tuple[Any, list[int]]] = {}  # the completion that each place sampled last, while nothing follows it
    sampled: dict[int, float] = {}
    for turn, (move, which, size) in enumerate(moves):
        index = which % len(places)
        here, seen = places[index]
        ids = [next(fresh) for _ in range(size)]
        if move == "sample":
            prompt = here.context.copy()
            refs = here.sample(completion(ids), turn=turn)
            assert np.array_equal(prompt, seen), "I1: what stands before a completion is what its prompt was"
            segment = here.build()[refs[0].segment]
            at = sum(len(s) for s in segment.spans[: refs[0].span])
            assert segment.token_ids[:at].tolist() == seen
            sampled |= {i: -i / 1000 for i in ids}
            places[index] = (here, seen + ids)
            last[index] = (refs, ids)
            continue
        if move == "cut" and index in last:
            refs, said = last.pop(index)
            keep = min(size - 1, len(said))
            dropped = here.cut(refs, keep=keep)
            assert dropped in (0, len(said) - keep)
            if dropped:
                for i in said[keep:]:
                    del sampled[i]
            places[index] = (here, seen[: len(seen) - len(said) + keep])
        elif move == "observe":
            here.observe(ids, turn=turn)
            places[index] = (here, seen + ids)
        elif move in ("rewrite", "continue"):
            new = seen + ids if move == "continue" else seen[: max(1, len(seen) - size)] + ids
            here.set_prompt(new, turn=turn)
            places[index] = (here, new)
        elif move == "fork" and len(places) < 5:
            places.append((here.fork(), seen))
        elif move == "agent" and len(places) < 5:
            other = here.fork(agent=f"agent {size % 2}")
            other.set_prompt(ids, turn=turn)
            places.append((other, ids))
        last.pop(index, None)
    for here, seen in places:
        assert here.context.tolist() == seen
    check_segments(trajectory(builder.build()), sampled)


def check_segments(t: Trajectory, sampled: dict[int, float]) -> None:
    """I2 to I4, given the id and the logprob of every token that was sampled and not dropped."""
    check_invariants(t)
    samples = to_samples(TrajectoryGroup(id="g", task=TASK, trajectories=(t,)), temperature=1.0)
    owned = Counter(int(i) for s in samples for i in s.token_ids[s.loss_weights > 0])
    assert owned == Counter(list(sampled)), "I4: each sampled token is trained once, and replays weigh nothing"
    for s in samples:
        for i, lp in zip(s.token_ids.tolist(), np.asarray(s.rollout_logprobs).tolist(), strict=True):
            assert lp == 0 or lp == pytest.approx(sampled[i], rel=1e-5)


# Episodes.

DROPS_REASONING = CHAT_TEMPLATE.replace("message.reasoning_content -%}", "message.reasoning_content and loop.last -%}")
CODECS = [Codec(tiny_tokenizer(), chat_template=template) for template in (CHAT_TEMPLATE, DROPS_REASONING)]
SAYINGS = ("<think>\nso\n</think>\n\nfour", "plain words and apples", "#### 4", "a much longer answer " * 4)
DEEDS = ("answer", "answer", "rewrite", "rewrite", "go_on", "fork", "critic", "mask", "stop")


class Busy(MultiTurnScheduler):
    """Does what it is told turn by turn, branches included."""

    def __init__(self, deeds: list[str]) -> None:
        self.deeds = deeds

    async def step(self, episode: Episode, turn: Any) -> Any:
        deed = self.deeds[turn.index % len(self.deeds)]
        if deed == "stop" or turn.index > 8:
            return None
        if deed == "rewrite":
            episode.rewrite([*episode.task.prompt, {"role": "assistant", "content": turn.message.text[:5] or "x"}])
        if deed == "go_on":
            return episode.go_on(" wait,", keep=turn.text[: len(turn.text) // 2])
        if deed == "mask":
            episode.weigh(turn, 0.0)
        if deed == "fork":
            fork = episode.fork()
            fork.record(turn, Reply.of("on a branch"))
            await asyncio.gather(self.run(fork), self.speak(episode.fork(), turn))
        if deed == "critic":
            await self.speak(episode.fork(agent="critic", messages=[{"role": "user", "content": "Judge."}]), None)
        return "go on"

    async def speak(self, episode: Episode, turn: Any) -> None:
        if turn is not None:
            episode.record(turn, Reply.of("elsewhere"))
        if await episode.prepare() is None:
            await episode.generate()


@given(
    deeds=st.lists(st.sampled_from(DEEDS), min_size=1, max_size=6),
    says=st.lists(st.sampled_from(SAYINGS), min_size=1, max_size=4),
    codec=st.sampled_from(CODECS),
    renders=st.booleans(),
    limits=st.sampled_from([Limits(max_turns=6), Limits(max_turns=6, max_tokens=150), Limits(max_context=300)]),
)
def test_episode_keeps_its_invariants_under_edits(
    deeds: list[str], says: list[str], codec: Codec, renders: bool, limits: Limits
) -> None:
    asked: dict[str, tuple[list[int], list[int]]] = {}

    def answer(request: GenerateRequest) -> Completion:
        ids = turn_ids(says[len(asked) % len(says)])[: request.sampling.max_tokens]
        asked[request.request_id] = (request.prompt_ids.tolist(), ids.tolist())
        return Completion(token_ids=ids, logprobs=np.full(len(ids), -0.5, np.float32), finish_reason=FinishReason.STOP)

    context = scripted_context([], scheduler=Busy(deeds), renders_history=renders, limits=limits)
    context.codec, context.engine = codec, ScriptedEngine(answer)
    t = asyncio.run(run_episode(context, task(data_source=None), id="e"))
    assert not t.is_failed, t.error
    assert len(t.turns) == len(asked) and [turn.index for turn in t.turns] == list(range(len(t.turns)))
    seen = []
    for _, segment, start, end in sampled_turns(t):
        seen.append((segment.token_ids[:start].tolist(), segment.token_ids[start:end].tolist()))
    for prompt, kept in seen:
        assert any(prompt == p and ids[: len(kept)] == kept for p, ids in asked.values()), "I1"
    assert Counter(tuple(p) for p, _ in seen) == Counter(tuple(p) for p, _ in asked.values())
    total = sum(len(ids) for _, ids in asked.values())
    assert t.num_sampled_tokens + t.metrics.get("dropped_cut", 0) == total == t.metrics["sampled_tokens"], "I3"
    masked = {i for i, turn in enumerate(t.turns) if deeds[i % len(deeds)] == "mask"}
    check_invariants(t, is_all_trained=False)
    for span in (span for segment in t.segments for span in segment.spans if span.source is SpanSource.SAMPLED):
        assert set(span.loss_weights.tolist()) <= ({0.0, 1.0} if span.turn in masked else {1.0}), "I3"


# The gradient.

VOCAB = 48


def exact_policy(mode: str, segment_weight: str) -> ModelPolicy:
    model = copy.deepcopy(MODEL)
    return local_policy(
        model,
        optim=OptimSettings(),
        loss=LossSettings(
            policy_loss_kwargs={"clip_high": 0.28},
            algorithm=AlgorithmOptions(aggregate=AverageOptions(name=mode), segment_weight=segment_weight),
        ),
        layout=LayoutSettings(max_tokens_per_batch=64),
    )


MODEL = in_float64(tiny_model(VOCAB, kind="llama", hidden=16, layers=2, heads=2, kv_heads=1))


def group_of(seed: int, *, is_cut: bool) -> TrajectoryGroup:
    """Four trajectories of two or three turns; with `is_cut`, every later turn is in a segment that replays the earlier."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(4):
        builder = TrajectoryBuilder()
        builder.open(rng.integers(0, VOCAB, 3))
        for turn in range(2 + index % 2):
            if turn:
                builder.observe(rng.integers(0, VOCAB, 2), turn=turn - 1)
                if is_cut:
                    builder.open(builder.context.copy(), turn=turn - 1)
            ids = rng.integers(0, VOCAB, int(rng.integers(2, 6))).tolist()
            builder.sample(completion(ids), turn=turn)
        segments = builder.build()
        assert len(segments) == (2 + index % 2 if is_cut else 1)
        made.append(trajectory(segments, id=str(index), reward=float(index % 3)))
    return TrajectoryGroup(id="g", task=TASK, trajectories=tuple(made))


def samples_of(group: TrajectoryGroup) -> list[TrainSample]:
    return assign_advantages([group], to_samples(group, temperature=1.0), estimator=grpo)


@pytest.mark.parametrize("segment_weight", SEGMENT_WEIGHTS)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6))
def test_gradient_is_independent_of_cuts(mode: str, segment_weight: str, seed: int) -> None:
    """One segment, against segments whose later ones replay the earlier as their prompt: float64, 1e-9."""
    gradients = []
    for is_cut in (False, True):
        policy = exact_policy(mode, segment_weight)
        policy.forward_backward(samples_of(group_of(seed, is_cut=is_cut)))
        gradients.append({n: p.grad.clone() for n, p in policy.backend.model.named_parameters() if p.grad is not None})
    whole, cut = gradients
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-6
    assert max(float((whole[n] - cut[n]).abs().max()) for n in whole) < 1e-9


def test_group_statistics_are_of_trajectories() -> None:
    whole, cut = (samples_of(group_of(1, is_cut=is_cut)) for is_cut in (False, True))
    assert len(cut) > len(whole) == 4

    def by_trajectory(samples: list[TrainSample]) -> dict[str, set[float]]:
        return {
            s.id.trajectory: {round(float(a), 6) for x in samples if x.id.trajectory == s.id.trajectory for a in
                              np.asarray(x.advantages)[x.loss_weights > 0]}
            for s in samples
        }  # fmt: skip

    assert by_trajectory(whole) == by_trajectory(cut)
    assert all(len(values) == 1 for values in by_trajectory(cut).values())


@pytest.mark.parametrize("mode", MODES)
def test_per_trajectory_weighs_trajectories_equally(mode: str) -> None:
    samples = samples_of(group_of(3, is_cut=True))
    shares = {}
    for segment_weight in SEGMENT_WEIGHTS:
        totals: Counter[str] = Counter()
        for sample, coef in zip(samples, loss_coefs(samples, mode=mode, segment_weight=segment_weight), strict=True):
            totals[sample.id.trajectory] += float(coef.sum())
        shares[segment_weight] = totals
    assert len({round(v, 9) for v in shares["per_trajectory"].values()}) == 1
    assert (len({round(v, 9) for v in shares["per_token"].values()}) == 1) == (mode == "seq-mean-token-mean")


def test_the_second_template_drops_reasoning() -> None:
    history = [Message(role="user", content="a"), Message(role="assistant", content="b", reasoning="c")]
    texts = [codec.template.render([*history, history[0]]) for codec in CODECS]
    assert ["<think>" in text for text in texts] == [True, False]


def test_messages_of_the_history_may_be_given_as_dicts() -> None:
    """The tests above rewrite with dicts; this one pins that both forms mean the same."""
    a, b = (
        asyncio.run(run_episode(scripted_context(["x"], scheduler=Rewrites(m)), task(data_source=None), id="e"))
        for m in (Message(role="user", content="again"), {"role": "user", "content": "again"})
    )
    assert [s.token_ids.tolist() for s in a.segments] == [s.token_ids.tolist() for s in b.segments]


class Rewrites(MultiTurnScheduler):
    def __init__(self, message: Any) -> None:
        self.message = message

    def step(self, episode: Episode, turn: Any) -> Any:
        return episode.rewrite([self.message]) if turn.index == 0 else None
