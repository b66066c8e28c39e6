"""The protocols between the parts of polyturn.

`rollout` reaches engines only through `Engine`; the training loop reaches the model only through `Policy`. A plug-in may
inherit a base class (`tools/base.py`, for example), or just have these methods. `core/snapshots.py` describes `snapshot`
and `restore`, the optional methods with which a resumed run restores the state of a tool or an interaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from polyturn.core.arrays import Floats
from polyturn.core.errors import ConfigError
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.metrics import Metrics
from polyturn.core.sample import TrainSample
from polyturn.core.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The capabilities of an engine."""

    seeded: bool = False
    """Whether the same seed and prompt give the same tokens."""
    logprobs: bool = False
    """Whether it returns logprobs as defined in `core/generation.py`, which training needs."""
    media: bool = False
    max_context: int | None = None
    """The longest prompt plus completion, in tokens; None if unknown."""
    shares_weights: bool = False
    """Whether it samples from the trained tensors themselves, so that a weight sync only passes the new policy version."""
    routes: bool = False
    """Whether completions have the experts of each token (`core/routing.py`)."""
    support: bool = False
    """Whether it supports `Sampling.keep_support`: completions have the tokens that each token was drawn from."""
    shares_loop: bool = False
    """Whether it computes on the trainer's event loop. An update must then not change its weights while it samples."""
    min_temperature: float = 0.0
    """The lowest temperature above 0 at which it samples."""

    def check_temperature(self, temperature: float, *, key: str) -> None:
        """Raise if the engine does not sample at the temperature that the configuration sets at `key`.

        Raises:
            ConfigError: the temperature is above 0 and below `min_temperature`.
        """
        if 0 < temperature < self.min_temperature:
            raise ConfigError(
                f"{key} is {temperature:g}, and the lowest temperature of the engine is {self.min_temperature:g}; set 0 "
                f"for greedy decoding or at least {self.min_temperature:g}, or use engine.kind: sglang or embedded"
            )


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids and logprobs out."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """The capabilities of this engine."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds spent generating so far."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Cancelling the call aborts the request.

        Raises:
            EngineError: the engine is lost or refuses the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running request now; its `generate` returns the tokens so far, with finish_reason ABORT."""
        ...

    async def end_session(self, session_id: str) -> None:
        """Free the state of an episode, such as its KV cache. Unknown ids are ignored."""
        ...

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Serve policy version `version` from now on.

        Args:
            version: The new policy version, which completions report.
            weights: name -> tensor; None if the engine shares the parameters of the trainer.
        """
        ...

    def read_metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call, under `engine/`; {} if there are none."""
        ...

    async def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        ...


class EngineLoad(NamedTuple):
    """The load of an engine at one moment."""

    queue: float
    """Number of requests that wait to be scheduled."""
    kv_use: float
    """Fraction of the KV cache in use, 0 to 1."""


@runtime_checkable
class LoadedEngine(Protocol):
    """An engine that reports its load, so that the rollout can adapt the number of running episodes to it."""

    @property
    def load(self) -> EngineLoad | None:
        """The last known load; None if unknown."""
        ...


@runtime_checkable
class Interaction(Protocol):
    """A partner that answers the model's turns: a simulated user, a grader, an environment."""

    name: str

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode; return the instance id that all later calls get."""
        ...

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the conversation so far; return (should_terminate, content, score of the turn, metadata).

        The content may be None only if the episode terminates.
        """
        ...

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the latest turn. polyturn calls this only for a last turn without a reply."""
        ...

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End the episode and free its resources. Called exactly once."""
        ...


@runtime_checkable
class Tool(Protocol):
    """A tool the model can call."""

    name: str

    @property
    def schema(self) -> Mapping[str, Any]:
        """The tool in OpenAI's function form: {"type": "function", "function": {"name": …, "parameters": …}}."""
        ...

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Begin one episode; return the instance id that all later calls get, or a pair (id, response)."""
        ...

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run one call; return (response, step reward or None, metrics or None), or just the response."""
        ...

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the tool's reward for the whole episode. Called once, at the end."""
        ...

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the episode and free its resources. Called exactly once."""
        ...


class PassResult(NamedTuple):
    """The results, other than the gradient, of a forward and backward pass over the samples of one optimizer step."""

    metrics: Metrics
    logprobs: list[Floats] | None = None
    """One [T] per sample: the log-probability of each token under the policy, for the records; None if not recorded."""
    entropies: list[Floats] | None = None
    """One [T] per sample: the entropy, in nats, of the distribution of each weighted token; None if not recorded."""
    is_finite: bool = True
    """Whether the loss is finite; if not, the step is skipped."""


class Scheduler(Protocol):
    """Drives episodes. `rollout.scheduler.MultiTurnScheduler`, the base of all schedulers, describes each method."""

    shared: bool
    forks: bool
    gives_reward: bool
    shows_tools: bool
    offers_tools: bool

    @property
    def scores_turns(self) -> bool | None:
        """Whether it scores turns; None if unknown."""
        ...

    def check_task(self, task: Task) -> None:
        """Raise a `DataError` if the scheduler cannot run the task."""
        ...

    async def run(self, episode: Any) -> StopReason:
        """Drive an episode to its end and return why it ended."""
        ...

    def on_trajectory_start(self, episode: Any) -> Any:
        """Prepare the trajectory before its prompt is encoded."""
        ...

    def show_tools(self, episode: Any) -> Any:
        """Write the tools into the prompt; called after `on_trajectory_start` if `shows_tools`."""
        ...

    def on_trajectory_end(self, episode: Any) -> Any:
        """Free the resources of the trajectory."""
        ...


class Stored(Protocol):
    """A part of a run whose state is saved and loaded in shards, one per rank."""

    def save(self, folder: Path) -> None:
        """Start writing a copy of the state into `folder`; later steps do not change the copy.

        Raises:
            CheckpointError: a rank died, so its shard cannot be written.
        """
        ...

    def is_saved(self) -> bool:
        """Return whether all ranks have finished writing.

        Raises:
            CheckpointError: a rank could not write its shard.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, whatever the number of ranks that wrote it.

        Raises:
            CheckpointError: the state is missing, damaged or of another model.
        """
        ...


class Policy(Stored, Protocol):
    """The trainer's side of the model: parameters and gradients."""

    train_seconds: float
    """Seconds spent in forward and backward passes and in optimizer steps so far."""

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[Floats]:
        """Return one [T] per sample: the log-probability of each token; 0 at index 0 and at unweighted tokens."""
        ...

    def forward_backward(self, samples: Sequence[TrainSample]) -> PassResult:
        """Add the gradient of the loss over `samples`, which are all samples of one optimizer step."""
        ...

    def optim_step(self) -> Metrics:
        """Take one optimizer step with the accumulated gradient, and clear the gradient."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the small state that is not sharded, such as the adapted KL coefficient, as plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        ...


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
