"""Keys that earlier configurations have, and what stands in the place of each.

    unknown key 'algorithm.clip_low', set to 0.1 (in run.yaml). It is no key any more; write algorithm.loss: {…}

Separate from `unknown.py`, which finds them: this is a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Successor(NamedTuple):
    """The successor of a retired key."""

    says: str
    """Ends the sentence about the key."""
    to: str = ""
    """The key that takes its value in a run's own configuration; options of a part may be the part. "" where none does."""
    was: Any = None
    """Its default."""
    key: str = ""
    """The key, as the table below has it."""

    def is_default(self, value: Any) -> bool:
        """Return whether a run's own configuration has it only because it has every key."""
        return value is None or value == {} or value == self.was


BESIDE = "write them beside the name"

RETIRED: Mapping[str, Successor] = {
    "algorithm.kl_coef": Successor("write algorithm.kl: {coef: …}", "algorithm.kl.coef", 0.0),
    "algorithm.kl_estimator": Successor("write algorithm.kl: {estimator: …}", "algorithm.kl.estimator", "k3"),
    "algorithm.kl_target": Successor("write algorithm.kl: {target: …}", "algorithm.kl.target"),
    "algorithm.kl_horizon": Successor("write algorithm.kl: {horizon: …}", "algorithm.kl.horizon", 10_000),
    "algorithm.kl_in_reward": Successor(
        "write algorithm.kl: {place: reward, coef: …}, in a list where the loss has a KL term too",
        was={"coef": 0.0, "estimator": "k1", "target": None, "horizon": 10_000},
    ),
    "algorithm.advantage_kwargs": Successor(f"{BESIDE}: algorithm.advantage: {{name: …, gamma: …}}", "algorithm.advantage"),
    "algorithm.norm_by_std": Successor(
        "write algorithm.advantage: {name: grpo, norm_by_std: …}", "algorithm.advantage.norm_by_std", True
    ),
    "algorithm.gamma": Successor("write algorithm.advantage: {name: …, gamma: …}", "algorithm.advantage.gamma"),
    "algorithm.lam": Successor("write algorithm.advantage: {name: gae, lam: …}", "algorithm.advantage.lam"),
    "algorithm.loss_kwargs": Successor(f"{BESIDE}: algorithm.loss: {{name: …, tau_pos: …}}", "algorithm.loss"),
    "algorithm.clip_low": Successor("write algorithm.loss: {name: ppo_clip, clip_low: …}", "algorithm.loss.clip_low"),
    "algorithm.clip_high": Successor("write algorithm.loss: {name: ppo_clip, clip_high: …}", "algorithm.loss.clip_high"),
    "algorithm.clip_dual": Successor("write algorithm.loss: {name: ppo_clip, dual_clip: …}", "algorithm.loss.dual_clip"),
    "algorithm.correction": Successor(
        "write algorithm.loss: {name: ppo_clip, correction: {…}}", "algorithm.loss.correction"
    ),
    "algorithm.distill": Successor("write algorithm.loss: {name: ppo_clip, distill: {…}}", "algorithm.loss.distill"),
    "algorithm.norm_length": Successor(
        "write algorithm.aggregate: {name: seq-mean-token-sum-norm, norm_length: …}", "algorithm.aggregate.norm_length"
    ),
    "rollout.reasoning_parser": Successor("write rollout.parser: {reasoning: …}", "rollout.parser.reasoning"),
    "rollout.calls_in_reasoning": Successor(
        "write rollout.parser: {calls_in_reasoning: …}", "rollout.parser.calls_in_reasoning", False
    ),
    "data.mix": Successor("write data.sampler: {name: mix, weights: {…}}", "data.sampler"),
    "data.sampler_kwargs": Successor(f"{BESIDE}: data.sampler: {{name: …, start: …}}", "data.sampler"),
    "model.lora.rank_stabilized": Successor(
        "multiply model.lora.alpha by the square root of the rank, which scales the update alike", was=False
    ),
    "train.distributed.strategy": Successor(
        "write train.backend: torch, which is FSDP2 over several ranks, or megatron (docs/guides/megatron.md)", was="fsdp"
    ),
    "optim.warmup_ratio": Successor(
        "write it as warmup_steps, where a number below 1 is a share", "optim.warmup_steps", 0.0
    ),
    "optim.total_steps": Successor("write schedule: {name: cosine, total_steps: …}", "optim.schedule.total_steps"),
    "optim.min_lr_ratio": Successor("write schedule: {name: cosine, min_lr_ratio: …}", "optim.schedule.min_lr_ratio", 0.0),
    "model.train_tokenizer": Successor("write model.tokenizer: {corpus: …, vocab_size: …}", "model.tokenizer"),
    "train.shared_prefix": Successor("write train.layout: {shared_prefix: …}", "train.layout.shared_prefix", "auto"),
    "reward.function.kwargs": Successor(f"{BESIDE}: reward.function: {{name: …, bonus: …}}", "reward.function"),
    "reward.routes.<name>.kwargs": Successor(f"{BESIDE}: {{name: …, bonus: …}}", "reward.routes.<name>"),
    "reward.batch_size": Successor("write reward.batch: {size: …}", "reward.batch.size", 64),
    "reward.batch_wait_s": Successor("write reward.batch: {wait_s: …}", "reward.batch.wait_s", 0.05),
    "policies.<name>.train": Successor(
        "a run trains one policy, the one of the section model; let that one play several parts "
        "(seats: [policy, policy], model: policy), or train the other in a run of its own",
        was=False,
    ),
    "policies.<name>.model.gradient_checkpointing": Successor(
        "leave it out: this policy is not trained, so it has no backward pass", was=False
    ),
    "policies.<name>.model.processor": Successor("leave it out: this policy is shown text only"),
    "policies.<name>.model.reference": Successor(
        "leave it out: this policy is not trained, so no KL term reads a reference"
    ),
    "engine.order": Successor("leave it out: waiting requests go in the order of arrival", was="longest_first"),
    "engine.order_kwargs": Successor("leave it out: waiting requests go in the order of arrival"),
    "engine.in_process": Successor(
        "leave it out: engine.kind: sglang starts a server beside the trainer (engine.launch)", was=False
    ),
}
"""A key as the table of keys writes it, or the end of one that stands in several places, and what stands in its place."""


def successor(key: str) -> Successor | None:
    """Return the successor of a key in the table of retired keys; None if there never was such a key."""
    steps = key.split(".")
    ends = (".".join(steps[start:]) for start in range(len(steps)))
    return next((RETIRED[end]._replace(key=end) for end in ends if end in RETIRED), None)
