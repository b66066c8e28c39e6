"""Log-probabilities of a micro-batch's targets under a causal language model, in the one meaning used everywhere:
log_softmax(logits / temperature) over the full vocabulary.

Separate because this is where the time and memory of training go. The vocabulary projection runs only where a target is
read off: hidden states are gathered first. Whether a model's logits really are its output embedding applied to the last
hidden state (some scale or cap them) is not guessed from its class: it is tried once, on a few tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.algorithms.kl import entropy
from polyturn.batching.layout import MicroBatch


class TargetScores(NamedTuple):
    """What the forward pass gives for each target."""

    logprobs_S: Tensor
    """[S] float32 (or wider), with gradient unless the caller turned gradients off."""
    entropy_S: Tensor | None
    """[S] entropy of the distribution that each target was drawn from; None unless asked for."""


class TargetForward:
    """The forward pass of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._head: nn.Module | None = _separate_head(model)

    @property
    def is_sparse(self) -> bool:
        """Whether the vocabulary projection runs at the targets only."""
        return self._head is not None

    def __call__(self, batch: MicroBatch, *, entropy_grad: bool | None = None) -> TargetScores:
        """Return the log-probability of each target of `batch`, and the entropy.

        Args:
            batch: What `layout` made, on the model's device.
            entropy_grad: None computes no entropy, False without gradient (a metric), True with (a loss term).
        """
        logits_SV = self._logits(batch)
        logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
        if batch.temperature_S is not None:
            logits_SV = logits_SV / batch.temperature_S[:, None]
        logprobs_SV = torch.log_softmax(logits_SV, dim=-1)
        logprobs_S = logprobs_SV.gather(1, batch.targets_S[:, None])[:, 0]
        if entropy_grad is None:
            return TargetScores(logprobs_S, None)
        return TargetScores(logprobs_S, entropy(logprobs_SV if entropy_grad else logprobs_SV.detach()))

    def _logits(self, batch: MicroBatch) -> Tensor:
        # No attention mask: rows are padded on the right and attention is causal, so no target sees a padded position,
        # and without a mask the attention kernel never builds a T x T one.
        inputs = {
            "input_ids": batch.input_ids_BT,
            "position_ids": batch.position_ids,
            **{name: v.to(self._model.dtype) if v.is_floating_point() else v for name, v in batch.media_inputs.items()},
            "use_cache": False,
        }
        if self._head is None:
            return self._model(**inputs).logits.flatten(0, 1)[batch.flat_S]
        hidden_BTH = self._model.base_model(**inputs).last_hidden_state
        logits: Tensor = self._head(hidden_BTH.flatten(0, 1).index_select(0, batch.flat_S))
        return logits


def _separate_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output embedding if it alone turns the backbone's last hidden state into the model's logits."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return None
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device)[None] % model.config.get_text_config().vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits
            parts = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    finally:
        model.train(was_training)
    is_same = whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-4, atol=1e-5)
    return head if is_same else None
