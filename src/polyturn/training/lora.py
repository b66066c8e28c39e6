"""LoRA: train low-rank matrices beside the frozen weights of the model (Hu et al. 2021).

    y = W x + (alpha / rank) B A dropout(x)        B is 0 at first, so the adapter changes nothing before the first update

The adapter is part of the model's modules, so the trainer, an engine that shares the parameters and a forward pass see one
ordinary model. Checkpoints keep the adapter only. Servers get the adapter, or as exports do, the merged weights
W + (alpha / rank) B A under the names of the model without an adapter.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyturn.core.errors import CheckpointError, ConfigError, one_line
from polyturn.engines.routers import beside_experts
from polyturn.engines.weights.folder import let_others_read
from polyturn.infra.model_json import read_model_json
from polyturn.training.options import LoraSettings
from polyturn.training.shards import Names, require_same_shapes, whole_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
"""Layers in place of which peft adapts the stacks of experts that some models, such as DeepSeek-V3, have beside them."""


def add_lora(model: PreTrainedModel, settings: LoraSettings, *, seed: int = 0) -> None:
    """Add an adapter to `model`. After that, only the adapter has gradients. The global random state does not change.

    Raises:
        ConfigError: peft is not installed, or the settings match no module of this model.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "model.lora needs peft, which is not installed; pip install 'polyturn[lora]', or remove model.lora"
        )
    from peft import LoraConfig

    def names(value: str | Sequence[str] | None) -> str | list[str] | None:
        return value if isinstance(value, str) or value is None else list(value)

    try:
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft takes fractions as well
            lora_dropout=settings.dropout,
            target_modules=names(_targets(model, settings)),
            exclude_modules=names(settings.exclude_modules),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model.add_adapter(config, adapter_name=ADAPTER)
            if model.device.type == "meta":
                # The same seed and order give the same adapter in one process and on many ranks.
                torch.manual_seed(seed)
                _draw_again(model)
    except (ValueError, re.error) as problem:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"model.lora does not fit this model: {one_line(problem)[:300]}; its linear modules are {', '.join(linear)}"
        ) from problem


def _targets(model: PreTrainedModel, settings: LoraSettings) -> str | Sequence[str]:
    """Return the modules to adapt. For a model with experts, name each linear layer except its feed-forward layers: peft's
    "all-linear" would include the experts, which are stacks of matrices, and the routers, which must choose like the
    engine's."""
    beside = [beside_experts(layer) for layer in model.modules()]
    if settings.target_modules != "all-linear" or not any(count for count, _ in beside):
        return settings.target_modules
    others = {part for _, routers in beside for part in routers.values()} | {model.get_output_embeddings()}
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part not in others]
    return [name for name in linear if not name.endswith(_FEED_FORWARD)]


def _draw_again(model: nn.Module) -> None:
    """Draw the adapter's values for a model without weights, as peft does for one with weights.

    Raises:
        ConfigError: the adapter wraps a module that is not a linear layer.
    """
    for name, layer in adapted_layers(model).items():
        pairs = [part[ADAPTER] for part in (layer.lora_A, layer.lora_B) if ADAPTER in part]
        if not all(isinstance(part, nn.Linear) for part in pairs) or not pairs:
            raise ConfigError(
                f"model.lora adapts {name}, which is not a linear layer; on many ranks only linear layers can be "
                "adapted, because the model is read in parts. Remove it from model.lora.target_modules, or use one "
                "process"
            )
        dtypes = [part.weight.dtype for part in pairs]
        # Drawn in float32 and then rounded, like peft: drawing in another dtype gives other numbers.
        for part in pairs:
            part.to_empty(device="cpu").float().reset_parameters()
        layer.reset_lora_parameters(ADAPTER, True)
        for part, dtype in zip(pairs, dtypes, strict=True):
            part.to(dtype)


def has_lora(model: nn.Module) -> bool:
    """Return whether `add_lora` put an adapter into `model`."""
    return any(".lora_" in name for name, _ in model.named_parameters())


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> live tensor of the adapter."""
    return {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}


@contextmanager
def adapter_replaced(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Use other adapter tensors of the same shape within the context; afterwards restore the model's own.

    Within the context the parameters point to other storage, so an engine that shares the original storage is unaffected.
    """
    own = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    saved = {name: p.data for name, p in own.items()}
    try:
        for name, parameter in own.items():
            parameter.data = tensors[name]
        yield
    finally:
        for name, parameter in own.items():
            parameter.data = saved[name]


def plain_name(name: str) -> str:
    """Return the name of a weight in the model without an adapter."""
    return re.sub(r"(\.base_layer)+\.", ".", name)  # peft wraps a stack of experts once for each of its matrices


def _weight_of(name: str, layer: Any) -> str:
    """Return the name, in the model without an adapter, of the weight that the adapted layer of that name changes."""
    return plain_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}")


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the live weights without the adapter, under the names of the model without an adapter."""
    return {plain_name(name): value.detach() for name, value in model.state_dict().items() if ".lora_" not in name}


def require_untied(model: nn.Module) -> None:
    """Raise if the adapter changes a weight that shares its tensor with another: merged, the two would differ.

    Raises:
        ConfigError: with the name of the module.
    """
    weights = base_weights(model)
    shared = Counter(weight.data_ptr() for weight in weights.values())
    for name, layer in adapted_layers(model).items():
        if shared[weights[_weight_of(name, layer)].data_ptr()] > 1:
            raise ConfigError(
                f"model.lora adapts {name}, whose weight the model also uses elsewhere (tie_word_embeddings), so a copy of "
                "the policy cannot hold the adapted weight; remove it from model.lora.target_modules"
            )


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights with the adapter added, under the names of the model without an adapter.

    Weights that the adapter changes are new tensors; all others are live.
    """
    weights = base_weights(model)
    with torch.no_grad():
        for name, layer in adapted_layers(model).items():
            weight = weights[own := _weight_of(name, layer)]
            # A new tensor: training adds the adapter to the live weight itself, so merging in place would add it twice.
            weights[own] = weight + layer.get_delta_weight(ADAPTER).to(weight)
    return weights


