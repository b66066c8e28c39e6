"""Weights under Hugging Face's names and under megatron-core's, and the way between whole ones and what ranks hold of them.

    q_proj, k_proj, v_proj      linear_qkv     of each group of heads its queries, its key and its value, over the ranks
    gate_proj, up_proj          linear_fc1     of each rank its rows of both
    experts.gate_up_proj[e]     local_experts.e.linear_fc1       on the rank that holds the expert, whole

A part of a weight is some boxes of these tensors, and so are its master and its moments: checkpoints hold them as such, and
each rank writes and reads its own. Layers and experts are counted over the whole model here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from polyturn.training.shards import Boxes, Names, Place, box_of, local_part, start_of

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
    of_stage = wide * degrees.context_parallel
    if experts and degrees.pipeline_parallel > 1 and degrees.expert_parallel != of_stage:
        raise ConfigError(
            f"{where} has pipeline_parallel {degrees.pipeline_parallel}, expert_parallel {degrees.expert_parallel} and "
            f"tensor_parallel x context_parallel {of_stage}; stages with experts work only where the latter two are equal"
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


class SourceRows(NamedTuple):
    """Rows of a weight that lie together in one of its sources."""

    source: int
    """Which one."""
    rows: slice
    at: Place
    """Their first row there."""


def source_rows(entry: Entry, shape: Sequence[int], *, part: int, num_groups: int, head_dim: int) -> list[SourceRows]:
    """Return the positions of a weight's rows in its sources.

    Args:
        entry: The weight.
        shape: Of the part that a rank holds.
        part: Which part that is.
        num_groups: Of heads in this part that have one key and value.
        head_dim: The size of a head.
    """
    if entry.expert is not None:
        return [SourceRows(0, slice(0, shape[0]), (entry.expert, *(0 for _ in shape)))]
    groups, sizes = 1, [shape[0]]
    if entry.layout == "gate_up":
        sizes = [shape[0] // 2] * 2
    elif entry.layout == "qkv":
        groups, sizes = num_groups, [shape[0] // num_groups - 2 * head_dim, head_dim, head_dim]
    is_whole, columns = entry.layout in ("whole", "columns"), part * shape[-1] if entry.layout == "columns" else 0
    rows, at = [], 0
    for group in range(groups):
        for source, size in enumerate(sizes):
            first = 0 if is_whole else (part * groups + group) * size
            rows.append(SourceRows(source, slice(at, at + size), (first, columns)[: len(shape)]))
            at += size
    return rows


class ShardedNames(Names):
    """The ranks that hold each part of one model, by Hugging Face's names."""

    def __init__(
        self,
        model: nn.Module,
        config: PreTrainedConfig,
        own: Mapping[str, Tensor],
        known: Iterable[Entry],
        *,
        degrees: Degrees,
        tensor_rank: int,
        first_layer: int,
        first_expert: int,
    ) -> None:
        """Tell all ranks what this one holds; the call is collective.

        Args:
            model: The Hugging Face model or the value function over it, for names and shapes.
            config: Its config.
            own: This rank's part of megatron-core's, layers and experts counted from 0 on every rank.
            known: The weights of the whole of it, and the matrices of its adapter.
            degrees: Over how many ranks they are split.
            tensor_rank: This rank's place among those that share layers.
            first_layer: The layer that it counts as 0.
            first_expert: The expert that it counts as 0.
        """
        split = {
            "part": tensor_rank,
            "num_groups": config.num_key_value_heads // degrees.tensor_parallel,
            "head_dim": config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads,
        }
        every = {entry.name: entry for entry in known}
        self._entry_of = {name: every[counted(name, first_layer, first_expert)] for name in own}
        self._boxes = {name: source_rows(self._entry_of[name], tensor.shape, **split) for name, tensor in own.items()}
        sources = {source for entry in every.values() for source in entry.sources}
        named = ((plain_name(name), tensor) for name, tensor in model.named_parameters())
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named if name in sources}
        mine = {name: {origin: tuple(box.shape) for origin, box in boxes.items()} for name, boxes in self.parts(own).items()}
        self._held: list[dict[str, dict[Place, tuple[int, ...]]]] = [{}] * dist.get_world_size()
        """For each rank: tensor -> where it has something of it -> the shape of that."""
        dist.all_gather_object(self._held, mine)

    def copies(self) -> dict[str, int]:
        """Return for each weight of this rank how many ranks hold the same; one that is tied counts for both names."""
        counts = {}
        for name, (first, *_) in self._boxes.items():
            source = self._entry_of[name].sources[first.source]
            counts[name] = sum(first.at in boxes.get(source, ()) for boxes in self._held)
        return counts

    def kinds(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
        """Return name -> shape and dtype of the whole, over all ranks."""
        kinds_by_name = {}
        for name, shape in self._shapes.items():
            like = next((tensor for own, tensor in tensors.items() if _kind(own) == _kind(name)), None)
            if like is not None:  # of the model, of a head, or of an adapter, as the tensor of that name is
                kinds_by_name[name] = TensorKind(shape if like.ndim else (), like.dtype)
        return kinds_by_name

    def sources(self, name: str) -> tuple[str, ...]:
        """Return of which tensors a weight is made."""
        return self._entry_of[name].sources

    def whole(self, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
        """Return a whole weight on the CPU on rank 0, and None elsewhere."""
        mine, rank, seen = self.parts(tensors).get(name, {}), dist.get_rank(), set[Place]()
        whole = torch.empty(self._shapes[name], dtype=self.kinds(tensors)[name].dtype) if rank == 0 else None
        for owner, boxes in enumerate(self._held):  # each place from the first rank that has it, and of a rank all at once
            places = [origin for origin in boxes.get(name, ()) if origin not in seen]
            seen.update(places)
            if not places or rank not in (0, owner):
                continue
            sizes = [math.prod(boxes[name][origin]) for origin in places]
            if rank == owner:
                flat = torch.cat([mine[origin].detach().reshape(-1) for origin in places]).cpu()
            if whole is None:
                dist.send(flat, dst=0)
                return None
            if owner:
                flat = torch.empty(sum(sizes), dtype=whole.dtype)
                dist.recv(flat, src=owner)
            for origin, values in zip(places, flat.split(sizes), strict=True):
                shape = boxes[name][origin]
                box_of(whole, origin, shape).copy_(values.view(shape))
        return whole

    def shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the boxes that this rank has."""
        kinds = self.kinds(tensors)
        return {name: Boxes(kinds[name], boxes) for name, boxes in self.parts(tensors).items()}

    def read(self, sections: Mapping[str, Mapping[str, Tensor]], folder: Path, *, whose: str) -> None:
        """Fill this rank's parts from a folder; one number of a tensor is that of all weights that it is made of."""
        super().read(sections, folder, whose=whose)
        for tensors in sections.values():
            parts_read = self.parts(tensors)
            for name, tensor in tensors.items():
                if not tensor.ndim:
                    tensor.copy_(parts_read[self.sources(name)[0]][()])

    def take(self, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Write this rank's parts of whole `weights` into live tensors, or of parts that hold them; of tied ones one name is
        enough."""
        parts_read = self.parts(tensors)
        for name in weights:
            for origin, box in parts_read.get(plain_name(name), {}).items():
                box.copy_(box_of(weights[name], origin, box.shape))

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[Place, Tensor]]:
        """Return name -> place in the whole -> what this rank holds there, live; replicas have one place.

        Of one number for a weight there is one for each of its sources. A `DTensor` is of rows of the weight.
        """
        parts_by_name: dict[str, dict[Place, Tensor]] = {}
        for name, entry in self._entry_of.items():
            if (tensor := tensors.get(name)) is None:
                continue
            if not tensor.ndim:
                for one in entry.sources:
                    parts_by_name.setdefault(one, {}).setdefault((), tensor)
                continue
            local, start = local_part(tensor), start_of(tensor)[0]
            for source, rows, origin in self._boxes[name]:
                low, high = max(rows.start, start), min(rows.stop, start + len(local))
                if low >= high:
                    continue
                box, further = local[low - start : high - start], low - rows.start
                if entry.expert is None:
                    at = (origin[0] + further, *origin[1:])
                else:
                    box, at = box[None], (entry.expert, further, *origin[2:])
                parts_by_name.setdefault(entry.sources[source], {})[at] = box
        return parts_by_name


def _kind(name: str) -> tuple[bool, bool]:
    """Return whether a tensor is of a head, and whether of an adapter."""
    return name in HEAD, ".lora_" in name


def counted(name: str, first_layer: int, first_expert: int) -> str:
    """Return a name with its layer and expert counted over the whole model."""
    for pattern, first in ((r"(decoder\.layers\.)(\d+)", first_layer), (r"(local_experts\.)(\d+)", first_expert)):
        name = re.sub(pattern, lambda match, first=first: f"{match[1]}{int(match[2]) + first}", name)  # type: ignore[misc]
    return name
