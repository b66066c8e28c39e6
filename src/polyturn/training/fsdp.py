"""Sharded: the placement of a network whose parameters, gradients and moments are spread over many devices.

    mesh (dp, tp):       a row of `tp` ranks splits every layer's matrices and sees the same samples, the `dp` rows see
                         different samples; fully_shard spreads each parameter over the rows
    mesh (copies, ep):   the same ranks once more: a group of `ep` ranks has every expert of a layer once, and tokens travel
                         within it; fully_shard spreads an expert over the groups

Several rows that split the tokens of the same samples (`context_parallel.py`) are rows like any others here: each has a part
of the gradient.

It differs from one device in three things. Gradients of the rows are summed, never averaged, because coefficients were
normalised over the global batch (I7). Every rank runs the same number of micro-batches, the shorter ones empty passes of
weight zero, because each pass of a sharded model is a collective. And the norm of the gradient is that of all shards, so
that clipping, and skipping a step that is not finite, come out the same everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
from polyturn.core.seeds import derive_seed
from polyturn.training.backend import Degrees
from polyturn.training.context_parallel import ContextRow
from polyturn.training.lora import adapter_tensors
from polyturn.training.modality_encoders import layers_of, towers_of
from polyturn.training.model_backend import Cut, Placement
from polyturn.training.network import Network
from polyturn.training.optim import Optimizer, OptimSettings
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
"""The sample that a rank computes, without weight, while the others still have samples."""


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
    return _mesh(dist.group.WORLD, device.type, tensor_parallel, ("dp", "tp"))


@functools.cache
def _mesh(world: Any, device_type: str, width: int, names: tuple[str, str]) -> DeviceMesh:
    # One of a kind, because its groups of ranks have threads, and policy and critic share it.
    return init_device_mesh(device_type, (world.size() // width, width), mesh_dim_names=names)


class OverRanks(Placement):
    """A placement over ranks, whose calls are collective."""

    def __init__(self, device: torch.device, *, start: Mapping[str, Tensor] | None = None) -> None:
        """Let this rank compute on `device`.

        What is trained, and a copy of it, begins with this rank's parts `start`, by the names of its backbone; None leaves
        it its own weights, which a model that is unread is given from its files.
        """
        self._device = device
        self._start = start

    def device(self, network: Network) -> torch.device:
        """Return the device of this rank."""
        return self._device

    def in_step(self, cut: Cut) -> Cut:
        """Return `cut`, made to give every rank as many micro-batches as the one that has most."""
        return functools.partial(self._cut_in_step, cut)

    def _cut_in_step(self, cut: Cut, samples: Sequence[TrainSample], coefs: Sequence[ArrayLike]) -> list[MicroBatch]:
        """Cut the samples of this rank's row, and add passes without weight until it has as many as the longest row.

        Raises:
            PolyturnError: on every rank, with the reason of the one whose samples cannot be laid out.
        """
        batches: list[MicroBatch] = []
        problem: PolyturnError | None = None
        try:
            batches = cut(samples, coefs) if samples else []
        except PolyturnError as caught:  # a medium that cannot be read, too: the other ranks are waiting
            problem = caught
        counts = torch.tensor([len(batches), problem is not None], device=self._device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        most, is_wrong = counts.tolist()
        if is_wrong:
            reasons: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(reasons, None if problem is None else str(problem))
            raise problem or AlignmentError(next(r for r in reasons if r is not None))
        if len(batches) == most:
            return batches
        # A rank that runs fewer passes would leave the others waiting in a collective for ever.
        (empty,) = cut([_FILLER], [np.zeros(2)])
        return [*batches, *[dataclasses.replace(empty, is_padding=True)] * (most - len(batches))]


class Sharded(OverRanks):
    """Parameters, gradients and moments in shards over a mesh."""

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        start: Mapping[str, Tensor] | None = None,
        degrees: Degrees | None = None,
    ) -> None:
        """Spread over `mesh`, from `make_mesh`, whose rows split matrices, and split the rest as `degrees` say.

        Raises:
            ConfigError: the rows do not divide into those that split the same samples.
        """
        super().__init__(device, start=start)
        self._mesh = mesh
        self._degrees = degrees = degrees or Degrees(tensor_parallel=mesh["tp"].size())
        seed = torch.tensor(torch.initial_seed() >> 1, device=device)
        dist.broadcast(seed, src=0)
        self._seed = int(seed)
        num_split = degrees.context_parallel
        self._context = ContextRow.of(device, size=num_split, inner=mesh["tp"].size()) if num_split > 1 else None
        num, names = degrees.expert_parallel, ("copies", "ep")
        self._experts = _mesh(dist.group.WORLD, device.type, num, names) if num > 1 else None

    @property
    def needs_packing(self) -> bool:  # type: ignore[override]
        """Whether tokens are split, which are those of packed rows."""
        return self._context is not None

    @classmethod
    def of(cls, degrees: Degrees, device: torch.device, *, start: Mapping[str, Tensor] | None = None) -> Sharded:
        """Spread over all ranks, by `degrees`."""
        mesh = make_mesh(device, tensor_parallel=degrees.tensor_parallel)
        return cls(mesh, device, start=start, degrees=degrees)

    @staticmethod
    def check(model: PreTrainedModel, degrees: Degrees) -> None:
        """Refuse degrees of parallelism that FSDP2 does not offer.

        Raises:
            ConfigError: layers are to be shared out, tokens of a model that cannot be packed, or heads or experts that are
                not there or do not divide.
        """
        where = "train.distributed"
        if degrees.context_parallel > 1:
            why = "it does not take text alone" if towers_of(model) else other_attention(model)
            if why is not None:
                raise ConfigError(
                    f"{where}.context_parallel is {degrees.context_parallel}, which splits packed rows, and "
                    f"{type(model).__name__} cannot be packed, because {why}; set it to 1"
                )
        if degrees.pipeline_parallel > 1:
            raise ConfigError(
                f"{where}.pipeline_parallel is {degrees.pipeline_parallel} and train.backend is torch, which has none; set "
                "train.backend: megatron, or leave it at 1"
            )
        if degrees.tensor_parallel > 1:
            plan_of_layers(model, parts=degrees.tensor_parallel)
        if degrees.expert_parallel > 1:
            require_experts(model, parts=degrees.expert_parallel)

    def values(self, backbone: PreTrainedModel) -> Network:
        """Return the form of a value function, which begins with the backbone of what is trained."""
        if self._start is not None:
            self._start = inside(self._start, f"{backbone.base_model_prefix}.")
        return super().values(backbone)

    def optimizer(self, network: Network, settings: OptimSettings) -> ShardedOptimizer:
        """Split the layers over a row, shard everything over the rows, and return the optimizer of this rank's shards.

        Raises:
            ConfigError: the model cannot be split as the mesh asks.
        """
        partial = self._shard(network, is_copy=True)
        prefix = next(name for name, module in network.saved.named_modules() if module is network.backbone)
        self._start = None  # a share of the weights; a copy of what is trained was made before
        named = [f"{prefix}.{name}".lstrip(".") for name in partial]
        return ShardedOptimizer(network.saved, settings, mesh=self._mesh, partial=named)

    def freeze(self, network: Network, *, is_copy: bool) -> None:
        """Split and shard a network that is only scored with, as one that is trained.

        Raises:
            ConfigError: it cannot be split as the mesh asks, or its files do not hold its weights.
        """
        self._shard(network, is_copy=is_copy)

    def _shard(self, network: Network, *, is_copy: bool) -> list[str]:
        """Split `network` over a row and its experts over their groups, shard it over the rest of the ranks, layer by layer,
        sum gradients instead of averaging them, fill its shards, and name the whole parameters with partial gradients."""
        tp = self._mesh["tp"]
        partial = split_layers(network.backbone, tp) if self._degrees.tensor_parallel > 1 else []
        groups = self._experts
        experts = [] if groups is None else split_experts(network.backbone, groups["ep"], row=tp)
        network.context = self._context
        network.encoders = encoders = tuple(towers_of(network.backbone))
        # Gradients of bfloat16 parameters would else be added up in bfloat16, rank after rank.
        is_low = any(p.dtype.itemsize < 4 for p in network.parameters())
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_low else None)
        for module in (*experts, *layers_of(network.backbone, encoders), *network.heads, network):
            mesh = groups["copies"] if groups is not None and module in experts else self._mesh["dp"]
            cut = functools.partial(_cut_experts, parts=mesh.size()) if module in experts else None
            sharded = fully_shard(module, mesh=mesh, mp_policy=precision, shard_placement_fn=cut)
            # Summed, for the coefficients hold the average already; by plain sums, because gloo has none that scale too.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        if is_copy and self._start is not None:
            take_weights(network.backbone, self._start, self._device)
        elif is_unread(network.backbone):
            read_weights(network.backbone, self._device)
        register_fsdp_forward_method(network, "try_out")  # it runs the model too, which gathers parameters for it
        return partial

    @contextmanager
    def drawing(self, *of: int) -> Iterator[None]:
        """Let the ranks of a row, which see the same tokens, drop the same of them, and other rows others."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self._seed, *of, self._mesh["dp"].get_local_rank()))
            yield

    def before_backward(self, network: Network, *, is_last: bool) -> None:
        """Sum this pass's gradient over the rows, or keep it whole until the last pass."""
        if self._degrees.gradient_sync == "last":
            assert isinstance(network, FSDPModule)
            network.set_requires_gradient_sync(is_last)

    def release(self, network: Network) -> None:
        """Free the whole copies of what the last pass used."""
        assert isinstance(network, FSDPModule)
        network.reshard()

    @contextmanager
    def adapter_replaced(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Exchange this rank's shards of the adapter in place, because that is where a sharded module gathers them from."""
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
    """Spread a rank's experts over `parts` ranks: whole, or where they do not divide, by the last axis of their matrices,
    because the first has gate and up one after the other, which are apart in files.

    Raises:
        ConfigError: neither divides.
    """
    count, width = len(local_part(parameter)), parameter.shape[-1]
    if count % parts and width % parts:
        raise ConfigError(
            f"train.distributed.expert_parallel leaves {count} experts of width {width} to {parts} ranks, which divide "
            "neither; raise it, or take another number of ranks"
        )
    return Shard(parameter.ndim - 1) if count % parts else None


class ShardedOptimizer(Optimizer):
    """AdamW over shards: each rank updates its own, by the norm of all."""

    def __init__(self, model: nn.Module, settings: OptimSettings, *, mesh: DeviceMesh, partial: Sequence[str] = ()) -> None:
        """Take the parameters of a sharded `model`; `partial` names those whose gradient must be summed over a row."""
        super().__init__(model, settings)
        self._mesh = mesh
        self._partial = set(partial)

    def _total_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        # Before the norm: each rank of a row has seen its own heads only, and the sum is the gradient.
        for name, param in self._named:
            if name in self._partial and param.grad is not None:
                dist.all_reduce(local_part(param.grad), group=self._mesh["tp"].get_group())
        dtype = torch.promote_types(params[0].dtype, torch.float32)
        squares = torch.zeros((), dtype=dtype, device=local_part(params[0]).device)
        for grad in (p.grad for p in params if p.grad is not None):
            # What several ranks hold, as a row does what it does not split, counts once.
            share = num_parts(grad) / dist.get_world_size()
            squares += torch.linalg.vector_norm(local_part(grad), dtype=dtype) ** 2 * share
        if self._problem is not None:
            squares += math.nan
        dist.all_reduce(squares)  # the same bits for all ranks, so all skip or none, and copies stay equal
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
