"""Shared by the benchmarks on real servers: a small random Qwen3, a server of it on chosen cores, and its client.

    async with server("vllm", cores={0}) as url:
        engine = client("vllm", url)

`make engines` builds the environments; a benchmark without its environment ends with a message and prints no figure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from polyturn.engines import serve_commands
from polyturn.engines.launcher import Server
from polyturn.engines.options import ServerOptions
from polyturn.engines.remote import RemoteEngine
from polyturn.engines.request_limits import ServedModel
from polyturn.engines.sglang import SglangEngine
from polyturn.engines.vllm import VllmEngine

VOCAB, MAX_CONTEXT = 1024, 8192
CLIENTS: dict[str, type[RemoteEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


def python_of(engine: str) -> Path:
    """Return the interpreter of the environment that serves `engine`.

    Raises:
        SystemExit: the environment was not built.
    """
    path = Path(__file__).parents[1] / "scripts" / "engines" / "build.py"
    spec = importlib.util.spec_from_file_location("engines_build", path)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    from venv_cache import interpreter  # beside the script, which made it importable

    python: Path | None = interpreter(build.folder_of(engine))
    if python is None:
        sys.exit(f"there is no environment for {engine}; build it with `make engines`")
    return python


def write_model(folder: Path) -> None:
    """Write a random Qwen3 of 0.7 million parameters."""
    from support.models import tiny_model

    model = tiny_model(VOCAB, hidden=128, layers=4, heads=4, kv_heads=2, max_positions=MAX_CONTEXT)
    model.save_pretrained(folder)


@contextlib.asynccontextmanager
async def server(
    engine: str,
    *,
    cores: Iterable[int] | None = None,
    args: tuple[str, ...] = (),
    model: Path | None = None,
    max_context: int = MAX_CONTEXT,
) -> AsyncIterator[str]:
    """Start a server and yield its URL.

    Args:
        engine: "vllm" or "sglang".
        cores: The cores that the server may use; None for all.
        args: Further flags of the server.
        model: The model's folder; None for a small random model.
        max_context: The largest number of tokens of a prompt plus its completion.
    """
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            write_model(model := Path(folder))
        spec = getattr(serve_commands, f"{engine}_command")(
            python=str(python_of(engine)), model=model, max_context=max_context, device="cpu", args=args
        )
        if cores is not None:
            listed = ",".join(map(str, sorted(cores)))
            # A parallel region must not have more threads than cores, and vLLM binds its threads by default.
            env = {**spec.env, "OMP_NUM_THREADS": str(len(set(cores))), "VLLM_CPU_OMP_THREADS_BIND": listed}
            spec = dataclasses.replace(spec, command=("taskset", "-c", listed, *spec.command), env=env)
        running = await Server.start(spec)
        try:
            yield running.url
        finally:
            await running.stop()


def client(engine: str, url: str, *, max_in_flight: int = 256) -> RemoteEngine:
    """Return a client of a server."""
    return CLIENTS[engine](
        url,
        ServedModel(vocab_size=VOCAB, max_context=MAX_CONTEXT),
        options=ServerOptions(kind="vllm", max_in_flight=max_in_flight),
    )
