"""Weights under Hugging Face's names and under megatron-core's, and the way between whole ones and what ranks hold of them.

    q_proj, k_proj, v_proj      linear_qkv     of each group of heads its queries, its key and its value, over the ranks
    gate_proj, up_proj          linear_fc1     of each rank its rows of both
    experts.gate_up_proj[e]     local_experts.e.linear_fc1       on the rank that holds the expert, whole

What is true of a weight is true of its gradient, its master and its moments, so all of them go the same way, one tensor at
a time. Layers and experts are counted over the whole model here.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from polyturn.core.errors import ConfigError
from polyturn.engines.weight_transport import TensorKind
from polyturn.training.backend import Degrees
from polyturn.training.lora import plain_name
from polyturn.training.network import ValueNetwork
from polyturn.training.shards import Names, stored_tensors

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
"""The model types whose weights have a place in megatron-core's model here."""
TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""Two names of one tensor, where a model ties them."""
HEAD = ("head.weight", "head.bias")
"""Of a value function: every rank holds them, in float32, so that there may be no masters of them."""


class Entry(NamedTuple):
    """One weight of megatron-core's model."""

    name: str
    sources: tuple[str, ...]
    """The weights of the Hugging Face model that it is made of."""
    layout: str = "whole"
    """The split among ranks: whole, rows, columns, qkv or gate_up."""
    expert: int | None = None
    """Of sources that hold all experts of a layer, the one that this is."""


def is_sparse(config: PreTrainedConfig, layer: int) -> bool:
    """Return whether a layer, counted from 0, has experts."""
    if config.model_type != "qwen3_moe":
        return False
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


