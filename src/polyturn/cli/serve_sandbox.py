"""`polyturn serve --sandbox`: SandboxFusion's `run_code`, on this machine, for tools and rewards that run programs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from polyturn.cli.listening import listen, needing
from polyturn.cli.serve import ServeOptions


def run(options: ServeOptions, *, python: Path | None = None, allow_unsafe: bool = False) -> None:
    """Serve until a signal asks to stop.

    Raises:
        ConfigError: the address would be open to others, or code cannot be isolated here.
    """
    with needing("serve", what="a server"):
        from polyturn.serving.sandbox import MAX_BODY_BYTES, SandboxService, create_app
    from polyturn.tools.python_sandbox.interpreter import Interpreter
    from polyturn.tools.python_sandbox.isolation import bare_python, interpreter_folders, require_walls
    from polyturn.tools.python_sandbox.limits import OUTPUT_OF_PROGRAMS, SandboxLimits

    rules = options.rules(max_body_bytes=MAX_BODY_BYTES)
    walls = require_walls(allow_unsafe=allow_unsafe)
    timeout_s = 30.0 if options.deadline_s is None else options.deadline_s
    limits = SandboxLimits(timeout_s=timeout_s, memory_mb=1024, output_bytes=OUTPUT_OF_PROGRAMS)
    interpreter = bare_python() if python is None else str(python)
    interpreter_folders(interpreter)
    slots = max(2, os.cpu_count() or 2)
    start = partial(Interpreter, limits, walls=walls, python=interpreter)
    service = SandboxService(start, limits=limits, max_concurrent=slots, max_waiting=64 * slots, warm=slots)
    app = create_app(service, rules=rules)
    listen(app, options, rules, what="sandbox", path="/run_code", more=f" ({walls.value})")
