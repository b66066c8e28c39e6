"""The critic over many ranks: sharded as the policy is, and led from one place.

    leader   DistributedCritic     values, returns and the coefficients of the whole batch; a share for each row of ranks
    ranks    ShardedCritic         backbone, head, gradients and moments in shards; no rank holds the whole critic

The gradient is that of one process, and so is the state, which loads with any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from polyturn.batching.layout import LayoutSettings, MicroBatch
from polyturn.core.arrays import Floats
from polyturn.core.errors import CheckpointError, RankLostError
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.core.sample import TrainSample
from polyturn.tokens.multimodal import MediaProcessor
from polyturn.training.critic import Critic, CriticSettings, ValueModel, bare, first_weights, value_coefs
from polyturn.training.fsdp import ShardedOptimizer, cut_optimizer, in_step, shard_layers
from polyturn.training.modality_encoders import layers_of, towers_of
from polyturn.training.optim import OptimSettings
from polyturn.training.rank_group import RankGroup, assign, put_back
from polyturn.training.shards import cut_like, gather_whole, require_same_shapes, spread_whole
from polyturn.training.tensor_parallel import split_layers


class ShardedCritic(Critic):
    """One rank's share; its methods are collective, so every rank calls the same ones in the same order."""

    optimizer: ShardedOptimizer

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        optim: OptimSettings,
        settings: CriticSettings | None = None,
        layout: LayoutSettings | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        """Take the backbone of `model`, which is used up by it, and shard it over `mesh`."""
        self._mesh = mesh
        super().__init__(model, optim=optim, settings=settings, layout=layout, media=media)
        self._device = device

    def score(self, samples: Sequence[TrainSample]) -> list[Floats]:
        """Return the values of this rank's samples."""
        values = super().score(samples)
        self._reshard()
        return values

    def optim_step(self) -> Metrics:
        """Take one step, on every rank or on none."""
        self._reshard()
        return super().optim_step()

    def state_dict(self) -> dict[str, Any]:
        """Return on rank 0 the whole state on the CPU, as `Critic` would; None in place of tensors on the others."""
        gathered: dict[str, Any] = gather_whole(super().state_dict())
        return gathered

    def load_whole(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the whole state on rank 0, in place; the other ranks give None.

        A state without an optimizer is that of a fresh start.

        Raises:
            CheckpointError: it is another model's.
        """
        whole = spread_whole(state)
        like = self.model.state_dict()
        require_same_shapes(whole["model"], like, whose="checkpoint's critic")
        whole["model"] = {name: cut_like(tensor, like[name]) for name, tensor in whole["model"].items()}
        if "optimizer" not in whole:
            self.model.load_state_dict(whole["model"])
            self.optimizer.take_parameters()
            return
        cut_optimizer(whole["optimizer"], like, self.optimizer)
        self.load_state_dict(whole)

    def _prepare(self, model: PreTrainedModel, optim: OptimSettings) -> tuple[ValueModel, ShardedOptimizer]:
        backbone, tp = model.base_model, self._mesh["tp"]
        assert isinstance(backbone, PreTrainedModel)
        value_model = ValueModel(model, backbone)
        partial = split_layers(backbone, tp) if tp.size() > 1 else []
        value_model.towers = tuple(towers_of(backbone))
        layers = layers_of(backbone, value_model.towers)
        # The head is by itself, because it is float32 whatever the backbone is.
        self._sharded = shard_layers([*layers, value_model.head, value_model], mesh=self._mesh["dp"])
        named = [f"backbone.{name}" for name in partial]
        return value_model, ShardedOptimizer(value_model, optim, mesh=self._mesh, partial=named)

    def _lay_out(self, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike]) -> list[MicroBatch]:
        """Cut this rank's samples, and add passes without weight until it has as many as the longest rank."""
        return in_step(super()._lay_out, samples, coefs, device=self._device)

    def _reshard(self) -> None:
        """Free the whole copies of what the last pass used."""
        self._sharded.reshard()


class DistributedCritic:
    """The critic of a whole team; the leader uses it as it would a `Critic`."""

    def __init__(
        self,
        team: RankGroup,
        *,
        settings: CriticSettings,
        layout: LayoutSettings | None = None,
        start: PreTrainedModel | None = None,
    ) -> None:
        """Let every rank make its share.

        Args:
            team: The ranks.
            settings: The value loss, as the ranks have it.
            layout: How the ranks lay their samples out, for what each gets; None takes the defaults.
            start: The whole model whose backbone the critic begins as; None where the ranks load one of their own.
        """
        self.settings = settings
        self._team = team
        self._layout = layout or LayoutSettings()
        team.call("make_critic", [()] * team.num_ranks)
        if start is not None:
            self._load({"model": first_weights(start)})

    def score(self, samples: Sequence[TrainSample]) -> list[Floats]:
        """Return for each sample [T] the value of the state that each weighted token is sampled in, 0 elsewhere."""
        rows, found = self._rows("critic_score", samples)
        return put_back(rows, found, len(samples))

    def forward_backward(self, samples: Sequence[TrainSample]) -> Metrics:
        """Add the gradient of the value loss over `samples`, everything that one optimizer step trains on.

        Raises:
            TrainingError: the samples have no values or returns.
        """
        began = time.perf_counter()
        _, found = self._rows("critic_forward_backward", samples, value_coefs(samples))
        # Each rank's part is already divided over the whole batch.
        sums = {name: [m[name].value for m in found if name in m] for name in ("critic/value_loss", "critic/clip_fraction")}
        metrics: Metrics = {name: Mean(sum(parts)) for name, parts in sums.items() if len(parts) == len(found)}
        return {**metrics, "time/critic_s": Sum(time.perf_counter() - began)}

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient on all ranks, or on none, and clear it.

        Raises:
            TrainingError: loss or gradient is not finite, once more in a row than such steps are skipped.
        """
        metrics: Metrics = self._all("critic_optim_step")[0]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on the CPU, the same that one process would return.

        Raises:
            CheckpointError: a rank is gone, and its shards with it.
        """
        try:
            state: dict[str, Any] = self._all("critic_state")[0]
        except RankLostError as problem:
            raise CheckpointError(f"no checkpoint can be made of the critic now: {problem}") from problem
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in a run of one process or another number of ranks.

        Raises:
            CheckpointError: the state is of another model.
        """
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._team.call("critic_load", [(state,), *[(None,)] * (self._team.num_ranks - 1)])

    def _all(self, command: str) -> list[Any]:
        return self._team.call(command, [()] * self._team.num_ranks)

    def _rows(
        self, command: str, samples: Sequence[TrainSample], *arrays: Sequence[Any]
    ) -> tuple[list[list[int]], list[Any]]:
        """Call with a share for each row of ranks; return the shares and what the first rank of each row returned."""
        width = self._team.tensor_parallel
        rows = assign(samples, settings=self._layout, num_shares=self._team.num_ranks // width)
        shares = [([bare(samples[i]) for i in row], *([np.asarray(a[i]) for i in row] for a in arrays)) for row in rows]
        return rows, self._team.call(command, [share for share in shares for _ in range(width)])[::width]
