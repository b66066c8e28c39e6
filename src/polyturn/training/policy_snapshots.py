"""PolicySnapshots: copies of the trained policy that serve as past opponents, refreshed every so many steps.

    step              0    1    2    3    4    5    6            refresh_every: 3
    trained policy   [v0] [v1] [v2] [v3] [v4] [v5] [v6]
    its snapshot      v0   v0   v0   v3   v3   v3   v6           the version of the latest step that 3 divides

So the weights of a snapshot depend only on the step. A checkpoint between two refreshes contains them; one at a refresh does
not, because there they equal the policy's. A resumed run has the same opponents as an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from polyturn.core.errors import CheckpointError
from polyturn.core.protocols import Engine
from polyturn.training.hf import write_weights

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PolicySnapshot:
    """A copy of the policy, and the engine that samples from it."""

    name: str
    model: PreTrainedModel
    """The copy, in separate memory; `frozen_copy` makes it."""
    engine: Engine
    """Samples from `model`, and reloads the weights with each new version."""
    refresh_every: int | None = None
    """Number of steps between refreshes; None keeps the weights of step 0."""
    version: int | None = None
    """The policy version of the copy; None until training starts."""

    def due(self, step: int) -> int:
        """Return the policy version that the copy must have at a step."""
        return 0 if self.refresh_every is None else step - step % self.refresh_every


class PolicySnapshots:
    """All snapshots of a run."""

    def __init__(
        self, snapshots: Sequence[PolicySnapshot] = (), *, weights: Callable[[], Mapping[str, Tensor]] = dict
    ) -> None:
        """Manage `snapshots`; `weights` returns the trained policy's current weights, named as in a model without an
        adapter."""
        self._snapshots = tuple(snapshots)
        self._weights = weights

    async def start(self, step: int) -> None:
        """Set every copy to its version at `step`, at the start of a new or resumed run."""
        for one in self._snapshots:
            if one.version is None or one.due(step) == step:
                # The checkpoint has no weights for this snapshot, which is newer than the checkpoint.
                if one.version is None and one.due(step) != step:
                    logger.warning(
                        "the checkpoint has no policy %r; it starts from the trained policy of step %d", one.name, step
                    )
                await self._take(one, step)
            else:
                await one.engine.update_weights(one.version)

    async def follow(self, step: int) -> None:
        """Refresh the copies that are due, once the policy has the weights of `step`."""
        for one in self._snapshots:
            if one.due(step) == step:
                await self._take(one, step)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the copies that differ from the policy at `step`, in memory that no refresh changes."""
        return {
            one.name: {"version": one.version, "weights": _copied(one.model)}
            for one in self._snapshots
            if one.version is not None and one.due(step) != step
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the copies from `state_dict`, except policies that the run no longer has.

        Raises:
            CheckpointError: a copy is of another model.
        """
        for one in self._snapshots:
            if (saved := state.get(one.name)) is None:
                continue
            try:
                write_weights(one.model, saved["weights"])
            except CheckpointError as problem:
                raise CheckpointError(f"the checkpoint's policy {one.name!r}: {problem}") from problem
            one.version = int(saved["version"])

    async def _take(self, one: PolicySnapshot, step: int) -> None:
        # The embedded engine shares this memory. It cannot sample before its new version is set: until then nothing awaits.
        write_weights(one.model, self._weights())
        one.version = step
        await one.engine.update_weights(step)


def _copied(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model as new tensors on the CPU; tied weights share one tensor."""
    # By address: tied tensors stay tied in a checkpoint only if they are the same object here.
    firsts: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    return {
        name: firsts.setdefault((live.data_ptr(), tuple(live.shape)), live.detach().to("cpu", copy=True))
        for name, live in model.state_dict().items()
    }
