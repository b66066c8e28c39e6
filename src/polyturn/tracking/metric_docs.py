"""The meaning of every metric: one sentence per name.

    meaning("tool/search/calls")  ->  "Calls of this tool; `unknown` counts the names that the model made up."

The viewer, the reference and a test use this table. `<…>` stands for a part that depends on the run; it may contain slashes.
Metrics with names from a scheduler, a tool or a reward function match a pattern.
"""

from __future__ import annotations

import re
from functools import cache

MEANINGS: dict[str, str] = {
    # rollout
    "rollout/turns": "Mean number of turns of a trajectory.",
    "rollout/success": "Share of scored trajectories whose `outcome` reached 1.",
    "rollout/failed": "Share of trajectories that failed; they are left out of the loss.",
    "rollout/cut": "Share of trajectories that a limit on tokens, context or time cut short.",
    "rollout/out_of_turns": "Share of trajectories that used up their turns (`max_turns`, `max_user_turns`, or the "
    "environment's).",
    "rollout/stop_<reason>": "Trajectories that stopped for this reason.",
    "rollout/state_generating": "Mean number of the step's episodes that were generating, over the time of the step.",
    "rollout/state_tool": "Mean number of the step's episodes that waited for tools, over the time of the step.",
    "rollout/state_interaction": "Mean number of the step's episodes that waited for an interaction, over the time of the "
    "step.",
    "rollout/concurrency": "Allowed concurrent episodes at the end of the step, if `rollout.min_concurrent` is set.",
    "rollout/segments": "Mean number of segments of a trajectory; above 1 if histories are edited or branch.",
    "rollout/segmented": "Share of trajectories of more than one segment.",
    "rollout/forks": "Branches of episodes, forked by schedulers or agents.",
    "rollout/user_tokens": "Tokens of simulated users (endpoints or further policies), including prompts.",
    "rollout/tool_calls": "Tool calls.",
    "rollout/loop_blocked": "Times that an async plug-in blocked the event loop and so all episodes; the log names the "
    "plug-in.",
    "rollout/loop_blocked_s": "Seconds for which the event loop was blocked.",
    "rollout/tool_errors": "Share of the tool calls that ended with any kind of error.",
    "rollout/tools_unavailable": "Trajectories that failed because a tool could not begin a call (a sandbox did not start).",
    "rollout/close_errors": "Tools, interactions and environments that raised when they were closed.",
    "rollout/resumed_episodes": "Running conversations of an interrupted run that continued after their last complete turn.",
    "rollout/restarted_episodes": "Running conversations of an interrupted run that started again.",
    "rollout/failed_snapshots": "Conversations without a snapshot, which a resumed run would start again.",
    # reward
    "reward/mean": "Mean total reward of the scored trajectories.",
    "reward/std": "Mean standard deviation (unbiased) of the total rewards of a group.",
    "reward/greedy": "Mean reward of the greedy rollouts that `remax` uses as baseline.",
    "reward/judge_tokens": "Tokens used by judges, as counted by their endpoints.",
    "reward/<component>": "Mean of a reward component, before weighting, or of a number its function returned.",
    # tokens
    "tokens/sampled": "Tokens that the policy sampled.",
    "tokens/prefilled": "Prompt and observation tokens that the engine processed, excluding cached ones.",
    "tokens/per_trajectory": "Mean number of sampled tokens of a trajectory.",
    "tokens/trained": "Tokens with a weight in the loss, over all updates of the step.",
    "tokens/processed": "Tokens that went through the forward pass of training, without padding.",
    "tokens/padding_share": "Share of padding in the training batches.",
    "tokens/shared_prefix": "Tokens that were not computed again because samples share them.",
    "tokens/packing_refused": "Updates with padded instead of packed samples, because the model does not support packing.",
    "tokens/greedy": "Tokens that greedy rollouts sampled.",
    "tokens/replayed": "Sampled tokens that are repeated, without weight, in a segment that branched after them.",
    "tokens/mismatch_rate": "Share of the checked trajectories whose tokens differ from a full render of the conversation; "
    "see the page on token exactness.",
    "tokens/mismatch_<kind>": "Differences of this kind between an episode's tokens and a full render.",
    "tokens/dropped_cut": "Sampled tokens that a scheduler removed before the history continued.",
    "tokens/asides": "Sampled tokens outside turns: a scheduler's lookahead, or text for another agent.",
    "tokens/dropped_masked": "Sampled tokens whose weight is 0 in the segment that owns them.",
    "tokens/dropped_loss_scale": "Weighted tokens whose weight the loss scale removed.",
    "tokens/observed": "Tokens of tools and users, if the loss uses them.",
    "tokens/dropped_failed": "Sampled tokens of failed trajectories.",
    "tokens/dropped_one_left": "Sampled tokens of groups with only one remaining trajectory.",
    "tokens/dropped_zero_variance": "Sampled tokens of groups whose rewards are all equal.",
    "tokens/dropped_truncated": "Weighted tokens of truncated samples, which the configuration leaves out.",
    "tokens/dropped_rejected": "Weighted tokens that the off-policy correction rejected.",
    "tokens/dropped_<reason>": "Sampled tokens of groups that were dropped before training, for this reason.",
    # buffer
    "buffer/groups": "Groups reaching the filters.",
    "buffer/groups_kept": "Groups that were trained.",
    "buffer/groups_all_failed": "Groups left out because every trajectory failed.",
    "buffer/groups_one_left": "Groups left out because all trajectories except one failed, so there is no comparison.",
    "buffer/groups_zero_variance": "Groups left out because all rewards are equal.",
    "buffer/groups_replayed": "Groups trained again from the replay buffer.",
    "buffer/groups_<reason>": "Groups that were dropped before training, for this reason.",
    "buffer/dropped_decile_<n>": "Trajectories that were sampled but not trained, for any reason, by length: 0 is the "
    "shortest tenth of all, 9 the longest.",
    "buffer/failed_trajectories": "Failed trajectories in the groups of the step.",
    "buffer/greedy_failed": "Greedy rollouts that failed or have no reward.",
    "buffer/samples": "Training samples (segments) of the kept groups.",
    "buffer/samples_kept": "Samples that were trained.",
    "buffer/samples_truncated": "Samples left out because a limit cut them.",
    "buffer/samples_unweighted": "Samples left out because no token has a weight.",
    "buffer/samples_taught": "Samples whose advantages a teacher changed (`self_distill`, `served_teachers`).",
    "buffer/samples_without_privileged": "Samples without privileged text, which keep the estimator's advantage.",
    "buffer/samples_other_prompt": "Samples that do not begin with their task's prompt and so cannot take privileged text.",
    "buffer/samples_privileged_too_long": "Samples that do not fit the model's context with the privileged text.",
    "buffer/staleness": "The largest number of policy versions between sampling a token and training it.",
    # loss
    "loss/total": "The minimised loss, over the updates of the step.",
    "loss/policy": "The policy's part of the loss.",
    "loss/kl": "The penalty on the KL from the reference, weighted.",
    "loss/router_balance": "The part of the loss that balances the use of experts, weighted.",
    "loss/entropy": "The entropy bonus, weighted, with its sign.",
    "loss/distill": "The distillation part of the loss, weighted.",
    "loss/observation": "The cross-entropy on tokens of tools and users, weighted.",
    "loss/sft": "Mean negative log-probability of the target tokens, in supervised training.",
    "loss/grad_norm": "Norm of the gradient before clipping.",
    "loss/grad_norm_clipped": "Norm of the gradient after clipping: at most `train.optim.max_grad_norm`.",
    "loss/lr": "The learning rate of the policy.",
    "loss/micro_batches": "Forward and backward passes.",
    "loss/skipped_steps": "Updates that were skipped because the loss or the gradient was not finite.",
    # policy
    "policy/entropy": "Mean entropy of the policy at the trained tokens, in nats.",
    "policy/high_entropy_threshold": "The lowest entropy of a token in the policy loss, with `high_entropy_share`.",
    "policy/observation_nll": "Mean negative log-probability of the observed tokens, if the loss uses them.",
    "policy/advantage": "Mean advantage of the trained tokens.",
    "policy/ratio": "Mean ratio of the new probability of a token to its old one.",
    "policy/ratio_max": "The largest ratio of a token's new probability to its old one.",
    "policy/approx_kl": "KL from the old policy after the updates: k3 estimate, per token.",
    "policy/clip_fraction": "Share of tokens whose ratio the loss clipped.",
    "policy/kl_to_reference": "KL from the reference, per token, by the configured estimator.",
    "policy/kl_to_teacher": "KL from the teacher, per token.",
    "policy/teacher_gap": "Mean log-probability of a trained token under the teacher that changes advantages, minus the "
    "policy's; its negative estimates KL(policy || teacher).",
    "policy/entropy_coef": "The current weight of the entropy bonus, if `entropy_target` controls it.",
    "policy/kl_coef": "The current weight of the KL term.",
    "policy/kl_in_reward": "KL from the reference that was subtracted from the rewards, per token.",
    "policy/kl_in_reward_coef": "The current weight of the KL penalty in the rewards.",
    "policy/rollout_difference": "Mean absolute difference between a token's log-probability in trainer and engine.",
    "policy/rollout_difference_p99": "99th percentile of the log-probability difference between trainer and engine.",
    "policy/rollout_difference_max": "The largest log-probability difference between trainer and engine.",
    "policy/router_missing": "Share of the tokens for which the engine returned no experts, so the router chose them again.",
    "policy/router_changed": "Share of the routers' choices that differ from the engine's, which were replayed.",
    "policy/router_changed_tokens": "Share of the tokens for which some layer's router would choose other experts.",
    "policy/router_balance": "Imbalance of the use of experts over a sequence: 1 is even, the number of experts the worst.",
    "policy/router_entropy": "Mean entropy of a router's softmax over all experts, in nats.",
    "policy/router_load_max": "Tokens of a layer's busiest expert as a multiple of an even share, mean over layers.",
    "policy/rollout_k3": "KL between engine and trainer: k3 estimate, per token.",
    "policy/rollout_<figure>_turn<n>": "The metric without `_turn<n>`, over turn n only; `turn3plus` is turn 3 and all "
    "later turns.",
    "policy/rollout_difference_first_token": "`policy/rollout_difference` over the first tokens of turns.",
    "policy/rollout_difference_later_tokens": "`policy/rollout_difference` over all tokens except the first of each turn.",
    "policy/correction_weight": "Mean importance weight of the off-policy correction.",
    "policy/correction_weight_max": "The largest importance weight of the off-policy correction, before the cap.",
    "policy/correction_capped_share": "Share of the off-policy correction's weights that the cap cut.",
    "policy/correction_effective_share": "Effective sample size of the correction's weights, as a share of the tokens.",
    "policy/correction_rejected_share": "Share of the tokens that the off-policy correction rejected.",
    "policy/correction_rejected_sequences": "Share of the samples in which the off-policy correction rejected all tokens.",
    "policy/off_policy_kl": "KL between the sampling policy and the trained policy: k1 estimate, per token.",
    "policy/off_policy_k3": "KL between the sampling policy and the trained policy: k3 estimate, per token.",
    "policy/off_policy_chi2": "Chi-square divergence between the sampling policy and the trained policy, per token.",
    "policy/off_policy_chi2_sequence": "Chi-square divergence between the sampling and the trained policy, per sample.",
    "policy/off_policy_ppl_gap": "Difference of the log-perplexities of the sampling policy and the trained policy.",
    "policy/off_policy_difference_lag<n>": "Mean log-probability difference between the sampling and the trained policy, at "
    "tokens sampled n versions ago.",
    "policy/<figure>": "A value that the chosen loss reports; see its page in the algorithms.",
    # critic
    "critic/value_loss": "Loss of the critic.",
    "critic/clip_fraction": "Share of the values whose change was clipped.",
    "critic/value": "Mean value that the critic predicts.",
    "critic/return": "Mean return that values are trained towards.",
    "critic/explained_variance": "1 - Var(return - value) / Var(return): should rise towards 1.",
    "critic/grad_norm": "Norm of the critic's gradient before clipping.",
    "critic/grad_norm_clipped": "Norm of the critic's gradient after clipping.",
    "critic/lr": "The learning rate of the critic.",
    "critic/skipped_steps": "The critic's updates that were skipped because the loss or the gradient was not finite.",
    # engine
    "engine/replicas": "Servers of the pool.",
    "engine/replicas_live": "Servers that answer.",
    "engine/lost": "Requests whose server was lost.",
    "engine/redone": "Requests that were sent again to another server.",
    "engine/stale": "Completions that were discarded because their server had other weights than the run sent.",
    "engine/moved": "Requests that went to another server than the one with their prefix.",
    "engine/restarts": "Restarts of servers.",
    "engine/queue": "Mean number of requests that waited for a slot of an engine, over the time of the step.",
    "engine/kv_use": "Mean share of the engines' KV cache that was in use.",
    # the machine
    "system/cpu_share": "Mean share of the machine's processors that was busy, including other programs.",
    "system/memory_share": "The largest share of the machine's memory that was in use during the step.",
    "system/process_gb": "The largest resident memory of the training process during the step, in GB.",
    "system/gpu<n>/busy_share": "Share of the time that this GPU ran a kernel (NVML).",
    "system/gpu<n>/memory_share": "The largest share of this GPU's memory that was in use during the step (NVML).",
    "system/gpu<n>/power_w": "Mean power that this GPU drew, in watts (NVML).",
    # time
    "time/step_s": "Seconds of the step, from the end of one update to the end of the next.",
    "time/generate_s": "Seconds of the step in which the engine was generating.",
    "time/train_s": "Seconds of training.",
    "time/prepare_s": "Seconds for filters, samples, scores and advantages.",
    "time/forward_backward": "Seconds in forward and backward passes.",
    "time/forward": "Seconds in forward passes.",
    "time/backward": "Seconds in backward passes.",
    "time/layout": "Seconds for laying out batches.",
    "time/optim": "Seconds in the optimizer.",
    "time/critic_s": "Seconds of the critic.",
    "time/other_share": "Share of the step in which neither the engine generated nor the policy trained.",
    "time/tools_s": "Sum of the seconds of all tool calls, which run concurrently.",
    "time/interaction_s": "Sum of the seconds of all interactions, which run concurrently.",
    "time/tool/<name>/p50_s": "Median seconds of a call of this tool.",
    "time/tool/<name>/p99_s": "99th percentile of the seconds of a call of this tool.",
    "time/tool/<name>/share": "Share of this tool in the time of all episodes.",
    "time/interaction/<name>/p50_s": "Median seconds of an answer of this interaction.",
    "time/interaction/<name>/p99_s": "99th percentile of the seconds of an answer of this interaction.",
    "time/interaction/<name>/share": "Share of this interaction in the time of all episodes.",
    # tools
    "tool/<name>/calls": "Calls of this tool; `unknown` counts the names that the model made up.",
    "tool/<name>/errors": "Share of this tool's calls that ended with an error.",
    "tool/<name>/error_<kind>": "Calls that failed with this kind of error; the reference lists the kinds.",
    "tool/<name>/unavailable": "Calls in which the tool reported to the model that its service is unavailable.",
    "tool/<name>/cut": "Calls whose result was cut because it was too long.",
    "tool/<name>/cut_chars": "Mean number of characters that were cut from a result that was too long.",
    "tool/<name>/waited_s": "Mean seconds that a call waited for a slot, if the tool or its host has a limit.",
    "tool/<name>/time_s": "Mean seconds of this tool's calls.",
    "tool/<name>/<measured>": "Mean of a number that the tool's `execute` returned.",
    # further policies
    "policies/<name>/tokens": "Tokens sampled by this policy, which is not the trained one.",
    "policies/<name>/version": "The step of the weights that this copy of the trained policy has.",
    # evaluation
    "eval/<set>/num_trajectories": "Trajectories of the evaluation set.",
    "eval/<set>/success": "Share of trajectories whose `outcome` reached 1.",
    "eval/<set>/first_turn_success": "Share of the trajectories that succeeded in the first turn.",
    "eval/<set>/repaired": "Success rate of trajectories in which the interaction rejected a turn before the last.",
    "eval/<set>/num_repairable": "Trajectories that count for `repaired`.",
    "eval/<set>/mean_reward": "Mean total reward.",
    "eval/<set>/mean_turns": "Mean number of turns.",
    "eval/<set>/mean_sampled_tokens": "Mean number of sampled tokens.",
    "eval/<set>/valid_tool_calls": "Share of all tool calls that ran without an error.",
    "eval/<set>/failed": "Share of the trajectories that failed.",
    "eval/<set>/cut": "Share of the trajectories that a limit on tokens, context or time cut short.",
    "eval/<set>/out_of_turns": "Share of the trajectories that used up their turns.",
    "eval/<set>/<source>/<variable>/<metric>": "With several samples per task: `mean@n`, `std@n`, and bootstrap estimates "
    "of `best@k`, `worst@k` and, if there is a `pred`, `maj@k` for k = 2, 4, …, n, of the reward, or of a number that its "
    "function returned, by data source.",
}
"""Name or pattern -> meaning. An exact name takes precedence over a pattern, and an earlier pattern over a later one."""


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    patterns = []
    for name, text in MEANINGS.items():
        if "<" in name:
            parts = re.split(r"<\w+>", name)
            patterns.append((re.compile("(.+)".join(re.escape(p) for p in parts)), text))
    return patterns


def meaning(name: str) -> str | None:
    """Return the meaning of a metric; None for an unknown name."""
    if name in MEANINGS:
        return MEANINGS[name]
    return next((text for pattern, text in _patterns() if pattern.fullmatch(name)), None)
