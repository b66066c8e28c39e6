"""Megatron: the placement of a policy whose layers megatron-core splits, by tensor, pipeline and expert parallelism.

    ranks of a row      tensor_parallel x pipeline_parallel of them see the same samples, in this order
    rows                see different samples; the experts of a layer may be spread over them (expert_parallel)

megatron-core has the layers, the groups and the collectives; batches, losses, states and the way to engines are those of
every other placement. The network gives the same log-probabilities on all ranks of a row, so each of them computes the same
loss, and gradients flow back through the stages. What runs where is in docs/guides/megatron.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.core.errors import ConfigError
from polyturn.engines.routers import Routers
from polyturn.training.backend import Degrees
from polyturn.training.fsdp import OverRanks
from polyturn.training.hf import load_model
from polyturn.training.lora import base_weights
from polyturn.training.megatron_lora import adapter_entries
from polyturn.training.megatron_network import MegatronNetwork, MegatronPolicy, MegatronValues
from polyturn.training.megatron_weights import HEAD, entries, require_split
from polyturn.training.network import Network, ValueNetwork
from polyturn.training.optim import Optimizer, OptimSettings
from polyturn.training.part_loading import is_unread


class Megatron(OverRanks):
    """The placement of parameters, gradients and moments that megatron-core splits."""

    def __init__(self, degrees: Degrees, device: torch.device, *, start: Mapping[str, Tensor] | None = None) -> None:
        """Split by `degrees`."""
        super().__init__(device, start=start)
        self._degrees = degrees

    @classmethod
    def of(cls, degrees: Degrees, device: torch.device, *, start: Mapping[str, Tensor] | None = None) -> Megatron:
        """Split by `degrees`."""
        return cls(degrees, device, start=start)

    @staticmethod
    def check(model: PreTrainedModel, degrees: Degrees) -> None:
        """Refuse what megatron-core does not split so.

        Raises:
            ConfigError: the model's family has no mapping, a size does not divide what it splits, or its adapter lies around
                something else than linear layers.
        """
        require_split(model.config, degrees)
        adapter_entries(model, entries(model.config), model.config, degrees)

    def policy(
        self, model: PreTrainedModel, *, routers: Routers | None = None, replays: bool = False, is_copy: bool = True
    ) -> Network:
        """Return megatron-core's form of `model`, with its weights.

        Raises:
            ConfigError: it cannot be split so.
        """
        self._prepare(model)
        network = MegatronPolicy(model, self._degrees, self._device, replays=replays)
        return self._filled(network, whole=lambda: base_weights(_read(model)), is_copy=is_copy)

    def values(self, backbone: PreTrainedModel) -> Network:
        """Return megatron-core's form of a value function over `backbone`, with its weights.

        Raises:
            ConfigError: it cannot be split so.
        """
        self._prepare(backbone)
        form = ValueNetwork(backbone)
        network = MegatronValues(form, self._degrees, self._device)
        return self._filled(network, whole=lambda: base_weights(ValueNetwork(_read(backbone))), is_copy=True)

    def _prepare(self, model: PreTrainedModel) -> None:
        """Make sure that a model can be split, and megatron-core's groups.

        Raises:
            ConfigError: it cannot be split so.
        """
        if model.is_activation_checkpointing and self._device.type == "cpu":
            raise ConfigError(
                "model.gradient_checkpointing is on and there is no GPU: megatron-core computes activations again with the "
                "random state of one; leave it out"
            )
        require_split(model.config, self._degrees)
        _make_groups(self._degrees, has_experts=model.config.model_type == "qwen3_moe", device=self._device)

    def _filled(
        self, network: MegatronNetwork, *, whole: Callable[[], Mapping[str, Tensor]], is_copy: bool
    ) -> MegatronNetwork:
        """Return `network` with the weights that training begins with, where it `is_copy` of what is trained and there are
        any, else with those of its model, which the first rank has `whole`."""
        own = network.own_tensors()
        if is_copy and self._start is not None:
            own |= network.tensors()
            for name in own.keys() & self._start.keys():  # a value function has a head of its own, and no output embedding
                own[name].copy_(self._start[name])
            return network
        found = whole() if dist.get_rank() == 0 else {}
        for name, kind in network.names.kinds(own).items():
            if dist.get_rank() == 0:
                tensor = found[name].to("cpu", kind.dtype).contiguous()
            else:
                tensor = torch.empty(kind.shape, dtype=kind.dtype)
            dist.broadcast(tensor, src=0)
            network.names.take(own, {name: tensor})
        return network

    def optimizer(self, network: Network, settings: OptimSettings) -> Optimizer:
        """Return what updates this rank's part."""
        assert isinstance(network, MegatronNetwork)
        self._start = None
        return MegatronOptimizer(network, settings)


