"""The contract of a tool.

async def test_my_tool():
    await check_tool(MyTool({}, SCHEMA), calls=[{"answer": "4"}, {"answer": "5"}], create_kwargs={"ground_truth": "4"})
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.core.messages import ToolCall
from polyturn.core.protocols import Tool
from polyturn.core.task import ToolKwargs
from polyturn.core.trajectory import ToolResult
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.testing.suites.common import DEADLINE_S, NUM_EPISODES, Findings, grown, holdings
from polyturn.tools.episode_tools import EpisodeTools
from polyturn.tools.failures import ToolFailure
from polyturn.tools.options import ToolOptions
from polyturn.tools.toolbox import Toolbox

_BROKEN = (ToolFailure.EXCEPTION, ToolFailure.TOO_LARGE, ToolFailure.TIMEOUT, ToolFailure.CONNECTION)


async def check_tool(
    tool: Tool,
    *,
    calls: Sequence[Mapping[str, Any]],
    is_deterministic: bool = True,
    **row: Mapping[str, Any],
) -> None:
    """Check that a tool keeps its contract with the framework, and report all problems.

    The suite checks the schema, the given calls, the rewards, concurrent episodes, and episodes without a call. It also
    checks that their state is freed, that the event loop is not blocked, and that the tool works in a whole episode.

    Args:
        tool: The tool to check; a function decorated with `polyturn.tool` is one.
        calls: Arguments of valid calls, in the order of an episode; at least one.
        is_deterministic: Whether equal calls get equal answers; False for a service that changes.
        row: The row's create_kwargs, execute_kwargs, calc_reward_kwargs and release_kwargs.

    Raises:
        ContractError: the tool breaks its contract; the message lists the problems.
    """
    kwargs = ToolKwargs(**row)
    async with Findings(f"tool {tool.name}") as findings:
        _check_schema(tool, findings)
        box = Toolbox([tool], ToolOptions(timeout_s=DEADLINE_S, max_result_chars=None))
        suite = _ToolSuite(box, tool, findings, kwargs)
        alone = await suite.play("alone", calls)
        await suite.play("unused", [], where=" in an episode without a call")
        if is_deterministic and not findings.problems:
            await suite.check_isolation(calls, alone)
            await suite.check_going_on(calls, alone)
        await suite.check_bad_arguments(calls[0])
        before = holdings(tool)
        for number in range(NUM_EPISODES):
            await suite.play(f"many-{number}", calls[:1])
        for name in grown(before, holdings(tool)):
            findings.expect(False, f"{name!r} keeps state of every ended episode; free it in release")
        await _check_episode(tool, findings, call=calls[0], kwargs=kwargs)


def _check_schema(tool: Tool, findings: Findings) -> None:
    schema = tool.schema
    try:
        json.dumps(schema)
    except (TypeError, ValueError):
        findings.expect(False, "its schema is not JSON; use plain values")
        findings.stop()
    function = schema.get("function")
    if not findings.expect(
        schema.get("type") == "function" and isinstance(function, Mapping),
        f"its schema is {schema!r:.80}; write {{type: function, function: {{name, description, parameters}}}}",
    ):
        findings.stop()
    assert isinstance(function, Mapping)
    findings.expect(
        function.get("name") == tool.name,
        f"its name is {tool.name!r}, but its schema says {function.get('name')!r}; use one name in both",
    )
    findings.expect(bool(function.get("description")), "its schema has no description, which the model needs")
    properties = (function.get("parameters") or {}).get("properties") or {}
    for name, of in properties.items():
        findings.expect(
            isinstance(of, Mapping) and bool(of.get("description")),
            f"the parameter {name!r} has no description in the schema, which the model needs",
        )


class _ToolSuite:
    """Plays episodes with one tool."""

    def __init__(self, box: Toolbox, tool: Tool, findings: Findings, kwargs: ToolKwargs) -> None:
        self._box = box
        self._tool = tool
        self._findings = findings
        self._task = dataclasses.replace(task(), tools=(tool.name,), tools_kwargs={tool.name: kwargs})

    async def play(self, id: str, calls: Sequence[Mapping[str, Any]], *, where: str = "") -> list[tuple[Any, float | None]]:
        """Play one episode, call by call, and return the observations and step rewards."""
        answers: list[tuple[Any, float | None]] = []
        session = EpisodeTools(self._box, id)
        async with self._findings.calling(f"an episode{where}"):
            await session.start(self._task)
            for number, arguments in enumerate(calls):
                (result,) = await session.call([self._call(number, arguments)])
                self._expect_fine(result, arguments)
                answers.append((result.content, result.reward))
            await session.finish()
        async with self._findings.calling("release"):
            for problem in await session.close():
                self._findings.expect(False, problem.replace(repr(id), "…"))
        return answers

    def _call(self, number: int, arguments: Mapping[str, Any]) -> ToolCall:
        return ToolCall(id=f"call_{number}", name=self._tool.name, arguments=arguments)

    def _expect_fine(self, result: ToolResult, arguments: Mapping[str, Any]) -> None:
        what = f"the call {dict(arguments)!r:.100}"
        self._findings.expect(result.error != ToolFailure.SCHEMA, f"{what} does not fit the schema: {result.content!r:.200}")
        self._findings.expect(
            result.error not in (*_BROKEN, ToolFailure.UNKNOWN_TOOL),
            f"{what} failed ({result.error}): {result.content!r:.200}; raise ToolError with a message for the model",
        )

    async def check_isolation(self, calls: Sequence[Mapping[str, Any]], alone: list[tuple[Any, float | None]]) -> None:
        """Play episodes concurrently, call by call; each must give the same results as alone."""
        sessions = [EpisodeTools(self._box, f"side-{number}") for number in range(3)]
        played: list[list[tuple[Any, float | None]]] = [[] for _ in sessions]
        async with self._findings.calling("episodes side by side"):
            for session in sessions:
                await session.start(self._task)
            for number, arguments in enumerate(calls):
                for session, answers in zip(sessions, played, strict=True):
                    (result,) = await session.call([self._call(number, arguments)])
                    answers.append((result.content, result.reward))
        for session in sessions:
            await session.close()
        different = next((answers for answers in played if answers != alone), None)
        self._findings.expect(
            different is None,
            f"a concurrent episode differs: {different!r:.200} instead of {alone!r:.200}; keep the state of an episode "
            "under its instance id, not on the object (is_deterministic=False if answers are random)",
        )

    async def check_going_on(self, calls: Sequence[Mapping[str, Any]], alone: list[tuple[Any, float | None]]) -> None:
        """If the tool supports snapshots, continue from one in a new episode after each call."""
        why_not = self._box.hooks[self._tool.name].why_not
        self._findings.expect(why_not is None or " without " not in why_not, f"{why_not}; offer both, or neither")
        if why_not is not None:
            return
        for number in range(1, len(calls)):
            played: list[tuple[Any, float | None]] = []
            first, then = EpisodeTools(self._box, "before"), EpisodeTools(self._box, "after")
            async with self._findings.calling("continuing after a call", advice="return JSON data from snapshot"):
                await first.start(self._task)
                for k, arguments in enumerate(calls[:number]):
                    await first.call([self._call(k, arguments)])
                state = json.loads(json.dumps(await first.snapshot()))
                await then.start(self._task)
                await then.restore(state)
                for k, arguments in enumerate(calls[number:], start=number):
                    (result,) = await then.call([self._call(k, arguments)])
                    played.append((result.content, result.reward))
                self._findings.expect(
                    played == alone[number:],
                    f"an episode that continues in another process differs: {played!r:.200} instead of "
                    f"{alone[number:]!r:.200}; put all state that calls change into snapshot, and do not set stateless",
                )
            for session in (first, then):
                await session.close()

    async def check_bad_arguments(self, call: Mapping[str, Any]) -> None:
        """Call the tool with wrong arguments; the model must get an error message, and the episode must continue."""
        wrong: list[Mapping[str, Any]] = [{}, {**call, "no_such_argument": 1}, dict.fromkeys(call, None)]
        wrong.append({name: {"not": [name]} for name in call})
        session = EpisodeTools(self._box, "wrong")
        async with self._findings.calling("a call with wrong arguments"):
            await session.start(self._task)
            for number, arguments in enumerate(wrong):
                (result,) = await session.call([self._call(number, arguments)])
                self._findings.expect(
                    result.error not in _BROKEN,
                    f"the call {dict(arguments)!r:.100} failed ({result.error}): {result.content!r:.100}; restrict the "
                    "schema, or raise ToolError with a message for the model",
                )
        await session.close()


async def _check_episode(tool: Tool, findings: Findings, *, call: Mapping[str, Any], kwargs: ToolKwargs) -> None:
    """Run one real episode in which the model calls the tool."""
    text = f"<tool_call>\n{json.dumps({'name': tool.name, 'arguments': dict(call)})}\n</tool_call>"
    context = scripted_context([text, "Done."], tools=[tool], rewards={"check": lambda trajectory: 0.0})
    one = dataclasses.replace(task(data_source="check"), tools=(tool.name,), tools_kwargs={tool.name: kwargs})
    async with findings.calling("a whole episode"):
        tiny_codec().template.render(one.prompt, tools=(tool.schema,), add_generation_prompt=True)
        trajectory = await run_episode(context, one, id="episode")
        findings.expect(not trajectory.is_failed, f"a whole episode failed: {trajectory.error}")
        results = [r for turn in trajectory.turns for r in turn.tool_results]
        findings.expect(
            trajectory.is_failed or [r.error for r in results] == [None],
            f"a model that calls it with {dict(call)!r:.100} reads {[r.content for r in results]!r:.200}",
        )
