"""Map weights between Hugging Face's and megatron-core's names, and between whole tensors and the parts on ranks.

    q_proj, k_proj, v_proj      linear_qkv     per group of heads its queries, key and value; groups are split over ranks
    gate_proj, up_proj          linear_fc1     per rank its rows of both
    experts.gate_up_proj[e]     local_experts.e.linear_fc1       whole, on the rank of the expert

A rank's part of a weight is a set of boxes of Hugging Face tensors, and so are its master and moments. Checkpoints store
these boxes, and each rank writes and reads its own. Layers and experts are numbered over the whole model here.
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
from polyturn.engines.weights.stream import TensorKind
from polyturn.training.lora import plain_name
from polyturn.training.options import Degrees
from polyturn.training.shards import Boxes, Names, Origin, box_of, local_part, start_of

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
"""Model types with a mapping of weights."""
TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""The names of the same tensor in a model with tied embeddings."""
HEAD = ("head.weight", "head.bias")
"""The head of a value function: whole on every rank, in float32, so it needs no masters."""


class Entry(NamedTuple):
    """One weight of megatron-core's model."""

    name: str
    sources: tuple[str, ...]
    """Names of the Hugging Face weights that it combines."""
    layout: str = "whole"
    """How ranks split it: whole, rows, columns, qkv or gate_up."""
    expert: int | None = None
    """Index of its expert in sources that contain all experts of a layer; None otherwise."""


def is_sparse(config: PreTrainedConfig, layer: int) -> bool:
    """Return whether the layer with this index has experts."""
    if config.model_type != "qwen3_moe":
        return False
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


def require_family(config: PreTrainedConfig) -> None:
    """Raise for a model whose weights cannot be mapped to megatron-core's.

    Raises:
        ConfigError: its family has no mapping, or its config has an option that the mapping does not support.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"train.backend is megatron and the model is a {kind}, whose weights have no mapping (there are "
            f"{', '.join(FAMILIES)}); set train.backend: torch"
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
                f"train.backend is megatron and the model's config has {key} {value!r}, which the mapping of {kind} "
                "weights does not support; set train.backend: torch"
            )


def require_split(config: PreTrainedConfig, degrees: Degrees) -> None:
    """Raise for a model that cannot be split by `degrees`.

    Raises:
        ConfigError: its family has no mapping, or a degree does not divide a size.
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
            divisor = f"a divisor of {count}" if count else "1"
            raise ConfigError(f"{where}.{name} is {size} and the model has {count} {what}; set {name} to {divisor}")
    of_stage = wide * degrees.context_parallel
    if experts and degrees.pipeline_parallel > 1 and degrees.expert_parallel != of_stage:
        raise ConfigError(
            f"{where} has pipeline_parallel {degrees.pipeline_parallel}, expert_parallel {degrees.expert_parallel} and "
            f"tensor_parallel x context_parallel {of_stage}; stages with experts need the latter two to be equal"
        )


def entries(config: PreTrainedConfig) -> Iterator[Entry]:
    """Yield the weights of a model, in the order of its layers."""
    yield Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows")
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
    yield Entry("output_layer.weight", (TIED[config.tie_word_embeddings],), "rows")


def value_entries(config: PreTrainedConfig) -> Iterator[Entry]:
    """Yield the weights of a value function, with the names that they have in `ValueModel`."""
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
    """Consecutive rows of a weight that are consecutive in one of its sources too."""

    source: int
    """Index of that source in `Entry.sources`."""
    rows: slice
    at: Origin
    """Origin of these rows in the source."""


