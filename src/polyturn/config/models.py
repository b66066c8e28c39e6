"""The configuration of a run as frozen models, with the type, default and meaning of every key.

    name: quickstart
    model: {path: Qwen/Qwen3-0.6B, dtype: bfloat16, lora: {rank: 16}}
    policies: {opponent: {model: Qwen/Qwen3-0.6B, engine: {kind: vllm}}, past: {model: self, refresh_every: 10}}
    data: {train: {files: train.parquet}, sampler: {name: mix, weights: {gsm8k: 2, search: 1}}}
    env: {name: gymnasium:FrozenLake-v1, tasks: 256}           # in place of data, rollout.scheduler and a reward
    rollout: {sampling: {temperature: 1.0}, limits: {max_turns: 4}, tools: {functions: [tools.py]}}
    reward: {routes: {"own/*": rewards.py:score}, weights: {outcome: 1.0, tool_step: 0.5}}
    algorithm: {advantage: {name: gae, lam: 0.95}, loss: {clip_high: 0.28, correction: {cap: 2.0}}, kl: {coef: 0.01}}
    evaluation: {data: {files: test.parquet}, every: 20, sets: {greedy: {}, avg8: {samples: 8}}}
    cluster: {address: auto, engines: {count: 4, resources: {GPU: 1}}}

`RunConfig` is the root. A rule about one section is in that section's class; rules about several sections are in the root.
A section that occurs several times (optimizers of the policy, the critic and the warm start; tasks for training and
evaluation; models, engines and sampling of the run and of further policies) is one class. Occurrences may have other
defaults, never other keys. The options of a part are a dataclass in its package (`engines/options.py`, `tools/options.py`,
…), used here directly.

`config/load.py` reads the YAML, and `build` makes objects from it. Paths are relative to the config file. A plug-in is named
by a registered name, `package.module:Attr` or `file.py:Attr`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from polyturn.algorithms.estimator_options import EstimatorOptions, GroupOptions, NamedEstimatorOptions
from polyturn.algorithms.loss_options import LossOptions, NamedLossOptions, PpoOptions
from polyturn.algorithms.options import AlgorithmOptions, CorrectionSettings, DistillSettings
from polyturn.config.parts import BY_NAME, OwnPart, Section
from polyturn.core.generation import Sampling
from polyturn.data.options import MixOptions
from polyturn.engines.options import AnyEngineOptions, EmbeddedOptions, OwnEngineOptions, is_deterministic
from polyturn.evaluation.options import EvalOptions
from polyturn.infra.live import NameOrObject
from polyturn.rewards.options import CallOptions, SandboxOptions
from polyturn.rewards.overlong import Overlong
from polyturn.rollout.limits import Limits
from polyturn.store.options import StoreSettings
from polyturn.tokens.options import ParserOptions
from polyturn.tools.options import ToolsOptions
from polyturn.training.options import CriticSettings, LoraSettings, SftOptions, TrainOptions


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


class TaskSourceConfig(Section):
    """A source of tasks: files of rows, a dataset on the hub, or a generator."""

    ONLY: ClassVar[Mapping[str, Sequence[str]]] = {
        "subset": ("dataset",),
        "split": ("dataset",),
        "streaming": ("dataset",),
        "columns": ("files", "dataset"),
        "kwargs": ("generator",),
    }
    """Key -> the source keys that it requires."""

    files: str | list[str] | None = None
    """jsonl or parquet files; globs are allowed."""
    dataset: str | None = None
    """A dataset on the Hugging Face hub, as owner/name, or a folder with one."""
    subset: str | None = None
    """The dataset's configuration, if it has several (`main` of openai/gsm8k)."""
    split: str | None = None
    """Split of the dataset; default "train", for evaluation "test". `train[:1000]` takes a part."""
    streaming: bool = False
    """Download only the first `limit` rows of the dataset."""
    columns: dict[str, str] = {}
    """Task field -> column in the files or the dataset: `{prompt: question, ground_truth: answer}`."""
    generator: NameOrObject | None = None
    """`file.py:function` that returns a sequence of tasks."""
    kwargs: dict[str, Any] = {}
    """Arguments of the generator."""
    limit: int | None = Field(None, ge=1)
    """Use only the first `limit` tasks."""
    system: str | None = None
    """System message for tasks without one."""
    interaction: str | None = None
    """Interaction of tasks without one; it receives the other columns of their rows."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskSourceConfig:
        if sum(one is not None for one in (self.files, self.dataset, self.generator)) != 1:
            raise ValueError("set exactly one of files, dataset and generator")
        set_ = {key: value for key, value in self if value}
        for key, kinds in self.ONLY.items():
            if key in set_ and not any(kind in set_ for kind in kinds):
                either = " or ".join(f"`{kind}`" for kind in kinds)
                raise ValueError(f"{key} requires {either}; set that, or remove {key}")
        if self.streaming and self.limit is None:
            raise ValueError("streaming downloads the first `limit` rows of a dataset; set limit, or remove streaming")
        return self


class OwnSampler(OwnPart):
    """Your own order of tasks: a Curriculum, which chooses the tasks of each epoch. Further keys are its arguments."""

    PART: ClassVar[str] = MixOptions.PART


class DataConfig(Section):
    """Tasks to train on."""

    train: TaskSourceConfig | None = None
    shuffle: bool = True
    """Visit tasks in a random order; false keeps the order of the source."""
    sampler: Annotated[MixOptions | OwnSampler, BY_NAME] | None = None
    """The order of tasks: `mix`, which divides visits among data sources, or `file.py:Class` of a Curriculum; null visits
    every task once per epoch."""
    drop_long_prompts: bool = False
    """Drop tasks whose prompt is longer than rollout.limits.max_prompt_tokens; false makes them an error."""


class EvalSetConfig(Section):
    """An evaluation set: how the evaluation tasks are sampled."""

    sampling: Sampling = Sampling(temperature=0.0)
    max_turns: int | None = Field(None, ge=1)
    """Overrides rollout.limits.max_turns."""
    samples: int = Field(1, ge=1, le=2**16)
    """Number of samples per task; more than one adds mean@N, best@N and, if reward functions return a `pred`, maj@N."""
    every: bool = True
    """Whether the set also runs every `evaluation.every` steps; false runs it only before and after training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(EvalOptions):
    """Validation: before training, every few steps, and after it."""

    data: TaskSourceConfig | None = None
    sets: dict[str, EvalSetConfig] = field(default_factory=lambda: {"greedy": EvalSetConfig()})
    """Name -> evaluation set; the first that runs during training chooses the best checkpoint."""
    success_at: float = 1.0
    """Smallest outcome that counts as success."""
    before_warm_start: bool = False
    """Also evaluate before a warm start, in sets named `untouched NAME`. This takes another evaluation and another load of
    the model."""


