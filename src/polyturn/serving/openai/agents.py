"""Command-line agents: how each is started, and how it gets the address of its model.

    scheduler_kwargs: {agent: claude_code, sandbox: {backend: podman, image: "my/image"}}

Your own agent is a value in a Python file, named as `agent: "file.py:mine"`:

    mine = CommandLineAgent(
        command=("my-agent", "--api", "{base_url}", "--key", "{api_key}", "--", "{instruction}"),
        install="pip install my-agent",
    )

`dataclasses.replace(AGENTS["claude_code"], timeout_s=600)` makes a variant of a known agent. The names between braces are
`instruction` (the text of the task's prompt), `base_url` (with /v1), `anthropic_base_url` (without), `api_key`, `model`,
and `home`, an empty folder for the agent's configuration, separate from its working folder. Any other name between braces
is an error. `{{name}}` gives a literal `{name}`, and braces around anything but a name are left as they are. The episode
ends when the agent exits; an exit code other than 0 is an error.
"""

from __future__ import annotations

import asyncio
import math
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from polyturn.core.errors import ConfigError, DataError, SchedulerError, did_you_mean
from polyturn.core.secrets import passed_on
from polyturn.core.task import Task
from polyturn.sandbox import BaseSandbox, SandboxFileError, SandboxSpec, try_sandbox
from polyturn.serving.openai.agent_process import address_variables, check_exit, run_command, task_line
from polyturn.serving.openai.endpoint import Address

NO_LIMIT_S = 7 * 86400.0
HOME = "/tmp/polyturn-agent"
"""The `home` folder in a sandbox."""
FIELDS = ("instruction", "base_url", "anthropic_base_url", "api_key", "model", "home")
"""The names that may stand between braces."""
_BRACES = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
"""A name between double braces (group 1, a literal) or between single braces (group 2, a field)."""


class FilledAgent(NamedTuple):
    """The command, variables and files of an agent in one episode."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLineAgent:
    """One agent: its command, variables and files."""

    command: tuple[str, ...]
    """The program and its arguments."""
    install: str = ""
    """The command that installs the agent, for the error message if it is missing."""
    check: str | None = None
    """A shell command that succeeds if the agent is installed; by default, the check is whether the program is on PATH."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path inside `home` -> content, written before the agent starts."""
    timeout_s: float | None = 1800.0
    """Seconds after which the agent is ended, and the episode is scored as it is; None leaves the limit to
    `rollout.limits.timeout_s`."""
    reads_task: bool = False
    """Whether the agent gets the task on standard input, as one line of JSON; otherwise standard input is empty."""

    def __post_init__(self) -> None:
        command, limit = self.command, self.timeout_s
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ConfigError(f"CommandLineAgent: command is {command!r:.100}; give a tuple: the program and its arguments")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf):
            raise ConfigError(f"CommandLineAgent: timeout_s is {limit!r:.100}; give a number of seconds above 0, or None")
        for where, texts in (("variables", self.variables), ("files", self.files)):
            for name, text in texts.items():
                if not isinstance(name, str) or not isinstance(text, str):
                    raise ConfigError(
                        f"CommandLineAgent: {where}[{name!r}] is {text!r:.100}; names and values must be texts"
                    )
        for name in self.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ConfigError(f"CommandLineAgent: files has {name!r}; give a path inside home")
        if not self.reads_task:
            self._check_braces()

    def _check_braces(self) -> None:
        """Refuse names between braces outside `FIELDS`."""
        texts = {f"command[{i}]": part for i, part in enumerate(self.command)}
        texts |= {f"variables[{name!r}]": text for name, text in self.variables.items()}
        texts |= {f"files[{name!r}]": text for name, text in self.files.items()}
        for where, text in texts.items():
            for match in _BRACES.finditer(text):
                if (name := match[2]) is not None and name not in FIELDS:
                    raise ConfigError(
                        f"CommandLineAgent: {where} has {{{name}}}, which is not a known name."
                        f"{did_you_mean(name, FIELDS)} Write {{{{{name}}}}} for a literal {{{name}}}"
                    )

    def filled(self, *, address: Address, model: str, instruction: str, home: str) -> FilledAgent:
        """Return the command, variables and files of one episode, with values in place of the names between braces."""
        values = {
            "instruction": instruction,
            "base_url": address.base_url,
            "anthropic_base_url": address.anthropic_base_url,
            "api_key": address.api_key,
            "model": model,
            "home": home,
        }

        def fill(text: str) -> str:
            return _BRACES.sub(lambda match: f"{{{match[1]}}}" if match[1] else values[match[2]], text)

        return FilledAgent(
            command=tuple(map(fill, self.command)),
            variables={name: fill(value) for name, value in self.variables.items()},
            files={name: fill(content) for name, content in self.files.items()},
        )


