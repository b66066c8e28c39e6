"""Build, load and save models in the Hugging Face format.

    build_model({"model_type": "qwen3", "hidden_size": 128, …}, seed=0)      random weights, the same for the same seed
    save_model(model, folder, tokenizer=tokenizer)                            AutoModelForCausalLM.from_pretrained(folder)

A save is atomic: a folder is either complete or absent, whenever the process dies. If it dies while replacing a folder, the
former folder remains under a name that ends in `.old`.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as _SEEING

from polyturn.core.errors import CheckpointError, ConfigError, did_you_mean, one_line
from polyturn.engines.onednn import use_onednn
from polyturn.engines.weights.folder import write_safetensors
from polyturn.engines.weights.stream import StreamedTensors, TensorKind, streamed
from polyturn.tokens.hub import only_cached
from polyturn.training import lora
from polyturn.training.part_loading import weight_files

_LAYER = re.compile(r".*?\.\d+\.")


def build_model(config: Mapping[str, Any], *, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a randomly initialised causal language model, possibly one that also reads images. The global random state does
    not change.

    Args:
        config: The fields of the transformers config; `model_type` names the architecture.
        seed: Seed of the initialisation.
        dtype: Type of the parameters.

    Raises:
        ConfigError: an unknown `model_type`, or fields that this architecture cannot be built from.
    """
    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ConfigError("the model config has no model_type; name the architecture, for instance model_type: qwen3")
    if str(model_type) not in CONFIG_MAPPING:
        raise ConfigError(
            f"transformers has no model_type {model_type!r}.{did_you_mean(str(model_type), CONFIG_MAPPING.keys())}"
        )
    try:
        built = AutoConfig.for_model(model_type, **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: PreTrainedModel = _auto_class(built).from_config(built, dtype=dtype, trust_remote_code=False)
    except Exception as problem:  # transformers raises many types for a wrong field
        raise ConfigError(f"no {model_type!r} model can be built from {fields}: {one_line(problem)}") from problem
    return model


def _auto_class(config: PreTrainedConfig) -> Any:
    is_composite = config.get_text_config() is not config
    return AutoModelForImageTextToText if is_composite and type(config) in _SEEING else AutoModelForCausalLM


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    needs_head: bool = True,
    outline_above: float = math.inf,
) -> PreTrainedModel:
    """Return the causal language model in the folder `source`, or with that name and revision on the hub. A model of more
    than `outline_above` parameters has only its config and shapes, without weights.

    Raises:
        ConfigError: there is no such model, it cannot be loaded, or weights are missing (without `needs_head`: of the
            backbone).
    """
    of = {"revision": revision or "main", "local_files_only": only_cached(str(source), revision=revision)}
    try:
        # A model's folder is data: code in it is never run.
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=False, **of)
        model: PreTrainedModel
        if outline_above < math.inf:
            with torch.device("meta"):
                model = _auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
            if count_parameters(model) > outline_above:
                return model
        model, info = _auto_class(config).from_pretrained(
            str(source), config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **of
        )
    except Exception as problem:  # transformers raises many types for a wrong config or damaged weights
        where = "the folder exists" if Path(source).is_dir() else "there is no such folder"
        raise ConfigError(
            f"no model can be loaded from {str(source)!r} ({where}: {one_line(problem)[:300]}); give a folder with "
            "config.json and weights, or a name on the hub"
        ) from problem
    backbone = "" if needs_head else f"{model.base_model_prefix}."
    if missing := sorted(name for name in info["missing_keys"] if name.startswith(backbone)):
        raise ConfigError(  # transformers would give them random values
            f"the weights of {str(source)!r} do not fit its config.json: {len(missing)} are missing, the first is "
            f"{missing[0]!r}; give a folder that `save_pretrained` wrote"
        )
    return model


load_outline = functools.partial(load_model, outline_above=0)
"""Return only the config and shapes of a model."""
load_plan = functools.partial(load_model, outline_above=1e9)
"""For a memory plan: a small model is loaded with weights, so that the plan also tests loading."""


