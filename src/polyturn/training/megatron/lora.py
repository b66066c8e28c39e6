"""LoRA on megatron-core's linear layers, with separate matrices for each Hugging Face layer that is fused into one.

    linear_qkv, linear_fc1      [T / n, H] -> A whole -> [T, r] -> B by rows -> this rank's share of the output of each part
    linear_proj, linear_fc2     [T, H / n] -> A by columns, added up -> [T / n, r] -> B whole -> [T / n, H]

So the n ranks that share a layer only exchange low-rank numbers. The matrices have the names and values of peft's, in
checkpoints too, so that an adapter can be resumed with any backend.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from transformers import PreTrainedConfig

from polyturn.core.errors import ConfigError
from polyturn.training.lora import ADAPTER, adapted_layers
from polyturn.training.megatron.weights import HEAD, Entry, counted, source_rows
from polyturn.training.options import Degrees


def adapter_entries(model: nn.Module, weights: Iterable[Entry], config: PreTrainedConfig, degrees: Degrees) -> list[Entry]:
    """Return the matrices of a model's adapter for `weights`; empty without an adapter.

    Raises:
        ConfigError: the adapter wraps a module other than linear layers of attention and of dense feed-forward layers, or a
            stage has no adapted layer.
    """
    targets, num_stages = set(adapted_layers(model)), degrees.pipeline_parallel
    entries, stages = list[Entry](), set[int]()
    for entry in weights:
        for module in (source.removesuffix(".weight") for source in entry.sources):
            if entry.layout in ("qkv", "gate_up", "columns") and module in targets:
                targets.remove(module)
                stages.add(int(entry.name.split(".")[2]) * num_stages // config.num_hidden_layers)
                inside, part = entry.name.removesuffix(".weight"), module.rpartition(".")[2]
                down, up = ("columns", "whole") if entry.layout == "columns" else ("whole", "rows")
                entries.append(Entry(f"{inside}.lora_A.{part}", (f"{module}.lora_A.{ADAPTER}.weight",), down))
                entries.append(Entry(f"{inside}.lora_B.{part}", (f"{module}.lora_B.{ADAPTER}.weight",), up))
    if targets:
        raise ConfigError(
            f"model.lora adapts {min(targets)} and train.backend is megatron, which adapts only linear layers of "
            "attention and of dense feed-forward layers; remove it from model.lora.target_modules, or set "
            "train.backend: torch"
        )
    if stages and len(stages) < num_stages:
        raise ConfigError(
            f"model.lora adapts no layer of {num_stages - len(stages)} of {num_stages} stages, which would not train; "
            "extend model.lora.target_modules, or lower train.distributed.pipeline_parallel"
        )
    return entries


def add_adapter(gpt: GPTModel, model: nn.Module, weights: Iterable[Entry], *, first_layer: int) -> None:
    """Add this rank's part of `model`'s adapter, if any, to `gpt`, without values. Then only the adapter, and the head of a
    value function, have gradients."""
    layers, own, inside = adapted_layers(model), gpt.config, dict(gpt.named_modules())
    if not layers:
        return
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(name in HEAD)
    for entry in weights:
        linear = inside.get(counted(entry.name.removesuffix(".weight"), -first_layer, 0))
        modules = [source.removesuffix(".weight") for source in entry.sources]
        if linear is not None and any(module in layers for module in modules):
            num_groups = own.num_query_groups // own.tensor_model_parallel_size if entry.layout == "qkv" else 1
            of_parts = source_rows(entry, linear.weight.shape, part=0, num_groups=num_groups, head_dim=own.kv_channels)
            widths = {modules[box.source]: box.rows.stop - box.rows.start for box in of_parts}
            _add_pairs(linear, widths, layers, num_groups=num_groups)


def _add_pairs(linear: Any, rows: Mapping[str, int], layers: Mapping[str, Any], *, num_groups: int) -> None:
    """Give a linear layer the pairs of its parts.

    Args:
        linear: megatron-core's layer.
        rows: Module -> number of rows of its weight on this rank, per group.
        layers: Adapted module -> peft's layer around it.
        num_groups: Number of groups in which the rows of the parts are interleaved.
    """
    linear.lora_A, linear.lora_B, linear.lora_dropout = nn.ParameterDict(), nn.ParameterDict(), nn.ModuleDict()
    widths, scaling = {}, 0.0
    for module, width in rows.items():
        part = module.rpartition(".")[2]
        widths[part] = width
        if (layer := layers.get(module)) is not None:
            rank, like = layer.r[ADAPTER], {"dtype": layer.lora_A[ADAPTER].weight.dtype, "device": linear.weight.device}
            down = nn.Parameter(torch.empty(rank, linear.weight.shape[1], **like))
            up = nn.Parameter(torch.empty(width * num_groups, rank, **like))
            whole: Any = up if isinstance(linear, RowParallelLinear) else down
            # Each rank sees only some positions, so the gradient is summed.
            whole.sequence_parallel = linear.sequence_parallel
            linear.lora_A[part], linear.lora_B[part], linear.lora_dropout[part] = down, up, layer.lora_dropout[ADAPTER]
            scaling = layer.scaling[ADAPTER]
    linear.register_forward_hook(functools.partial(_adapted, widths=widths, num_groups=num_groups, scaling=scaling))


def _adapted(
    linear: Any,
    inputs: tuple[Tensor, ...],
    output: tuple[Tensor, Tensor | None],
    *,
    widths: Mapping[str, int],
    num_groups: int,
    scaling: float,
) -> tuple[Tensor, Tensor | None]:
    """Return a linear layer's output with its adapter; `widths` are the widths of its parts in each group."""
    (hidden_TBH, *_), (out_TBO, bias) = inputs, output
    is_summed = isinstance(linear, RowParallelLinear)
    share = reduce_scatter_to_sequence_parallel_region if is_summed else gather_from_sequence_parallel_region
    added = []
    for part, width in widths.items():
        if part in linear.lora_A:
            down, up = linear.lora_A[part], linear.lora_B[part]
            low_TBR = share(nn.functional.linear(linear.lora_dropout[part](hidden_TBH).to(down.dtype), down))
            added.append(nn.functional.linear(low_TBR, up).unflatten(-1, (num_groups, -1)))
        else:
            # A part without an adapter adds zeros, because the parts are interleaved in every group.
            added.append(out_TBO.new_zeros(*out_TBO.shape[:-1], num_groups, width))
    return (out_TBO + torch.cat(added, dim=-1).flatten(-2) * scaling).to(out_TBO.dtype), bias
