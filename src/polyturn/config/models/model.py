"""The sections `model` and `policies`: the model that is trained, and further ones, which speak and are not trained.

    model: {path: Qwen/Qwen3-0.6B, dtype: bfloat16, lora: {rank: 16}}
    policies:
      opponent: {model: Qwen/Qwen3-0.6B, engine: {kind: vllm}}
      earlier:  {checkpoint: runs/nim/checkpoints/step-000040}
      past:     {model: self, refresh_every: 10}

A model comes from a folder or the hub (`path`) or has random weights (`init`): exactly one of the two. The name of a further
policy stands wherever a model may speak: a seat of a game, a simulated user, a judge.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from polyturn.config.parts import Section
from polyturn.core.generation import Sampling
from polyturn.core.live import NameOrObject
from polyturn.engines.options import AnyEngineOptions
from polyturn.training.options import LoraSettings


class TrainTokenizerConfig(Section):
    """A byte-level BPE tokenizer trained when the run starts, for models that have none yet."""

    PART: ClassVar[str] = "one that is trained"

    corpus: NameOrObject
    """`file.py:function` that returns the texts to train on."""
    vocab_size: int = Field(512, ge=300, le=2**24)
    """Tokens of the vocabulary."""

    @field_validator("corpus", mode="before")
    @classmethod
    def _is_a_function(cls, corpus: Any) -> Any:
        if isinstance(corpus, list | tuple):
            raise ValueError("write a function that returns these texts, and name it: file.py:function")
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
    """Folder or hub id of the tokenizer, or what one is trained on when the run starts; defaults to `path`."""
    chat_template: str | None = None
    """A chat template that replaces the tokenizer's own: `hermes`, which shows tools, a file, or Jinja source."""
    template_kwargs: dict[str, Any] = {}
    """Passed to the chat template at every render, for instance {enable_thinking: false}."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the parameters, in training and in the embedded engine. auto takes bfloat16 on a CUDA GPU that has it, and float32
    elsewhere. With bfloat16 the optimizer keeps float32 masters, and gradients are summed in float32."""
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

    processor: NameOrObject | None = None
    """The processor of images, videos and sounds: a folder or hub id, `file.py:function`, which is called with
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


SELF = "self"
"""Names the policy that is trained, where a policy's model is asked for."""


class PolicyConfig(Section):
    """A further policy of the run, which speaks and is not trained."""

    model: str | AnyModelConfig | None = None
    """A folder or hub id, or keys of the section `model`, without those of training; or `self`: a copy of the policy that is
    trained."""
    checkpoint: str | None = None
    """Weights and tokenizer in place of those of `model`: a checkpoint, a run's folder (its latest checkpoint) or a model's.
    Where it is an adapter, `model` says what it was put on; null for the model of the run."""
    refresh_every: int | None = Field(None, ge=1)
    """Of `self`: the copy is taken again every so many steps; null keeps what the policy was when training started."""
    engine: AnyEngineOptions | None = None
    """Its engine; null is an embedded engine with the settings of the run's, where that is embedded too."""
    sampling: Sampling | None = None
    """Its sampling; null is that of the trained policy in training."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of one completion, unless its caller says otherwise; null takes rollout.limits.max_tokens_per_turn."""
    max_context: int | None = Field(None, ge=2)
    """Its longest prompt and answer together; null is its model's own limit, at most 4,096; of `self`, the run's."""

    @model_validator(mode="after")
    def _speaks(self) -> PolicyConfig:
        if self.model is None and self.checkpoint is None:
            raise ValueError(
                "a policy needs a model (a folder, a hub id, or self for a copy of the one that is trained) or a checkpoint"
            )
        if self.model == SELF and self.checkpoint is not None:
            raise ValueError(f"model is self and checkpoint is {self.checkpoint!r}: drop one of the two")
        if self.model == SELF and self.engine is not None and self.engine.kind != "embedded":
            raise ValueError(
                f"model is self and engine.kind is {self.engine.kind!r}; a copy of the policy that is trained is embedded"
            )
        if self.model != SELF and self.refresh_every is not None:
            raise ValueError(
                f"refresh_every is {self.refresh_every} and model is not self; only a copy of the policy that is trained is "
                "taken again"
            )
        return self