def source_rows(entry: Entry, shape: Sequence[int], *, part: int, num_groups: int, head_dim: int) -> list[SourceRows]:
    """Return the positions of a weight's rows in its sources.

    Args:
        entry: The weight.
        shape: Shape of the part on a rank.
        part: Index of the part.
        num_groups: Number of groups of heads in this part; a group shares one key and value.
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
    """The parts of a model on each rank, by Hugging Face's names."""

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
        """Tell all ranks which parts this one holds; the call is collective.

        Args:
            model: The Hugging Face model, or the value function over it, for names and shapes.
            config: Its config.
            own: This rank's megatron-core tensors, with layers and experts numbered from 0 on every rank.
            known: All weights of the model, and the matrices of its adapter.
            degrees: Number of ranks of each kind of parallelism.
            tensor_rank: This rank's index among the ranks that split the same layers.
            first_layer: Index in the model of this rank's layer 0.
            first_expert: Index in the model of this rank's expert 0.
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
        self._rank_boxes: list[dict[str, dict[Origin, tuple[int, ...]]]] = [{}] * dist.get_world_size()
        """For each rank: tensor -> origin of a box on that rank -> shape of the box."""
        dist.all_gather_object(self._rank_boxes, mine)

    def copies(self) -> dict[str, int]:
        """Return for each weight of this rank the number of ranks with the same part; a tied weight counts for both
        names."""
        counts = {}
        for name, (first, *_) in self._boxes.items():
            source = self._entry_of[name].sources[first.source]
            counts[name] = sum(first.at in boxes.get(source, ()) for boxes in self._rank_boxes)
        return counts

    def kinds(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
        """Return name -> shape and dtype of the whole tensor, for the tensors of all ranks."""
        kinds_by_name = {}
        for name, shape in self._shapes.items():
            like = next((tensor for own, tensor in tensors.items() if _kind(own) == _kind(name)), None)
            if like is not None:  # `tensors` has tensors of this kind (see `_kind`)
                kinds_by_name[name] = TensorKind(shape if like.ndim else (), like.dtype)
        return kinds_by_name

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors that a weight combines."""
        return self._entry_of[name].sources

    def whole(self, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
        """Return a whole weight on the CPU on rank 0, and None elsewhere."""
        mine, rank, seen = self.parts(tensors).get(name, {}), dist.get_rank(), set[Origin]()
        whole = torch.empty(self._shapes[name], dtype=self.kinds(tensors)[name].dtype) if rank == 0 else None
        # Each box comes from the first rank that has it; a rank sends all its boxes at once.
        for owner, boxes in enumerate(self._rank_boxes):
            origins = [origin for origin in boxes.get(name, ()) if origin not in seen]
            seen.update(origins)
            if not origins or rank not in (0, owner):
                continue
            sizes = [math.prod(boxes[name][origin]) for origin in origins]
            if rank == owner:
                flat = torch.cat([mine[origin].detach().reshape(-1) for origin in origins]).cpu()
            if whole is None:
                dist.send(flat, dst=0)
                return None
            if owner:
                flat = torch.empty(sum(sizes), dtype=whole.dtype)
                dist.recv(flat, src=owner)
            for origin, values in zip(origins, flat.split(sizes), strict=True):
                shape = boxes[name][origin]
                box_of(whole, origin, shape).copy_(values.view(shape))
        return whole

    def shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the boxes that this rank has."""
        kinds = self.kinds(tensors)
        return {name: Boxes(kinds[name], boxes) for name, boxes in self.parts(tensors).items()}

    def read(self, sections: Mapping[str, Mapping[str, Tensor]], folder: Path, *, whose: str) -> None:
        """Fill this rank's parts from a folder. A scalar of a combined weight is read from its first source."""
        super().read(sections, folder, whose=whose)
        for tensors in sections.values():
            parts_read = self.parts(tensors)
            for name, tensor in tensors.items():
                if not tensor.ndim:
                    tensor.copy_(parts_read[self.sources(name)[0]][()])

    def take(self, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of `weights`, whole or partial, into live tensors. One name is enough for tied weights."""
        parts_read = self.parts(tensors)
        for name in weights:
            for origin, box in parts_read.get(plain_name(name), {}).items():
                box.copy_(box_of(weights[name], origin, box.shape))

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[Origin, Tensor]]:
        """Return name -> origin in the whole tensor -> this rank's live box at that origin; replicas have the same origin.

        A scalar of a weight appears once for each of its sources. A `DTensor` contains rows of the weight.
        """
        parts_by_name: dict[str, dict[Origin, Tensor]] = {}
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
    """Return whether a tensor belongs to a head, and whether to an adapter."""
    return name in HEAD, ".lora_" in name


def counted(name: str, first_layer: int, first_expert: int) -> str:
    """Return a name with its layer and expert numbered over the whole model."""
    for pattern, first in ((r"(decoder\.layers\.)(\d+)", first_layer), (r"(local_experts\.)(\d+)", first_expert)):
        name = re.sub(pattern, lambda match, first=first: f"{match[1]}{int(match[2]) + first}", name)  # type: ignore[misc]
    return name