AGENTS: Mapping[str, CommandLineAgent] = MappingProxyType({
    "claude_code": CommandLineAgent(
        command=(
            *("claude", "-p", "--output-format", "json", "--dangerously-skip-permissions", "--strict-mcp-config"),
            *("--tools", "Bash,Read,Edit,Write", "--", "{instruction}"),
        ),
        install="npm install -g @anthropic-ai/claude-code",
        variables={
            "ANTHROPIC_MODEL": "{model}",
            "CLAUDE_CONFIG_DIR": "{home}",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # without it, it does not start as root
        },
    ),
    "codex": CommandLineAgent(
        command=(
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"),
            *("--", "{instruction}"),
        ),
        install="npm install -g @openai/codex",
        variables={"CODEX_HOME": "{home}"},
        files={
            "config.toml": """model = "{model}"
model_provider = "polyturn"
web_search = "disabled"
[features]
multi_agent = false
apps = false
plugins = false
[model_providers.polyturn]
name = "polyturn"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
        },
    ),
    "mini_swe_agent": CommandLineAgent(
        command=(
            *("mini", "--model", "openai/{model}", "--task={instruction}", "--exit-immediately", "--yolo"),
            *("-c", "mini.yaml", "-c", "agent.cost_limit=0", "-o", "{home}/trajectory.json"),
        ),
        install="pip install mini-swe-agent",
        variables={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{home}",
        },
    ),
    "openhands": CommandLineAgent(
        command=("python3", "{home}/run.py", "{instruction}"),
        install="pip install openhands-sdk openhands-tools",
        check="python3 -c 'import openhands.sdk, openhands.tools'",
        files={
            "run.py": """import os, sys
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

llm = LLM(
    model="openai/{model}", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"],
    usage_id="polyturn", num_retries=0,
)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
"""
        },
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"},
    ),
})  # fmt: skip
"""The agents that a configuration can name without a file."""


def instruction_of(task: Task) -> str:
    """Return the task's prompt as one text for an agent's command line.

    Raises:
        DataError: the prompt has no text, or has media.
    """
    if any(message.media for message in task.prompt):
        raise DataError(f"task {task.id!r} has media, which cannot be passed to a command-line agent")
    text = "\n\n".join(message.text for message in task.prompt if message.text)
    if not text:
        raise DataError(f"task {task.id!r} has a prompt without text, so a command-line agent has nothing to do")
    return text


async def run_here(
    agent: CommandLineAgent, *, address: Address, model: str, task: Task, env: Mapping[str, Any], id: str
) -> bool:
    """Run an agent on this machine, in a temporary folder; return whether it ended within its time limit.

    Raises:
        SchedulerError: the agent cannot be started, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="polyturn-agent-") as folder:
        own = agent.filled(address=address, model=model, instruction=instruction_of(task), home=f"{folder}/home")
        work = await asyncio.to_thread(_make_folders, Path(folder), own.files)
        own_env = {**own.variables, **env}
        try:
            async with asyncio.timeout(agent.timeout_s) as limit:
                await run_command(own.command, address=address, task=task, env=own_env, cwd=work, id=id, stdin=b"")
        except TimeoutError:
            if not limit.expired():
                raise
            return False
    return True


async def run_inside(
    box: BaseSandbox, agent: CommandLineAgent, *, address: Address, model: str, task: Task, env: Mapping[str, Any], id: str
) -> bool:
    """Run an agent in a sandbox's working folder; return whether it ended within its time limit.

    Raises:
        SchedulerError: the agent cannot be started, or fails.
        SandboxError: the sandbox failed.
    """
    own = FilledAgent(agent.command, agent.variables, agent.files)
    if not agent.reads_task:
        own = agent.filled(address=address, model=model, instruction=instruction_of(task), home=HOME)
    try:
        await box.write(f"{HOME}/.polyturn", b"")  # creates the folder
        for name, content in own.files.items():
            await box.write(f"{HOME}/{name}", content.encode())
    except SandboxFileError as problem:
        raise SchedulerError(f"the agent's files cannot be written into its sandbox: {problem}") from problem
    variables = {**own.variables, **{k: str(v) for k, v in env.items()}, **address_variables(address, id)}
    result = await box.exec(
        own.command,
        env=variables,
        stdin=task_line(task) if agent.reads_task else b"",
        timeout_s=NO_LIMIT_S if agent.timeout_s is None else agent.timeout_s,
    )
    if not result.is_timeout:
        check_exit(own.command[0], result.exit_code, result.stdout + result.stderr)
    return not result.is_timeout


def check_installed(agent: CommandLineAgent, name: str, *, env: Mapping[str, Any], spec: SandboxSpec | None) -> None:
    """Check that an agent is installed on this machine, or in a sandbox that is started for the check.

    Raises:
        ConfigError: the agent is not installed, or the sandbox does not start.
    """
    check = agent.check or f"command -v {shlex.quote(agent.command[0])}"
    variables = {k: str(v) for k, v in env.items()}
    where = "on this machine" if spec is None else f"in its {spec.backend} sandbox"
    if spec is None:
        environ = {**passed_on(), **variables}
        exit_code = subprocess.run(["sh", "-c", check], env=environ, capture_output=True).returncode
    else:
        exit_code = try_sandbox(spec, where=f"the agent {name!r}", command=check, env=variables).exit_code
    if exit_code != 0:
        advice = f"; install it there: {agent.install}" if agent.install else ""
        raise ConfigError(f"the agent {name!r} is not installed {where} ({check!r} fails){advice}")


def _make_folders(folder: Path, files: Mapping[str, str]) -> Path:
    """Create an agent's folders and write its files; return its working folder."""
    for name in ("home", "work"):
        (folder / name).mkdir()
    for name, content in files.items():
        file = folder / "home" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    return folder / "work"
