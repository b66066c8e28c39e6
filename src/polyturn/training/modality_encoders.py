"""Modality encoders: the parts of a model that run only on batches with images, video or sound.

    rank 0   [ image + text ]   visual, language_model
    rank 1   [ text ]                   language_model      visual is touched: its gradient is 0, not None

Every rank must join every collective. An encoder that is sharded by itself would be gathered only on ranks that run it. So
encoders are sharded with the root, and each of their parameters has a gradient on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def encoders_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the outermost modules of a model's backbone outside its decoder; empty if the backbone is the decoder."""
    backbone = model.base_model
    assert isinstance(backbone, PreTrainedModel)
    decoder = backbone.get_decoder()
    if decoder is backbone:
        return []
    inside = set(decoder.modules())
    encoders: list[nn.Module] = []
    around: list[nn.Module] = [backbone]
    while around:
        for child in around.pop().children():
            if child is decoder or child in inside:
                continue
            if decoder in child.modules():
                around.append(child)
            else:
                encoders.append(child)
    return encoders


def layers_of(model: PreTrainedModel, encoders: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers outside `encoders`: they run on every batch, so each may be sharded by itself."""
    kinds = set(model._no_split_modules or ())
    apart = {module for encoder in encoders for module in encoder.modules()}
    return [module for module in model.modules() if type(module).__name__ in kinds and module not in apart]


def touching(out: Tensor, encoders: Sequence[nn.Module]) -> Tensor:
    """Return `out` plus 0 times an element of each trained parameter of `encoders`, so that all get gradients."""
    if not torch.is_grad_enabled():
        return out
    # One element of a parameter puts the whole parameter into the graph.
    for parameter in (p for encoder in encoders for p in encoder.parameters() if p.requires_grad and p.numel()):
        out = out + 0.0 * parameter.reshape(-1)[0]
    return out