def _read(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with its weights, read from its files where it has none; of a backbone the backbone."""
    if not is_unread(model):
        return model
    whole = load_model(str(model.name_or_path), dtype=model.dtype)
    found = whole if isinstance(whole, type(model)) else whole.base_model
    assert isinstance(found, PreTrainedModel)
    return found


def _make_groups(degrees: Degrees, *, has_experts: bool, device: torch.device) -> None:
    """Let megatron-core make its process groups, once; a row is consecutive ranks.

    Raises:
        ConfigError: those of a model without experts are there, and do not fit one with them.
    """
    if parallel_state.model_parallel_is_initialized():
        if has_experts and parallel_state.get_expert_tensor_parallel_world_size() > 1:
            raise ConfigError(
                "a model with experts stands beside one without, and train.distributed.tensor_parallel is above 1, which "
                "megatron-core cannot split both by; take models of one kind, or tensor_parallel 1"
            )
        return
    parallel_state.initialize_model_parallel(
        degrees.tensor_parallel,
        degrees.pipeline_parallel,
        expert_model_parallel_size=degrees.expert_parallel,
        expert_tensor_parallel_size=1 if has_experts else None,
        order="tp-cp-ep-pp-dp",
    )
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)  # dropout is 0, and its streams are asked for all the same


class MegatronOptimizer(Optimizer):
    """AdamW over this rank's part: gradients are summed where ranks hold the same, and the norm is that of all."""

    def __init__(self, network: MegatronNetwork, settings: OptimSettings) -> None:
        super().__init__(network.saved, settings)
        self._copies_of = network.names.copies()
        self._live = dict(network.saved.named_parameters())
        self._is_tied = network.is_split_tie

    def _total_norm(self, params: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of the whole gradient, which is summed over ranks first."""
        square = torch.zeros((), dtype=torch.float32, device=params[0].device)
        for name, param in self._named:
            if param.grad is None:  # an expert that got no token here did get some elsewhere, and the sum is collective
                param.grad = torch.zeros_like(param)
            self._sum(name, param.grad)
            square += torch.linalg.vector_norm(param.grad, dtype=torch.float32) ** 2 / self._copies_of[name]
        if self._problem is not None:
            square += math.nan
        dist.all_reduce(square)
        return torch.sqrt(square)

    def _sum(self, name: str, grad: Tensor) -> None:
        """Add up the gradient of a parameter over the ranks that hold the same part of it."""
        live = self._live[name]
        if ".experts." in name:
            dist.all_reduce(grad, group=parallel_state.get_expert_data_parallel_group())
            return
        dist.all_reduce(grad, group=parallel_state.get_data_parallel_group())
        tp = parallel_state.get_tensor_model_parallel_group()
        # Each rank of a row has seen a share of the positions, or of the heads.
        if tp.size() > 1 and getattr(live, "sequence_parallel", False):
            dist.all_reduce(grad, group=tp)
        if self._is_tied and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            dist.all_reduce(grad, group=parallel_state.get_embedding_group())
        if name in HEAD:  # every stage holds it, and the last one uses it
            dist.all_reduce(grad, group=parallel_state.get_pipeline_model_parallel_group())

    def _skip(self, problem: str) -> None:
        """Skip with the reason of the rank that has one."""
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, self._problem)
        super()._skip(next((r for r in reasons if r is not None), problem))
