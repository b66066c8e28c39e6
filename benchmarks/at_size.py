"""Times load, score, update, checkpoint and sync of a 0.5B model against the plain work. Prints one JSON line.

    python benchmarks/at_size.py [--layers 24] [--tokens 128] [--repeats 2] [--engine vllm]

The model has the sizes of Qwen2.5-0.5B and random weights in float32. Each part is timed alternately with the least work
that it must do: `load` with reading the files' bytes, `score` and `update` with a bare loop over the same rows, `checkpoint`
with writing as many bytes to one file and to the disk (`held` is how long training waits for it), and both halves of a
weight sync (ours, which writes the weights for the server, and the server's loading) with a copy of the weights in memory.
Seconds are medians of wall time, which includes waiting for disks and servers, so results of a busy machine mean little.
`peak_mb` is the additional memory of each part; `mb` is the size of the data that it must move.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _real_servers import CLIENTS, python_of

from polyturn.batching.layout import LayoutSettings
from polyturn.core.sample import SampleId, TrainSample
from polyturn.engines import serve_commands
from polyturn.engines.launcher import Server
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.weights.folder import WeightFolder
from polyturn.engines.weights.stream import streamed
from polyturn.training.hf import build_model, load_model, save_model
from polyturn.training.optim import OptimSettings
from polyturn.training.policy import ModelPolicy, local_policy

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
DTYPE = torch.float32  # of this benchmark: CPUs without AMX or AVX512-BF16 multiply bfloat16 fifty times slower
LIMIT = 1.5


def bytes_of(field: str) -> int:
    """Return a memory figure of this process, in bytes: VmRSS is the current size, VmHWM the largest."""
    match = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


class Part:
    """One part: its seconds, the seconds of the plain work, and its peak memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.ours, self.plain, self.peak = num_bytes, list[float](), list[float](), 0

    @contextlib.contextmanager
    def timed(self, seconds: list[float]) -> Iterator[None]:
        """Time the block, and record the peak memory of our side."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, began = bytes_of("VmRSS"), time.perf_counter()
        yield
        seconds.append(time.perf_counter() - began)
        if seconds is self.ours:
            self.peak = max(self.peak, bytes_of("VmHWM") - before)

    def figures(self) -> dict[str, Any]:
        """Return the part as JSON."""
        ours, plain = statistics.median(self.ours), statistics.median(self.plain)
        return {
            "seconds": round(ours, 3),
            "plain_seconds": round(plain, 3),
            "ratio": round(ours / plain, 2),
            "mb": round(self.num_bytes / 1e6),
            "peak_mb": round(self.peak / 1e6),
        }


def in_turns(part: Part, repeats: int, ours: Callable[[], object], plain: Callable[[], object]) -> Part:
    """Run both repeatedly; the first time is not measured."""
    for repeat in range(repeats + 1):
        for work, seconds in ((plain, part.plain), (ours, part.ours)):
            with part.timed(seconds if repeat else []):
                work()
    return part


def sample(number: int, tokens: int) -> TrainSample:
    """Return a sample in which all tokens but the first are trained."""
    rng, weights = np.random.default_rng(number), np.ones(tokens, np.float32)
    weights[0] = 0
    return TrainSample(
        id=SampleId("g", str(number), 0),
        token_ids=rng.integers(0, QWEN["vocab_size"], tokens).astype(np.int32),  # type: ignore[call-overload]
        loss_weights=weights,
        turn_ids=np.zeros(tokens, np.int32),
        old_logprobs=np.full(tokens, -12, np.float32),
        advantages=np.ones(tokens, np.float32),
    )


def read_all(folder: Path) -> None:
    """Read the bytes of all weights into memory."""
    for file in folder.glob("*.safetensors"):
        buffer = bytearray(file.stat().st_size)
        with file.open("rb", buffering=0) as opened:
            opened.readinto(buffer)


def write_all(path: Path, weights: list[torch.Tensor], num_bytes: int) -> None:
    """Write `num_bytes` of repeated weights to one file, and wait for the disk."""
    with path.open("wb", buffering=0) as file:
        left = num_bytes
        while left > 0:
            for tensor in weights:
                view = tensor.view(torch.uint8).numpy().reshape(-1)[:left]
                file.write(view.data)
                left -= len(view)
        os.fsync(file.fileno())  # a finished checkpoint is on the disk
    path.unlink()


def bare(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean log-probability of a row, in plain torch."""
    logits = model(ids).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).mean()


