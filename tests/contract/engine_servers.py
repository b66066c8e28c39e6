"""The real servers of the contract tests: started once for the whole session, from the environments of `make engines`.

`POLYTURN_TEST_ENGINES=0` leaves them out, and so does a missing environment; both are said in the test report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from polyturn.engines.launcher import LaunchSpec

ROOT = Path(__file__).parents[2]
MAX_CONTEXT = 256


def why_not(engine: str) -> str | None:
    """Return why `engine` cannot be started here; None if it can."""
    if os.environ.get("POLYTURN_TEST_ENGINES") == "0":
        return "POLYTURN_TEST_ENGINES=0 leaves the real engines out"
    if not interpreter(engine).exists():
        return f"there is no environment for {engine}; `make engines` builds it"
    return None


def interpreter(engine: str) -> Path:
    """Return the interpreter of the engine's environment, whether it is there or not."""
    script = ROOT / "scripts" / "engines" / "build.py"
    shown = subprocess.run([sys.executable, str(script), "--where", engine], check=True, capture_output=True, text=True)
    return Path(shown.stdout.split()[1])


def launch_spec(engine: str, model: Path) -> LaunchSpec:
    """Return how `engine` serves the model in `model` on a CPU, in float32."""
    python = str(interpreter(engine))
    if engine == "vllm":
        return LaunchSpec(
            command=(
                *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--host", "127.0.0.1", "--port", "{port}", "--max-model-len", str(MAX_CONTEXT)),
                *("--enforce-eager", "--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
                *("--skip-tokenizer-init", "--worker-extension-cls", "polyturn_vllm_worker.WeightLoader"),
            ),
            env={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_SERVER_DEV_MODE": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(ROOT / "src" / "polyturn" / "engines" / "server_side"),
            },
        )
    return LaunchSpec(
        command=(
            *(python, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"),
            *("--attention-backend", "torch_native", "--disable-cuda-graph", "--disable-overlap-schedule"),
            *("--sleep-on-idle", "--mem-fraction-static", "0.1", "--max-total-tokens", "65536"),
            *("--max-running-requests", "64", "--context-length", str(MAX_CONTEXT), "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", "{port}", "--skip-tokenizer-init"),
        ),
        env={
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "2",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        },
    )
