"""PolicySnapshots: copies of the policy that is trained, which play its past selves and are taken again every so many steps.

    step              0    1    2    3    4    5    6            refresh_every: 3
    trained policy   [v0] [v1] [v2] [v3] [v4] [v5] [v6]
    its snapshot      v0   v0   v0   v3   v3   v3   v6           the version of the latest step that 3 divides

So which weights a snapshot has depends on the step alone. A checkpoint between two refreshes holds them beside the policy's
own; one at a refresh does not, because there they are the policy's own. A run that goes on has the same opponents as one
that was never interrupted.
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
    """One copy, and the engine that samples from it."""

    name: str
    model: PreTrainedModel
    """Its own memory; `frozen_copy` makes it."""
    engine: Engine
    """Samples from `model`; loads its weights when it gets a new version."""
    refresh_every: int | None = None
    """In steps; None keeps the weights of step 0."""
    version: int | None = None
    """Which version of the policy it is; None until training starts."""

    def due(self, step: int) -> int:
        """Return which version it is to be at a step."""
        return 0 if self.refresh_every is None else step - step % self.refresh_every


class PolicySnapshots:
    """The copies of the trained policy that a run keeps."""

    def __init__(
        self, followers: Sequence[PolicySnapshot] = (), *, weights: Callable[[], Mapping[str, Tensor]] = dict
    ) -> None:
        """Take the copies; `weights` returns those of the trained policy as they are now, as a plain model names them."""
        self._followers = tuple(followers)
        self._weights = weights

    async def start(self, step: int) -> None:
        """Bring every copy to where it is at `step`, at the start of a run or of one that goes on."""
        for one in self._followers:
            if one.version is None or one.due(step) == step:
                # Nothing was loaded for it: an older checkpoint, or a policy that the run did not have then.
                if one.version is None and one.due(step) != step:
                    logger.warning("the checkpoint has no policy %r; it is the policy as it is at step %d", one.name, step)
                await self._take(one, step)
            else:
                await one.engine.update_weights(one.version)

    async def follow(self, step: int) -> None:
        """Take again the copies that are due, once the policy's weights are those of `step`."""
        for one in self._followers:
            if one.due(step) == step:
                await self._take(one, step)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the copies that are not the policy itself as it is at `step`, in memory that no refresh changes."""
        return {
            one.name: {"version": one.version, "weights": _copied(one.model)}
            for one in self._followers
            if one.version is not None and one.due(step) != step
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the copies that `state_dict` returned; those that the run has no more are left out.

        Raises:
            CheckpointError: one is of another model.
        """
        for one in self._followers:
            if (saved := state.get(one.name)) is None:
                continue
            try:
                write_weights(one.model, saved["weights"])
            except CheckpointError as problem:
                raise CheckpointError(f"the checkpoint's policy {one.name!r}: {problem}") from problem
            one.version = int(saved["version"])

    async def _take(self, one: PolicySnapshot, step: int) -> None:
        # Its embedded engine shares this memory, and samples nothing between here and the new version: nothing is awaited.
        write_weights(one.model, self._weights())
        one.version = step
        await one.engine.update_weights(step)


def _copied(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model as new tensors on the CPU, tied ones as one."""
    # By address: in a checkpoint tied tensors are one again only where they are one object here.
    firsts: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    return {
        name: firsts.setdefault((live.data_ptr(), tuple(live.shape)), live.detach().to("cpu", copy=True))
        for name, live in model.state_dict().items()
    }
