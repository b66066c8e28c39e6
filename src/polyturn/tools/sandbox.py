"""SandboxFusionTool: runs the model's code in a sandbox service, in SandboxFusion's HTTP protocol.

    POST {"code": "…", "language": "python", "run_timeout": 30, "compile_timeout": 30, "memory_limit_MB": 1024, …}
    <-   {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "4\\n"}, …}

The model sees the output of the code, or the reason for a failure: a time limit, a compile error, a crash, a broken sandbox.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from polyturn.core.errors import ConfigError
from polyturn.infra.settings import AtLeastOne, Seconds, Text
from polyturn.rewards.code import run_request
from polyturn.tools.base import BaseTool
from polyturn.tools.failures import ToolFailure
from polyturn.tools.http_service import ServiceReply, ServiceSettings
from polyturn.tools.results import FAILURE
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)

_SHARE = 0.375
"""Share of a call's deadline for each of compiling and running; a quarter is left for a free sandbox and the network."""
SLACK_S = 10.0
"""Seconds of a call in addition to compiling and running the code: waiting for a free sandbox, and the network."""


class FusionSettings(ServiceSettings):
    """The sandbox, and the limits of the code."""

    sandbox_fusion_url: str = ""
    """The whole URL of run_code; required."""
    default_timeout: Seconds = 30.0
    """Maximum number of seconds for compiling the code, and for running it; each is at most three eighths of the deadline of
    a call (`rollout.tools.timeout_s`)."""
    default_language: Text = "python"
    memory_limit_mb: AtLeastOne = 1024
    num_workers: AtLeastOne = 10
    rate_limit: AtLeastOne = 10
    max_retries: AtLeastOne = 3


class SandboxFusionTool(BaseTool):
    """Runs code. Config: `FusionSettings`; a subclass may read further keys."""

    checks_own_arguments = True
    stateless = True
    """True, because no answer depends on the state of the episode."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        is_subclass = type(self) is not SandboxFusionTool
        settings = FusionSettings.read(config, who="the sandbox tool", ignores_others=is_subclass)
        if not settings.sandbox_fusion_url:
            raise ConfigError("sandbox_fusion_url is not set: give the tool the URL of a sandbox's run_code")
        self.sandbox_fusion_url = settings.sandbox_fusion_url
        self.default_timeout = settings.default_timeout
        self._is_timeout_set = "default_timeout" in settings.model_fields_set
        self.default_language = settings.default_language
        self.memory_limit_mb = settings.memory_limit_mb
        self._max_concurrent = settings.max_concurrent
        self._service = settings.service(self.sandbox_fusion_url, timeout_s=2 * self.default_timeout + SLACK_S)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    @property
    def max_concurrency(self) -> int:
        """Maximum number of concurrent calls; others wait for a slot, which does not count for their deadline."""
        return self._max_concurrent

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the default schema, for a tool file without one."""
        code = {"type": "string", "description": "The code to run; print what you want to see."}
        return OpenAIFunctionToolSchema.of("code_interpreter", "Run code and return its output.", {"code": code})

    def fit_deadline(self, timeout_s: float) -> None:
        """Lower the time limits of compiling and running: both together fit into three quarters of a call's deadline.

        Lowering a limit that the tool's config sets logs a warning.
        """
        if self.default_timeout > _SHARE * timeout_s:
            if self._is_timeout_set:
                logger.warning(
                    "tool %r: default_timeout is %g s, but compiling and running have %g s each, so that both end before "
                    "the deadline of a call, %g s; set a shorter default_timeout, or a longer rollout.tools.timeout_s",
                    self.name,
                    self.default_timeout,
                    _SHARE * timeout_s,
                    timeout_s,
                )
            self.default_timeout = _SHARE * timeout_s

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Start an instance for one episode."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._service.open()
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, None, dict[str, Any]]:
        """Run `code`; `timeout` (never above the default) and `language` are read if they are given."""
        code = parameters.get("code", "")
        code = code if isinstance(code, str) else str(code)
        timeout_s = min(_number(parameters.get("timeout"), self.default_timeout), self.default_timeout)
        reply = await self._service.post(
            run_request(
                code,
                stdin=None,
                language=str(parameters.get("language", self.default_language)),
                timeout_s=timeout_s,
                memory_limit_mb=self.memory_limit_mb,
            )
        )
        status, text = read_reply(reply, timeout_s=timeout_s)
        is_failed = float(status not in ("finished", "code_error"))
        metrics: dict[str, Any] = {"status": status, "num_tries": reply.num_tries, "failed": is_failed}
        if is_failed:
            metrics[FAILURE] = _kind(reply, status)
        return ToolResponse(text=text), None, metrics

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:
        """Return None: running code does not affect the reward."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the episode's state; raise KeyError for an id that was never created."""
        del self._instance_dict[instance_id]
        await self._service.close()


def read_reply(reply: ServiceReply, *, timeout_s: float) -> tuple[str, str]:
    """Return a run's status (finished, code_error, compile_error, code_timeout, or the service's failure), and its text."""
    if reply.status != "ok":
        return reply.status, f"The sandbox gave no answer ({reply.status}): {reply.error}"
    data = reply.data if isinstance(reply.data, Mapping) else {}
    for stage, kind in (("compile_result", "compile_error"), ("run_result", "code_error")):
        result = data.get(stage)
        if not isinstance(result, Mapping):
            continue
        printed = f"{result.get('stdout') or ''}{result.get('stderr') or ''}"
        if result.get("status") == "TimeLimitExceeded":
            what = "Compiling" if stage == "compile_result" else "The code"
            return "code_timeout", f"{printed}{what} took longer than {timeout_s:g} s and was stopped."
        is_finished = result.get("status") == "Finished"
        if is_finished and result.get("return_code") in (0, None):
            if stage == "run_result":
                return "finished", printed or "The code ran and printed nothing."
        elif is_finished or result.get("status") == "Error":
            return kind, printed or f"The code ended with exit code {result.get('return_code')} and printed nothing."
    why = str(data.get("message") or data.get("status") or reply.data)
    return "sandbox_error", f"The sandbox failed: {why:.500}"


def _kind(reply: ServiceReply, status: str) -> str | None:
    """Return the kind of a failure; None for a failure that the code itself caused."""
    if reply.status != "ok":
        return reply.failure
    return ToolFailure.EXCEPTION.value if status == "sandbox_error" else None


def _number(value: Any, default: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return default
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return default
    return number if number > 0 else default
