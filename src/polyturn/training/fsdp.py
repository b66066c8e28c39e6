"""Sharded: a placement that spreads the parameters, gradients and moments of a network over many devices.

    mesh (dp, tp):       a row of `tp` ranks splits every layer's matrices and sees the same samples, the `dp` rows see
                         different samples; fully_shard spreads each parameter over the rows
    mesh (copies, ep):   a second mesh over the same ranks, for experts: a group of `ep` ranks has every expert of a layer
                         once, and tokens travel within the group; fully_shard spreads an expert over the groups

Rows that split the tokens of the same samples (`context_parallel.py`) count as rows here too: each has a part of the
gradient.

Three points differ from one device. Gradients of the rows are summed, never averaged, because coefficients are
normalised over the global batch (I7). Every rank runs the same number of micro-batches, some of them without weight, because
each pass of a sharded model is collective. The norm of the gradient covers all shards, so that all ranks clip by the same
factor, or all skip the step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from polyturn.batching.layout import MicroBatch
from polyturn.core.errors import AlignmentError, ConfigError, PolyturnError
from polyturn.core.sample import SampleId, TrainSample
from polyturn.training.context_parallel import ContextRow
from polyturn.training.lora import adapter_tensors
from polyturn.training.modality_encoders import encoders_of, layers_of
from polyturn.training.model import ScoringModel
from polyturn.training.model_backend import Cut, Placement
from polyturn.training.optim import Optimizer, OptimSettings
from polyturn.training.options import Degrees
from polyturn.training.packed_attention import other_attention
from polyturn.training.part_loading import is_unread, read_weights, take_weights
from polyturn.training.shards import inside, local_part, num_parts
from polyturn.training.tensor_parallel import plan_of_layers, require_experts, split_experts, split_layers

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
"""A sample without weight, computed by a rank that has no more samples while other ranks still have some."""


def make_mesh(device: torch.device, *, tensor_parallel: int = 1) -> DeviceMesh:
    """Return the mesh over all ranks of the process group; ranks along "tp" have the same samples.

    Raises:
        ConfigError: the ranks do not divide into rows.
    """
    ranks = dist.get_world_size()
    if ranks % tensor_parallel:
        raise ConfigError(
            f"train.distributed.tensor_parallel is {tensor_parallel} and there are {ranks} ranks; set tensor_parallel to a "
            f"divisor of {ranks}"
        )
    return _mesh(dist.group.WORLD, device.type, tensor_parallel, ("dp", "tp"))


@functools.cache
def _mesh(world: Any, device_type: str, width: int, names: tuple[str, str]) -> DeviceMesh:
    # Cached, so that policy and critic share one mesh, because the process groups of each mesh have their own threads.
    return init_device_mesh(device_type, (world.size() // width, width), mesh_dim_names=names)


class OverRanks(Placement):
    """A placement over ranks. All of its calls are collective."""

    def __init__(self, degrees: Degrees, device: torch.device, *, start: Mapping[str, Tensor] | None = None) -> None:
        """Split by `degrees`, and compute on `device`.

        The trained network and copies of it start with this rank's parts `start`, by the names of the backbone. None keeps
        the model's weights; an unread model reads them from its files.
        """
        super().__init__()
        self._degrees = degrees
        self._device = device
        self._start = start

    @classmethod
    def of(cls, degrees: Degrees, device: torch.device, *, start: Mapping[str, Tensor] | None = None) -> Self:
        """Split by `degrees`, as the constructor does."""
        return cls(degrees, device, start=start)

    @property
    def needs_packing(self) -> bool:  # type: ignore[override]
        """Whether ranks split tokens, which requires packed rows."""
        return self._degrees.context_parallel > 1

    def device(self, network: ScoringModel) -> torch.device:
        """Return the device of this rank."""
        return self._device

    def in_step(self, cut: Cut) -> Cut:
        """Wrap `cut` so that every rank gets as many micro-batches as the rank with the most."""
        return functools.partial(self._cut_in_step, cut)

    def _cut_in_step(self, cut: Cut, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike]) -> list[MicroBatch]:
        """Cut the samples of this rank's row, and add passes without weight up to the number of the longest row.

        Raises:
            PolyturnError: samples of a rank cannot be laid out; raised on every rank, with that rank's reason.
        """
        batches: list[MicroBatch] = []
        problem: PolyturnError | None = None
        try:
            batches = cut(samples, coefs) if samples else []
        except PolyturnError as caught:  # such as an unreadable image; the other ranks are waiting
            problem = caught
        counts = torch.tensor([len(batches), problem is not None], device=self._device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        most, is_wrong = counts.tolist()
        if is_wrong:
            reason = _first_reason(None if problem is None else str(problem))
            raise problem or AlignmentError(str(reason))
        if len(batches) == most:
            return batches
        # A rank with fewer passes would leave the others waiting in a collective forever.
        (empty,) = cut([_FILLER], [np.zeros(2)])
        return [*batches, *[dataclasses.replace(empty, is_padding=True)] * (most - len(batches))]


class OptimizerOverRanks(Optimizer):
    """AdamW that skips a step on all ranks if one rank has a reason to."""

    def _skip(self, problem: str) -> None:
        """Skip the step with the reason of the first rank that has one."""
        super()._skip(_first_reason(self._problem) or problem)


def _first_reason(own: str | None) -> str | None:
    """Return the reason of the first rank that has one; collective."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, own)
    return next((reason for reason in reasons if reason is not None), None)


