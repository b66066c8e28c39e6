"""Models that score and are never trained: the reference of a KL term, and a teacher.

    FrozenModel        a separate module: a copy of the model at the start of the run, or another checkpoint
    AdapterReference   the trained model with its initial adapter: no second copy of the weights

Checkpoints contain the weights that are in no other file: the copy, and the initial adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polyturn.batching.layout import MicroBatch
from polyturn.core.errors import ConfigError
from polyturn.training.lora import adapter_tensors
from polyturn.training.model import ScoringModel

Replaced = Callable[[nn.Module, Mapping[str, Tensor]], AbstractContextManager[None]]


class Scorer(Protocol):
    """Computes log-probabilities without gradient."""

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        ...

    def kept(self) -> dict[str, Tensor] | None:
        """Return name -> live tensor for checkpoints; None if the tensors are in another file."""
        ...


class FrozenModel:
    """A model with frozen weights that scores tokens."""

    def __init__(self, network: ScoringModel, *, is_kept: bool, release: Callable[[ScoringModel], object]) -> None:
        """Score with `network`, which checkpoints contain if it `is_kept`. `release` frees the memory that a pass
        gathered."""
        self.network = network
        self._is_kept = is_kept
        self._release = release

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        with torch.no_grad():
            logprobs = self.network.scores(batch)
        self._release(self.network)
        return logprobs

    def kept(self) -> dict[str, Tensor] | None:
        """Return the weights if checkpoints keep them."""
        return self.network.own_tensors() if self._is_kept else None


class AdapterReference:
    """The trained model with the adapter it had when this object was made."""

    def __init__(self, network: ScoringModel, replaced: Replaced) -> None:
        """Score with `network`; `replaced` exchanges its adapter during a pass."""
        self._network = network
        self._replaced = replaced
        self._adapter: dict[str, Tensor] = {n: t.clone() for n, t in adapter_tensors(network.saved).items()}

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        was_training = self._network.training
        self._network.eval()  # an adapter's dropout is only for training
        try:
            with torch.no_grad(), self._replaced(self._network.saved, self._adapter):
                return self._network.scores(batch)
        finally:
            self._network.train(was_training)

    def kept(self) -> dict[str, Tensor]:
        """Return the initial adapter."""
        return self._adapter


def require_same_vocabulary(model: PreTrainedModel, other: PreTrainedModel, *, name: str) -> None:
    """Raise unless `other` has the same vocabulary as the trained model.

    Raises:
        ConfigError: the sizes of the vocabularies do not match.
    """
    own, its = (m.config.get_text_config().vocab_size for m in (model, other))
    if own != its:
        raise ConfigError(
            f"the {name} has a vocabulary of {its} and the model of {own}; log-probabilities of the same ids can only "
            "be compared between models with the same tokenizer"
        )
