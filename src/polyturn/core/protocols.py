"""The protocols between parts: small, and free of any implementation.

`rollout` reaches engines only through `Engine`; the training loop reaches the model only through `Policy`. A plug-in may
inherit the base class that its folder offers, or just have these methods. What a tool or an
interaction may offer beside them, so that its conversations go on after a restart, is in `core/snapshots.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from polyturn.core.arrays import Floats
from polyturn.core.generation import Completion, GenerateRequest
from polyturn.core.lifecycle import StopReason
from polyturn.core.metrics import Metrics
from polyturn.core.sample import TrainSample
from polyturn.core.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The capabilities of an engine."""

    seeded: bool = False
    """The same seed and prompt give the same tokens."""
    logprobs: bool = False
    """Logprobs in the one meaning that training needs (see `core/generation.py`)."""
    media: bool = False
    pause_modes: tuple[str, ...] = ()
    max_context: int | None = None
    """The longest prompt plus completion, in tokens; None when unknown."""
    shares_weights: bool = False
    """True where it samples from the tensors that are trained, so that of a new policy version only the number is news."""
    routes: bool = False
    """Completions say which experts each token went to (`core/routing.py`)."""
    support: bool = False
    """It heeds `Sampling.keep_support`: completions have the tokens that each one was drawn from."""
    shares_loop: bool = False
    """True where it computes on the trainer's event loop, in turns with training, which must then not run beside it."""


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
        """End a running request now; its `generate` returns what there is, with finish_reason ABORT."""
        ...

    async def end_session(self, session_id: str) -> None:
        """Forget what is kept for an episode, such as its KV cache. Unknown ids are fine."""
        ...

    async def update_weights(self, version: int, *, weights: Mapping[str, Any] | None = None) -> None:
        """Serve policy version `version` from now on.

        Args:
            version: The new policy version; completions carry it.
            weights: name -> tensor; None when the engine shares the trainer's own parameters.
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
    """Requests that wait for a place."""
    kv_use: float
    """Share of the KV cache that is in use."""


@runtime_checkable
class LoadedEngine(Protocol):
    """An engine that reports its load, which the number of episodes in flight may follow."""

    @property
    def load(self) -> EngineLoad | None:
        """The load as last read; None where it is not known."""
        ...


@runtime_checkable
class Interaction(Protocol):
    """A partner that answers the model's turns: a simulated user, a grader, an environment."""

    name: str

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode and return the id to use from then on."""
        ...

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the conversation so far: (should_terminate, content, score of the turn, metadata)."""
        ...

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the turn."""
        ...

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End the episode and free what it held. Called exactly once."""
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
        """Begin one episode; return the id to use from then on, or a pair (id, response)."""
        ...

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer one call: (response, step reward or None, metrics or None), or just the response."""
        ...

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the tool's reward for the whole episode. Called once, at the end."""
        ...

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the episode and free what it held. Called exactly once."""
        ...


class PassResult(NamedTuple):
    """Figures of a forward and backward pass over the samples of one optimizer step, beside the gradient."""

    metrics: Metrics
    logprobs: list[Floats] | None = None
    """For each sample [T] its log-probabilities under the policy, for the records; None where they are not kept."""
    entropies: list[Floats] | None = None
    """For each sample [T] the entropy in nats of what each of its weighted tokens was drawn from; None likewise."""
    is_finite: bool = True
    """Whether the loss was; if not, the step is skipped."""


class Scheduler(Protocol):
    """Drives episodes; `rollout.scheduler.MultiTurnScheduler` is the base of all of them and says what each method does."""

    shared: bool
    forks: bool
    gives_reward: bool
    shows_tools: bool

    @property
    def scores_turns(self) -> bool | None:
        """Whether it scores turns; None where it may."""
        ...

    def check_task(self, task: Task) -> None:
        """Refuse a task that it cannot run."""
        ...

    async def run(self, episode: Any) -> StopReason:
        """Drive an episode to its end and return why it ended."""
        ...

    def on_trajectory_start(self, episode: Any) -> Any:
        """Do what is to be done before the prompt is encoded."""
        ...

    def show_tools(self, episode: Any) -> Any:
        """Write the tools into the prompt, behind `on_trajectory_start`, if `shows_tools`."""
        ...

    def on_trajectory_end(self, episode: Any) -> Any:
        """Let go of what the trajectory held."""
        ...


class Stored(Protocol):
    """A part of a run whose state is written and read in shards, by all of its ranks."""

    def save(self, folder: Path) -> None:
        """Begin to write it into `folder`, from a copy that no step changes.

        Raises:
            CheckpointError: a rank is gone, and its shards with it.
        """
        ...

    def is_saved(self) -> bool:
        """Return whether that is done by all.

        Raises:
            CheckpointError: it could not be.
        """
        ...

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, there with any number of ranks.

        Raises:
            CheckpointError: it is missing, damaged or of another model.
        """
        ...


class Policy(Stored, Protocol):
    """The trainer's side of the model: parameters and gradients."""

    train_seconds: float
    """Seconds spent in forward and backward so far."""

    def score(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[Floats]:
        """Return for each sample [T] the log-probability of each token, 0 at index 0 and where nothing is weighted."""
        ...

    def forward_backward(self, samples: Sequence[TrainSample]) -> PassResult:
        """Add the gradient of the loss over `samples`, everything that one optimizer step trains on."""
        ...

    def optim_step(self) -> Metrics:
        """Take one optimizer step from the summed gradient, and clear it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the small rest of what is needed to continue, as plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        ...


class Tracker(Protocol):
    """Receives the numbers of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