def load_unread(
    source: str | Path, *, dtype: torch.dtype = torch.float32, revision: str | None = None, needs_head: bool = True
) -> PreTrainedModel:
    """Return the model without its weights, which `part_loading` reads into shards. Its `name_or_path` is a folder on this
    machine. Weights that are not in safetensors cannot be read in parts and are loaded now.

    Raises:
        ConfigError: as `load_model` does.
    """
    folder = Path(source)
    if not folder.is_dir():
        cached = only_cached(str(source), revision=revision)
        wanted = ["*.json", "*.safetensors"]
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=wanted, local_files_only=cached))
    if not weight_files(folder):
        return load_model(source, dtype=dtype, revision=revision, needs_head=needs_head)
    model = load_outline(folder, dtype=dtype)
    # As transformers loads them: a bfloat16 router would choose other experts.
    for name, buffer in [*model.named_buffers()]:
        if any(part in name for part in model._keep_in_fp32_modules_strict or ()):
            inside, _, own = name.rpartition(".")
            setattr(model.get_submodule(inside), own, buffer.float())
    return model


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares no memory with `model` and needs no gradients, with an adapter merged.

    Raises:
        ConfigError: the adapter changes one of two tied weights.
    """
    if lora.has_lora(model):
        lora.require_untied(model)
        with torch.random.fork_rng():  # initialisation draws random weights, which are overwritten
            plain: PreTrainedModel = type(model)(model.config)
        copied = plain.to(model.device)  # type: ignore[arg-type]  # a mixin hides the signature
        weights = plain_weights(model)
        for name, parameter in copied.named_parameters():  # not the buffers: those for positions stay float32
            parameter.data = parameter.data.to(weights[name].dtype)
        write_weights(copied, weights)
    else:
        copied = copy.deepcopy(model)
    return copied.requires_grad_(False).eval()


def plain_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of `model` under the names without an adapter, which is merged; without an adapter, the live
    tensors."""
    return lora.merged_weights(model) if lora.has_lora(model) else lora.base_weights(model)


def write_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Write weights into `model`, in place.

    Raises:
        CheckpointError: names or shapes do not fit.
    """
    own, tied = model.state_dict(), dict(model.named_parameters(remove_duplicate=False)).keys()
    again = tied - dict(model.named_parameters()).keys()
    if odd := sorted((own.keys() ^ weights.keys()) - again):
        raise CheckpointError(f"the weights do not fit {type(model).__name__}: {odd[0]!r} is in only one of the two")
    try:
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
    except RuntimeError as problem:
        raise CheckpointError(f"the weights do not fit {type(model).__name__}: {one_line(problem)[:300]}") from problem


def choose_kernels(model: PreTrainedModel, *, attention: str | None = None, liger: bool = False) -> PreTrainedModel:
    """Set the kernels of a model, and return it.

    Args:
        model: Changed in place, except for its parameters.
        attention: Name of the attention in transformers; None keeps the present one.
        liger: Whether Liger's kernels replace norms, rotations and feed-forward layers, if Liger supports the architecture.

    Raises:
        ConfigError: the kernels are not installed, or the model cannot use them.
    """
    if attention is not None:
        try:
            model.set_attn_implementation(attention)
        except (ImportError, ValueError, RuntimeError) as problem:
            raise ConfigError(
                f"model.attn_implementation is {attention!r}, which cannot be used here: {one_line(problem)[:300]}; install "
                "what it needs, or set sdpa"
            ) from problem
    if liger:
        try:
            from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
        except ImportError as problem:
            raise ConfigError(
                f"model.liger is true and {one_line(problem)}; pip install liger-kernel, or set it to false"
            ) from problem
        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    use_onednn(model)
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only the input of every layer, and compute the layer again in the backward pass, which takes a third more time
    and much less memory. This applies in train mode only, so it does not affect an engine over the same parameters.

    Raises:
        ConfigError: the architecture does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"{type(model).__name__} cannot compute layers again; set model.gradient_checkpointing to false")
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def takes_media(model: PreTrainedModel) -> bool:
    """Return whether the model reads more than text: its config contains a text model's config among others."""
    return model.config.get_text_config() is not model.config