def of_trainer(folder: Path, scratch: Path, *, tokens: int, repeats: int) -> tuple[dict[str, Part], ModelPolicy]:
    """Measure the parts in the trainer's process."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    load = Part(size)
    in_turns(load, repeats, lambda: load_model(folder, dtype=DTYPE), lambda: read_all(folder))
    model = load_model(folder, dtype=DTYPE)
    rows = [sample(number, tokens) for number in range(2)]
    ids = [torch.from_numpy(row.token_ids.astype(np.int64))[None] for row in rows]
    policy = local_policy(model, optim=OptimSettings(lr=1e-6), layout=LayoutSettings(max_tokens_per_batch=tokens))

    def plain_score() -> None:
        with torch.no_grad():
            for row in ids:
                bare(model, row)

    def update() -> None:
        policy.forward_backward(rows)
        policy.optim_step()

    def plain_update() -> None:
        for row in ids:
            (-bare(model, row)).backward()
        for parameter in model.parameters():
            parameter.grad = None

    score = in_turns(Part(size), repeats, lambda: policy.score(rows), plain_score)
    updated = in_turns(Part(size), repeats, update, plain_update)
    state = sum(t.nbytes for t in policy.backend.state_dict().values() if isinstance(t, torch.Tensor))  # type: ignore[attr-defined,misc]

    def checkpoint() -> None:
        began = time.perf_counter()
        policy.backend.save(scratch / "state")
        waits.ours.append(time.perf_counter() - began)
        while not policy.backend.is_saved():
            time.sleep(0.01)
        save_model(model, scratch / "model")

    waits = Part(state)
    saved = in_turns(
        Part(state + size),
        repeats,
        checkpoint,
        lambda: write_all(scratch / "plain", [p.data for p in model.parameters()], state + size),
    )
    waits.ours, waits.plain = waits.ours[1:], saved.plain
    return {"load": load, "score": score, "update": updated, "checkpoint": saved, "checkpoint: held": waits}, policy


async def of_server(kind: str, folder: Path, policy: ModelPolicy, repeats: int) -> tuple[Part, Part]:
    """Measure writing new weights to shared memory, and the server's loading of them."""
    weights = streamed(policy.weights())
    size = sum(kind.nbytes for kind in weights.kinds.values())
    written, loaded = Part(size), Part(size)
    spec = getattr(serve_commands, f"{kind}_command")(
        python=str(python_of(kind)), model=folder, max_context=512, device="cpu", args=("--dtype", "float32")
    )
    running = await Server.start(spec)
    try:
        vocab: Any = QWEN["vocab_size"]
        engine = CLIENTS[kind](running.url, ServedModel(vocab_size=vocab, folder=folder))
        with WeightFolder(folder) as files:
            for repeat in range(repeats + 1):
                for part in (written, loaded):
                    with part.timed(part.plain if repeat else []):
                        _ = [tensor.clone() for tensor in weights.values()]
                with written.timed(written.ours if repeat else []):
                    checkpoint = files.write(weights)
                with loaded.timed(loaded.ours if repeat else []):
                    await engine.update_weights(repeat + 1, weights=checkpoint)
        await engine.close()
    finally:
        await running.stop()
    return written, loaded


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="of each of two rows")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine", choices=["vllm", "sglang", "none"], default="vllm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        random_model = build_model({**QWEN, "num_hidden_layers": options.layers}, seed=0, dtype=DTYPE)
        count = sum(p.numel() for p in random_model.parameters())
        save_model(random_model, Path(folder) / "model")
        del random_model
        model = Path(folder) / "model"
        (Path(folder) / "run").mkdir()
        parts, policy = of_trainer(model, Path(folder) / "run", tokens=options.tokens, repeats=options.repeats)
        if options.engine != "none":
            sync = asyncio.run(of_server(options.engine, model, policy, options.repeats))
            parts |= dict(zip(("sync: written", "sync: loaded"), sync, strict=True))
    figures = {name: part.figures() for name, part in parts.items()}
    print(
        json.dumps(
            {
                "benchmark": "at_size",
                "parameters": count,
                "cores": os.cpu_count(),
                "parts": figures,
                "limit": LIMIT,
                "ok": all(part["ratio"] <= LIMIT for part in figures.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
