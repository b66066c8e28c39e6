"""Weights under Hugging Face's names and under megatron-core's, and their way between rank 0 and the ranks that hold them.

    q_proj, k_proj, v_proj      linear_qkv     of each group of heads its queries, its key and its value, over the ranks
    gate_proj, up_proj          linear_fc1     of each rank its rows of both
    experts.gate_up_proj[e]     local_experts.e.linear_fc1       on the rank that holds the expert, whole

What is true of a weight is true of its gradient, its master and its moments, so all of them go the same way, one tensor at
a time: no rank but the first ever holds a whole model. Layers and experts are counted over the whole model here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from polyturn.core.errors import CheckpointError, ConfigError
from polyturn.training.backend import Degrees

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
"""The model types whose weights have a place in megatron-core's model here."""
TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""Two names of one tensor, where a model ties them."""


class Entry(NamedTuple):
    """One weight of megatron-core's model."""

    name: str
    sources: tuple[str, ...]
    """The weights of the Hugging Face model that it is made of."""
    layout: str = "whole"
    """How ranks share it: whole, rows, columns, qkv or gate_up."""
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


def cut(entry: Entry, tensors: Sequence[Tensor], *, num_parts: int, num_groups: int) -> list[Tensor]:
    """Return the parts of a weight that ranks hold, from the tensors of its sources.

    Args:
        entry: The weight.
        tensors: One for each source.
        num_parts: Ranks that share it.
        num_groups: Of heads that have one key and value.
    """
    if entry.layout == "whole":
        return [tensors[0]]
    if entry.layout == "gate_up":
        gates, ups = (tensor.chunk(num_parts) for tensor in tensors)
        return [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    if entry.layout == "qkv":
        tensors = [torch.cat([t.unflatten(0, (num_groups, -1)) for t in tensors], dim=1).flatten(0, 1)]
    return list(tensors[0].chunk(num_parts, dim=1 if entry.layout == "columns" else 0))


def join(entry: Entry, parts: Sequence[Tensor], *, num_groups: int, head_dim: int) -> list[Tensor]:
    """Return the tensors of a weight's sources from its parts: the inverse of `cut`."""
    if entry.layout == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    whole = torch.cat(list(parts), dim=1 if entry.layout == "columns" else 0)
    if entry.layout != "qkv":
        return [whole]
    grouped = whole.unflatten(0, (num_groups, -1))
    queries = grouped.shape[1] - 2 * head_dim
    return [t.flatten(0, 1) for t in grouped.split([queries, head_dim, head_dim], dim=1)]


class HeldPart(NamedTuple):
    """What a rank holds of a weight."""

    part: int
    shape: tuple[int, ...]


class ShardedNames:
    """Who holds what of one model; every method is collective."""

    def __init__(
        self, config: PreTrainedConfig, own: Mapping[str, Tensor], *, tensor_rank: int, first_layer: int, first_expert: int
    ) -> None:
        """Tell all ranks what this one holds.

        Args:
            config: Of the Hugging Face model.
            own: Name -> tensor of this rank's part of the model, layers and experts counted from 0 on every rank.
            tensor_rank: This rank's place among those that share layers.
            first_layer: The layer that it counts as 0.
            first_expert: The expert that it counts as 0.
        """
        self._config = config
        self._groups = config.num_key_value_heads
        self._head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        held = {}
        self._local = {_counted(name, first_layer, first_expert): name for name in own}
        self._entries = {entry.name: entry for entry in entries(config)}
        for name, local in self._local.items():
            part = 0 if self._entries[name].layout == "whole" else tensor_rank
            held[name] = HeldPart(part, tuple(own[local].shape))
        self._held: list[dict[str, HeldPart]] = [{}] * dist.get_world_size()
        dist.all_gather_object(self._held, held)

    def copies(self) -> dict[str, int]:
        """Return for each tensor of this rank how many ranks hold the same; one that is tied counts for both names."""
        counts = {}
        tied = {"output_layer.weight", "embedding.word_embeddings.weight"} if self._config.tie_word_embeddings else set()
        for name, local in self._local.items():
            part = self._held[dist.get_rank()][name].part
            names = tied if name in tied else {name}
            counts[local] = sum(held[n].part == part for held in self._held for n in names if n in held)
        return counts

    def gather(self, own: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Return Hugging Face's name -> whole tensor on the CPU on rank 0, and name -> None elsewhere.

        Args:
            own: This rank's parts, by the names given at construction; one that is missing counts as 0.
        """
        rank, whole = dist.get_rank(), dict[str, Tensor | None]()
        dtype = next(iter(own.values())).dtype
        for entry in self._entries.values():
            owners = self._owners(entry.name)
            if not owners or (entry.name == "output_layer.weight" and self._config.tie_word_embeddings):
                continue
            parts = [self._bring(own, entry.name, source, dtype) for source in owners]
            if rank != 0:
                whole |= dict.fromkeys(entry.sources)
                continue
            found = join(entry, [p for p in parts if p is not None], num_groups=self._groups, head_dim=self._head_dim)
            for name, tensor in zip(entry.sources, found, strict=True):
                if entry.expert is None:
                    whole[name] = tensor.clone()
                    continue
                experts = whole.setdefault(name, tensor.new_empty(self._config.num_experts, *tensor.shape))
                assert experts is not None
                experts[entry.expert] = tensor
        if self._config.tie_word_embeddings:
            whole[TIED[0]] = whole[TIED[1]]
        return whole

    def scatter(self, whole: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return this rank's parts of what rank 0 gives, on the CPU, by the names given at construction.

        Raises:
            CheckpointError: on every rank, where `whole` is of another model.
        """
        rank, own = dist.get_rank(), dict[str, Tensor]()
        said: list[Any] = [None if whole is None else self._problem(whole), whole and next(iter(whole.values())).dtype]
        dist.broadcast_object_list(said, src=0)
        problem, dtype = said
        if problem is not None:
            raise CheckpointError(problem)
        for entry in self._entries.values():
            num_parts, parts = len(self._owners(entry.name)), list[Tensor]()
            if whole is not None and num_parts:
                given = [whole[name] if entry.expert is None else whole[name][entry.expert] for name in entry.sources]
                parts = cut(entry, given, num_parts=num_parts, num_groups=self._groups)
            for holder, held in enumerate(self._held):
                place = held.get(entry.name)
                if place is None or rank not in (0, holder):
                    continue
                if whole is not None:
                    part = parts[place.part].detach().to("cpu").contiguous()
                    if holder != 0:
                        dist.send(part, dst=holder)
                        continue
                    part = part.clone()
                else:
                    part = torch.empty(place.shape, dtype=dtype)
                    dist.recv(part, src=0)
                own[self._local[entry.name]] = part
        return own

    def _owners(self, name: str) -> list[int]:
        """Return for each part of a weight the first rank that holds it; [] where none of them needs it."""
        first: dict[int, int] = {}
        for rank, held in enumerate(self._held):
            if name in held:
                first.setdefault(held[name].part, rank)
        return [first[part] for part in sorted(first)]

    def _bring(self, own: Mapping[str, Tensor], name: str, source: int, dtype: torch.dtype) -> Tensor | None:
        """Return rank 0's copy of what `source` holds; None on other ranks."""
        rank, shape = dist.get_rank(), self._held[source][name].shape
        if rank == source:
            found = own.get(self._local[name])
            part = torch.zeros(shape, dtype=dtype) if found is None else found.detach().to("cpu").contiguous()
            if rank != 0:
                dist.send(part, dst=0)
            return part
        if rank != 0:
            return None
        part = torch.empty(shape, dtype=dtype)
        dist.recv(part, src=source)
        return part

    def _problem(self, whole: Mapping[str, Tensor]) -> str | None:
        """Return the sentence for weights of another model."""
        used = {name: entry for entry in self._entries.values() for name in entry.sources if self._owners(entry.name)}
        if lacking := sorted(used.keys() - whole.keys()):
            return f"the checkpoint is of another model: it lacks {lacking[:3]}"
        for name, entry in used.items():
            held = self._held[self._owners(entry.name)[0]][entry.name].shape
            columns = held[-1] * (len(self._owners(entry.name)) if entry.layout == "columns" else 1)
            if len(held) > 1 and whole[name].shape[-1] != columns:
                return (
                    f"the checkpoint is of another model: its {name} has the shape {tuple(whole[name].shape)}, and this "
                    f"model's has {columns} columns"
                )
        return None


class ParameterOrder:
    """The numbers that an optimizer's state gives to parameters: matrices first, then vectors (`Optimizer`)."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        matrices = [name for name, parameter in named if parameter.ndim > 1]
        vectors = [name for name, parameter in named if parameter.ndim <= 1]
        self.names, self._counts = [*matrices, *vectors], (len(matrices), len(vectors))

    def state(self, adamw: Mapping[str, Any], moments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of AdamW with `moments`, by kind and name, and all else as in `adamw`."""
        steps = [values["step"] for values in adamw["state"].values()]
        values = {
            number: {"step": steps[0].clone(), **{kind: found[name] for kind, found in moments.items()}}
            for number, name in enumerate(self.names if steps else ())
        }
        first, second = self._counts
        numbers = (list(range(first)), list(range(first, first + second)))
        groups = [{**group, "params": own} for group, own in zip(adamw["param_groups"], numbers, strict=True)]
        return {"state": values, "param_groups": groups}


def _counted(name: str, first_layer: int, first_expert: int) -> str:
    """Return a name with its layer and expert counted over the whole model."""
    for pattern, first in ((r"(decoder\.layers\.)(\d+)", first_layer), (r"(local_experts\.)(\d+)", first_expert)):
        name = re.sub(pattern, lambda found, first=first: f"{found[1]}{int(found[2]) + first}", name)  # type: ignore[misc]
    return name
