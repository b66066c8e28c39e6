"""The commands that start vLLM and SGLang for training, on a GPU and on a CPU.

    vllm_command(python="/venv/bin/python", model=Path("out/model"), max_context=4096, device="cpu")  ->  LaunchSpec

The clients rely on each of these flags (see `vllm.py`, `sglang.py`). A user's arguments come last and win. An image
processor needs its tokenizer; without images neither is loaded. On a CPU both servers compute in float32, because some
virtual machines lack the instructions for bfloat16 attention.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyturn.core.generation import MAX_SUPPORT
from polyturn.engines.launcher import LaunchSpec
from polyturn.engines.weights.stream import Transport

SERVER_SIDE = Path(__file__).parent / "server_side"


def vllm_command(
    *,
    python: str,
    model: Path,
    max_context: int,
    device: str,
    sees: bool = False,
    transport: Transport = "folder",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """Return the command line of a vLLM server of `model`.

    `device` is "cuda" or "cpu", `sees` means that prompts contain images, and `transport` is the transport of new weights.
    """
    flags = [
        *("--model", str(model), "--host", "{host}", "--port", "{port}"),
        *("--max-model-len", str(max_context), *([] if sees else ["--skip-tokenizer-init"])),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"),
        *("--max-logprobs", str(MAX_SUPPORT)),
        *([] if transport in {"folder", "adapter"} else ["--weight-transfer-config.backend", transport]),
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    if transport == "ipc":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # vLLM sends pickled handles
    if device == "cpu":
        # For chunked prefill vLLM rewinds the request's random generator, which crashes on a CPU.
        flags += ["--enforce-eager", "--dtype", "float32", "--no-enable-chunked-prefill"]
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return LaunchSpec(
        command=(python, "-m", "vllm.entrypoints.openai.api_server", *flags, *args),
        env={**environment, **(env or {}), "PYTHONPATH": _python_path(env)},
    )


def sglang_command(
    *,
    python: str,
    model: Path,
    max_context: int,
    device: str,
    sees: bool = False,
    transport: Transport = "folder",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """Return the command line of an SGLang server of `model`.

    `device` is "cuda" or "cpu", `sees` means that prompts contain images, and `transport` is the transport of new weights.
    """
    flags = ["--host", "{host}", "--port", "{port}", "--model-path", str(model), "--context-length", str(max_context)]
    if not sees:
        flags.append("--skip-tokenizer-init")
    environment = {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    if device == "cpu":
        flags += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph"]
        flags += ["--disable-overlap-schedule", "--sleep-on-idle", "--mem-fraction-static", "0.1"]
        flags += ["--max-total-tokens", "65536", "--max-running-requests", "64"]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}
    return LaunchSpec(
        command=(python, "-m", "sglang.launch_server", *flags, *args),
        env={**environment, **(env or {}), "PYTHONPATH": _python_path(env)},
    )


def _python_path(env: Mapping[str, str] | None) -> str:
    """Return the server's `PYTHONPATH`, with the plug-in first."""
    own = (env or {}).get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(SERVER_SIDE), *([own] if own else [])])
