"""The commands that start vLLM and SGLang so that training can use them, on a GPU and on a CPU.

    vllm_command(python="/venv/bin/python", model=Path("out/model"), max_context=4096, device="cpu")  ->  LaunchSpec

Each flag here is one that the clients rely on (`vllm.py`, `sglang.py` say why); what a user adds comes after them and wins.
A processor of images needs its tokenizer; without images neither is loaded. On a CPU both compute in float32: the matrix
instructions of bfloat16 attention there are not in every virtual machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyturn.core.generation import MAX_SUPPORT
from polyturn.engines.launcher import LaunchSpec
from polyturn.engines.weight_transport import Way

SERVER_SIDE = Path(__file__).parent / "server_side"


def vllm_command(
    *,
    python: str,
    model: Path,
    max_context: int,
    device: str,
    sees: bool = False,
    transport: Way = "folder",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """Return the command line of a vLLM server of `model`.

    `device` is "cuda" or "cpu", `sees` says that prompts show images, `transport` how new weights come.
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
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its handles come pickled
    if device == "cpu":
        # A prompt in pieces makes vLLM rewind the request's random generator, which a CPU generator cannot: it would crash.
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
    transport: Way = "folder",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """Return the command line of a SGLang server of `model`.

    `device` is "cuda" or "cpu", `sees` says that prompts show images, `transport` how new weights come.
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
    """Return the server's `PYTHONPATH`, with our plug-in first."""
    own = (env or {}).get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(SERVER_SIDE), *([own] if own else [])])
