"""Runs the parts of scripts/gpu/run.sh, each in a process with a time limit, so that a failure affects one part only.

    bash scripts/gpu/run.sh [--tiny] [--only tests engine] [--seconds 360]

tests         pytest -m gpu: scores, gradients, sampling, a run
train_step    benchmarks/gpu_train_step.py at 0.5B and 1.5B: MFU of an optimizer step
engine        the embedded engine at 64 and 256 requests at once: tokens per second, time to first token
learns        examples/sums with SmolLM2: steps per minute, success before and after
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="polyturn-gpu-"))
PARTS = ("tests", "train_step", "engine", "learns")
EXAMPLE = ROOT / "examples" / "sums" / "config.yaml"
LIMIT_S = {"tests": 150, "train_step": 70, "engine": 60, "learns": 170}


def commands(part: str, *, tiny: bool) -> list[list[str]]:
    """Return the command lines of a part."""
    python = sys.executable
    if part == "tests":
        return [[python, "-m", "pytest", "tests/unit/test_on_device.py", "-m", "gpu", "-n", "0"]]
    if part == "train_step":
        sizes = [["--tiny"]] if tiny else [["--model", "0.5b"], ["--model", "1.5b"]]
        return [[python, "benchmarks/gpu_train_step.py", *size] for size in sizes]
    if part == "engine":
        return [[python, __file__, "--measure-engine", *(["--tiny"] if tiny else [])]]
    return [[python, __file__, "--measure-learning", *(["--tiny"] if tiny else [])]]


def run(part: str, *, tiny: bool, left_s: float) -> list[dict[str, Any]]:
    """Run a part; return its JSON lines, or the error."""
    results = []
    for number, command in enumerate(commands(part, tiny=tiny)):
        began = time.perf_counter()
        limit_s = min(LIMIT_S[part], left_s)
        log = OUT / f"{part}-{number}.log"
        with log.open("wb") as file:
            try:
                code: int | str = subprocess.run(
                    command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"not done after {limit_s:.0f} s"
        lines = log.read_text(errors="replace").splitlines()
        figures = next((json.loads(line) for line in reversed(lines) if line.startswith("{")), {})
        took_s = round(time.perf_counter() - began, 1)
        left_s = max(left_s - took_s, 1.0)
        result = {"part": part, "seconds_in_all": took_s, **figures}
        if part == "tests":
            result["summary"] = lines[-1] if lines else ""
        if code != 0:
            result |= {"failed": code, "last_lines": lines[-12:]}
        results.append(result)
    return results


def measure_engine(*, tiny: bool) -> dict[str, Any]:
    """Return tokens per second of the embedded engine, for random weights of a 0.5B Qwen2 and prompts of 256 tokens."""
    import torch
    from gpu_train_step import MODELS

    from polyturn.core.generation import GenerateRequest, SamplingParams
    from polyturn.engines.embedded import EmbeddedEngine
    from polyturn.training.hf import build_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fields = MODELS["tiny" if tiny else "0.5b"]
    config = {"model_type": "qwen2", "tie_word_embeddings": True, "max_position_embeddings": 4096, **fields}
    model: Any = (
        build_model(config, seed=0, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32).to(device).eval()
    )
    prompt_len, new, figures = (16, 8, {}) if tiny else (256, 128, {})
    generator = torch.Generator().manual_seed(0)

    async def ask(engine: EmbeddedEngine, batch: int, tokens: int) -> float:
        async def one(index: int, ids: list[int]) -> None:
            sampling = SamplingParams(max_tokens=tokens, seed=index)
            name = f"{tokens}-{index}"
            await engine.generate(GenerateRequest(request_id=name, session_id=name, prompt_ids=ids, sampling=sampling))
            await engine.end_session(name)

        prompts = torch.randint(0, fields["vocab_size"], (batch, prompt_len), generator=generator).tolist()
        began = time.perf_counter()
        await asyncio.gather(*(one(index, ids) for index, ids in enumerate(prompts)))
        return time.perf_counter() - began

    for batch in (4, 8) if tiny else (64, 256):
        engine = EmbeddedEngine(model, num_slots=batch)
        asyncio.run(ask(engine, batch, 2))  # warm-up: selects kernels and allocates memory
        prefill_s = asyncio.run(ask(engine, batch, 1))
        whole_s = asyncio.run(ask(engine, batch, new))
        figures[f"batch_{batch}"] = {
            "tokens_per_s": round(batch * new / whole_s),
            "decode_tokens_per_s": round(batch * (new - 1) / max(whole_s - prefill_s, 1e-9)),
            "prefill_s": round(prefill_s, 3),
        }
    memory = round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None
    return {
        "benchmark": "gpu_engine",
        "model": "tiny" if tiny else "0.5b",
        "cuda_graphs": False,
        **figures,
        "memory_gib": memory,
    }


def measure_learning(*, tiny: bool) -> dict[str, Any]:
    """Return figures of the sums example: seconds until the first step, steps per minute, success before and after."""
    import torch

    folder = OUT / "learns"
    settings = [f"out={folder}", "name=sums"]
    if tiny:
        settings += ["train.steps=1", "train.groups_per_step=2", "train.group_size=2", "evaluation.data.limit=2"]
    else:
        settings += ["train.steps=24"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", "from polyturn.cli.main import main; main()", "train", str(EXAMPLE), *settings],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    ends: list[float] = []
    for line in process.stdout:
        print(line, end="", flush=True)
        if re.match(r"step \d+/", line):
            ends.append(time.perf_counter())
    if process.wait():
        raise SystemExit(process.returncode)
    success: dict[str, list[float]] = {}
    for line in (folder / "sums" / "metrics.jsonl").read_text().splitlines():
        for key, value in json.loads(line).items():
            if key.startswith("eval/") and key.endswith("/success"):
                success.setdefault(key.split("/")[1], []).append(round(value, 3))
    return {
        "benchmark": "gpu_learns",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "steps": len(ends),
        "first_step_s": round(ends[0] - began, 1),
        "steps_per_minute": round(60 * (len(ends) - 1) / (ends[-1] - ends[0]), 1) if len(ends) > 1 else None,
        "success_before_and_after": {name: [values[0], values[-1]] for name, values in success.items()},
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    """Run the parts and print their JSON lines; the exit code is the number of parts that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="the same parts with tiny models, on any machine")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=360, help="for all parts together")
    parser.add_argument("--measure-engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure-learning", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_engine or args.measure_learning:
        print(json.dumps(measure_engine(tiny=args.tiny) if args.measure_engine else measure_learning(tiny=args.tiny)))
        return 0
    began, num_failed = time.perf_counter(), 0
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "results.jsonl").open("a") as file:
        for part in args.only:
            for result in run(part, tiny=args.tiny, left_s=max(args.seconds - (time.perf_counter() - began), 1)):
                num_failed += "failed" in result
                line = json.dumps(result)
                print(line, flush=True)
                file.write(line + "\n")
                file.flush()
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
