"""Split decoder layers among ranks by the tensor parallel plans of transformers.

    colwise   the outputs of a linear layer are split over the row   q, k, v, gate, up    in an adapter: B
    rowwise   its inputs are split, its outputs summed               o, down              in an adapter: A

Embedding, head and all modules outside the plan stay whole within a row; embedding and head may be one tensor, and
fully_shard spreads them over the rows. A whole parameter that sees only this rank's heads (`replicated_with_grad_allreduce`:
the norms of queries and keys) has a partial gradient on each rank of a row, which is summed before the optimizer step.

Experts are never cut: each rank of an expert group has some experts of every layer. The ranks of a group have different
tokens, send each to the ranks of its experts, and get the outputs back (transformers' `AllToAllEP`). The ranks of a row have
the same tokens, so each sends a share of them. Without expert parallelism, experts and routers are whole within a row.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.expert_parallel import apply_expert_parallelism

from polyturn.core.errors import ConfigError
from polyturn.training.lora import ADAPTER

_SUMMED = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_DISPATCHED = "ep_dispatch_experts"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config fields for the number of experts of a layer."""


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> list[str]:
    """Split the layers of `model` over `mesh` in place; return the names of whole parameters with partial gradients.

    Raises:
        ConfigError: transformers has no plan for this model, or its heads do not divide.
    """
    plan = plan_of_layers(model, parts=mesh.size())
    styles: dict[str, ParallelStyle] = {}
    partial: list[str] = []
    for name, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if _matches(pattern, name)), None)
        if style == "colwise":
            styles |= dict.fromkeys(_split_parts(name, module, of_adapter="lora_B"), ColwiseParallel())
        elif style == "rowwise":
            styles |= dict.fromkeys(_split_parts(name, module, of_adapter="lora_A"), RowwiseParallel())
        elif style == _SUMMED:
            partial += [f"{name}.{own}" for own, _ in module.named_parameters()]
        elif style not in (None, _EXPERTS):
            raise ConfigError(
                f"the tensor parallel plan of {model.config.model_type!r} splits {name} {style!r}, which is not "
                "supported; set train.distributed.tensor_parallel to 1"
            )
    parallelize_module(model, mesh, styles)
    return partial


def plan_of_layers(model: PreTrainedModel, *, parts: int) -> dict[str, str]:
    """Return pattern of names in layers -> style in which transformers splits them over `parts` ranks.

    Raises:
        ConfigError: transformers has no plan for the model, or its heads do not divide.
    """
    plan = {name: style for name, style in (model.tp_plan or {}).items() if ".layers." in f".{name}"}
    key = f"train.distributed.tensor_parallel is {parts}"
    if not plan:
        raise ConfigError(
            f"{key} and transformers has no tensor parallel plan for {model.config.model_type!r}; set it to 1; "
            "parameters are sharded all the same"
        )
    config = model.config.get_text_config()
    # Before the first pass, in which torch would raise an obscure error about a shape.
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(config, name, 0)) % parts:  # GPT-NeoX has no num_key_value_heads
            raise ConfigError(f"{key} and the model's {name} is {count}; set tensor_parallel to a divisor of {count}")
    return plan


def require_experts(model: PreTrainedModel, *, parts: int) -> None:
    """Raise for a model whose experts cannot be split.

    Raises:
        ConfigError: the model has no experts, transformers has no plan for them, they have an adapter, or they do not
            divide.
    """
    text, key = model.config.get_text_config(), f"train.distributed.expert_parallel is {parts}"
    count, plan = num_experts(model.config), text.base_model_ep_plan
    # Some plans also split dense layers, which needs ranks with the same tokens.
    if not count or not plan or not {_DISPATCHED, "grouped_gemm"} >= set(plan.values()):
        why = "transformers has no plan that splits only the experts of" if count else "there are no experts in"
        raise ConfigError(f"{key} and {why} a {text.model_type}; set it to 1")
    if adapted := next((name for name, _ in model.named_parameters() if re.search(r"\.experts\..*lora_", name)), None):
        raise ConfigError(f"{key} and model.lora adapts {adapted}; set model.lora.target_modules without experts")
    if count % parts:
        raise ConfigError(f"{key} and the model has {count} experts; set expert_parallel to a divisor of {count}")


def num_experts(config: PreTrainedConfig) -> int:
    """Return the number of experts in a layer of the model; 0 without experts."""
    fields = config.get_text_config().to_dict()
    return next((fields[name] for name in _COUNTS if fields.get(name)), 0)


def split_experts(model: PreTrainedModel, mesh: DeviceMesh, *, row: DeviceMesh) -> list[nn.Module]:
    """Split the experts of every layer over `mesh` in place, and return the modules with experts; empty without any. The
    ranks of `row` have the same tokens.

    Raises:
        ConfigError: the experts cannot be split.
    """
    if not num_experts(model.config):
        return []
    require_experts(model, parts=mesh.size())
    # Parameters before modules, because modules count their remaining experts.
    names = [name for named in (model.named_parameters(), model.named_modules()) for name, _ in named]
    plan = {name: style for name in names for pattern, style in model.ep_plan.items() if _matches(pattern, name)}
    apply_expert_parallelism(model, mesh, row, plan, "all_to_all")
    return [model.get_submodule(name) for name, style in plan.items() if style == _DISPATCHED]


def _split_parts(name: str, module: nn.Module, *, of_adapter: str) -> list[str]:
    """Return the linear layers to split for `module`: itself, or its base layer and one side of its adapter.

    The other side is whole on every rank of a row and sees whole inputs or gradients, so its gradient needs no sum.
    """
    if "base_layer" not in dict(module.named_children()):
        return [name]
    return [f"{name}.base_layer", f"{name}.{of_adapter}.{ADAPTER}"]


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