class EnvConfig(Section):
    """An environment, which provides tasks, observations and rewards."""

    PART: ClassVar[str] = "any environment"

    name: NameOrObject
    """`prefix:id`, for instance `textarena:GuessTheNumber-v0`; or `package.module:Class` or `file.py:Class`."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment."""
    tasks: int = Field(1024, ge=1)
    """Number of training tasks, one per seed from `seed` on."""
    eval_tasks: int = Field(64, ge=0)
    """Number of evaluation tasks, with the following seeds; 0 means no evaluation."""
    seed: int = Field(0, ge=0)
    """The first seed."""
    prompt: str | None = None
    """Text before the environment's first observation; null takes the adapter's text."""
    system: str | None = None
    """A system message."""
    action: str | None = None
    """Regular expression for the action in the model's answer: the last match, or its first group. Null passes the whole
    answer except the reasoning."""
    score: Literal["sum", "last"] | None = None
    """The reward of an episode: the sum of its rewards or the last one; null takes the environment's default."""
    seats: list[NameOrObject | dict[str, Any] | list[NameOrObject | dict[str, Any]]] = []
    """The player of each seat of a game: policy, random, a name in `policies` or {policy: …, temperature: …},
    `file.py:function`, {url: …, model: …}; or a list, from which one is drawn per task. Empty: the policy plays all
    seats."""
    eval_seats: list[NameOrObject | dict[str, Any] | list[NameOrObject | dict[str, Any]]] = []
    """The players in evaluation; empty: as in training."""
    rotate: bool = True
    """Rotate the players through the seats from task to task."""
    forfeit: float | None = None
    """Reward of a player that a limit stops before the environment is done; null is 0, or -1 in a game of several
    players."""

    @field_validator("action")
    @classmethod
    def _compiles(cls, action: str | None) -> str | None:
        try:
            re.compile(action or "")
        except re.error as problem:
            raise ValueError(f"{action!r} is not a regular expression ({problem})") from problem
        return action


