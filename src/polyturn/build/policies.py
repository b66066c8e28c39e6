"""Build the further policies of a run from the section `policies`: each has a model, a tokenizer and an engine.

opponent  ->  model.py and engine.py, like the run itself, with this policy's `model` and `engine`
past      ->  a copy of the trained model, the run's tokenizer, and a `PolicySnapshot` that training refreshes
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.algorithms.options import RoutingOptions
from polyturn.build.engine import build_engine, untrained
from polyturn.build.model import build_codec, build_model, max_context_of
from polyturn.config.config_source import ConfigSource, folder_or_name, model_folder
from polyturn.config.models import SELF, AnyModelConfig, ModelConfig, PolicyConfig, RolloutConfig
from polyturn.core.errors import ConfigError, PolyturnError
from polyturn.core.generation import SamplingParams
from polyturn.engines.options import EmbeddedOptions
from polyturn.partners.policy import FrozenPolicy
from polyturn.tokens.codec import Codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import ToolCallParser, build_parser

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from polyturn.training.policy_snapshots import PolicySnapshot

MAX_TOKENS = 512
"""Default limit on the tokens of a policy's message."""


@dataclass(frozen=True, kw_only=True)
class FurtherPolicies:
    """The further policies of a run."""

    by_name: dict[str, FrozenPolicy] = dataclasses.field(default_factory=dict)
    snapshots: tuple[PolicySnapshot, ...] = ()
    """The copies of the trained policy."""

    @property
    def busy_s(self) -> float:
        """Seconds that the engines of these policies have spent generating so far."""
        engines: list[Any] = [one.engine for one in self.by_name.values()]
        return float(sum(engine.busy_s for engine in engines))

    def read_metrics(self) -> dict[str, float]:
        """Return the tokens of each policy since the last call, and the version of each copy of the trained policy."""
        metrics = {f"policies/{name}/tokens": float(one.read_tokens()) for name, one in self.by_name.items()}
        return metrics | {f"policies/{one.name}/version": float(one.version or 0) for one in self.snapshots}


def build_policies(
    source: ConfigSource, *, model: PreTrainedModel | None = None, codec: Codec | None = None
) -> FurtherPolicies:
    """Make the further policies of a run; `model` is the trained model, None if this process has none to copy."""
    by_name: dict[str, FrozenPolicy] = {}
    snapshots: list[PolicySnapshot] = []
    for name, one in source.config.policies.items():
        try:
            if one.model != SELF:
                by_name[name] = _frozen(name, one, source)
                continue
            if model is None or codec is None:
                raise ConfigError("model is `self`, the policy in training, and this command does not train; set checkpoint")
            snapshot, by_name[name] = _snapshot(name, one, source, model=model, codec=codec)
            snapshots.append(snapshot)
        except PolyturnError as problem:
            raise ConfigError(f"policies.{name}: {problem}") from problem
    return FurtherPolicies(by_name=by_name, snapshots=tuple(snapshots))


def _frozen(name: str, one: PolicyConfig, source: ConfigSource) -> FrozenPolicy:
    checkpoint = None if one.checkpoint is None else model_folder(source.base / os.path.expanduser(one.checkpoint))
    own = _own_source(one, source, _model_config(one, source, checkpoint))
    codec = build_codec(own, checkpoint=checkpoint)
    model = build_model(own, codec.tokenizer, checkpoint=checkpoint).requires_grad_(False).eval()
    max_context = max_context_of(one.max_context, model, key="max_context")
    engine = build_engine(own, model, tokenizer=codec.tokenizer, media=None, max_context=max_context, checkpoint=checkpoint)
    return _policy(name, one, source, engine=engine, codec=codec, parser=build_parser(codec), max_context=max_context)


def _snapshot(
    name: str, one: PolicyConfig, source: ConfigSource, *, model: PreTrainedModel, codec: Codec
) -> tuple[PolicySnapshot, FrozenPolicy]:
    from polyturn.training.hf import frozen_copy
    from polyturn.training.policy_snapshots import PolicySnapshot

    copied = frozen_copy(model)
    default = source.config.rollout.limits.max_context or 4096
    max_context = max_context_of(one.max_context, copied, default=default, key="max_context")
    own = _own_source(one, source, source.config.model)
    engine = build_engine(own, copied, tokenizer=codec.tokenizer, media=None, max_context=max_context, checkpoint=None)
    snapshot = PolicySnapshot(name=name, model=copied, engine=engine, refresh_every=one.refresh_every)
    parser = build_parser(codec, source.config.rollout.parser, base=source.base)
    return snapshot, _policy(name, one, source, engine=engine, codec=codec, parser=parser, max_context=max_context)


def _policy(
    name: str,
    one: PolicyConfig,
    source: ConfigSource,
    *,
    engine: Any,
    codec: Codec,
    parser: ToolCallParser,
    max_context: int,
) -> FrozenPolicy:
    rollout = source.config.rollout
    key, sampling = ("rollout.sampling", rollout.sampling) if one.sampling is None else ("sampling", one.sampling)
    engine.capabilities.check_temperature(sampling.temperature, key=f"{key}.temperature")
    return FrozenPolicy(
        name,
        engine=engine,
        encoder=DeltaEncoder(codec, escape_prompts=rollout.escape_prompts, escape_observations=rollout.escape_observations),
        parser=parser,
        sampling=SamplingParams.of(
            sampling,
            max_tokens=one.max_tokens or rollout.limits.max_tokens_per_turn or MAX_TOKENS,
        ),
        max_context=max_context,
    )


def _own_source(one: PolicyConfig, source: ConfigSource, model: ModelConfig) -> ConfigSource:
    """Return the configuration of a run with only this policy."""
    config = source.config
    if one.engine is not None and one.engine.update == "sleep":
        raise ConfigError(
            "engine.update is sleep, and only new weights would wake the engine, which a policy without training "
            "never gets; remove engine.update"
        )
    # Servers of the run's model cannot serve another one.
    engine = one.engine or (config.engine if isinstance(config.engine, EmbeddedOptions) else EmbeddedOptions())
    algorithm = dataclasses.replace(config.algorithm, routing=RoutingOptions(replay="off"))
    changed = config.model_copy(
        update={"model": model, "engine": engine, "rollout": RolloutConfig(), "algorithm": algorithm}
    )
    return untrained(ConfigSource(config=changed, base=source.base))


def _model_config(one: PolicyConfig, source: ConfigSource, checkpoint: Path | None) -> ModelConfig:
    own = source.config.model
    if isinstance(one.model, AnyModelConfig):
        return ModelConfig(**dict(one.model))
    if one.model is not None:
        path = folder_or_name(one.model, source.base)
        return ModelConfig(path=path, dtype=own.dtype)
    assert checkpoint is not None  # the config model requires one of the two
    if (checkpoint / "config.json").is_file():
        return ModelConfig(path=str(checkpoint), dtype=own.dtype, template_kwargs=own.template_kwargs)
    return own
