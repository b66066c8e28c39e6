"""The text of each token, and the reason why it was trained or not.

    ids [ 7 301 12 ]  ->  texts [ "Hel" "lo" " ⏎" ]      Every character belongs to one token; a character that several
                                                         tokens share is shown on the one that completes it.

The reason belongs to a span, because all tokens of a span have the same origin. If weights differ within a span, tokens have
separate reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyturn.core.errors import DataError, one_line
from polyturn.core.lifecycle import StopReason
from polyturn.core.trajectory import Segment, Span, SpanSource, Trajectory
from polyturn.infra.contained import contained
from polyturn.store.schema import Trained

logger = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 256 << 20

DROPPED = {
    "failed": "the trajectory failed and is left out of the loss",
    "one_left": "all others of its group failed, so there was nothing to compare it with",
    "zero_variance": "every member of its group had the same reward, so there was nothing to learn",
    "truncated": "the trajectory was truncated, and truncated ones are left out of the loss",
    "rejected": "the off-policy correction rejected all of its tokens",
    "not_taken": "the step did not train on its group",
}
"""`Trained.dropped` -> text in the viewer; other reasons are shown unchanged."""

STOPPED = {
    StopReason.STOP: "the model finished, and there was no answer",
    StopReason.ENV_DONE: "an interaction, a tool, the environment or the scheduler ended it",
    StopReason.LENGTH: "a completion was cut, at rollout.limits.max_tokens_per_turn or at the max_tokens of the request",
    StopReason.MAX_TURNS: "the limit rollout.limits.max_turns or max_user_turns was reached",
    StopReason.MAX_TOKENS: "the limit rollout.limits.max_tokens was reached",
    StopReason.CONTEXT_FULL: "the context is full: rollout.limits.max_context, or the model's own limit",
    StopReason.TIMEOUT: "the limit rollout.limits.timeout_s was reached",
    StopReason.ERROR: "it failed and is left out of the loss",
    StopReason.ABORTED: "it was aborted and is left out of the loss",
}
"""Stop reason -> text in the viewer."""


class TokenTexts:
    """Decodes a run's tokens with the tokenizer in its folder."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer of the run in `folder`; without one, tokens are shown as ids."""
        self._tokenizer: Any = None
        checkpoints = sorted(folder.glob("checkpoints/step-*/model"), reverse=True)
        for name in ("tokenizer", *(str(path.relative_to(folder)) for path in checkpoints)):
            try:
                file = contained(folder, f"{name}/tokenizer.json")
                if file is not None and file.is_file():
                    self._tokenizer = self._read(file)
                    return
            except DataError as problem:
                logger.warning("tokens are shown as ids: %s", problem)

    def _read(self, file: Path) -> Any:
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise DataError(f"{file} is larger than {MAX_TOKENIZER_BYTES} bytes, the limit for a tokenizer")
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(file))
        except Exception as problem:  # the library raises plain Exception for a damaged file
            raise DataError(f"{file} cannot be read ({one_line(problem)})") from problem

    @property
    def is_known(self) -> bool:
        """Whether the run has a tokenizer."""
        return self._tokenizer is not None

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; "" for a token that does not complete a character."""
        if self._tokenizer is None:
            return [f"{i} " for i in ids]
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        out = []
        for i in ids:
            try:
                out.append(stream.step(self._tokenizer, int(i)) or "")
            except Exception:  # for invalid bytes the library raises a plain Exception
                stream = DecodeStream(skip_special_tokens=False)
                out.append("\ufffd")
        return out


def is_trained(trajectory: Trajectory, trained: Trained, *, split: str) -> bool:
    """Return whether the trajectory was used in a loss; weights determine which of its tokens."""
    return split.startswith("train") and not trajectory.is_failed and trained.dropped is None


def why(trajectory: Trajectory, segment: Segment, span: Span, trained: Trained, *, split: str) -> str:
    """Return why the tokens of a span were trained or not, as a sentence without a full stop."""
    if span.source is SpanSource.PROMPT:
        if segment.parent is not None:
            return "prompt: this segment continues an edited history; repeated tokens are trained where they were sampled"
        return "prompt: it comes from the task, and only the model's tokens are trained"
    if span.source is SpanSource.OBSERVATION:
        return f"observation: {_who_answered(trajectory, span)} wrote it, and only the model's tokens are trained"
    if not split.startswith("train"):
        return "sampled in an evaluation, which does not train"
    if trajectory.is_failed:
        return f"sampled, not trained: {DROPPED['failed']} ({trajectory.error or trajectory.stop_reason.value})"
    if trained.dropped is not None:
        return f"sampled, not trained: {DROPPED.get(trained.dropped, trained.dropped)}"
    if _is_aside(trajectory, span):
        is_trained = span.weights is None or bool(span.weights.any())
        reason = f"an aside of {segment.agent!r}, which is not a turn of the conversation"
        return f"sampled and trained: {reason}" if is_trained else f"sampled, not trained: {reason}"
    if span.weights is not None and not span.weights.any():
        return "sampled, not trained: the scheduler set its weight to 0"
    return "sampled and trained"


def why_weight(recorded: float, used: float) -> str | None:
    """Return why a token's weight differs from the one in its span; None if it does not."""
    if used == recorded:
        return None
    if used == 0.0:
        return "sampled, not trained: algorithm.loss_scale set its weight to 0"
    return f"sampled and trained with the weight {used:g}; algorithm.loss_scale changed it from {recorded:g}"


def _is_aside(trajectory: Trajectory, span: Span) -> bool:
    """Return whether a span is not part of a turn: a lookahead, or a completion in another role."""
    if not 0 <= span.turn < len(trajectory.turns):
        return False
    return not any(trajectory.span(ref) is span for ref in trajectory.turns[span.turn].spans)


def _who_answered(trajectory: Trajectory, span: Span) -> str:
    if not 0 <= span.turn < len(trajectory.turns):
        return "the environment"
    turn = trajectory.turns[span.turn]
    names = sorted({r.name for r in turn.tool_results if r.name})
    if names:
        return f"the tool {', '.join(names)}" if len(names) == 1 else f"the tools {', '.join(names)}"
    if not turn.observation:
        return "the chat template, between two turns,"
    if "interaction" in turn.timings:
        return "the interaction (a user's reply)"
    return "the environment" if "env" in turn.scores else "the agent's own loop or the scheduler"