def as_checkpoint(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> StreamedTensors:
    """Return weights of `model` with the names and shapes of its published checkpoint, tied tensors once.

    A transformers class may use the name `model.visual.blocks.0…` for the published `visual.blocks.0…`, or one tensor for
    all experts of a layer; servers read the published form. Such a layer is read as a whole, and converted by the process
    that has its tensors.
    """
    weights = streamed(weights)
    layers: dict[str, list[str]] = {}
    for name in weights.kinds:
        layer = _LAYER.match(name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    kinds: dict[str, TensorKind] = {}
    source: dict[str, list[str]] = {}
    groups: list[list[str]] = []
    for names in layers.values():
        outline = {n: torch.empty(weights.kinds[n].shape, dtype=weights.kinds[n].dtype, device="meta") for n in names}
        names_reverted = revert_weight_conversion(model, outline)  # without values: only names and shapes matter here
        is_same = {n: t.shape for n, t in names_reverted.items()} == {n: t.shape for n, t in outline.items()}
        kinds |= {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in names_reverted.items()}
        source |= {name: [name] if is_same else names for name in names_reverted}
        groups += [[name] for name in names_reverted] if is_same else [list(names_reverted)]
    if kinds == weights.kinds:
        return weights

    def sources(names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(needed for name in names for needed in source[name]))

    def bring(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return dict(revert_weight_conversion(model, {name: weights[name] for name in sources(names)}))

    there = weights.use_there
    if there is None:
        return StreamedTensors(kinds, bring, groups=groups)
    conversion = _Conversion(type(model), model.config.to_json_string(), getattr(model, "_weight_conversions", None))

    def use_there(pieces: Sequence[Sequence[str]], use: Callable[..., Any]) -> Any:
        return there([sources(names) for names in pieces], functools.partial(_use_converted, conversion, use))

    return StreamedTensors(kinds, bring, groups=groups, use_there=use_there)


class _Conversion(NamedTuple):
    """Converts tensors to the form of a checkpoint in a process that need not have the model."""

    kind: Any
    """The model's class."""
    config: str
    own: Any
    """The conversions with which transformers loaded the model; None takes those of its class."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outline = _outline(self.kind, self.config)
        outline._weight_conversions = self.own
        return dict(revert_weight_conversion(outline, dict(tensors)))


@functools.lru_cache(maxsize=1)
def _outline(kind: Any, config: str) -> PreTrainedModel:
    with torch.device("meta"):
        outline: PreTrainedModel = kind(kind.config_class.from_dict(json.loads(config)))
    return outline


def _use_converted(
    conversion: _Conversion, use: Callable[..., Any], tensors: Iterator[Mapping[str, torch.Tensor]], end: Any
) -> Any:
    return use((conversion(piece) for piece in tensors), end)


def _save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write the files of a model's folder except weights."""
    folder.mkdir(parents=True)
    config = copy.deepcopy(model.config)  # the live config belongs to the trained model
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def save_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: ProcessorMixin | None = None,
    adapter_only: bool = False,
    tensors: Mapping[str, torch.Tensor] | None = None,
    merged: bool = True,
) -> Path:
    """Write `model` to `folder`, replacing the folder, with the tokenizer, its chat template, and the processor of a model
    that reads more than text; return `folder`.

    An adapter is merged into the weights, or left out if not `merged`. With `adapter_only`, or with `tensors`, only the
    adapter is written, in peft's format. `tensors` replace the tensors that training changes, and are read a few at a time.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    fresh, old = folder.with_name(f".{folder.name}.{mark}.new"), folder.with_name(f".{folder.name}.{mark}.old")
    try:
        if lora.has_lora(model) and (adapter_only or tensors is not None):
            lora.save_adapter(model, fresh, tensors)
        else:
            _save_config(model, fresh)
            if tensors is None:
                tensors = plain_weights(model) if merged else lora.base_weights(model)
            write_safetensors(as_checkpoint(model, tensors).buckets(), fresh)
        if processor is not None:
            processor.save_pretrained(fresh)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        # Two renames, because a folder that is not empty cannot be replaced in one.
        if folder.exists():
            os.replace(folder, old)
        try:
            os.replace(fresh, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; tied tensors count once."""
    return sum(p.numel() for p in model.parameters())
