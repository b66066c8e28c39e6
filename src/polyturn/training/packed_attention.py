"""Attention over packed rows with shared prefixes (`batching/packing.py`), for transformers models whose attention can be
replaced.

    CPU   row by row: a row's queries attend to its context and itself. A row without a context is plain causal attention; a
          row with one is computed in blocks of queries, so the largest mask is [BLOCK, row] and never [N, N]
    GPU   one FlexAttention over the flat axis, with k <= q < until[k] as its mask

If a row of ranks splits the axis (`context_parallel.py`), a rank's queries attend to the keys and values of all ranks: on a
CPU in blocks with a mask, on a GPU with the same FlexAttention.

Whether a model can be packed is tested once: a few branching rows must give the same results packed and alone. This detects
sliding windows, capped logits, attention sinks, recurrent layers and custom attention.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from polyturn.batching.packing import Packing, common_prefix, pack, sorted_rows
from polyturn.core.errors import ConfigError, one_line
from polyturn.training.context_parallel import ContextShare

NAME = "polyturn_packed"
BLOCK = 256
"""Number of queries per block in a row with a context."""
_OTHER_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")


class PackedView:
    """A packing on the device of a model, with masks that are made once for all layers."""

    def __init__(self, packing: Packing, device: torch.device, share: ContextShare | None = None) -> None:
        self.packing = packing
        self.share = share
        """This rank's share of the axis; None for all of it."""
        self.num_calls = 0
        """Number of attention calls."""
        self._device = device
        self._band: Tensor | None = None
        self._block_mask: Any = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose attention this rank computes."""
        return self.packing.num_tokens if self.share is None else len(self.share.own_L)

    def causal(self, num_queries: int, num_keys: int, dtype: torch.dtype) -> Tensor:
        """Return [Q, K] the additive mask of the last Q of K tokens: 0, and -inf for later tokens."""
        if self._band is None or self._band.dtype != dtype:
            # One band for all layers and blocks; a mask of another shape is a view of the band, shifted along the diagonal.
            width = max((len(row) for row in self.packing.row_indices), default=0)
            ahead = torch.arange(-width, BLOCK)[None] > torch.arange(BLOCK)[:, None]
            self._band = torch.zeros(ahead.shape, dtype=dtype).masked_fill_(ahead, float("-inf"))
            self._band = self._band.to(self._device, non_blocking=True)
        start = self._band.shape[1] - BLOCK - (num_keys - num_queries)
        return self._band[:num_queries, start : start + num_keys]

    @property
    def block_mask(self) -> Any:
        """The mask of FlexAttention."""
        if self._block_mask is None:
            from torch.nn.attention import flex_attention

            make: Callable[..., Any] = flex_attention.create_block_mask
            if self._device.type == "cuda":
                make = _compiled(make)
            share = self.share
            of_all = torch.from_numpy(self.packing.until_N).to(self._device, non_blocking=True)
            until_N = of_all if share is None else share.until_M
            at_L = torch.arange(self.num_tokens, device=self._device) if share is None else share.own_L

            def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (k <= at_L[q]) & (at_L[q] < until_N[k])

            self._block_mask = make(sees, None, None, len(at_L), len(until_N), device=self._device)
        return self._block_mask


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, view: PackedView, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return [1, H, N, D] the attention of each row over its context and itself.

    Args:
        query: [1, H, N, D].
        key: [1, KV, N, D].
        value: [1, KV, N, D].
        view: The packing.
        scale: Factor on the scores.
        dropout: Probability of dropping a weight.
    """
    attend = functools.partial(
        scaled_dot_product_attention, scale=scale, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
    )
    packing = view.packing
    # `split` instead of slices: its gradient is one concatenation, but the gradient of each slice would be a tensor over the
    # whole axis, filled with zeros.
    keys, values = key.split(packing.pieces, dim=2), value.split(packing.pieces, dim=2)
    own = [row for row in packing.rows if row.own[0] < row.own[1]]
    queries = query.split([sum(packing.pieces[slice(*row.own)]) for row in own], dim=2)
    outs = []
    for row, q in zip(own, queries, strict=True):
        k, v = (_joined([p[i] for i in (*row.context, *range(*row.own))]) for p in (keys, values))
        if not row.context:
            outs.append(attend(q, k, v, is_causal=True))
            continue
        num_before = k.shape[2] - q.shape[2]
        for start in range(0, q.shape[2], BLOCK):
            part = q[:, :, start : start + BLOCK]
            seen = num_before + start + part.shape[2]
            mask = view.causal(part.shape[2], seen, q.dtype)[None, None]
            outs.append(attend(part, k[:, :, :seen], v[:, :, :seen], attn_mask=mask))
    return torch.cat(outs, dim=2)


