"""TRL's own losses, run in the interpreter of `scripts/environments/build.py trl`: numbers in, loss and gradient out.

stdin   {"logprobs": [[…]], "old": …, "ref": …, "entropies": …, "mask": …, "advantages": […], "cases": {name: settings}}
stdout  {name: {"loss": number, "gradient": [[…]]}}

It calls `GRPOTrainer._compute_loss` on an object that holds the settings alone, in float64 and without a model.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from trl import GRPOTrainer


def one(arrays: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the loss of one case and its gradient by the log-probabilities."""
    logprobs = arrays["logprobs"].clone().requires_grad_()
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (logprobs, arrays["entropies"], None)
    defaults: dict[str, Any] = {
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "top_entropy_quantile": 1.0,
    }
    constants: dict[str, Any] = {
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "max_completion_length": arrays["mask"].shape[1],
        "current_gradient_accumulation_steps": 1,
    }
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    own = {k: v for k, v in settings.items() if k not in arguments}
    for name, value in {**defaults, **constants, **own}.items():
        setattr(trainer, name, value)
    trainer.args = SimpleNamespace(**{**arguments, **{k: v for k, v in settings.items() if k in arguments}})
    trainer.model.training = True
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer.accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, **_: x,
        pad_across_processes=lambda x, **_: x,
    )
    trainer.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, trainer)
    trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
    ids = torch.ones_like(arrays["mask"], dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": arrays["mask"],
        "advantages": arrays["advantages"],
        "old_per_token_logps": arrays["old"],
        "ref_per_token_logps": arrays["ref"],
        "num_items_in_batch": arrays["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return {"loss": loss.item(), "gradient": logprobs.grad.tolist()}


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    arrays = {k: torch.tensor(v, dtype=torch.float64) for k, v in request.items() if k != "cases"}
    json.dump({name: one(arrays, settings) for name, settings in request["cases"].items()}, sys.stdout)


if __name__ == "__main__":
    main()
