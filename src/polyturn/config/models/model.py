"""The section `model`: which weights, tokenizer and chat template, and whether all weights are trained or an adapter.

    model: {path: Qwen/Qwen3-0.6B, dtype: bfloat16, lora: {rank: 16}}

A model comes from a folder or the hub (`path`) or has random weights (`init`): exactly one of the two.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polyturn.config.models.base import Section
from polyturn.training.options import LoraSettings


class TrainTokenizerConfig(Section):
    """A byte-level BPE tokenizer trained when the run starts, for models that have none yet."""

    PART: ClassVar[str] = "one that is trained"

    corpus: str
    """`file.py:function` that returns the texts to train on."""
    vocab_size: int = Field(512, ge=300, le=2**24)
    """Tokens of the vocabulary."""


class AnyModelConfig(Section):
    """A model: weights from a folder or hub id, or random weights from an architecture."""

    path: str | None = None
    """Folder or hub id of a Hugging Face model."""
    revision: str | None = None
    """Branch, tag or commit of `path` on the hub."""
    init: dict[str, Any] | None = None
    """Architecture of a model with random weights: `model_type` and that type's config keys."""
    tokenizer: str | TrainTokenizerConfig | None = None
    """Folder or hub id of the tokenizer, or what one is trained on when the run starts; defaults to `path`."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own, or the file that holds it."""
    template_kwargs: dict[str, Any] = {}
    """Passed to the chat template at every render, for instance {enable_thinking: false}."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the parameters, in training and in the embedded engine. With bfloat16 the optimizer keeps float32 masters."""
    lora: LoraSettings | None = None
    """Train an adapter; null trains all weights."""

    @model_validator(mode="after")
    def _one_source(self) -> AnyModelConfig:
        if (self.path is None) == (self.init is None):
            raise ValueError(
                "set exactly one of model.path (weights from a folder or hub id) and model.init (random weights)"
            )
        if self.init is not None and not self.tokenizer:
            raise ValueError(
                "a model from model.init needs model.tokenizer: a folder, a hub id, or a corpus to train one on"
            )
        return self


class ModelConfig(AnyModelConfig):
    """The model: weights from a folder or hub id, or random weights from an architecture."""

    processor: str | None = None
    """What makes a model's inputs of images, videos and sounds: a folder or hub id, `file.py:function`, which is called with
    the tokenizer, or `none`. Defaults to the one in `path`, for a model that takes more than text."""
    gradient_checkpointing: bool = False
    """Compute every layer again in the backward pass instead of keeping its activations: more time, much less memory."""
    attn_implementation: str | None = None
    """Attention as transformers names it (sdpa, flash_attention_2, …); null takes the model's own. Packed rows have one
    of their own."""
    liger: bool = False
    """Use Liger's fused kernels where the architecture has them: less memory and time on a GPU (liger-kernel)."""
    reference: str | None = None
    """Folder or hub id of the reference of the KL term; null takes the model as it is when training starts."""
