"""The section `policies`: further policies of the run, by name, which speak and are not trained.

    policies:
      opponent: {model: Qwen/Qwen3-0.6B, engine: {kind: vllm}}
      earlier:  {checkpoint: runs/nim/checkpoints/step-000040}
      past:     {model: self, refresh_every: 10}

A name stands wherever a model may speak: a seat of a game, a simulated user, a judge.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from polyturn.config.models.base import Section
from polyturn.config.models.model import AnyModelConfig
from polyturn.core.generation import Sampling
from polyturn.engines.options import AnyEngineOptions

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
    """What it is sampled from; null is an embedded engine with the settings of the run's, where that is embedded too."""
    sampling: Sampling | None = None
    """How it is sampled; null as the policy that is trained is in training."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that it says at once, where whoever asks it does not say; null takes rollout.limits.max_tokens_per_turn."""
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
