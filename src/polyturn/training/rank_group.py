"""A team: all ranks of a run as their leader sees them, and one rank as the leader's commands see it.

    leader   Team.call(command, a share for each rank)   ->   Rank.run(command, share) on every rank   ->   Answers

What a command does is the rank's business: its policy's, or its critic's. How it travels is that of processes that torchrun
started (`process_group`), or of Ray (`cluster`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from polyturn.batching.microbatch import LayoutSettings, plan
from polyturn.core.arrays import Floats
from polyturn.core.errors import PolyturnError
from polyturn.core.metrics import Metrics
from polyturn.core.sample import TrainSample

if TYPE_CHECKING:
    from polyturn.training.critic_shards import ShardedCritic
    from polyturn.training.fsdp import ShardedPolicy


class RankGroup(Protocol):
    """All ranks of a run, as the leader sees them."""

    num_ranks: int
    tensor_parallel: int

    def call(self, command: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let every rank run `command` on its share, and return what each returned.

        Raises:
            RankLostError: a rank is gone.
            PolyturnError: what a rank raised.
        """
        ...

    def close(self) -> None:
        """Let the ranks end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReply:
    """What a rank did."""

    value: Any = None
    error: PolyturnError | None = None


@dataclass(slots=True)
class RankWorker:
    """Runs the leader's commands on one rank."""

    make: Callable[[Any], ShardedPolicy]
    """Makes the policy from what the leader says about it; called again when training follows a warm start."""
    make_critic: Callable[[], ShardedCritic]
    _of_policy: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Name -> command; what it is done with lives as long as these do."""
    _of_critic: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def run(self, command: str, share: tuple[Any, ...]) -> RankReply:
        """Run one command. What the library raises is an answer; anything else is a bug and ends the rank."""
        try:
            if command == "make":
                self._of_policy = {}
                gc.collect()  # frees the former one first: there may be no room for two
                self._take(self.make(*share))
                return RankReply()
            if command == "make_critic":
                self._take_critic(self.make_critic())
                return RankReply()
            return RankReply(value={**self._of_policy, **self._of_critic}[command](*share))
        except PolyturnError as problem:
            return RankReply(error=problem)

    def _take(self, policy: ShardedPolicy) -> None:
        def forward_backward(samples: Any, coefs: Any, kl_coef: float) -> tuple[Metrics, list[Floats] | None]:
            policy.kl.load_state_dict({"coef": kl_coef})  # the leader's, which follows the KL of all ranks
            return policy.forward_backward(samples, coefs=coefs), policy.last_logprobs

        self._of_policy = {
            "load": policy.load_whole,
            "score": lambda samples, reference: policy.score(samples, reference=reference),
            "forward_backward": forward_backward,
            "sft": lambda samples, coefs: (policy.sft_forward_backward(samples, coefs=coefs), None),
            "optim_step": policy.optim_step,
            "state": policy.state_dict,
            "weights": policy.whole_weights,
        }

    def _take_critic(self, critic: ShardedCritic) -> None:
        self._of_critic = {
            "critic_load": critic.load_whole,
            "critic_score": critic.score,
            "critic_forward_backward": lambda samples, coefs: critic.forward_backward(samples, coefs=coefs),
            "critic_optim_step": critic.optim_step,
            "critic_state": critic.state_dict,
        }


def values_of(answers: Sequence[RankReply]) -> list[Any]:
    """Return the values of all ranks, or raise the first error."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return [answer.value for answer in answers]


def assign(samples: Sequence[TrainSample], *, settings: LayoutSettings, num_shares: int) -> list[list[int]]:
    """Return the samples of each share, in rising order: micro-batches are planned over all of them and dealt out by cost.

    Samples of one micro-batch stay together, so that what they begin with in common is computed once, on one rank. Those
    without a weighted token cost nothing and go to the first share.
    """
    ranks = plan(samples, settings=settings, num_ranks=num_shares).ranks
    shares = [{i for batch in batches if not batch.is_padding for i in batch.samples} for batches in ranks]
    shares[0] |= set(range(len(samples))).difference(*shares)
    return [sorted(share) for share in shares]


def put_back(rows: Sequence[Sequence[int]], found: Sequence[Sequence[Floats]], count: int) -> list[Floats]:
    """Return what the rows found in the order of the samples."""
    at = {i: value for row, values in zip(rows, found, strict=True) for i, value in zip(row, values, strict=True)}
    return [at[i] for i in range(count)]
