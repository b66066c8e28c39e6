"""Load weights into a model that is already sharded: each rank reads only its part of every tensor.

    outline (meta)  -- fully_shard -->  shards (meta)  -- read_weights -->  this rank's part of the tensors in the files
                                                       -- take_weights -->  copies of shards that this rank already has

transformers maps the tensors of files to the tensors of the model (renamed, merged or tied), and cuts them like a `DTensor`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import LoadStateDictConfig

from polyturn.core.errors import ConfigError, one_line
from polyturn.training.lora import plain_name

logger = logging.getLogger(__name__)

_INDEX, _SINGLE, _KIND = "model.safetensors.index.json", "model.safetensors", "*.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's weights; empty if they have another format.

    Raises:
        ConfigError: their index cannot be read.
    """
    if (index := folder / _INDEX).is_file():
        try:
            return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ConfigError(f"{index} cannot be read ({one_line(problem)}); copy the model again") from problem
    return [folder / _SINGLE] if (folder / _SINGLE).is_file() else sorted(folder.glob(_KIND))


def is_unread(model: PreTrainedModel) -> bool:
    """Return whether `model` has parameters without values."""
    return any(parameter.is_meta for parameter in model.parameters())


def read_weights(model: PreTrainedModel, device: torch.device, *, only: Collection[str] | None = None) -> int:
    """Fill the shards of an unread model from its folder, and return the number of bytes read.

    Args:
        model: A sharded model without weights; an adapter in it already has values.
        device: Device of the weights.
        only: Names, in a model without an adapter, of the weights to read; None reads all.

    Raises:
        ConfigError: the folder has the weights of another model.
    """
    mapping: list[Any] = get_model_conversion_mapping(model)
    folder, read = Path(str(model.name_or_path)), list[int]()
    with ExitStack() as opened:
        parts: dict[str, _CountedSlice] = {}
        for file in weight_files(folder):
            try:
                file_tensors = opened.enter_context(safe_open(str(file), framework="pt"))
            except (OSError, SafetensorError) as problem:  # of a download that was interrupted
                raise ConfigError(
                    f"the weights in {folder} cannot be read ({one_line(problem)}); copy it again"
                ) from problem
            parts |= {name: _CountedSlice(file_tensors.get_slice(name), read) for name in file_tensors.keys()}  # noqa: SIM118
        info, _ = PreTrainedModel._load_pretrained_model(
            model,
            _under_own_names(parts, model, mapping, only),
            None,
            LoadStateDictConfig(dtype=model.dtype, device_map={"": str(device)}, weight_mapping=mapping),
        )
    wrong = sorted(name for name, *_ in info.mismatched_keys)
    # Before looking for missing weights: a tied tensor is in no file, and gets its values here.
    _settle(model, device)
    unread = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    wrong += [name for name in unread if only is None or plain_name(name) in only]
    if wrong:
        raise ConfigError(
            f"the weights in {folder} do not fit its config.json: {wrong[0]!r} is missing or has another shape; "
            "give a folder that `save_pretrained` wrote"
        )
    logger.info("read %.1f MB of the weights in %s", sum(read) / 1e6, folder)
    return sum(read)


def take_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Fill the shards of a model with copies of `tensors`.

    Args:
        model: A sharded model, without weights or with weights that are overwritten.
        tensors: Name -> shard of a parameter or saved buffer, from a model that is cut in the same way.
        device: Device of new tensors.
    """
    was_unread = is_unread(model)
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()}, assign=was_unread)
    if was_unread:
        _settle(model, device)


def _under_own_names(
    parts: Mapping[str, Any], model: PreTrainedModel, mapping: list[Any], only: Collection[str] | None
) -> dict[str, Any]:
    """Return a file's tensors (`only` some), renamed for layers that an adapter wraps."""
    adapted = {plain_name(name): name for name in model.state_dict()}
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamed = {}
    for name, part in parts.items():
        own, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, adapted)
        if only is not None and plain_name(own) not in only:
            continue
        inside = adapted.get(own, "")
        renamed[inside if ".base_layer." in inside else name] = part
    return renamed


def _settle(model: PreTrainedModel, device: torch.device) -> None:
    """Tie weights, and compute the buffers that are in no file, such as those of rotary positions."""
    model.tie_weights()
    # Marked tensors keep their values: `initialize_weights` is called only for the buffers, which the model computes.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # how transformers knows what to leave alone
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))
    model.initialize_weights()


class _CountedSlice:
    """A tensor in a file that is read in parts; counts the bytes."""

    def __init__(self, part: Any, read: list[int]) -> None:
        self._part = part
        self._read = read

    def get_shape(self) -> list[int]:
        shape: list[int] = self._part.get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._part.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> Tensor:
        # safetensors returns a view of the whole file; copy the part, so that it starts its own storage.
        tensor: Tensor = self._part[index].clone(memory_format=torch.contiguous_format)
        self._read.append(tensor.nbytes)
        return tensor