LIMITS = Limits(timeout_s=7200.0)
"""Default limits. The time is enough for 8 turns in which every call takes its whole deadline."""


class RolloutConfig(Section):
    """Episodes: their sampling, scheduler, limits and text."""

    sampling: Sampling = Sampling()
    limits: Limits = LIMITS
    tools: ToolsOptions = ToolsOptions()
    interactions: str | list[dict[str, Any]] | None = None
    """A YAML file with an `interaction` list, or the list."""
    interaction_timeout_s: float = Field(60.0, gt=0)
    """Deadline of an interaction's answer, in seconds; a later answer fails the trajectory."""
    parser: Annotated[ParserOptions, BY_NAME] = ParserOptions()
    scheduler: NameOrObject | None = None
    """A built-in scheduler, or `file.py:Class` of a MultiTurnScheduler; the default runs tool calls first, otherwise the
    interaction answers."""
    scheduler_kwargs: dict[str, Any] = {}
    """Arguments of the scheduler's class."""
    scheduler_timeout_s: float = Field(60.0, gt=0)
    """Deadline of each method of the scheduler or environment, in seconds. For a synchronous method, which runs in a thread,
    it covers the whole call; for an async method, each stretch between two calls of its episode."""
    watchdog_s: float | None = Field(1.0, gt=0)
    """Seconds for which an async plug-in may block the event loop before a warning names it; null never warns."""
    use_inference_chat_template: bool = False
    """Sample each turn from the history as rendered by the chat template, which may leave out the reasoning of earlier
    turns. A history that changes this way becomes several segments. False keeps all tokens of the model."""
    max_concurrent: int = Field(256, ge=1)
    """Largest number of live episodes; rollout workers run equal shares."""
    min_concurrent: int | None = Field(None, ge=1)
    """Smallest number of live episodes: the number adapts to the engine's queue and KV cache up to max_concurrent; null
    keeps it at max_concurrent."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """Largest share of failed trajectories among the latest 1,024; a larger share ends the run with the reasons."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable", "off"] = "strict"
    """Which differences between incremental and full encoding count: all, all except white space at edges, or none."""
    sanity_every: int = Field(16, ge=0)
    """Compare incremental token ids with a full render in every n-th episode; 0 never, 1 always."""
    escape_prompts: Literal["delimiters", "all", "none"] = "delimiters"
    """Which control tokens in the text of a task's prompt are encoded as ordinary text. delimiters: those that open and
    close turns, roles and media. all: all, including <think>. none: none."""
    escape_observations: bool = True
    """Encode tool results, tool calls and user replies as ordinary text even if they contain the text of control tokens.
    False lets an environment write control tokens."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_concurrent is not None and self.min_concurrent > self.max_concurrent:
            raise ValueError(f"min_concurrent is {self.min_concurrent}, above max_concurrent {self.max_concurrent}")
        return self


class RewardFunctionConfig(OwnPart):
    """A reward function. Further keys are keyword arguments of every call."""

    PART: ClassVar[str] = "any reward function"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(CallOptions):
    """The reward of a trajectory and its scores."""

    function: Annotated[RewardFunctionConfig, BY_NAME] | None = None
    """Scores every task without a route below; the built-in routes are then unused."""
    routes: dict[str, Annotated[RewardFunctionConfig, BY_NAME]] = field(default_factory=dict)
    """data_source, exact or as a glob -> reward function. The built-in routes are added."""
    overlong: Overlong = field(default_factory=Overlong)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    weights: dict[str, float] | None = None
    """Weight of each named score; null takes 1 for `outcome` and for `tool_step`."""
    interaction: Literal["last", "sum", "max", "mean"] = "last"
    """Reduction of an interaction's turn scores to one score, if the interaction scores the task."""


