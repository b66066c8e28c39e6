"""Supervised training on conversations, with the same encoding, layout and loss weights as reinforcement learning.

    conversation  ->  PROMPT SAMPLED OBSERVATION SAMPLED  ->  TrainSample  ->  weighted cross-entropy

An assistant message is encoded as the model would write it, including the end token, and takes the place of sampled tokens.
All other messages are observations with weight 0. Trajectories of a run need no encoding: their samples are the sampled
tokens (rejection sampling).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from polyturn.batching.samples import to_samples
from polyturn.core.builder import TrajectoryBuilder
from polyturn.core.errors import DataError
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.metrics import merge, reduce
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.trajectory import Trajectory, TrajectoryGroup
from polyturn.data.conversations import Conversation
from polyturn.tokens.delta import DeltaEncoder
from polyturn.training.options import SftOptions

if TYPE_CHECKING:
    from polyturn.training.policy import ModelPolicy


def encode_conversation(conversation: Conversation, encoder: DeltaEncoder, *, id: str) -> TrainSample:
    """Return the training sample of one conversation."""
    messages = conversation.messages
    first = next(i for i, m in enumerate(messages) if m.role == "assistant")
    builder = TrajectoryBuilder()
    builder.open(encoder.start(messages[:first]))
    builder.add_media(*(medium for message in messages[:first] for medium in message.media))
    turn, position = -1, first
    while position < len(messages):
        turn += 1
        ids = encoder.assistant(messages[position])
        weight = 1.0 if conversation.weights is None else conversation.weights[turn]
        completion = Completion(token_ids=ids, finish_reason=FinishReason.STOP)
        builder.sample(completion, turn=turn, weights=np.full(len(ids), weight, np.float32))
        end = position + 1
        # All messages up to the next assistant message at once: a template may render several tool results together.
        while end < len(messages) and messages[end].role != "assistant":
            end += 1
        observed = messages[position + 1 : end]
        if observed and end < len(messages):  # an observation at the end needs no encoding
            builder.observe(encoder.extend(observed, last_id=int(ids[-1])), turn=turn)
            builder.add_media(*(medium for message in observed for medium in message.media))
        elif not observed and end < len(messages):
            raise DataError(f"conversation {id}: two assistant messages in a row; put a user or tool message between them")
        position = end
    segment = builder.build()[0]
    return TrainSample(
        id=SampleId("sft", id, 0),
        token_ids=segment.token_ids,
        loss_weights=segment.loss_weights,
        turn_ids=segment.turn_ids,
        media=segment.media,
    )


def trajectory_samples(trajectories: Iterable[Trajectory], *, min_reward: float) -> list[TrainSample]:
    """Return the samples of the trajectories with a reward of at least `min_reward`, with the sampled tokens.

    Raises:
        DataError: no trajectory has such a reward.
    """
    all_of_them = list(trajectories)
    good = [t for t in all_of_them if t.reward is not None and t.reward.total >= min_reward]
    if not good:
        best = max((t.reward.total for t in all_of_them if t.reward is not None), default=float("nan"))
        raise DataError(
            f"none of {len(all_of_them)} trajectories has a reward of at least {min_reward:g}; the best has {best:g}, so "
            "lower warm_start.min_reward"
        )
    groups = [TrajectoryGroup(id=f"sft{i}", task=t.task, trajectories=(t,)) for i, t in enumerate(good)]
    return [s for g in groups for s in to_samples(g, temperature=1.0)]


def run_sft(
    policy: ModelPolicy,
    samples: Sequence[TrainSample],
    options: SftOptions,
    *,
    seed: int = 0,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    first_step: int = 0,
    spent_s: float = 0.0,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Train on `samples` in a seeded random order, epoch after epoch.

    Args:
        policy: The policy to train.
        samples: Samples from `encode_conversation` or `trajectory_samples`.
        options: Steps, time limit and batch size.
        seed: Seed of the order.
        on_step: Called with the number of steps taken and the metrics of the last one.
        first_step: Number of steps taken by an interrupted run; the order continues after them.
        spent_s: Seconds of these steps, which count for the time limit.
        should_stop: Called before every step; True ends the training.

    Returns:
        The number of steps taken, `first_step` included.

    Raises:
        DataError: no sample has a token with a weight.
    """
    if not any(sample.num_weighted for sample in samples):
        raise DataError(
            f"none of {len(samples)} conversations has a token to train on; give some assistant messages a `loss` above 0, "
            "or choose other conversations (warm_start.conversations)"
        )
    rng = np.random.default_rng(seed)
    order: list[int] = []  # drawn for earlier steps too, so that a resumed run has the same order
    began = time.monotonic() - spent_s
    for step in range(options.steps):
        while len(order) < options.batch_size:
            order += rng.permutation(len(samples)).tolist()
        batch, order = [samples[i] for i in order[: options.batch_size]], order[options.batch_size :]
        if step < first_step:
            continue
        is_late = options.max_seconds is not None and time.monotonic() - began >= options.max_seconds
        if is_late or should_stop():
            return step
        metrics = merge([policy.sft_forward_backward(batch), policy.optim_step()])
        if on_step is not None:
            on_step(step + 1, reduce(metrics))
    return options.steps
