"""Megatron: a placement over megatron-core, with tensor, context, pipeline and expert parallelism.

    ranks of a row      tensor x context x pipeline parallel ranks, in this order, see the same samples
    rows                see different samples; expert_parallel spreads the experts of a layer over rows

megatron-core provides layers, process groups and collectives. Batches, losses, states and weight syncs are as with any other
placement. The network returns the same log-probabilities on all ranks of a row, so each rank computes the same loss, and
gradients flow back through the stages. See docs/guides/megatron.md.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedConfig, PreTrainedModel

from polyturn.core.errors import ConfigError
from polyturn.engines.routers import Routers
from polyturn.training.fsdp import OptimizerOverRanks, OverRanks
from polyturn.training.lora import base_weights, plain_name
from polyturn.training.megatron.buckets import gather_rows, in_buckets, own_rows, sum_to_rows, sum_together
from polyturn.training.megatron.lora import adapter_entries
from polyturn.training.megatron.model import MegatronModel, MegatronPolicy, MegatronValues
from polyturn.training.megatron.weights import HEAD, entries, require_split
from polyturn.training.model import ScoringModel, ValueModel
from polyturn.training.optim import Optimizer, OptimSettings
from polyturn.training.options import Degrees
from polyturn.training.part_loading import is_unread, read_weights
from polyturn.training.shards import Origin


class Megatron(OverRanks):
    """Parameters, gradients and moments split by megatron-core."""

    @staticmethod
    def check(model: PreTrainedModel, degrees: Degrees) -> None:
        """Raise for a model that this module cannot split by `degrees`.

        Raises:
            ConfigError: the model's family has no mapping, a degree does not divide a size, or the adapter wraps a module
                that is not a linear layer.
        """
        require_split(model.config, degrees)
        adapter_entries(model, entries(model.config), model.config, degrees)

    def policy(
        self, model: PreTrainedModel, *, routers: Routers | None = None, replays: bool = False, is_copy: bool = True
    ) -> ScoringModel:
        """Return the policy network of `model` in megatron-core's layers, with weights.

        Raises:
            ConfigError: the model cannot be split by the degrees.
        """
        self._prepare(model)
        network = MegatronPolicy(model, self._degrees, self._device, replays=replays)
        return self._filled(network, model, is_copy=is_copy)

    def values(self, backbone: PreTrainedModel) -> ScoringModel:
        """Return the value network over `backbone` in megatron-core's layers, with weights.

        Raises:
            ConfigError: the model cannot be split by the degrees.
        """
        self._prepare(backbone)
        network = MegatronValues(ValueModel(backbone), self._degrees, self._device)
        return self._filled(network, backbone, inside="backbone.", is_copy=True)

    def _prepare(self, model: PreTrainedModel) -> None:
        """Check that a model can be split, and make megatron-core's process groups.

        Raises:
            ConfigError: the model cannot be split by the degrees.
        """
        require_split(model.config, self._degrees)
        if self._device.type == "cpu":
            require_no_cuda(model.config, self._degrees)
        _make_groups(self._degrees, self._device)

    def _filled(self, network: MegatronModel, model: PreTrainedModel, *, is_copy: bool, inside: str = "") -> MegatronModel:
        """Fill `network` and return it: a copy of the trained network (`is_copy`) with the start weights, if there are any.
        Otherwise use `model`'s weights, under names that start with `inside`; an unread `model` reads them from its
        files."""
        own = network.own_tensors()
        if is_copy and self._start is not None:
            own |= network.tensors()
            for name in own.keys() & self._start.keys():  # a value function has no output embedding, but a head
                own[name].copy_(self._start[name])
            return network
        parts_of = {name.removeprefix(inside): boxes for name, boxes in network.names.parts(own).items()}
        weights = base_weights(_read(model, parts_of) if is_unread(model) else model)
        network.names.take(own, {inside + name: tensor for name, tensor in weights.items() if name in parts_of})
        return network

    def optimizer(self, network: ScoringModel, settings: OptimSettings) -> Optimizer:
        """Return the optimizer of this rank's parameters."""
        assert isinstance(network, MegatronModel)
        self._start = None
        return MegatronOptimizer(network, settings)