class OwnEstimator(OwnPart):
    """Your own advantage estimator. Further keys are its arguments."""

    PART: ClassVar[str] = EstimatorOptions.PART


class OwnLoss(OwnPart):
    """Your own policy loss. Further keys are its arguments."""

    PART: ClassVar[str] = LossOptions.PART

    correction: CorrectionSettings | None = None
    """Off-policy correction: weigh or reject tokens by how far the policy that sampled them is from the trained one; null
    does not."""
    distill: DistillSettings | None = None
    """Also learn from a teacher's log-probabilities; null does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(AlgorithmOptions):
    """Advantages, policy loss and further loss terms."""

    advantage: Annotated[NamedEstimatorOptions | OwnEstimator, BY_NAME] = field(default_factory=GroupOptions)
    critic: CriticSettings = field(default_factory=CriticSettings)
    loss: Annotated[NamedLossOptions | OwnLoss, BY_NAME] = field(default_factory=PpoOptions)

    @property
    def needs_rewards(self) -> bool:
        """Whether rewards change the gradient, so that every task needs one. They do not if the policy loss is `none`, or if
        advantages come from a teacher alone."""
        return self.loss.name != "none" and (self.teacher is None or self.teacher.advantage_coef > 0)


Amount = Annotated[float, Field(ge=0)]


class ActorsConfig(Section):
    """Processes of one kind on a cluster."""

    count: int = Field(1, ge=1, le=2**16)
    """Number of processes."""
    resources: dict[str, Amount] = {"CPU": 1}
    """Ray resources of each process: CPU, GPU, and custom resources of nodes."""


class ClusterConfig(Section):
    """Ranks, engines and rollout workers on a Ray cluster. Without an address all run on this machine."""

    address: str | None = None
    """`auto`, an address, or `local` for a cluster on this machine; set by `--ray`."""
    rank_resources: dict[str, Amount] = {"CPU": 1}
    """Ray resources of each rank (train.distributed.ranks)."""
    engines: ActorsConfig = ActorsConfig()
    """Replicas of the engine, embedded or started servers, each with all of these resources. Not for `engine.urls`."""
    workers: ActorsConfig = ActorsConfig()
    """Processes that run episodes (tools, interactions, rewards). Without an address they run on this machine, and a count
    of 1 runs episodes in the run's main process."""
    restarts: int = Field(0, ge=0)
    """Number of restarts of a run from its latest checkpoint after a rank, or the last rollout worker or engine, died."""
    patience_s: float = Field(300.0, gt=0)
    """Seconds to wait until the cluster has room."""


TAKEN = ("policy", "random", SELF)
"""Reserved names of policies."""
MAX_NAME = 200
"""Largest length of a folder's name in bytes, with room for suffixes; file systems allow 255."""


class DumpConfig(Section):
    """Dump trajectories as JSON lines, one file per step, in addition to the run's records."""

    train: str | None = None
    """Folder for training trajectories, relative to the working directory."""
    evaluation: str | None = None
    """Folder for evaluation trajectories, relative to the working directory."""


class TrackerConfig(OwnPart):
    """A tracker that receives the metrics of a run. Further keys are its arguments, for instance `project`."""

    PART: ClassVar[str] = "any tracker"

    name: NameOrObject
    """tensorboard, wandb, mlflow, trackio, otel, a registered name or `file.py:Class`."""
    samples: int = Field(4, ge=0)
    """Number of trajectories per step in its table of samples."""


class CompatConfig(Section):
    """Compatibility with rows and dashboards of other trainers."""

    require_interaction_name: bool = False
    """Raise for `interaction_kwargs` without a name; false takes the interaction "gsm8k"."""
    validation_metrics: bool = False
    """Also record evaluations under val-core/ and val-aux/."""


