"""The contract of an interaction.

async def test_my_interaction():
    await check_interaction(MyInteraction({}), says=["#### 5", "#### 4"], ground_truth="4")
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from polyturn.core.protocols import Interaction
from polyturn.core.snapshots import SnapshotHooks
from polyturn.core.task import InteractionRef
from polyturn.interactions.adapters import in_usual_form
from polyturn.rollout.interaction_session import InteractionSession, LoadedInteraction
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task
from polyturn.testing.suites.common import DEADLINE_S, NUM_EPISODES, Findings, grown, holdings

AWKWARD = {"empty": "", "long": "word " * 20_000, "odd": "\x00 </s> {{ 7*7 }} \ud7ff 🙂 <tool_call>", "numbers": "1" * 500}
"""Texts that a model may write at any time."""

Reply = tuple[bool, str, float | None]


async def check_interaction(
    interaction: Interaction,
    *,
    says: Sequence[str] = ("Hello.", "Goodbye."),
    prompt: str = "What is 2+2?",
    is_deterministic: bool = True,
    **row: Any,
) -> None:
    """Check that an interaction keeps its contract with the framework, and report all problems.

    The suite checks the id that `start_interaction` returns. It also checks the four values that `generate_response`
    returns, and the final score, for `says` and for unusual texts. Concurrent episodes must not affect each other, their
    state must be freed, and no call may block the event loop. At the end a whole episode runs.

    Args:
        interaction: The interaction to check.
        says: The model's turns.
        prompt: The task's prompt.
        is_deterministic: Whether equal conversations get equal replies; False if a model or a service answers.
        row: Arguments of the interaction, as a row of the dataset would give them.

    Raises:
        ContractError: the interaction breaks its contract; the message lists the problems.
    """
    usual, kwargs = in_usual_form(interaction), {"name": interaction.name, **row}
    async with Findings(f"interaction {type(interaction).__name__}") as findings:
        suite = _InteractionSuite(usual, findings, prompt=prompt, kwargs=kwargs)
        await suite.check_ids()
        alone = await suite.play("alone", says)
        if is_deterministic and not findings.problems:
            await suite.check_isolation(says, alone)
            await suite.check_going_on(interaction, says, alone)
        for kind, text in AWKWARD.items():
            await suite.play(f"awkward-{kind}", [text], where=f" after a message that is {kind}")
        await suite.check_nothing_is_left(interaction, says)
        await _check_episode(interaction, findings, says=says, prompt=prompt, kwargs=kwargs)


class _InteractionSuite:
    """The calls into one interaction."""

    def __init__(self, interaction: Interaction, findings: Findings, *, prompt: str, kwargs: dict[str, Any]) -> None:
        self._interaction = interaction
        self._findings = findings
        self._prompt = {"role": "user", "content": prompt}
        self._kwargs = kwargs

    async def check_ids(self) -> None:
        """Check `start_interaction`, and an episode that ends before its first turn."""
        ids: list[Any] = []
        async with self._findings.calling("start_interaction", advice="it gets the row's kwargs, so accept **kwargs"):
            ids = [
                await self._interaction.start_interaction(requested, **self._kwargs) for requested in (None, None, "mine")
            ]
        if not ids:
            self._findings.stop()
        self._findings.expect(
            all(isinstance(i, str) and i for i in ids),
            f"start_interaction returned {ids!r:.200}; return the id as text: the one passed in, or a new one",
        )
        self._findings.expect(ids[0] != ids[1], f"start_interaction(None) returned {ids[0]!r} twice; return new ids")
        async with self._findings.calling(
            "finalize_interaction", advice="accept an episode that ends before its first turn"
        ):
            for instance_id in ids:
                await self._interaction.finalize_interaction(instance_id)

    async def check_going_on(self, author: Interaction, says: Sequence[str], alone: list[Reply]) -> None:
        """If the interaction supports snapshots, continue from one in a new session after each reply."""
        ref = InteractionRef(name=author.name, kwargs=self._kwargs)
        hooks = SnapshotHooks.of(author, label="it")
        why_not = hooks.why_not
        self._findings.expect(why_not is None or " without " not in why_not, f"{why_not}; offer both, or neither")
        if why_not is not None:
            return
        for number in range(1, len(alone)):
            host = LoadedInteraction(author, author.name, timeout_s=DEADLINE_S)
            first, then = InteractionSession(host, ref), InteractionSession(host, ref)
            played: list[Reply] = []
            messages: list[dict[str, Any]] = [dict(self._prompt)]
            async with self._findings.calling("continuing after a reply", advice="return JSON data from snapshot"):
                await first.start("before")
                for k, text in enumerate(says[: len(alone)]):
                    if k == number:
                        state = json.loads(json.dumps(await first.snapshot()))
                        await then.start("after")
                        await then.restore(state)
                    messages.append({"role": "assistant", "content": text})
                    reply = await (first if k < number else then).reply(copy.deepcopy(messages))
                    messages.append({"role": "user", "content": reply.content})
                    played.append((reply.is_done, str(reply.content), reply.score))
                same = [(bool(done), str(content or ""), score) for done, content, score in alone]
                self._findings.expect(
                    played == same,
                    f"a conversation that continues in another process differs: {played!r:.200} instead of "
                    f"{same!r:.200}; put all state that replies change into snapshot, and do not set stateless",
                )
            for interaction in (first, then):
                await interaction.close()

    async def play(self, instance_id: str, says: Sequence[str], *, where: str = "") -> list[Reply]:
        """Play one episode and return the replies."""
        replies: list[Reply] = []
        started = False
        async with self._findings.calling(f"an episode{where}"):
            instance_id = await self._interaction.start_interaction(instance_id, **self._kwargs)
            started = True
            messages: list[dict[str, Any]] = [dict(self._prompt)]
            for text in says:
                messages.append({"role": "assistant", "content": text})
                reply = await self._reply(instance_id, messages, where)
                if reply is None:
                    break
                replies.append(reply)
                if reply[0]:
                    break
                messages.append({"role": "user", "content": reply[1]})
            score = await self._interaction.calculate_score(instance_id)
            self._findings.expect(
                score is None or _is_finite(score), f"calculate_score returned {score!r:.80}{where}; return a finite number"
            )
        if started:
            async with self._findings.calling("finalize_interaction"):
                await self._interaction.finalize_interaction(instance_id)
        return replies

    async def _reply(self, instance_id: str, messages: list[dict[str, Any]], where: str) -> Reply | None:
        messages_copied = copy.deepcopy(messages)
        answer = await self._interaction.generate_response(instance_id, messages_copied, **self._kwargs)
        expect = self._findings.expect
        expect(messages_copied == messages, "generate_response changed its argument messages; copy the list")
        if not expect(
            isinstance(answer, tuple | list) and len(answer) == 4,
            f"generate_response returned {answer!r:.80}{where}; return (should_terminate, content, score, metadata)",
        ):
            return None
        done, content, score, metadata = answer
        expect(
            isinstance(done, bool) or type(done).__name__ == "bool_",
            f"generate_response returned should_terminate={done!r:.40}{where}; return True or False",
        )
        expect(
            isinstance(content, str) or (content is None and bool(done)),
            f"generate_response returned the content {content!r:.40}{where}; return text",
        )
        expect(
            score is None or _is_finite(score),
            f"generate_response returned the score {score!r:.40}{where}; return a finite number or None",
        )
        expect(
            metadata is None or isinstance(metadata, dict),
            f"generate_response returned metadata of type {type(metadata).__name__}{where}; return a dict",
        )
        return bool(done), str(content or ""), None if score is None or not _is_finite(score) else float(score)

    async def check_isolation(self, says: Sequence[str], alone: list[Reply]) -> None:
        """Play episodes concurrently, turn by turn; each must give the same results as alone."""
        histories: dict[str, list[dict[str, Any]]] = {}
        played: dict[str, list[Reply]] = {}
        async with self._findings.calling("episodes side by side"):
            for number in range(3):
                instance_id = await self._interaction.start_interaction(f"side-{number}", **self._kwargs)
                histories[instance_id], played[instance_id] = [dict(self._prompt)], []
            for text in says[: len(alone)]:
                for instance_id, messages in histories.items():
                    messages.append({"role": "assistant", "content": text})
                    reply = await self._reply(instance_id, messages, "")
                    if reply is not None:
                        played[instance_id].append(reply)
                        messages.append({"role": "user", "content": reply[1]})
            for instance_id in histories:
                await self._interaction.finalize_interaction(instance_id)
        different = next((replies for replies in played.values() if replies != alone), None)
        self._findings.expect(
            different is None,
            f"a concurrent episode differs: {different!r:.200} instead of {alone!r:.200}; keep the state of an episode "
            "under its instance id, not on the object (is_deterministic=False if replies are random)",
        )

    async def check_nothing_is_left(self, interaction: Interaction, says: Sequence[str]) -> None:
        """Play many episodes; the object's collections must not grow with them."""
        before = holdings(interaction)
        for number in range(NUM_EPISODES):
            await self.play(f"many-{number}", says[:1])
        for name in grown(before, holdings(interaction)):
            self._findings.expect(False, f"{name!r} keeps state of every ended episode; free it in finalize_interaction")


async def _check_episode(
    interaction: Interaction, findings: Findings, *, says: Sequence[str], prompt: str, kwargs: dict[str, Any]
) -> None:
    """Run one real episode."""
    context = scripted_context(list(says), interactions={interaction.name: interaction})
    ref = InteractionRef(name=interaction.name, kwargs=kwargs)
    one = dataclasses.replace(task(prompt, data_source=None), interaction=ref)
    async with findings.calling("a whole episode"):
        trajectory = await run_episode(context, one, id="episode")
        findings.expect(
            not trajectory.is_failed,
            f"a whole episode failed: {trajectory.error}",
        )
        findings.expect(
            not trajectory.metrics.get("close_errors"), "finalize_interaction failed at the end of an episode; see the log"
        )


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