def attend_share(
    query: Tensor, key: Tensor, value: Tensor, share: ContextShare, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return [1, H, L, D] the attention of this rank's tokens over the keys and values of the whole axis."""
    outs = []
    for start in range(0, query.shape[2], BLOCK):
        block = slice(start, start + BLOCK)
        mask, is_grouped = share.sees(block), query.shape[1] != key.shape[1]
        outs.append(
            scaled_dot_product_attention(
                query[:, :, block], key, value, mask, scale=scale, dropout_p=dropout, enable_gqa=is_grouped
            )
        )
    return torch.cat(outs, dim=2)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, view: PackedView, *, scale: float) -> Tensor:
    """Return the result of `attend_rows`, from one kernel over the flat axis."""
    from torch.nn.attention import flex_attention

    flex: Callable[..., Any] = flex_attention.flex_attention
    if query.device.type == "cuda":
        flex = _compiled(flex)
    is_grouped = query.shape[1] != key.shape[1]
    out: Tensor = flex(query, key, value, block_mask=view.block_mask, scale=scale, enable_gqa=is_grouped)
    return out


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, view: PackedView, *, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Return the result of `attend_rows`, with the fastest kernel of the device; a scale of None is D ** -0.5."""
    scale, share = query.shape[-1] ** -0.5 if scale is None else scale, view.share
    if share is not None:
        key, value = share.gathered(key, value)
    if query.device.type == "cuda" and not dropout:
        return attend_flex(query, key, value, view, scale=scale)
    if share is not None:
        return attend_share(query, key, value, share, scale=scale, dropout=dropout)
    return attend_rows(query, key, value, view, scale=scale, dropout=dropout)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_view: PackedView | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement the attention interface of transformers: [1, H, N, D] in, [1, N, H, D] out.

    Raises:
        ConfigError: the layer requires something other than plain causal attention.
    """
    if packed_view is None:  # another part of the model, such as its vision encoder
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    other = [name for name in _OTHER_ATTENTION if kwargs.get(name) is not None]
    if other:
        raise ConfigError(f"a layer's attention has {' and '.join(other)}")
    packed_view.num_calls += 1
    attended = attend_packed(query, key, value, packed_view, scale=scaling, dropout=dropout)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, packed_attention)


@contextlib.contextmanager
def packed(model: PreTrainedModel) -> Iterator[None]:
    """Let the model's layers attend by rows. A backward pass that computes layers again must also run within the context."""
    # Set in the config, which transformers' layers read in each pass, so no module is replaced.
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def attending(model: PreTrainedModel, packing: Packing | None) -> contextlib.AbstractContextManager[None]:
    """Let the model attend by rows if a micro-batch is packed; otherwise change nothing."""
    return contextlib.nullcontext() if packing is None else packed(model)


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Return the reason why `model` cannot be trained on packed rows, tested on branching rows; None if it can."""
    config = model.config.get_text_config()
    if (why := other_attention(model)) is not None:
        return why
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _trial(model, num_layers=int(config.num_hidden_layers), vocab=int(config.vocab_size))
    except (ConfigError, RuntimeError, TypeError, ValueError) as problem:  # an error of the model's code is the reason
        return one_line(problem)
    finally:
        model.train(was_training)


def other_attention(model: PreTrainedModel) -> str | None:
    """Return the reason, from its config, why `model` cannot be trained on packed rows; None if there is none."""
    config = model.config.get_text_config()
    if config._attn_implementation == "eager":
        return "its attention is the eager one"
    layer_types = config.to_dict().get("layer_types") or []
    if other := sorted(set(layer_types) - {"full_attention"}):
        return f"it has layers of {' and '.join(other)}"
    return None


def _trial(model: PreTrainedModel, *, num_layers: int, vocab: int) -> str | None:
    """Compare packed rows with the same rows alone, and test whether a row reads another one's tokens."""
    parameter = next(model.parameters())
    rows = [np.array(r) % vocab for r in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 5], [1, 2, 3, 7, 8, 9], [9, 2, 3])]
    rows = [rows[i] for i in sorted_rows(rows)]
    packing = pack(rows, shared=[0, *itertools.starmap(common_prefix, itertools.pairwise(rows))])
    view = PackedView(packing, parameter.device)
    ids = torch.zeros((1, packing.num_tokens), dtype=torch.int64, device=parameter.device)
    for span, row in zip(packing.row_indices, rows, strict=True):
        ids[0, span] = torch.from_numpy(row).to(ids)
    positions = torch.from_numpy(packing.positions_N)[None].to(ids)
    # Tokens that only the first row has. Changing them must not change the results of other tokens on the flat axis.
    is_own = torch.from_numpy(packing.until_N == len(rows[0])).to(parameter.device)

    def hidden(ids: Tensor, **inputs: Any) -> Tensor:
        out: Tensor = model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state[0]
        return out

    with packed(model):
        flat = hidden(ids, position_ids=positions, packed_view=view)
        other = hidden(torch.where(is_own, (ids + 1) % vocab, ids), position_ids=positions, packed_view=view)
    if view.num_calls < 2 * num_layers:
        return f"{view.num_calls // 2} of its {num_layers} layers let their attention be replaced"
    # A row that reads another one changes by a tenth and more. One that does not may still round otherwise, because changed
    # tokens go to other experts, whose matrices then have other sizes. bfloat16 rounds by 2^-8 in every layer.
    leak, apart = (1e-5, 1e-3) if parameter.dtype.itemsize >= 4 else (0.03, 0.1)
    if not _is_close(flat[~is_own], other[~is_own], leak):
        return "a row of its packed rows reads another one"
    for span, row in zip(packing.row_indices, rows, strict=True):
        if not _is_close(flat[torch.from_numpy(span)], hidden(torch.from_numpy(row).to(ids)[None]), apart):
            return "packed rows give other hidden states than rows alone"
    return None


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether two tensors differ by at most `tolerance` times the largest number."""
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
