"""Keys and values of former versions, each with its successor.

    unknown key 'engine.order', set to 'fifo' (in run.yaml). It is no longer a key; remove it: …
    engine.weights is 'http' (in run.yaml); it is no longer supported; use gloo, …

Keys whose last part is unchanged, such as `algorithm.clip_low`, are not listed: `unknown.py` suggests the new section.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

RETIRED: Mapping[str, str] = {
    "algorithm.kl_coef": "write algorithm.kl.coef",
    "algorithm.kl_estimator": "write algorithm.kl.estimator",
    "algorithm.kl_target": "write algorithm.kl.target",
    "algorithm.kl_horizon": "write algorithm.kl.horizon",
    "algorithm.kl_in_reward": "write algorithm.kl={place: reward, coef: …}, in a list if the loss has a KL term too",
    "algorithm.clip_dual": "write algorithm.loss.dual_clip",
    "algorithm.loss_kwargs": "write its entries beside the name: algorithm.loss={name: …, tau_pos: …}",
    "algorithm.advantage_kwargs": "write its entries beside the name: algorithm.advantage={name: …, gamma: …}",
    "data.mix": "write data.sampler={name: mix, weights: {…}}",
    "data.sampler_kwargs": "write its entries beside the name: data.sampler={name: …, start: …}",
    "engine.in_process": "remove it: engine.kind=sglang starts servers, with the options of engine.launch",
    "engine.num_threads": "remove it: num_threads counts for sampling and for training",
    "engine.order": "remove it: waiting requests are served in the order of arrival",
    "engine.order_kwargs": "remove it: waiting requests are served in the order of arrival",
    "engine.process": "remove it: the embedded engine samples during training if train.max_staleness is above 0",
    "model.lora.rank_stabilized": "multiply model.lora.alpha by the square root of the rank, which has the same effect",
    "model.train_tokenizer": "write model.tokenizer={corpus: …, vocab_size: …}",
    "optim.warmup_ratio": "write warmup_steps, where a number below 1 is a share of the steps",
    "policies.*.train": "a run trains one policy; let it play several parts (model: policy), or train the other in its run",
    "reward.batch_size": "write reward.batch.size",
    "reward.batch_wait_s": "write reward.batch.wait_s",
    "reward.function.kwargs": "write its entries beside the name: reward.function={name: …, bonus: …}",
    "reward.routes.*.kwargs": "write its entries beside the name: {name: …, bonus: …}",
    "rollout.reasoning_parser": "write rollout.parser.reasoning",
    "rollout.tools.breaker.min_episodes": "remove it: the failures of all episodes count, and concurrent ones count once",
    "train.distributed.strategy": "write train.backend: torch (FSDP2 on several ranks) or megatron",
    # values
    "engine.weights=disk": "use folder, with engine.weights_folder",
    "engine.weights=group": "use nccl between GPUs, or gloo",
    "engine.weights=http": "use gloo (or nccl between GPUs), the server's own transfer",
    "engine.weights=shared_memory": "use folder",
    "reward.batch.wait_s=None": "write the number of seconds for which a call is collected, such as 1.0",
}
"""Key, or key=value -> what to write now. `*` stands for a name; the key may be inside another section."""


def successor(key: str) -> str:
    """Return the advice for a retired `key` or `key=value`, "" for any other."""
    return next((text for pattern, text in RETIRED.items() if fnmatchcase(f".{key}", f"*.{pattern}")), "")