def whole_merged(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Return a whole weight with the adapter added, gathering the adapter's parts; the call is collective.

    Raises:
        ConfigError: the adapter wraps a module that is not a linear layer.
    """
    layer = next((layer for own, layer in adapted_layers(model).items() if _weight_of(own, layer) == name), None)
    if layer is None:
        return weight
    pair = [part[ADAPTER].weight for part in (layer.lora_A, layer.lora_B) if ADAPTER in part]
    is_linear = len(pair) == 2 and all(isinstance(part[ADAPTER], nn.Linear) for part in (layer.lora_A, layer.lora_B))
    if not is_linear or not name.endswith(".weight"):  # the pair of a stack of experts is linear, its parameter has a name
        raise ConfigError(
            f"model.lora adapts {name}, which is not in a linear layer; on many ranks only linear layers can be merged "
            "for an engine. Remove it from model.lora.target_modules, or use one process"
        )
    down, up = (whole_tensor(part.detach()) for part in pair)
    added = up @ down * layer.scaling[ADAPTER]
    return weight + (added.T if layer.fan_in_fan_out else added).to(weight)


def adapter_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the content of peft's settings file for the model's adapter, with the names of the adapted modules as targets:
    servers do not read regular expressions."""
    config: Any = model.peft_config[ADAPTER]
    settings: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=list))
    return settings | {"target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers(model)})}


def as_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an adapter's tensors from their names in the model to those in peft's files."""
    return {f"base_model.model.{_without_adapter(name)}": tensor for name, tensor in tensors.items()}


def _without_adapter(name: str) -> str:
    return name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")  # an embedding's names end with the adapter


def save_adapter(model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter in peft's format, with the values of `tensors` if given."""
    model.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors))
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"no adapter was written to {folder}; the model has none")
    let_others_read(folder / WEIGHTS_FILE)


def require_same_settings(folder: Path, *, rank: int, alpha: float) -> None:
    """Raise if the adapter in `folder` has another scale, which the shapes of its tensors do not show.

    Raises:
        CheckpointError: rank or alpha differ, or the adapter's settings are damaged.
    """
    saved = read_model_json(folder / CONFIG_FILE)
    own: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "use_rslora": False, "use_dora": False}
    if not saved.get("target_parameters"):  # peft scales the parts of stacked experts itself, by a pattern
        own["alpha_pattern"] = {}
    for name, value in own.items():
        if saved.get(name, value) != value:
            raise CheckpointError(
                f"the adapter in {folder} has {name} {saved[name]!r}, and model.lora has {value!r}; set model.lora as in "
                "the run that wrote it"
            )


def advice(saved: Iterable[str], own: Iterable[str]) -> str:
    """Return the end of an error about an adapter with the tensors `saved`, which does not fit a model with `own`."""
    targets, own_targets = _adapted_by(saved), _adapted_by(own)
    text = "; set model.lora as in the run that wrote it"
    if targets == own_targets or not targets:
        return text
    left_out = ", because all-linear leaves out experts and routers" if targets > own_targets else ""
    return f"{text}, with model.lora.target_modules: [{', '.join(sorted(targets))}]{left_out}"


def _adapted_by(names: Iterable[str]) -> set[str]:
    """Return the suffixes of modules that make peft adapt the tensors `names`."""
    modules = {name.partition(".lora_")[0].removesuffix(".base_layer").rpartition(".")[2] for name in names}
    return modules - {"experts"} | set(_FEED_FORWARD if "experts" in modules else ())


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Load the adapter that `save_adapter` wrote to `folder` into the model.

    Raises:
        CheckpointError: there is no adapter, or it is of another model, shape or scale.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise CheckpointError(f"there is no adapter in {folder}; an adapter's folder contains {WEIGHTS_FILE}")
    config: Any = model.peft_config[ADAPTER]
    require_same_settings(folder, rank=config.r, alpha=config.lora_alpha)
    own = adapter_tensors(model)
    named = {_without_adapter(name): name for name in own}
    try:
        saved = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(str(file)).items()}
        # peft also writes the frozen weight of an embedding or output embedding that is adapted.
        saved = {name: tensor for name, tensor in saved.items() if ".lora_" in name or ".base_layer." not in name}
    except SafetensorError as problem:
        raise CheckpointError(f"the adapter {file} is damaged ({one_line(problem)}); copy it again") from problem
    tensors, names = {named.get(name, name): tensor for name, tensor in saved.items()}, Names()
    require_same_shapes(names.kinds(tensors), names.kinds(own), whose=f"adapter in {folder}", hint=advice(tensors, own))
    names.take(own, tensors)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the name of each adapted module in the model without an adapter -> the module that wraps it."""
    if not has_lora(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
