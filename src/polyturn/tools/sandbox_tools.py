"""SandboxTools: bash, read_file, write_file and edit_file, which share one sandbox per episode.

    tools:
      - class_name: polyturn.tools.sandbox_tools.SandboxTools
        config: {sandbox: {backend: podman, image: "python:3.12-slim"}, timeout: 45, tools: [bash, edit_file]}

    bash({"command": "cd /app && x=1"})  ->  "The command printed nothing."
    bash({"command": "echo $x; pwd"})    ->  "1\n/app\n"

One item of a tool file makes four tools. The sandbox is started at an episode's first call and closed at its end. Each
command runs in a new shell, which restores the folder, variables and functions of the previous one. If a command hangs, it
is killed, and the state before it remains.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar
from uuid import uuid4

from pydantic import Field

from polyturn.core.errors import ConfigError, ToolError, did_you_mean
from polyturn.infra.settings import AtLeastOne, Seconds, Settings
from polyturn.sandbox import BaseSandbox, EpisodeSandboxes, SandboxFileError, SandboxSpec, read_spec, try_sandbox
from polyturn.sandbox.base import ExecResult
from polyturn.tools.base import BaseTool
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)

SHARE = 0.75
"""Share of a call's deadline that its command may use; the rest is for starting a sandbox."""
MAX_COMMAND = 100_000
"""Maximum size of a command in bytes; the kernel does not accept much longer arguments."""
MAX_EDITED = 4 << 20
_SHELL = """exec 2>&1
if [ -f /tmp/.polyturn-shell ]; then
  . /tmp/.polyturn-shell > /dev/null 2>&1
  cd "$PWD"
fi
POLYTURN_COMMAND=$1
shift
polyturn_keep() {
  if [ -n "$BASH_VERSION" ]; then declare -f; declare -p; else export -p; fi > /tmp/.polyturn-shell 2> /dev/null
}
trap polyturn_keep EXIT
eval "$POLYTURN_COMMAND"
"""
"""Shell script that runs one command: it restores the state of the previous command, and stores the new state at its exit.
Restoring prints errors about the shell's read-only variables, which are discarded."""


class SandboxToolSettings(Settings):
    """Settings of the tools that share a sandbox."""

    type: str = "native"
    timeout: Seconds = 45.0
    """Maximum number of seconds of a command."""
    max_output_bytes: AtLeastOne = 1 << 16
    tools: Annotated[list[str], Field(min_length=1)] | None = None
    """The names of the tools; null means all."""


class SandboxTool(BaseTool):
    """A tool that works in the episode's sandbox."""

    waits_apart: ClassVar[bool] = True
    NAME: ClassVar[str]
    DESCRIPTION: ClassVar[str]
    ARGUMENTS: ClassVar[Mapping[str, str | int]]
    """Argument name -> description; arguments whose description ends with "(optional)" may be left out."""

    def __init__(
        self, settings: SandboxToolSettings, boxes: EpisodeSandboxes, spec: SandboxSpec | None, *, config: dict[str, Any]
    ) -> None:
        """Make the tool.

        Args:
            settings: Its deadline and the maximum size of its output.
            boxes: The sandboxes of live episodes, shared with other tools.
            spec: The spec of an episode's sandbox; None if the environment provides it.
            config: The settings before parsing.
        """
        super().__init__(config, None)
        self._boxes = boxes
        self._spec = spec
        self.timeout_s = settings.timeout
        self._max_bytes = settings.max_output_bytes

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema."""
        kinds = {"start": "integer", "num_lines": "integer", "timeout": "number"}
        properties = {name: {"type": kinds.get(name, "string"), "description": of} for name, of in self.ARGUMENTS.items()}
        required = [name for name, of in self.ARGUMENTS.items() if not str(of).endswith("(optional)")]
        return OpenAIFunctionToolSchema.of(self.NAME, self.DESCRIPTION, properties, required=required)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start an instance for one episode; the first call starts its sandbox."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._boxes.join(instance_id, self._spec)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer a call in the episode's sandbox.

        Raises:
            ToolError: a file cannot be read or written, or an argument does not fit.
            SandboxError: the sandbox failed; the trajectory is dropped.
        """
        try:
            return await self.work(await self._boxes.of(instance_id), parameters)
        except SandboxFileError as problem:
            raise ToolError(str(problem)) from problem

    async def work(self, box: BaseSandbox, parameters: Mapping[str, Any]) -> Any:
        """Answer one call."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:
        """Return None: the tool does not reward episodes."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Close the sandbox when its last tool is released."""
        await self._boxes.leave(instance_id)


class BashTool(SandboxTool):
    """Runs a command in a shell whose state is kept."""

    NAME = "bash"
    DESCRIPTION = (
        "Run a command in a shell. The folder, variables and functions are kept between calls. Processes in the background "
        "stay, too; redirect their output to a file."
    )
    ARGUMENTS: ClassVar = {
        "command": "The command.",
        "timeout": "Seconds after which it is stopped (optional)",
    }

    def fit_deadline(self, timeout_s: float) -> None:
        """Limit a command to three quarters of a call's deadline."""
        if self.timeout_s > SHARE * timeout_s:
            logger.warning(
                "tool %r: a command may take %g s (three quarters of a call's deadline), not %g s; raise "
                "rollout.tools.timeout_s, or lower timeout",
                self.name,
                SHARE * timeout_s,
                self.timeout_s,
            )
            self.timeout_s = SHARE * timeout_s

    async def work(self, box: BaseSandbox, parameters: Mapping[str, Any]) -> Any:
        """Run the command, and return its output and how it ended."""
        command = parameters["command"]
        if len(command.encode("utf-8", "replace")) > MAX_COMMAND or "\0" in command:
            raise ToolError(
                f"the command has {len(command)} characters; at most {MAX_COMMAND} bytes without NUL are run; write long "
                "texts with write_file"
            )
        timeout_s = min(max(parameters.get("timeout") or self.timeout_s, 0.1), self.timeout_s)
        shell = [box.shell, "-c", _SHELL, box.shell, command]
        result = await box.exec(shell, timeout_s=timeout_s, max_bytes=self._max_bytes)
        metrics = {"exit_code": result.exit_code, "is_timeout": float(result.is_timeout), "duration_s": result.duration_s}
        return ToolResponse(text=result_text(result, timeout_s=timeout_s)), None, metrics


