"""A second module over the same parameters: the engine's own view of the trainer's model.

Separate because of one promise: storage is shared and nothing else is. The trainer's module stays in train mode with its
gradients and hooks' state; the twin is in eval mode, wants no gradients, and sees every in-place change of the parameters
(an optimizer step) at once, so a weight sync copies nothing.
"""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def share_parameters(model: M) -> M:
    """Return a copy of `model`'s structure whose parameters and buffers use the same memory.

    Parameters become new, gradient-free `Parameter` objects over the same storage (tied ones stay tied); buffers, also
    those outside the state dict such as rotary frequencies, are the same tensors. Configs and plain attributes are copied.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer
    twin = copy.deepcopy(model, memo)
    return twin.eval()
