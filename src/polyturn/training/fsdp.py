"""ShardedPolicy: one rank's share of a model whose parameters, gradients and moments are spread over many devices.

    mesh (dp, tp):   a row of `tp` ranks holds one shard of every layer's matrices and sees the same samples,
                     the `dp` rows see different samples; fully_shard spreads each parameter over the rows

It is `LocalPolicy` with three differences. Gradients of the rows are summed, never averaged, because coefficients were
normalised over the global batch (I7). Every rank runs the same number of micro-batches, the shorter ones empty passes of
weight zero, because each pass of a sharded model is a collective. And the norm of the gradient is that of all shards, so
that clipping, and skipping a step that is not finite, come out the same everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from polyturn.batching.layout import MicroBatch
from polyturn.core.arrays import Floats
from polyturn.core.errors import AlignmentError, ConfigError, PolyturnError
from polyturn.core.metrics import Metrics
from polyturn.core.sample import SampleId, TrainSample
from polyturn.training.forward import TargetForward, TargetScores
from polyturn.training.local import LocalPolicy
from polyturn.training.lora import adapter_tensors, has_lora
from polyturn.training.modality_encoders import layers_of, touching, towers_of
from polyturn.training.optim import Optimizer, OptimSettings, clone_tensors
from polyturn.training.reference import AdapterReference, FrozenModel, Scorer, make_reference
from polyturn.training.shards import cut_like, gather_whole, is_split_over_row, local_part, spread_whole
from polyturn.training.tensor_parallel import split_layers

_FILLER = TrainSample(
    id=SampleId("filler", "0", 0),
    token_ids=np.zeros(2, np.int32),
    loss_weights=np.array([0, 1], np.float32),
    turn_ids=np.zeros(2, np.int32),
).replace(
    **dict.fromkeys(
        ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "correction", "marks"), np.zeros(2, np.float32)
    )
)
"""What a rank computes, without weight, while the others still have samples."""


def make_mesh(device: torch.device, *, tensor_parallel: int = 1) -> DeviceMesh:
    """Return the mesh over all ranks of the process group: rows that hold the same samples along "tp".

    Raises:
        ConfigError: the ranks do not divide into rows.
    """
    ranks = dist.get_world_size()
    if ranks % tensor_parallel:
        raise ConfigError(
            f"train.distributed.tensor_parallel is {tensor_parallel} and there are {ranks} ranks; it must divide them"
        )
    return init_device_mesh(device.type, (ranks // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))


class ShardedPolicy(LocalPolicy):
    """Owns this rank's shards; its methods are collective, so every rank calls the same ones in the same order."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        **options: Any,
    ) -> None:
        """Shard `model` in place, and with it a reference or teacher that is a model of its own.

        Args:
            model: The whole model, on any device; the same architecture on every rank.
            mesh: From `make_mesh`.
            device: Where this rank computes.
            options: Those of `LocalPolicy`.

        Raises:
            ConfigError: the model cannot be split as `mesh` asks.
        """
        self.mesh = mesh
        self._own_device = device
        super().__init__(model, **options)

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[Floats]:
        """Return the log-probabilities of this rank's samples."""
        scores = super().score(samples, reference=reference)
        self._root.reshard()
        return scores

    optimizer: ShardedOptimizer

    def optim_step(self) -> Metrics:
        """Take one step, on every rank or on none."""
        self._root.reshard()
        return super().optim_step()

    def state_dict(self) -> dict[str, Any]:
        """Return on rank 0 the whole state on the CPU, as `LocalPolicy` would; None in place of tensors on the others."""
        gathered: dict[str, Any] = gather_whole(super().state_dict())
        return gathered

    def load_whole(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the whole state on rank 0, in place; the other ranks give None.

        A state without an optimizer is that of a fresh start: a reference that is a copy of the model then has its weights.

        Raises:
            CheckpointError: it is another model's.
        """
        whole = spread_whole(state)
        like = self.model.state_dict()
        is_fresh = "optimizer" not in whole
        if isinstance(self._reference, ShardedAdapterReference):
            kept = whole["model"] if is_fresh else whole.get("reference", {})
            whole["reference"] = {name: cut_like(t, like[name]) for name, t in kept.items() if ".lora_" in name}
        elif isinstance(self._reference, _ShardedFrozenModel) and (is_fresh or "reference" in whole):
            own = self._reference.live()
            kept = whole["model"] if is_fresh else whole["reference"]
            whole["reference"] = {name: cut_like(t, own.get(name)) for name, t in kept.items()}
        whole["model"] = {name: cut_like(tensor, like.get(name)) for name, tensor in whole["model"].items()}
        if is_fresh:
            self.model.load_state_dict(whole["model"])
            self.optimizer.take_parameters()
            is_copy = isinstance(self._reference, _ShardedFrozenModel) and self._reference.is_kept
            if self._reference is not None and (is_copy or isinstance(self._reference, ShardedAdapterReference)):
                self._reference.load_state_dict(whole["reference"])
            return
        cut_optimizer(whole["optimizer"], like, self.optimizer)
        self.load_state_dict(whole)

    def whole_weights(self) -> dict[str, Any]:
        """Return name -> whole tensor on the CPU on rank 0, name -> None on the others: of what training changes.

        With LoRA that is the adapter.
        """
        own = adapter_tensors(self.model) if has_lora(self.model) else self.model.state_dict()
        gathered: dict[str, Any] = gather_whole({n: t.detach() for n, t in own.items()})
        return gathered

    def _prepare(
        self, model: PreTrainedModel, optim: OptimSettings, reference: bool | PreTrainedModel
    ) -> tuple[Any, Scorer | None, ShardedOptimizer]:
        # A reference is made of the whole model, and whether its head is separate is tried on the whole model too.
        self._root = _Root(model, TargetForward(model))
        scorer = make_reference(model, self._root, reference)  # type: ignore[arg-type]
        if isinstance(scorer, FrozenModel):
            scorer = _ShardedFrozenModel(scorer, mesh=self.mesh["dp"])
        tp = self.mesh["tp"]
        if tp.size() > 1 and has_lora(model):
            raise ConfigError(
                f"model.lora cannot be split within layers and train.distributed.tensor_parallel is {tp.size()}; set it to 1"
            )
        partial = split_layers(model, tp) if tp.size() > 1 else []
        self._root.shard(self.mesh["dp"])
        if isinstance(scorer, AdapterReference):
            scorer = ShardedAdapterReference(model, self._root)  # type: ignore[arg-type]
        return self._root, scorer, ShardedOptimizer(model, optim, mesh=self.mesh, partial=partial)

    def _frozen(self, teacher: PreTrainedModel) -> Scorer:
        return _ShardedFrozenModel(FrozenModel(teacher, is_kept=False), mesh=self.mesh["dp"])

    def _lay_out(self, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike]) -> list[MicroBatch]:
        """Cut this rank's samples, and add passes without weight until it has as many as the longest rank."""
        return in_step(super()._lay_out, samples, coefs, device=self._own_device)


def in_step(
    lay_out: Callable[[Sequence[TrainSample], Sequence[ArrayLike]], list[MicroBatch]],
    samples: Sequence[TrainSample],
    coefs: Sequence[ArrayLike],
    *,
    device: torch.device,
) -> list[MicroBatch]:
    """Cut the samples of this rank by `lay_out`, and add passes without weight until it has as many as the longest rank.

    Raises:
        PolyturnError: on every rank, with the reason of the one whose samples cannot be laid out.
    """
    batches: list[MicroBatch] = []
    problem: PolyturnError | None = None
    try:
        batches = lay_out(samples, coefs) if samples else []
    except PolyturnError as found:  # a medium that cannot be read, too: the other ranks are waiting
        problem = found
    counts = torch.tensor([len(batches), problem is not None], device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    most, is_wrong = counts.tolist()
    if is_wrong:
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, None if problem is None else str(problem))
        raise problem or AlignmentError(next(r for r in reasons if r is not None))
    if len(batches) == most:
        return batches
    (empty,) = lay_out([_FILLER], [np.zeros(2)])
    return [*batches, *[dataclasses.replace(empty, is_padding=True)] * (most - len(batches))]


def shard_layers(modules: Sequence[nn.Module], *, mesh: DeviceMesh) -> FSDPModule:
    """Spread the parameters of each module over `mesh`, and sum gradients instead of averaging them; return the last one,
    the root."""
    for module in modules:
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    return sharded


def cut_optimizer(state: dict[str, Any], like: Mapping[str, Tensor], optimizer: ShardedOptimizer) -> None:
    """Cut the whole state of an optimizer in place, as this rank's parameters are; `like` is the model's state."""
    masters = state.get("masters", {})
    state["masters"] = {name: cut_like(tensor, like.get(name)) for name, tensor in masters.items()}
    params = optimizer.parameters_in_order()
    for number, values in state["adamw"]["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and number < len(params) and value.shape == params[number].shape:
                values[name] = cut_like(value, params[number])


class _Root(nn.Module):
    """The root of the sharded modules: the whole forward pass, the head included, happens inside its hooks."""

    def __init__(self, model: PreTrainedModel, forward: TargetForward) -> None:
        super().__init__()
        self.model = model
        self._targets = forward
        self._towers = tuple(towers_of(model))

    def shard(self, mesh: DeviceMesh) -> None:
        """Spread the parameters over `mesh`, layer by layer, and sum gradients instead of averaging them."""
        shard_layers([*layers_of(self.model, self._towers), self], mesh=mesh)

    def reshard(self) -> None:
        """Free the whole copies of what the last pass used; the sharded module brings its own."""

    def forward(self, batch: MicroBatch, **options: Any) -> TargetScores:
        """Return what the forward pass gives for each target."""
        scores = self._targets(batch, **options)
        # The hook of the backward pass must not sit on a view, hence the copy.
        return scores._replace(logprobs_S=touching(scores.logprobs_S.clone(), self._towers))


class _ShardedFrozenModel(FrozenModel):
    """A frozen model that is sharded like the one that trains; every pass of it is a collective too."""

    def __init__(self, whole: FrozenModel, *, mesh: DeviceMesh) -> None:
        self.__dict__.update(whole.__dict__)
        self._root = _Root(self._model, self._forward)
        self._root.shard(mesh)
        self._forward = self._root  # type: ignore[assignment]

    def live(self) -> dict[str, Any]:
        """Return name -> this rank's shard."""
        return self._model.state_dict()

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        found = super().logprobs(batch)
        self._root.reshard()
        return found


class ShardedAdapterReference(AdapterReference):
    """The sharded model with its adapter as it was when training started, also where it was zero.

    This rank's shards of the adapter are exchanged in place, because that is where a sharded module gathers them from.
    """

    def __init__(self, model: PreTrainedModel, forward: TargetForward) -> None:
        self._model = model
        self._forward = forward
        self._adapter = clone_tensors(adapter_tensors(model))

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        assert self._adapter is not None
        own = {name: local_part(tensor) for name, tensor in adapter_tensors(self._model).items()}
        saved = {name: tensor.clone() for name, tensor in own.items()}
        was_training = self._model.training
        self._model.eval()
        with torch.no_grad():
            try:
                for name, tensor in own.items():
                    tensor.copy_(local_part(self._adapter[name]))
                return self._forward(batch).logprobs_S
            finally:
                for name, tensor in own.items():
                    tensor.copy_(saved[name])
                self._model.train(was_training)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the adapter of the start; an empty state is one that was zero."""
        assert self._adapter is not None
        with torch.no_grad():
            for name, tensor in self._adapter.items():
                local = local_part(tensor)
                if state:
                    local.copy_(local_part(state[name]))
                elif ".lora_B." in name:
                    local.zero_()


class ShardedOptimizer(Optimizer):
    """AdamW over shards: each rank updates its own, by the norm of all."""

    def __init__(self, model: nn.Module, settings: OptimSettings, *, mesh: DeviceMesh, partial: Sequence[str] = ()) -> None:
        """Take the parameters of a sharded `model`; `partial` names those whose gradient must be summed over a row."""
        super().__init__(model, settings)
        self._mesh = mesh
        self._partial = set(partial)

    def parameters_in_order(self) -> list[nn.Parameter]:
        """Return the parameters by the numbers that the state gives them."""
        return [p for group in self._adamw.param_groups for p in group["params"]]

    def _total_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        tp = self._mesh["tp"]
        if self._partial:
            for name, param in self._named:
                if name in self._partial and param.grad is not None:
                    dist.all_reduce(local_part(param.grad), group=tp.get_group())
        dtype = torch.promote_types(params[0].dtype, torch.float32)
        squares_split, squares_whole = (torch.zeros((), dtype=dtype, device=local_part(params[0]).device) for _ in range(2))
        for grad in (p.grad for p in params if p.grad is not None):
            square = torch.linalg.vector_norm(local_part(grad), dtype=dtype) ** 2
            if is_split_over_row(grad):
                squares_split += square
            else:
                squares_whole += square
        if self._problem is not None:
            squares_whole += math.nan
        # What is whole in a row counts once. All ranks get the same bits, so all skip or none, and copies stay equal.
        squares = squares_split + squares_whole / tp.size()
        dist.all_reduce(squares)
        return torch.sqrt(squares)

    def _clip(self, params: Sequence[nn.Parameter], norm: Tensor) -> None:
        assert self.settings.max_grad_norm is not None
        factor = torch.clamp(self.settings.max_grad_norm / (norm + 1e-6), max=1.0)
        for param in params:
            if param.grad is not None:
                local_part(param.grad).mul_(factor)

    def _skip(self, problem: str) -> None:
        """Skip with the reason of the rank that has one."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, self._problem)
        super()._skip(next((r for r in reasons if r is not None), problem))

    def _non_finite_message(self, norm: float) -> str:
        # By this rank's shards alone: not every rank comes here, and a look at whole tensors is a collective.
        bad = [n for n, p in self._named if p.grad is not None and not torch.isfinite(local_part(p.grad)).all()]
        where = f", first in {bad[0]!r}" if bad else ""
        return (
            f"the gradient's norm is {norm} at optimizer step {self.step_count}{where}: look at the loss metrics of the "
            "last steps, or lower optim.lr"
        )
