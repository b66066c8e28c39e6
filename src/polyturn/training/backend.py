"""Backend: the parameters, gradients and moments of one network, wherever they are.

    ModelPolicy, Critic     what is computed over the batch of a whole step: coefficients, marks, the weight of the KL term
      |  score, forward_backward, optim_step, save, load
    ModelBackend            the network of this process: whole (`Placement`), or this rank's shards of it (`Sharded`)
    RankedBackend           the same calls, made on every rank of a group, each with a share of the samples

Another way of holding a model (pipelines, experts spread over nodes) is another `Placement` on the ranks, an entry point of
`polyturn.backends`; nothing above it learns of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import ArrayLike
from torch import Tensor

from polyturn.core.arrays import Floats
from polyturn.core.metrics import Metrics
from polyturn.core.plugins import Registry
from polyturn.core.protocols import PassResult, Stored
from polyturn.core.sample import TrainSample

warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed", category=UserWarning)
# megatron-core's, as it is imported


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The number of ranks that each kind of parallelism spans."""

    tensor_parallel: int = 1
    """The matrices of a layer."""
    pipeline_parallel: int = 1
    """The layers."""
    expert_parallel: int = 1
    """The experts of a layer."""
    context_parallel: int = 1
    """The tokens of a micro-batch."""
    gradient_sync: str = "each"
    """"each" sums gradients after each micro-batch, "last" after the last one alone."""


OWN, REFERENCE, ENTROPY = "own", "reference", "entropy"
"""What scores: the network that is trained, the frozen reference beside it, or the entropy of the trained policy."""


backends: Registry[Any] = Registry("backends")
"""Name -> a `Placement` of ranks (`model_backend.py`) that is made by `of(degrees, device, start=…)`, and whose
`check(model, degrees)` refuses a model, of which the weights are not read yet, that it cannot split."""


class TermWeights(NamedTuple):
    """The weights that may change from step to step."""

    kl: float = 0.0
    """Of the KL to the reference."""
    entropy: float = 0.0
    """Of the bonus for entropy."""


NO_WEIGHTS = TermWeights()


class Backend(Stored, Protocol):
    """A network with its optimizer. On the ranks of a group every call is collective: all make it, in the same order.

    Checkpoints are written by `torch.distributed.checkpoint`: `model/NAME` by the names of the Hugging Face model, which is
    what exports, another number of ranks and another backend read; `reference/NAME`, `masters/NAME` and `moments/KIND/NAME`
    follow it (`shards.Names`).
    """

    @property
    def step_count(self) -> int:
        """Number of optimizer steps that were taken or skipped."""
        ...

    def score(self, samples: Sequence[TrainSample], scorer: str = OWN) -> list[Floats]:
        """Return for each sample [T] what `scorer` gives each weighted token, 0 elsewhere."""
        ...

    def forward_backward(
        self,
        samples: Sequence[TrainSample],
        coefs: Sequence[ArrayLike],
        objective: str,
        weights: TermWeights = NO_WEIGHTS,
    ) -> PassResult:
        """Add the gradient of an objective over `samples`, whose tokens count as `coefs` say, and return its figures; its
        terms beside the policy loss count as `weights` say."""
        ...

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient on all ranks, or on none, and clear it."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return name -> weight without gradient, for an engine; streamed where no process holds them whole."""
        ...

    def trained(self) -> Mapping[str, Tensor]:
        """Return name -> what training changes, whole: with LoRA the adapter, else as `weights`."""
        ...

    def weight_groups(self, is_merged: bool = True) -> list[str]:
        """Return the groups of parameters, one of a name in all layers, that `shift_weights` moves: the model's own, or what
        training changes."""
        ...

    def shift_weights(self, group: str, scale: float) -> None:
        """Move a group to `scale` times some noise of the size of its values from where it was; 0 puts it back to the bit.

        So it is proved that each group arrives at an engine.
        """
        ...

    def free_cache(self) -> None:
        """Return cached, unused GPU memory, so that a server on the same GPU can have it."""
        ...

    def close(self) -> None:
        """Free what training needed beside the model."""
        ...


class OverBackend:
    """Base of the policy and of the critic, whose state lives in a `Backend`."""

    backend: Backend

    def save(self, folder: Path) -> None:
        """Let the backend begin to write its state."""
        self.backend.save(folder)

    def is_saved(self) -> bool:
        """Return whether the backend has written it."""
        return self.backend.is_saved()

    def load(self, folder: Path) -> None:
        """Let the backend continue from what it wrote."""
        self.backend.load(folder)
