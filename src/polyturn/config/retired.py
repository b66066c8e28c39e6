"""Keys that earlier configurations have, and what stands in the place of each.

    unknown key 'algorithm.clip_low', set to 0.1 (in run.yaml). It is no key any more; write algorithm.loss: {…}

Separate from `schema.py`, which knows annotations only.
"""

from __future__ import annotations

from collections.abc import Mapping

RETIRED: Mapping[str, str] = {
    "algorithm.kl_coef": "write algorithm.kl: {coef: …}",
    "algorithm.kl_estimator": "write algorithm.kl: {estimator: …}",
    "algorithm.kl_target": "write algorithm.kl: {target: …}",
    "algorithm.kl_horizon": "write algorithm.kl: {horizon: …}",
    "algorithm.kl_in_reward": "write algorithm.kl: {place: reward, coef: …}, in a list where the loss has a KL term too",
    "algorithm.advantage_kwargs": "write them beside the name: algorithm.advantage: {name: …, gamma: …}",
    "algorithm.norm_by_std": "write algorithm.advantage: {name: grpo, norm_by_std: …}",
    "algorithm.gamma": "write algorithm.advantage: {name: …, gamma: …}",
    "algorithm.lam": "write algorithm.advantage: {name: gae, lam: …}",
    "algorithm.loss_kwargs": "write them beside the name: algorithm.loss: {name: …, tau_pos: …}",
    "algorithm.clip_low": "write algorithm.loss: {name: ppo_clip, clip_low: …}",
    "algorithm.clip_high": "write algorithm.loss: {name: ppo_clip, clip_high: …}",
    "algorithm.clip_dual": "write algorithm.loss: {name: ppo_clip, dual_clip: …}",
    "algorithm.correction": "write algorithm.loss: {name: ppo_clip, correction: {…}}",
    "algorithm.distill": "write algorithm.loss: {name: ppo_clip, distill: {…}}",
    "data.mix": "write data.sampler: {name: mix, weights: {…}}",
    "data.sampler_kwargs": "write them beside the name: data.sampler: {name: …, start: …}",
    "model.lora.rank_stabilized": "multiply model.lora.alpha by the square root of the rank, which scales the update alike",
    "train.distributed.strategy": "leave it out: ranks train with torch's FSDP2, and Megatron is not built "
    "(docs/guides/scale.md says why)",
    "policies.<name>.train": "a run trains one policy, the one of the section model; let that one play several parts "
    "(seats: [policy, policy], model: policy), or train the other in a run of its own",
    "policies.<name>.model.gradient_checkpointing": "leave it out: this policy is not trained, so it has no backward pass",
    "policies.<name>.model.processor": "leave it out: this policy is shown text only",
    "policies.<name>.model.reference": "leave it out: this policy is not trained, so no KL term reads a reference",
    "engine.in_process": "leave it out: engine.kind: sglang starts a server beside the trainer (engine.launch)",
}
"""A key as the table of keys wrote it, and its successor: the end of a sentence."""
