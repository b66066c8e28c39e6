"""The sections `model` and `policies`: the trained model, and further models that sample and are not trained.

    model: {path: Qwen/Qwen3-0.6B, dtype: bfloat16, lora: {rank: 16}}
    policies:
      opponent: {model: Qwen/Qwen3-0.6B, engine: {kind: vllm}}
      earlier:  {checkpoint: runs/nim/checkpoints/step-000040}
      past:     {model: self, refresh_every: 10}

A model comes from a folder or the hub (`path`), or has random weights (`init`): exactly one of the two. A further policy's
name can be used for a seat of a game, a simulated user or a judge.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from polyturn.config.parts import Section
from polyturn.core.generation import Sampling
from polyturn.engines.options import AnyEngineOptions
from polyturn.infra.live import NameOrObject
from polyturn.training.options import LoraSettings


class TrainTokenizerConfig(Section):
    """A byte-level BPE tokenizer trained at the start of the run, for models without a tokenizer."""

    PART: ClassVar[str] = "one that is trained"

    corpus: NameOrObject
    """`file.py:function` that returns the texts to train on."""
    vocab_size: int = Field(512, ge=300, le=2**24)
    """Size of the vocabulary."""

    @field_validator("corpus", mode="before")
    @classmethod
    def _is_a_function(cls, corpus: Any) -> Any:
        if isinstance(corpus, list | tuple):
            raise ValueError("write a function that returns the texts, and give its name: file.py:function")
        return corpus


class AnyModelConfig(Section):
    """A model: weights from a folder or hub id, or random weights from an architecture."""

    path: NameOrObject | None = None
    """Folder or hub id of a Hugging Face model."""
    revision: str | None = None
    """Branch, tag or commit of `path` on the hub."""
    init: dict[str, Any] | None = None
    """Architecture of a model with random weights: `model_type` and that type's config keys."""
    tokenizer: NameOrObject | TrainTokenizerConfig | None = None
    """Folder or hub id of the tokenizer, or options to train one at the start of the run; defaults to `path`."""
    chat_template: str | None = None
    """A chat template in place of the tokenizer's: `hermes`, which supports tools, a file, or Jinja source."""
    template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, for instance {enable_thinking: false}."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the parameters in training and in the embedded engine. auto: bfloat16 on CUDA GPUs that support it, otherwise
    float32. With bfloat16 the optimizer keeps float32 master weights, and gradients are summed in float32."""
    lora: LoraSettings | None = None
    """Options of a LoRA adapter; with null, all weights are trained."""

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

    processor: NameOrObject | None = None
    """The processor of images, videos and sounds: a folder or hub id, `file.py:function`, which is called with the
    tokenizer, or `none`. Defaults to the one in `path` if the model reads more than text."""
    gradient_checkpointing: bool = False
    """Compute every layer again in the backward pass instead of keeping its activations: slower, with much less memory."""
    attn_implementation: str | None = None
    """Name of the attention in transformers (sdpa, flash_attention_2, …); null takes the model's default. Packed rows use
    polyturn's attention."""
    liger: bool = False
    """Use Liger's fused kernels if they support the architecture: less memory and time on a GPU (liger-kernel)."""
    reference: str | None = None
    """Folder or hub id of the reference for the KL term; null takes the model at the start of training."""


SELF = "self"
"""Name of the trained policy in place of a policy's model."""


class PolicyConfig(Section):
    """A further policy of the run, which samples and is not trained."""

    model: str | AnyModelConfig | None = None
    """A folder or hub id; keys of the section `model`, except those for training; or `self`, a copy of the trained
    policy."""
    checkpoint: str | None = None
    """Weights and tokenizer that replace `model`'s: a checkpoint, a run's folder (its latest checkpoint) or a model's
    folder. For an adapter, `model` is its base model; null takes the model of the run."""
    refresh_every: int | None = Field(None, ge=1)
    """For `self`: number of steps between refreshes of the copy; null keeps the policy at the start of training."""
    engine: AnyEngineOptions | None = None
    """Engine of the policy; null is an embedded engine, with the settings of the run's engine if that is embedded too."""
    sampling: Sampling | None = None
    """Sampling of the policy; null takes the trained policy's sampling in training."""
    max_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens per completion, unless the caller sets it; null takes rollout.limits.max_tokens_per_turn."""
    max_context: int | None = Field(None, ge=2)
    """Largest length of prompt plus completion, in tokens; null takes the model's limit, at most 4,096, and for `self` the
    run's."""

    @model_validator(mode="after")
    def _speaks(self) -> PolicyConfig:
        if self.model is None and self.checkpoint is None:
            raise ValueError(
                "a policy needs a model (a folder, a hub id, or self for a copy of the trained policy) or a checkpoint"
            )
        if self.model == SELF and self.checkpoint is not None:
            raise ValueError(f"model is self and checkpoint is {self.checkpoint!r}: remove one of them")
        if self.model == SELF and self.engine is not None and self.engine.kind != "embedded":
            raise ValueError(
                f"model is self and engine.kind is {self.engine.kind!r}; a copy of the trained policy needs an "
                "embedded engine"
            )
        if self.model != SELF and self.refresh_every is not None:
            raise ValueError(
                f"refresh_every is {self.refresh_every} and model is not self; only a copy of the trained policy can "
                "be refreshed"
            )
        return self
