"""Measures how many incomplete weight syncs, which lack one group of parameters, are detected. Prints one JSON line.

    python benchmarks/canary.py [--trials 100] [--true-trials 20] [--engines vllm,sglang] [--ways folder,gloo]

The transport gloo of vLLM needs the trainer's side of vLLM's package: run the script with the interpreter of vLLM's
environment, PYTHONPATH=src:tests, and the packages of polyturn that are missing there.

A trial does not train. It uses a server of `make engines` with the true weights of a small tied Qwen3, runs the start-up
proof while one group of parameters keeps its old values, and records whether the proof failed and named that group. The
groups alternate until there are `--trials` trials, each with another seed. Complete syncs must pass, else the script fails.
Target: all faulty syncs are detected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from _real_servers import CLIENTS, VOCAB, server, write_model
from transformers import AutoModelForCausalLM

from polyturn.core.errors import EngineError
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.weights.stream import Transport
from polyturn.engines.weights.transfer import WeightTransfer
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy
from polyturn.training.weight_probe import WeightProbe
from polyturn.training.weight_shifts import groups_of
from polyturn.training.weight_sync import WeightSync


class Leaky:
    """An engine that receives only part of the tensors; everything else is the wrapped engine's."""

    def __init__(self, engine: RemoteEngine, true: Mapping[str, torch.Tensor]) -> None:
        self._update = engine.update_weights
        self._true = true
        self.kept: frozenset[int] = frozenset()
        """Positions of the tensors that are not sent."""

    async def __call__(self, version: int, *, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Stand in for `update_weights`."""
        assert weights is not None
        sent = {name: self._true[name] if tensor.data_ptr() in self.kept else tensor for name, tensor in weights.items()}
        await self._update(version, weights=sent)


async def measure(kind: str, transport: Transport, trials: int, true_trials: int) -> dict[str, Any]:
    """Return the results of one server."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        policy = local_policy(model, optim=OptimSettings(lr=1e-3))
        true = {name: tensor.clone() for name, tensor in policy.weights().items()}
        live = policy.weights()
        groups = groups_of(live)
        detected = named = passed = 0
        missed: list[str] = []
        args = ("--weight-transfer-config.backend", transport) if (kind, transport) == ("vllm", "gloo") else ()
        transfer = None if transport == "folder" else WeightTransfer(transport, CLIENTS[kind].open_link)
        async with server(kind, args=args) as url:
            engine = CLIENTS[kind](url, ServedModel(vocab_size=VOCAB, folder=Path(folder)), transfer=transfer)
            leaky = Leaky(engine, true)
            engine.update_weights = leaky  # type: ignore[method-assign]
            began = time.perf_counter()
            for trial in range(trials):
                name = list(groups)[trial % len(groups)]
                leaky.kept = frozenset(live[kept].data_ptr() for kept in groups[name])
                try:
                    await sync(engine, policy, trial).start(0)
                    missed.append(name)
                except EngineError as problem:
                    detected += 1
                    named += name in str(problem)
            seconds = time.perf_counter() - began
            leaky.kept = frozenset()
            for trial in range(true_trials):
                await sync(engine, policy, trials + trial).start(0)
                passed += 1
            await engine.close()
    return {
        "groups": len(groups),
        "trials": trials,
        "detected": detected,
        "named": named,
        "missed": missed,
        "true_syncs_passed": passed,
        "seconds_per_trial": round(seconds / trials, 2),
    }


def sync(engine: RemoteEngine, policy: ModelPolicy, seed: int) -> WeightSync:
    """Return a weight sync whose proof has other prompts for each seed."""
    return WeightSync(engine, policy, WeightProbe(vocab_size=VOCAB, num_prompts=2, num_tokens=16, seed=seed))


def main() -> None:
    """Measure all servers and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--true-trials", type=int, default=20)
    parser.add_argument("--engines", default="vllm,sglang")
    parser.add_argument("--ways", default="folder")
    options = parser.parse_args()
    results = {
        f"{kind} {transport}": asyncio.run(measure(kind, transport, options.trials, options.true_trials))
        for kind in options.engines.split(",")
        for transport in options.ways.split(",")
    }
    ok = all(r["detected"] == r["trials"] for r in results.values())
    print(json.dumps({"benchmark": "canary", "results": results, "ok": ok}))


if __name__ == "__main__":
    main()