def _read(model: PreTrainedModel, parts: Mapping[str, Mapping[Origin, Tensor]]) -> PreTrainedModel:
    """Return a model with this rank's part of its weights, read from files; other weights stay without values."""
    copied = copy.deepcopy(model)
    for name, parameter in list(copied.named_parameters()):
        if (boxes := parts.get(plain_name(name))) is not None and parameter.is_meta:
            module_name, _, attribute = name.rpartition(".")
            setattr(
                copied.get_submodule(module_name), attribute, nn.Parameter(_outline(parameter, boxes), requires_grad=False)
            )
    read_weights(copied, torch.device("cpu"), only=parts.keys())
    return copied


def _outline(whole: Tensor, boxes: Mapping[Origin, Tensor]) -> DTensor:
    """Return a rank's part of a tensor as a `DTensor` without values, with the rank's boxes side by side."""
    low = [min(origin[d] for origin in boxes) for d in range(whole.ndim)]
    high = [max(origin[d] + box.shape[d] for origin, box in boxes.items()) for d in range(whole.ndim)]
    shape = [end - start for start, end in zip(low, high, strict=True)]
    split = [Shard(d) for d, size in enumerate(shape) if size < whole.shape[d]]
    has_experts = whole.ndim == 3
    group = parallel_state.get_expert_model_parallel_group() if has_experts else _row_group()
    return DTensor.from_local(
        torch.empty(shape, dtype=whole.dtype, device="meta"),
        DeviceMesh.from_group(group, "cpu"),
        split or [Replicate()],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def require_no_cuda(config: PreTrainedConfig, degrees: Degrees) -> None:
    """Raise, for ranks without a GPU, for features for which megatron-core needs CUDA.

    Raises:
        ConfigError: layers or their matrices are split, or the model has experts.
    """
    sizes = {"tensor_parallel": degrees.tensor_parallel, "pipeline_parallel": degrees.pipeline_parallel}
    why = next((f"train.distributed.{name} is {size}" for name, size in sizes.items() if size > 1), None)
    if config.model_type == "qwen3_moe":
        why = "the model has experts"
    if why is not None:
        raise ConfigError(
            f"train.backend is megatron, {why}, for which megatron-core needs a GPU, and there is none; set "
            "train.backend: torch, or use GPUs"
        )


def _row_group() -> dist.ProcessGroup:
    return parallel_state.get_tensor_model_parallel_group()


def _make_groups(degrees: Degrees, device: torch.device) -> None:
    """Let megatron-core make its process groups, once; the ranks of a row are consecutive."""
    if parallel_state.model_parallel_is_initialized():
        return
    # With stages, megatron-core expects as many copies of experts as of other layers, even for models without experts.
    is_without = degrees.pipeline_parallel > 1 and degrees.expert_parallel == 1
    parallel_state.initialize_model_parallel(
        degrees.tensor_parallel,
        degrees.pipeline_parallel,
        context_parallel_size=degrees.context_parallel,
        expert_model_parallel_size=degrees.expert_parallel,
        expert_tensor_parallel_size=degrees.tensor_parallel * degrees.context_parallel if is_without else 1,
        order="tp-cp-ep-pp-dp",
    )
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)  # required even with dropout 0


