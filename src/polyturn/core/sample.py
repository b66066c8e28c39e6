"""TrainSample: the per-token arrays of one segment, which the trainer and the losses read.

Index t of every array describes token t. Only `batching/layout.py` shifts the arrays to prediction targets.

    token_ids         [ p  p  p  a  a  o  o  a  a ]     p: prompt, a: sampled by the model, o: observation
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
    """Names a segment by its group, its trajectory and its index in the trajectory."""

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
    """[T] from the engine; 0 at tokens that were not sampled."""
    support: Support | None = None
    """[T, K] the tokens that each sampled token was drawn from, -1 elsewhere. Log-probabilities are normalised over these
    tokens. None if the run does not record them."""
    old_logprobs: NDArray[np.float32] | None = None
    """[T] from the trainer at the start of the step; the denominator of the importance ratio."""
    ref_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    """[T] from the critic: index t is the value of the state in which token t is sampled."""
    rewards: NDArray[np.float32] | None = None
    """[T] rewards of single tokens in addition to `reward`, such as a KL penalty; ignored at tokens with loss weight 0."""
    advantages: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    """[T] the targets of the critic; NaN at tokens whose value is not trained."""
    correction: NDArray[np.float32] | None = None
    """[T] factor on the policy loss of each token: the importance correction (`algorithms/correction.py`) times the
    selection of high-entropy tokens (`algorithms/high_entropy.py`)."""
    marks: NDArray[np.float32] | None = None
    """[T] 1 at tokens that the policy loss treats differently (`algorithms.losses.marks`)."""
    observed: NDArray[np.float32] | None = None
    """[T] weight of each token in the observation loss: 1 for text of a tool or user, 0 for the task's prompt and sampled
    tokens. None if the run has no such loss."""
    versions: NDArray[np.int32] | None = None
    """[T] the policy version of each sampled token, -1 elsewhere."""
    reward: float = 0.0
    """The scalar reward of the trajectory, or of the segment's agent if agents have separate rewards; NaN without one."""
    turn_scores: NDArray[np.float32] | None = None
    """[number of turns] the score of each turn of the trajectory, NaN if it has none; None if no turn was scored. Indexed by
    `turn_ids`: `turn_scores[turn_ids[loss_weights != 0]]`."""
    temperature: float = 1.0
    """The sampling temperature; logprobs are log_softmax(logits / temperature)."""
    media: tuple[Media, ...] = ()
    routed_experts: Routes | None = None
    """[T, L, K] the experts of each token (`core/routing.py`); None if unknown for every token."""

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
                "temperature); give a number above 0, or 1 for greedy decoding, which engines report at temperature 1"
            )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Run-length encode the arrays: samples are pickled for each rank and command, and most arrays repeat values.
        make, (kind, values) = Record.__reduce__(self)
        return _unpickled, (make, kind, {name: packed(value) for name, value in values.items()})

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_weighted(self) -> int:
        """Number of tokens with a loss weight other than 0."""
        return int(np.count_nonzero(self.loss_weights))

    def replace(self, **arrays: Any) -> TrainSample:
        """Return a copy with some arrays replaced, for instance `sample.replace(old_logprobs=…)`."""
        return dataclasses.replace(self, **arrays)


def _unpickled(make: Callable[..., TrainSample], kind: type[TrainSample], values: Mapping[str, Any]) -> TrainSample:
    return make(kind, {name: unpacked(value) for name, value in values.items()})
