"""Models that are scored and never trained: the reference of a KL term, and a teacher.

    FrozenModel        a module of its own: a copy of the model at the start of the run, or another checkpoint
    AdapterReference   the trained model itself with its adapter as it was at the start: no second copy of the weights

What belongs to the run and to no file is kept in its checkpoints: the copy, and an adapter that was not zero.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polyturn.batching.layout import MicroBatch
from polyturn.core.errors import CheckpointError, ConfigError
from polyturn.training.forward import TargetForward
from polyturn.training.lora import adapter_off, adapter_replaced, adapter_tensors, has_lora
from polyturn.training.optim import clone_tensors


class Scorer(Protocol):
    """Gives log-probabilities without gradient."""

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a checkpoint must keep; None where there is nothing."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        ...


class FrozenModel:
    """A module that stays as it is."""

    def __init__(self, model: PreTrainedModel, *, is_kept: bool) -> None:
        """Wrap `model`; `is_kept` says whether checkpoints hold it, because no file does."""
        self._model = model.requires_grad_(False).eval()
        self._forward = TargetForward(self._model)
        self.is_kept = is_kept

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        with torch.no_grad():
            return self._forward(batch).logprobs_S

    def state_dict(self) -> dict[str, Any] | None:
        """Return the weights where they are kept."""
        if not self.is_kept:
            return None
        state: dict[str, Any] = clone_tensors(self._model.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write the weights in place.

        Raises:
            CheckpointError: they are another model's.
        """
        try:
            self._model.load_state_dict(dict(state))
        except RuntimeError as problem:
            raise CheckpointError(f"the checkpoint's reference does not fit this model: {problem}") from problem


class AdapterReference:
    """The trained model with its adapter as it was when this was made: off, if it was zero then."""

    def __init__(self, model: PreTrainedModel, forward: TargetForward) -> None:
        self._model = model
        self._forward = forward
        tensors = adapter_tensors(model)
        is_zero = all(not tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)
        self._adapter: dict[str, Tensor] | None = None if is_zero else clone_tensors(tensors)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return [S] the log-probability of each target."""
        was_training = self._model.training
        self._model.eval()
        former = adapter_off(self._model) if self._adapter is None else adapter_replaced(self._model, self._adapter)
        try:
            with torch.no_grad(), former:
                return self._forward(batch).logprobs_S
        finally:
            self._model.train(was_training)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the adapter of the start, if there was one."""
        return clone_tensors(self._adapter) if self._adapter is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the adapter of the start."""
        self._adapter = clone_tensors(state) or None


def make_reference(model: PreTrainedModel, forward: TargetForward, source: bool | PreTrainedModel) -> Scorer | None:
    """Return the reference that `source` asks for: none, the model as it is now, or another model.

    Raises:
        ConfigError: the other model has another vocabulary.
    """
    if source is False:
        return None
    if source is not True:
        require_same_vocabulary(model, source, name="reference")
        return FrozenModel(source, is_kept=False)
    if has_lora(model):
        return AdapterReference(model, forward)
    return FrozenModel(copy.deepcopy(model), is_kept=True)


def require_same_vocabulary(model: PreTrainedModel, other: PreTrainedModel, *, name: str) -> None:
    """Refuse a model that cannot read the trained model's ids.

    Raises:
        ConfigError: it has a smaller vocabulary, or another one by its size.
    """
    own, its = (m.config.get_text_config().vocab_size for m in (model, other))
    if own != its:
        raise ConfigError(
            f"the {name} has a vocabulary of {its} and the model of {own}; log-probabilities of the same ids can only be "
            "compared between models of one tokenizer"
        )
