"""TrainSample: one segment, ready for the trainer. The shape between rollout and loss.

index t describes token t; the shift to targets happens once, in `batching/layout.py`.

    token_ids         [ p  p  p  a  a  o  o  a  a ]
    loss_weights      [ 0  0  0  1  1  0  0  1  1 ]
    rollout_logprobs  [ 0  0  0 -1 -2  0  0 -1 -3 ]
    advantages        [ 0  0  0  A  A  0  0  A  A ]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Record, Support, float_array, ids_array, support_array
from polyturn.core.errors import AlignmentError, ConfigError
from polyturn.core.media import Media
from polyturn.core.routing import Routes, routes_array
from polyturn.core.runs import packed, unpacked


class SampleId(NamedTuple):
    """Which segment of which trajectory of which group."""

    group: str
    trajectory: str
    segment: int


_FLOATS = (
    "loss_weights", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns",
    "correction", "marks", "observed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample(Record):
    """Per-token arrays of one segment, all of one length [T]."""

    id: SampleId
    token_ids: NDArray[np.int32]
    loss_weights: NDArray[np.float32]
    turn_ids: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32] | None = None
    """The engine's, 0 where nothing was sampled."""
    support: Support | None = None
    """[T, K] the tokens that each sampled token was drawn from, -1 elsewhere: log-probabilities are normalised over them;
    None where the run does not record them."""
    old_logprobs: NDArray[np.float32] | None = None
    """The trainer's at the start of the step, the denominator of the ratio."""
    ref_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    """The critic's: index t is the value of the state that token t is sampled in."""
    rewards: NDArray[np.float32] | None = None
    """Rewards on single tokens beside the trajectory's own `reward`, such as a KL penalty; read at weighted tokens only."""
    advantages: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    """The critic's targets; NaN where its value is not trained."""
    correction: NDArray[np.float32] | None = None
    """The factor of each token's policy loss: another policy sampled it (`algorithms/correction.py`), or its entropy is too
    low (`algorithms/high_entropy.py`)."""
    marks: NDArray[np.float32] | None = None
    """1 at the tokens that the policy loss treats apart (`algorithms.losses.marks`)."""
    observed: NDArray[np.float32] | None = None
    """The weight of each token in the observation loss: 1 where a tool or user wrote it, 0 for the task's prompt and for
    sampled tokens; None where the run has no such loss."""
    versions: NDArray[np.int32] | None = None
    """The policy version of each sampled token, -1 elsewhere."""
    reward: float = 0.0
    """The trajectory's scalar reward; that of the segment's agent, where agents have rewards of their own."""
    turn_scores: NDArray[np.float32] | None = None
    """[K] the score of each turn of the trajectory, NaN where nothing scored it; None if no turn was scored. `turn_ids`
    index it: `turn_scores[turn_ids[loss_weights != 0]]`."""
    temperature: float = 1.0
    """The temperature that the tokens were sampled at; logprobs are log_softmax(logits / temperature)."""
    media: tuple[Media, ...] = ()
    routed_experts: Routes | None = None
    """[T, L, K] the experts that each token went to (`core/routing.py`); None where none is known."""

    def __post_init__(self) -> None:
        self._freeze(**dict.fromkeys(("token_ids", "turn_ids", "versions"), ids_array), routed_experts=routes_array)
        self._freeze(support=support_array)
        self._freeze(**dict.fromkeys((*_FLOATS, "turn_scores"), float_array))
        for name in ("turn_ids", "versions", "routed_experts", "support", *_FLOATS):
            array = getattr(self, name)
            if array is not None and len(array) != len(self.token_ids):
                raise AlignmentError(f"sample {self.id}: {name} has {len(array)} entries for {len(self.token_ids)} tokens")

        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"sample {self.id}: its temperature is {self.temperature}, and log-probabilities are log_softmax(logits / "
                "temperature); give a number above 0, and 1 for greedy decoding, whose log-probabilities engines give at 1"
            )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # To each rank that trains it, for each command: mostly of arrays that say the same of many tokens.
        make, (kind, values) = Record.__reduce__(self)
        return _unpickled, (make, kind, {name: packed(value) for name, value in values.items()})

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_weighted(self) -> int:
        """Number of tokens that have a weight in the loss."""
        return int(np.count_nonzero(self.loss_weights))

    def replace(self, **arrays: Any) -> TrainSample:
        """Return a copy with some arrays set, for instance `sample.replace(old_logprobs=…)`."""
        return dataclasses.replace(self, **arrays)


def _unpickled(make: Callable[..., TrainSample], kind: type[TrainSample], values: Mapping[str, Any]) -> TrainSample:
    return make(kind, {name: unpacked(value) for name, value in values.items()})