class MegatronOptimizer(OptimizerOverRanks):
    """AdamW over this rank's rows: ranks with the same part of a weight divide its master and moments by rows.

    Each rank sums the gradient of its samples. A step reduces these sums to each rank's rows, and gathers the new rows on
    all ranks (ZeRO, stage 1; Rajbhandari et al. 2020). megatron-core's own optimizer would not do: it cuts a buffer of all
    weights into ranges, which do not fit the tensor boxes of checkpoints. The norm covers all ranks.
    """

    def __init__(self, network: MegatronModel, settings: OptimSettings) -> None:
        self._live = {name: p for name, p in network.saved.named_parameters() if p.requires_grad}
        self._meshes = {
            has_experts: DeviceMesh.from_group(group(), next(iter(self._live.values())).device.type)
            for has_experts, group in (
                (False, functools.partial(parallel_state.get_data_parallel_group, with_context_parallel=True)),
                (True, parallel_state.get_expert_data_parallel_group),
            )
        }
        super().__init__(network.saved, settings)
        self._buckets = in_buckets(
            (name, (".experts." in name, live.dtype), live.numel()) for name, live in self._live.items()
        )
        """The names of the weights whose gradients are summed, and whose rows are gathered, in one call each."""
        copies = network.names.copies()
        self._copies_of = {name: copies[name] // self._mesh(name).size() for name in self._live}
        self._is_tied = network.is_split_tie
        self._sums: dict[str, Tensor] = {}
        """Name -> gradient of a low-precision weight, summed over micro-batches in float32."""

    def sections(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's rows of masters and moments."""
        return {
            prefix: {name: self._as_rows(name, tensor) if tensor.ndim else tensor for name, tensor in tensors.items()}
            for prefix, tensors in super().sections().items()
        }

    def collect(self) -> None:
        """Add the gradient of low-precision weights to the float32 sums, which stay whole until the step."""
        for name, live in self._live.items():
            if live.grad is not None and live.dtype.itemsize < 4:
                self._sums[name] = self._sums[name].add_(live.grad) if name in self._sums else live.grad.float()
                live.grad = None

    def zero_grad(self) -> None:
        """Forget the gradient."""
        super().zero_grad()
        self._sums = {}
        for live in self._live.values():
            live.grad = None

    def _own(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return this rank's rows of a parameter, live."""
        return nn.Parameter(own_rows(parameter.detach(), self._mesh(name).get_group()))

    def _write_back(self) -> None:
        """Write this rank's new rows into the weights, and gather the rows of other ranks."""
        super()._write_back()
        with torch.no_grad():
            for names in self._buckets:
                gather_rows([self._live[name] for name in names], self._mesh(names[0]).get_group())

    def _total_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        """Reduce the gradient to each rank's rows, and return the norm of the whole gradient."""
        grads: dict[str, Tensor] = {}
        for names in self._buckets:
            wholes = [self._whole(name) for name in names]
            grads |= zip(names, sum_to_rows(wholes, self._mesh(names[0]).get_group()), strict=True)
        self._sum_over_row(grads)
        square = torch.zeros((), dtype=torch.float32, device=params[0].device)
        for name, param in self._named:
            param.grad = grads[name]
            square += torch.linalg.vector_norm(param.grad, dtype=torch.float32) ** 2 / self._copies_of[name]
        if self._problem is not None:
            square += math.nan
        dist.all_reduce(square)
        return torch.sqrt(square)

    def _whole(self, name: str) -> Tensor:
        """Return the gradient of a weight, summed over this rank's samples, and forget it."""
        live = self._live[name]
        grad, live.grad = self._sums.pop(name, live.grad), None
        # An expert without a token here may have some elsewhere, and the sum is collective.
        return torch.zeros_like(live, dtype=torch.promote_types(live.dtype, torch.float32)) if grad is None else grad

    def _sum_over_row(self, grads: Mapping[str, Tensor]) -> None:
        """Sum the gradients of weights that several ranks of a row have, where each rank computed only a part."""
        grads = {name: grad for name, grad in grads.items() if ".experts." not in name}
        # Each rank of a row has the gradient of its share of the positions or heads.
        split = [grad for name, grad in grads.items() if getattr(self._live[name], "sequence_parallel", False)]
        sum_together(split, _row_group())
        tied = [grad for name, grad in grads.items() if name in ("embedding.word_embeddings.weight", "output_layer.weight")]
        if tied and self._is_tied:
            sum_together(tied, parallel_state.get_embedding_group())
        # Every stage has the head of a value function, but only the last one uses it.
        heads = [grad for name, grad in grads.items() if name in HEAD]
        sum_together(heads, parallel_state.get_pipeline_model_parallel_group())

    def _mesh(self, name: str) -> DeviceMesh:
        """Return the mesh of ranks that divide the rows of a weight."""
        return self._meshes[".experts." in name]

    def _as_rows(self, name: str, rows: Tensor) -> DTensor:
        """Return `rows`, this rank's rows of a tensor shaped like a weight, as a `DTensor`."""
        live = self._live[name]
        return DTensor.from_local(
            rows, self._mesh(name), [Shard(0)], run_check=False, shape=live.shape, stride=live.stride()
        )