class Sharded(OverRanks):
    """Parameters, gradients and moments in shards over a mesh."""

    def __init__(self, degrees: Degrees, device: torch.device, *, start: Mapping[str, Tensor] | None = None) -> None:
        """Spread over all ranks, by `degrees`.

        Raises:
            ConfigError: the ranks do not divide by `degrees`.
        """
        super().__init__(degrees, device, start=start)
        self._mesh = make_mesh(device, tensor_parallel=degrees.tensor_parallel)
        seed = torch.tensor(self._seed, device=device)
        dist.broadcast(seed, src=0)
        self._seed, self._row = int(seed), self._mesh["dp"].get_local_rank()
        num_split = degrees.context_parallel
        self._context = ContextRow.of(device, size=num_split, inner=degrees.tensor_parallel) if num_split > 1 else None
        num, names = degrees.expert_parallel, ("copies", "ep")
        self._experts = _mesh(dist.group.WORLD, device.type, num, names) if num > 1 else None

    @staticmethod
    def check(model: PreTrainedModel, degrees: Degrees) -> None:
        """Raise for degrees of parallelism that this placement does not support.

        Raises:
            ConfigError: pipeline stages, context parallelism of a model that cannot be packed, or a model whose heads or
                experts do not divide.
        """
        where = "train.distributed"
        if degrees.context_parallel > 1:
            why = "it does not read text only" if encoders_of(model) else other_attention(model)
            if why is not None:
                raise ConfigError(
                    f"{where}.context_parallel is {degrees.context_parallel}, which splits packed rows, and "
                    f"{type(model).__name__} cannot be packed, because {why}; set it to 1"
                )
        if degrees.pipeline_parallel > 1:
            raise ConfigError(
                f"{where}.pipeline_parallel is {degrees.pipeline_parallel} and train.backend torch has no pipeline; "
                "set train.backend: megatron, or pipeline_parallel: 1"
            )
        if degrees.tensor_parallel > 1:
            plan_of_layers(model, parts=degrees.tensor_parallel)
        if degrees.expert_parallel > 1:
            require_experts(model, parts=degrees.expert_parallel)

    def values(self, backbone: PreTrainedModel) -> ScoringModel:
        """Return the network of a value function over `backbone`, which starts with the weights of the trained model."""
        if self._start is not None:
            self._start = inside(self._start, f"{backbone.base_model_prefix}.")
        return super().values(backbone)

    def optimizer(self, network: ScoringModel, settings: OptimSettings) -> ShardedOptimizer:
        """Split the layers over a row, shard everything over the rows, and return the optimizer of this rank's shards.

        Raises:
            ConfigError: the model cannot be split as the mesh asks.
        """
        partial = self._shard(network, is_copy=True)
        prefix = next(name for name, module in network.saved.named_modules() if module is network.backbone)
        self._start = None  # frees memory: copies of the trained network were made before
        named = [f"{prefix}.{name}".lstrip(".") for name in partial]
        return ShardedOptimizer(network.saved, settings, mesh=self._mesh, partial=named)

    def freeze(self, network: ScoringModel, *, is_copy: bool) -> None:
        """Split and shard a network that only scores, like a trained one.

        Raises:
            ConfigError: the model cannot be split as the mesh asks, or its files lack weights.
        """
        self._shard(network, is_copy=is_copy)

    def _shard(self, network: ScoringModel, *, is_copy: bool) -> list[str]:
        """Split `network` over a row and its experts over their groups, shard it layer by layer over the other ranks, and
        fill the shards. Gradients are summed, not averaged. Return the names of the parameters that are whole on every rank
        of a row, but whose gradient is split: each rank has an addend."""
        tp = self._mesh["tp"]
        partial = split_layers(network.backbone, tp) if self._degrees.tensor_parallel > 1 else []
        groups = self._experts
        experts = [] if groups is None else split_experts(network.backbone, groups["ep"], row=tp)
        network.context = self._context
        network.encoders = encoders = tuple(encoders_of(network.backbone))
        # Otherwise gradients of bfloat16 parameters would be summed over ranks in bfloat16.
        is_low = any(p.dtype.itemsize < 4 for p in network.parameters())
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_low else None)
        for module in (*experts, *layers_of(network.backbone, encoders), *network.heads, network):
            mesh = groups["copies"] if groups is not None and module in experts else self._mesh["dp"]
            cut = functools.partial(_cut_experts, parts=mesh.size()) if module in experts else None
            sharded = fully_shard(module, mesh=mesh, mp_policy=precision, shard_placement_fn=cut)
            # Summed, because the coefficients already average; with factor 1, because gloo cannot scale.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        if is_copy and self._start is not None:
            take_weights(network.backbone, self._start, self._device)
        elif is_unread(network.backbone):
            read_weights(network.backbone, self._device)
        register_fsdp_forward_method(network, "try_out")  # it runs the model too, so it must gather parameters
        return partial

    def before_backward(self, network: ScoringModel, *, is_last: bool) -> None:
        """Sum this pass's gradient over the rows, or, with gradient_sync "last", only in the last pass."""
        if self._degrees.gradient_sync == "last":
            assert isinstance(network, FSDPModule)
            network.set_requires_gradient_sync(is_last)

    def release(self, network: ScoringModel) -> None:
        """Free the gathered parameters of the last pass."""
        assert isinstance(network, FSDPModule)
        network.reshard()

    @contextmanager
    def adapter_replaced(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Exchange this rank's shards of the adapter in place, because a sharded module gathers from these tensors."""
        own = {name: local_part(tensor) for name, tensor in adapter_tensors(model).items()}
        saved = {name: tensor.clone() for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.copy_(local_part(tensors[name]))
            yield
        finally:
            for name, tensor in own.items():
                tensor.copy_(saved[name])


def _cut_experts(parameter: nn.Parameter, *, parts: int) -> Shard | None:
    """Choose how to spread a rank's experts over `parts` ranks: whole experts, or if their number does not divide, the last
    axis of their matrices. The first axis joins gate and up, which are separate in files.

    Raises:
        ConfigError: neither the number nor the width divides.
    """
    count, width = len(local_part(parameter)), parameter.shape[-1]
    if count % parts and width % parts:
        raise ConfigError(
            f"train.distributed.expert_parallel leaves {count} experts of width {width} to {parts} ranks, and neither "
            f"number is a multiple of {parts}; raise expert_parallel, or use another number of ranks"
        )
    return Shard(parameter.ndim - 1) if count % parts else None


class ShardedOptimizer(OptimizerOverRanks):
    """AdamW over shards: each rank updates its shards, clipped by the norm of all shards."""

    def __init__(self, model: nn.Module, settings: OptimSettings, *, mesh: DeviceMesh, partial: Sequence[str] = ()) -> None:
        """Optimise the parameters of a sharded `model`. `partial` names those whose gradient must be summed over a row."""
        super().__init__(model, settings)
        self._mesh = mesh
        self._partial = set(partial)

    def _total_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        # Before the norm: each rank of a row has only the part of its heads, and the sum is the gradient.
        for name, param in self._named:
            if name in self._partial and param.grad is not None:
                dist.all_reduce(local_part(param.grad), group=self._mesh["tp"].get_group())
        dtype = torch.promote_types(params[0].dtype, torch.float32)
        # On the device on which the ranks communicate, even if the gradients are offloaded to the CPU.
        device = local_part(self._copies[0][0] if self._copies else params[0]).device
        squares = torch.zeros((), dtype=dtype, device=device)
        for grad in (p.grad for p in params if p.grad is not None):
            # A tensor that several ranks hold, such as one that a row does not split, counts once.
            share = num_parts(grad) / dist.get_world_size()
            squares += torch.linalg.vector_norm(local_part(grad), dtype=dtype) ** 2 * share
        if self._problem is not None:
            squares += math.nan
        dist.all_reduce(squares)  # identical bits on all ranks, so all skip or none, and copies stay equal
        return torch.sqrt(squares)

    def _clip(self, params: Sequence[nn.Parameter], norm: Tensor) -> None:
        assert self.settings.max_grad_norm is not None
        factor = torch.clamp(self.settings.max_grad_norm / (norm + 1e-6), max=1.0)
        for param in params:
            if param.grad is not None:
                grad = local_part(param.grad)
                grad.mul_(factor.to(grad.device))

    def _non_finite_message(self, norm: float) -> str:
        # Only this rank's shards: not every rank gets here, and gathering whole tensors is collective.
        bad = [n for n, p in self._named if p.grad is not None and not torch.isfinite(local_part(p.grad)).all()]
        where = f", first in {bad[0]!r}" if bad else ""
        return (
            f"the gradient's norm is {norm} at optimizer step {self.step_count}{where}: look at the loss metrics of the "
            "last steps, or lower optim.lr"
        )