def require_family(config: PreTrainedConfig) -> None:
    """Refuse a model whose weights have no place in megatron-core's.

    Raises:
        ConfigError: its family has none, or its config asks for what that family does otherwise.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"train.backend is megatron and the model is a {kind}, whose weights have no mapping; it knows "
            f"{', '.join(FAMILIES)}; take train.backend torch"
        )
    layers = set(config.to_dict().get("layer_types") or ["full_attention"])
    odd = {
        "hidden_act": config.hidden_act != "silu" and config.hidden_act,
        "layer_types": layers != {"full_attention"} and sorted(layers),
        "attention_bias": kind != "qwen2" and config.to_dict().get("attention_bias"),
        "mlp_bias": config.to_dict().get("mlp_bias"),
        "rope_type": config.rope_parameters["rope_type"] not in ("default", "linear", "llama3")
        and config.rope_parameters["rope_type"],
    }
    for key, value in odd.items():
        if value:
            raise ConfigError(
                f"train.backend is megatron and the model's config has {key} {value!r}, which the mapping of {kind} weights "
                "does not know; take train.backend torch"
            )


def require_split(config: PreTrainedConfig, degrees: Degrees) -> None:
    """Refuse a model that cannot be split so.

    Raises:
        ConfigError: its family has no mapping, or a size does not divide what it splits.
    """
    require_family(config)
    experts = config.num_experts if config.model_type == "qwen3_moe" else 0
    where, wide = "train.distributed", degrees.tensor_parallel
    for name, size, what, count in (
        ("tensor_parallel", wide, "attention heads", config.num_attention_heads),
        ("tensor_parallel", wide, "key and value heads", config.num_key_value_heads),
        ("tensor_parallel", wide, "rows of an MLP", config.intermediate_size),
        ("tensor_parallel", wide, "tokens in its vocabulary", config.vocab_size),
        ("pipeline_parallel", degrees.pipeline_parallel, "layers", config.num_hidden_layers),
        ("expert_parallel", degrees.expert_parallel, "experts", experts),
    ):
        if size > 1 and (count == 0 or count % size):
            raise ConfigError(f"{where}.{name} is {size} and the model has {count} {what}; it must divide them")
    if experts and degrees.pipeline_parallel > 1 and degrees.expert_parallel != wide:
        raise ConfigError(
            f"{where} has pipeline_parallel {degrees.pipeline_parallel}, expert_parallel {degrees.expert_parallel} and "
            f"tensor_parallel {wide}; stages with experts work only where the latter two are equal"
        )


def entries(config: PreTrainedConfig) -> Iterator[Entry]:
    """Yield the weights of a model, in the order of its layers."""
    yield Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows")
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
    yield Entry("output_layer.weight", (TIED[config.tie_word_embeddings],), "rows")


def value_entries(config: PreTrainedConfig) -> Iterator[Entry]:
    """Yield the weights of a value function: those of a backbone, as `ValueNetwork` names them, and of its head."""
    for entry in entries(config):
        if entry.name != "output_layer.weight":
            yield entry._replace(sources=tuple(f"backbone.{name.removeprefix('model.')}" for name in entry.sources))
    yield from (Entry(name, (name,)) for name in HEAD)


def _layer(config: PreTrainedConfig, layer: int) -> Iterator[Entry]:
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    attention, own = f"{ours}.self_attention", f"{theirs}.self_attn"
    yield Entry(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",))
    for kind in ("weight", "bias") if config.model_type == "qwen2" else ("weight",):
        qkv = (f"{own}.q_proj.{kind}", f"{own}.k_proj.{kind}", f"{own}.v_proj.{kind}")
        yield Entry(f"{attention}.linear_qkv.{kind}", qkv, "qkv")
    if config.model_type in ("qwen3", "qwen3_moe"):
        yield Entry(f"{attention}.q_layernorm.weight", (f"{own}.q_norm.weight",))
        yield Entry(f"{attention}.k_layernorm.weight", (f"{own}.k_norm.weight",))
    yield Entry(f"{attention}.linear_proj.weight", (f"{own}.o_proj.weight",), "columns")
    yield Entry(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",))
    if not is_sparse(config, layer):
        both = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        yield Entry(f"{ours}.mlp.linear_fc1.weight", both, "gate_up")
        yield Entry(f"{ours}.mlp.linear_fc2.weight", (f"{theirs}.mlp.down_proj.weight",), "columns")
        return
    yield Entry(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.gate.weight",))
    for e in range(config.num_experts):
        expert = f"{ours}.mlp.experts.local_experts.{e}"
        yield Entry(f"{expert}.linear_fc1.weight", (f"{theirs}.mlp.experts.gate_up_proj",), expert=e)
        yield Entry(f"{expert}.linear_fc2.weight", (f"{theirs}.mlp.experts.down_proj",), expert=e)


def region(entry: Entry, whole: Tensor, *, part: int, num_parts: int, num_groups: int) -> Tensor:
    """Return of a whole tensor, one of the sources of a weight, what one part of the weight holds, as a view.

    Args:
        entry: The weight.
        whole: The tensor; or one number for it, which every part has.
        part: Which part.
        num_parts: How many ranks share the weight.
        num_groups: Of heads that have one key and value.
    """
    if whole.ndim == 0 or (entry.expert is None and entry.layout == "whole"):
        return whole
    if entry.expert is not None:
        return whole[entry.expert]
    if entry.layout == "qkv":
        whole = whole.unflatten(0, (num_groups, -1))
    return whole.chunk(num_parts, dim=1 if entry.layout == "columns" else 0)[part]


def pieces(entry: Entry, held: Tensor, *, num_groups: int, head_dim: int) -> Sequence[Tensor]:
    """Return of a part of a weight what is of each of its sources, as views, each of the shape of its `region`.

    Args:
        entry: The weight.
        held: The part; or one number for it.
        num_groups: Of heads in this part that have one key and value.
        head_dim: The size of a head.
    """
    if held.ndim == 0:
        return [held] * len(entry.sources)
    if entry.layout == "gate_up":
        return held.chunk(2)
    if entry.layout == "qkv":
        grouped = held.unflatten(0, (num_groups, -1))
        return grouped.split([grouped.shape[1] - 2 * head_dim, head_dim, head_dim], dim=1)
    return [held]


class ShardedNames(Names):
    """The ranks that hold each part of one model, by Hugging Face's names."""

    def __init__(
        self,
        model: nn.Module,
        config: PreTrainedConfig,
        own: Iterable[str],
        known: Iterable[Entry],
        *,
        tensor_rank: int,
        first_layer: int,
        first_expert: int,
    ) -> None:
        """Tell all ranks what this one holds; the call is collective.

        Args:
            model: The Hugging Face model or the value function over it, for names and shapes.
            config: Its config.
            own: The names of this rank's part of megatron-core's, layers and experts counted from 0 on every rank.
            known: The weights of the whole of it, and the matrices of its adapter.
            tensor_rank: This rank's place among those that share layers.
            first_layer: The layer that it counts as 0.
            first_expert: The expert that it counts as 0.
        """
        self._groups = config.num_key_value_heads
        self._head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        self._tied: tuple[str, ...] = ()
        if config.tie_word_embeddings and not isinstance(model, ValueNetwork):
            self._tied = ("embedding.word_embeddings.weight", "output_layer.weight")
        self._local = {counted(name, first_layer, first_expert): name for name in own}
        every = {entry.name: entry for entry in known}
        self._entry_of = {local: every[name] for name, local in self._local.items()}
        self._places: dict[str, list[tuple[Entry, int]]] = {}
        """Hugging Face's name -> the weights that the tensor is part of, and which of their sources it is."""
        for entry in every.values():
            for number, source in enumerate(entry.sources):
                self._places.setdefault(source, []).append((entry, number))
        named = ((plain_name(name), tensor) for name, tensor in model.named_parameters())
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named if name in self._places}
        self._held: list[dict[str, int]] = [{}] * dist.get_world_size()
        """For each rank: weight -> the part of it that this rank holds."""
        self._own = {entry.name: 0 if entry.layout == "whole" else tensor_rank for entry in self._entry_of.values()}
        dist.all_gather_object(self._held, self._own)
        self._owners: dict[str, dict[int, int]] = {}
        """Weight -> part -> the first rank that holds it."""
        for rank, held in enumerate(self._held):
            for name, part in held.items():
                self._owners.setdefault(name, {}).setdefault(part, rank)

    def copies(self) -> dict[str, int]:
        """Return for each tensor of this rank how many ranks hold the same; one that is tied counts for both names."""
        counts = {}
        for local, entry in self._entry_of.items():
            part, names = self._own[entry.name], self._tied if entry.name in self._tied else (entry.name,)
            counts[local] = sum(held.get(name) == part for held in self._held for name in names)
        return counts

    def kinds(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
        """Return name -> shape and dtype of the whole, over all ranks."""
        found = {}
        for name, shape in self._shapes.items():
            if (like := self._like(name, tensors)) is not None:
                found[name] = TensorKind(shape if like.ndim else (), like.dtype)
        return found

    def sources(self, name: str) -> tuple[str, ...]:
        """Return of which tensors a weight is made."""
        return self._entry_of[name].sources

    def whole(self, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
        """Return a whole tensor on the CPU on rank 0, and None elsewhere."""
        like, rank = self._like(name, tensors), dist.get_rank()
        assert like is not None
        whole = torch.empty(self._shapes[name] if like.ndim else (), dtype=like.dtype) if rank == 0 else None
        for entry, number in self._places[name] if like.ndim else self._places[name][:1]:
            if entry.name in self._tied[1:]:  # the embedding is the same
                continue
            # In one order on all ranks: sends and receives are matched by it, and carry no name.
            for part, owner in sorted(self._owners[entry.name].items()):
                piece = None
                if rank == owner:
                    piece = self._piece(entry, number, tensors).detach().to("cpu").contiguous()
                if whole is not None:
                    there = self._region(entry, whole, part)
                    if piece is None:
                        piece = torch.empty(there.shape, dtype=there.dtype)
                        dist.recv(piece, src=owner)
                    there.copy_(piece)
                elif piece is not None:
                    dist.send(piece, dst=0)
        return whole

    def written(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors on rank 0, which writes all of them, and nothing elsewhere."""
        found = {name: self.whole(tensors, name) for name in self.kinds(tensors)}
        return {name: whole for name, whole in found.items() if whole is not None}

    def read(self, sections: Mapping[str, Mapping[str, Tensor]], folder: Path, *, whose: str) -> None:
        """Fill this rank's parts, by reading the tensors that they are of, a bucket at a time."""
        for prefix, tensors in sections.items():
            if tensors:
                self.take(tensors, stored_tensors(folder, prefix=prefix))

    def take(self, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Write this rank's parts of whole `weights` into live tensors; of tied ones one name is enough."""
        for name in weights:
            for entry, number in self._places.get(plain_name(name), ()):
                if self._local.get(entry.name) in tensors:
                    there = self._region(entry, weights[name], self._own[entry.name])
                    self._piece(entry, number, tensors).copy_(there)

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[Hashable, Tensor]]:
        """Return name -> place in the whole -> what this rank holds there, live; replicas have one place."""
        found: dict[str, dict[Hashable, Tensor]] = {}
        for name, places in self._places.items():
            for entry, number in places:
                if self._local.get(entry.name) in tensors:
                    place = (entry.expert, self._own[entry.name])
                    found.setdefault(name, {})[place] = self._piece(entry, number, tensors)
        return found

    def _like(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return a tensor of this rank that has the dtype of the one of that name, and is one number where that is: of the
        model, of a head or of an adapter, as that is; None where there is none."""
        return next((tensor for own, tensor in tensors.items() if _kind(own) == _kind(name)), None)

    def _region(self, entry: Entry, whole: Tensor, part: int) -> Tensor:
        """Return of a whole tensor what a part of a weight holds."""
        num_parts = len(self._owners[entry.name])
        return region(entry, whole, part=part, num_parts=num_parts, num_groups=self._groups)

    def _piece(self, entry: Entry, number: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return of this rank's part of a weight what is of one of its sources."""
        groups = self._groups // len(self._owners[entry.name])
        return pieces(entry, tensors[self._local[entry.name]], num_groups=groups, head_dim=self._head_dim)[number]


def _kind(name: str) -> tuple[bool, bool]:
    """Return whether a tensor is of a head, and whether of an adapter."""
    return name in HEAD, ".lora_" in name


def counted(name: str, first_layer: int, first_expert: int) -> str:
    """Return a name with its layer and expert counted over the whole model."""
    for pattern, first in ((r"(decoder\.layers\.)(\d+)", first_layer), (r"(local_experts\.)(\d+)", first_expert)):
        name = re.sub(pattern, lambda found, first=first: f"{found[1]}{int(found[2]) + first}", name)  # type: ignore[misc]
    return name