class ReadFileTool(SandboxTool):
    """Reads a text file, or some of its lines."""

    NAME = "read_file"
    DESCRIPTION = "Read a text file."
    ARGUMENTS: ClassVar = {
        "path": "The file.",
        "start": "The first line, from 1 (optional)",
        "num_lines": "How many lines (optional)",
    }

    async def work(self, box: BaseSandbox, parameters: Mapping[str, Any]) -> str:
        """Return the lines."""
        lines = list(io.StringIO(await _text(box, parameters["path"])))  # ends lines only at newlines, unlike splitlines
        first = max(parameters.get("start") or 1, 1) - 1
        last = None if parameters.get("num_lines") is None else first + max(parameters["num_lines"], 0)
        return "".join(lines[first:last]) or f"[No lines; the file has {len(lines)}.]"


class WriteFileTool(SandboxTool):
    """Writes a whole file."""

    NAME = "write_file"
    DESCRIPTION = "Write a file; what was in it is replaced, and missing folders are made."
    ARGUMENTS: ClassVar = {"path": "The file.", "content": "All of its new content."}

    async def work(self, box: BaseSandbox, parameters: Mapping[str, Any]) -> str:
        """Write the file."""
        data = parameters["content"].encode("utf-8", "replace")
        await box.write(parameters["path"], data)
        return f"Wrote {len(data)} bytes to {parameters['path']}."


class EditFileTool(SandboxTool):
    """Replaces one passage of a text file."""

    NAME = "edit_file"
    DESCRIPTION = "Replace a passage of a file, which must occur in it exactly once."
    ARGUMENTS: ClassVar = {"path": "The file.", "old": "The passage, exactly as it is.", "new": "The text in its place."}

    async def work(self, box: BaseSandbox, parameters: Mapping[str, Any]) -> str:
        """Replace the passage."""
        text = await _text(box, parameters["path"])
        count = text.count(parameters["old"]) if parameters["old"] else 0
        if count != 1:
            why = "is empty" if not parameters["old"] else f"occurs {count} times"
            raise ToolError(f"old {why} in {parameters['path']}; give a passage that occurs exactly once")
        await box.write(parameters["path"], text.replace(parameters["old"], parameters["new"]).encode("utf-8", "replace"))
        return f"Edited {parameters['path']}."


TOOLS: tuple[type[SandboxTool], ...] = (BashTool, ReadFileTool, WriteFileTool, EditFileTool)


class SandboxTools(BaseTool):
    """The class that an item of a tool file names to get all of these tools.

    Config: `sandbox`, a mapping with the fields of `SandboxSpec` (such as `backend`, `image` and `network`), and the fields
    of `SandboxToolSettings`.
    """

    @classmethod
    def expand(cls, config: Mapping[str, Any], *, base: Path | None = None) -> list[BaseTool]:
        """Return the tools that an item's `config` describes, after a trial start of their sandbox.

        Raises:
            ConfigError: a setting is unknown, or the sandbox does not start.
        """
        spec = read_spec(config.get("sandbox", {}), where="sandbox", base=base)
        try_sandbox(spec, where="the sandbox tools")
        return list(make_tools({k: v for k, v in config.items() if k != "sandbox"}, EpisodeSandboxes(), spec))


def make_tools(config: Mapping[str, Any], boxes: EpisodeSandboxes, spec: SandboxSpec | None) -> Sequence[SandboxTool]:
    """Make the tools that `config` names, with the sandboxes `boxes`.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    known = {tool.NAME: tool for tool in TOOLS}
    settings = SandboxToolSettings.read(config, who="the sandbox tools")
    chosen = list(known) if settings.tools is None else settings.tools
    for name in chosen:
        if name not in known:
            raise ConfigError(f"there is no sandbox tool {name!r}.{did_you_mean(name, known)}")
    return [known[name](settings, boxes, spec, config=dict(config)) for name in dict.fromkeys(chosen)]


def result_text(result: ExecResult, *, timeout_s: float) -> str:
    """Return a command's result as text for the model: its output, then how it ended if it did not succeed."""
    output = result.stdout + result.stderr
    if result.is_timeout:
        end = f"[The command took longer than {timeout_s:g} s and was stopped.]"
    else:
        end = f"[exit code {result.exit_code}]" if result.exit_code else ""
    gap = "\n" if output and end and not output.endswith("\n") else ""
    return output + gap + end or "The command printed nothing."


async def _text(box: BaseSandbox, path: str) -> str:
    try:
        return (await box.read(path, max_bytes=MAX_EDITED)).decode()
    except UnicodeDecodeError as problem:
        raise ToolError(f"{path} is not UTF-8 text") from problem
