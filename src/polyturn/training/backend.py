"""Backend: the interface to the parameters, gradients and moments of one network, on one device or many ranks.

    ModelPolicy, Critic     computations over the batch of a whole step: coefficients, marks, the weight of the KL term
      |  score, forward_backward, optim_step, save, load
    ModelBackend            the network of this process: whole (`Placement`), or this rank's shards of it (`Sharded`)
    RankedBackend           makes the same calls on every rank of a group, each with a share of the samples

To split a model in another way (pipelines, experts over nodes), register another `Placement` as an entry point of
`polyturn.backends`. The classes in the drawing do not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import ArrayLike
from torch import Tensor

from polyturn.core.arrays import Floats
from polyturn.core.metrics import Metrics
from polyturn.core.protocols import PassResult, Stored
from polyturn.core.sample import TrainSample
from polyturn.infra.plugins import Registry

warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed", category=UserWarning)
# megatron-core warns on import


OWN, REFERENCE, ENTROPY = "own", "reference", "entropy"
"""Scorers: log-probabilities of the trained network, or of the frozen reference, or the entropy of the trained policy."""


backends: Registry[Any] = Registry("backends")
"""Name -> a class of `Placement` (`model_backend.py`). `of(degrees, device, start=…)` makes one; `check(model, degrees)`
raises for a model, still without weights, that it cannot split."""


class TermWeights(NamedTuple):
    """Weights of loss terms that may change from step to step."""

    kl: float = 0.0
    """Weight of the KL to the reference."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    measures_entropy: bool = True
    """Whether the entropy is computed although its weight is 0."""


NO_WEIGHTS = TermWeights()


class Backend(Stored, Protocol):
    """A network with its optimizer. On a group of ranks every call is collective: all ranks make it, in the same order.

    Checkpoints are written by `torch.distributed.checkpoint` as `model/NAME`, `reference/NAME`, `masters/NAME` and
    `moments/KIND/NAME` (`shards.Names`). NAME is the name in the Hugging Face model, so that exports, other numbers of ranks
    and other backends can read them.
    """

    @property
    def step_count(self) -> int:
        """Number of optimizer steps, taken or skipped."""
        ...

    def score(self, samples: Sequence[TrainSample], scorer: str = OWN) -> list[Floats]:
        """Return for each sample [T] the result of `scorer` at each weighted token, 0 elsewhere."""
        ...

    def forward_backward(
        self,
        samples: Sequence[TrainSample],
        coefs: Sequence[ArrayLike],
        objective: str,
        weights: TermWeights = NO_WEIGHTS,
    ) -> PassResult:
        """Add the gradient of the named objective over `samples`, and return its metrics. `coefs` has the coefficient of
        each token, `weights` those of the KL and entropy terms."""
        ...

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, or skip it on all ranks, and clear the gradient."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return name -> weight without gradient, for an engine; streamed if the weights are spread over ranks."""
        ...

    def trained(self) -> Mapping[str, Tensor]:
        """Return name -> whole tensor that training changes: with LoRA the adapter, else the weights."""
        ...

    def weight_groups(self, is_merged: bool = True) -> list[str]:
        """Return the groups of parameters for `shift_weights`, each a name across all layers: of the merged model, or of the
        tensors that training changes."""
        ...

    def shift_weights(self, group: str, scale: float) -> None:
        """Add to a group `scale` times noise of the size of its values; 0 restores the exact values.

        This tests that each group reaches an engine.
        """
        ...

    def free_cache(self) -> None:
        """Release cached, unused GPU memory to other processes, such as a server on the same GPU."""
        ...

    def close(self) -> None:
        """Free the resources of training; the model stays."""
        ...


class OverBackend:
    """Base of the policy and the critic, which keep their state in a `Backend`."""

    backend: Backend

    def save(self, folder: Path) -> None:
        """Start writing the backend's state."""
        self.backend.save(folder)

    def is_saved(self) -> bool:
        """Return whether the backend's state is written."""
        return self.backend.is_saved()

    def load(self, folder: Path) -> None:
        """Load the backend's state."""
        self.backend.load(folder)