class RunConfig(Section):
    """A whole run."""

    name: str = "run"
    """Name of the run, and of its folder."""
    out: str = "runs"
    """Folder of runs, relative to the working directory; the run's folder is `out/name`."""
    seed: int = 0
    """Seed of tasks, sampling and initial weights."""
    num_threads: int | None = Field(None, ge=1)
    """Number of torch threads; null leaves the choice to torch."""
    plugins: list[str] = []
    """Python files to import first, which register their plug-ins."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    env: NameOrObject | EnvConfig | list[NameOrObject | EnvConfig] | None = None
    """One or several environments in place of `data`, `rollout.scheduler` and a reward: `textarena:GuessTheNumber-v0`."""
    policies: dict[str, PolicyConfig] = {}
    """Further policies, which sample and are not trained; their names can be used for players, simulated users and
    judges."""
    rollout: RolloutConfig = RolloutConfig()
    engine: AnyEngineOptions = EmbeddedOptions()
    """The engine that samples completions: embedded in this process, or servers. Its keys depend on `kind`."""
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    warm_start: SftOptions = SftOptions()
    train: TrainOptions = TrainOptions()
    evaluation: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    dump: DumpConfig = DumpConfig()
    store: StoreSettings = StoreSettings()
    tracking: list[NameOrObject | TrackerConfig] = []
    """Trackers in addition to metrics.jsonl: names, or {name: wandb, project: …} with the tracker's arguments."""
    compat: CompatConfig = CompatConfig()

    @property
    def deadline_s(self) -> float:
        """The longest deadline of a plug-in's call, in seconds."""
        rollout, engine = self.rollout, self.engine
        of_engine = engine.timeout_s if isinstance(engine, OwnEngineOptions) else 0.0
        return max(
            rollout.tools.timeout_s,
            rollout.interaction_timeout_s,
            rollout.scheduler_timeout_s,
            self.reward.timeout_s,
            of_engine,
        )

    @field_validator("out")
    @classmethod
    def _of_the_user(cls, out: str) -> str:
        return os.path.expanduser(out)  # a shell does not expand the ~ of out=~/runs

    @field_validator("name")
    @classmethod
    def _stays_below_out(cls, name: str) -> str:
        if {"", ".", ".."} & set(name.split("/")):
            raise ValueError("a run's folder is out/name, inside `out`; set out to the parent folder")
        if any(len(part.encode()) > MAX_NAME for part in name.split("/")):
            raise ValueError(f"a run's folder has this name, which may have at most {MAX_NAME} bytes")
        return name

    @field_validator("policies")
    @classmethod
    def _names(cls, policies: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        for name in policies:
            if name in TAKEN or not re.fullmatch(r"[A-Za-z_][\w-]*", name):
                what = "has another meaning in lists of players" if name in TAKEN else "is not a valid name"
                raise ValueError(f"a policy is named {name!r}, which {what}; choose a name such as 'opponent'")
        return policies

    @model_validator(mode="after")
    def _promises(self) -> RunConfig:
        train = self.train
        if isinstance(self.data.sampler, MixOptions) and train.epochs is not None:
            raise ValueError("the sampler mix has no epochs; set train.steps instead of train.epochs")
        if self.evaluation.before_warm_start and self.cluster.address is not None:
            raise ValueError(
                f"evaluation.before_warm_start is true and cluster.address is {self.cluster.address!r}: the process "
                "that starts a run would have to evaluate the untouched model; remove evaluation.before_warm_start, and "
                "use polyturn eval"
            )
        late = {"train.max_staleness": train.max_staleness, "train.oversample": train.oversample}
        for name, value in late.items():
            if is_deterministic(self.engine) and value:
                raise ValueError(
                    f"engine.deterministic promises equal bits, and with {name} {value:g} the trained groups depend on "
                    f"how long episodes take; set {name} to 0, or engine.deterministic to false"
                )
        return self
