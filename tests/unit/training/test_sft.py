"""Supervised training: which tokens of a conversation are learnt, and in which order samples come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyturn.api import warm_starting
from polyturn.core.errors import DataError
from polyturn.core.messages import Message, ToolCall
from polyturn.core.metrics import Mean, Metrics
from polyturn.core.sample import TrainSample
from polyturn.data.conversations import Conversation, generate_conversations, read_conversations
from polyturn.infra.live import LiveObject
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from polyturn.tokens.delta import DeltaEncoder
from polyturn.training.options import SftOptions, TrainOptions
from polyturn.training.sft import encode_conversation, run_sft, trajectory_samples
from support.refusals import refuses
from support.states import EmptyPolicy

CODEC = tiny_codec()


def say(role: Any, content: str, **fields: Any) -> Message:
    return Message(role=role, content=content, **fields)


TWO_TURNS = (say("system", "s"), say("user", "2+2?"), say("assistant", "5"), say("user", "no"), say("assistant", "4"))


def encode(messages: Sequence[Message], **fields: Any) -> TrainSample:
    return encode_conversation(Conversation(messages=tuple(messages), **fields), DeltaEncoder(CODEC), id="c")


def learnt(sample: TrainSample) -> list[str]:
    """Return the text of each run of weighted tokens."""
    runs, weighted = [], sample.loss_weights > 0
    for index in range(len(sample)):
        if weighted[index] and (index == 0 or not weighted[index - 1]):
            runs.append([])
        if weighted[index]:
            runs[-1].append(int(sample.token_ids[index]))
    return [CODEC.decode(ids) for ids in runs]


def test_only_assistant_turns_are_learnt():
    assert learnt(encode(TWO_TURNS)) == ["5<|im_end|>", "4<|im_end|>"]


def test_tokens_are_those_of_one_rendering():
    sample = encode(TWO_TURNS)
    whole = CODEC.encode(CODEC.template.render(TWO_TURNS))
    assert np.array_equal(sample.token_ids, whole[: len(sample)]), (
        "up to the newline after the last turn, which nothing follows"
    )
    assert len(whole) - len(sample) <= 1


def test_tool_calls_are_learnt_as_text():
    call = ToolCall(id="c0", name="calc", arguments={"a": 1})
    messages = [
        say("user", "?"),
        say("assistant", "", tool_calls=(call,)),
        say("tool", "2", tool_call_id="c0"),
        say("assistant", "2"),
    ]
    first, second = learnt(encode(messages))
    assert first.startswith("<tool_call>") and '"name": "calc"' in first and first.endswith("</tool_call><|im_end|>")
    assert second == "2<|im_end|>"


def test_weights_choose_the_learnt_turns():
    sample = encode(TWO_TURNS, weights=(0.0, 0.5))
    assert learnt(sample) == ["4<|im_end|>"] and set(sample.loss_weights) == {0.0, 0.5}
    assert sorted(set(sample.turn_ids.tolist())) == [-1, 0, 1]


def test_non_numeric_weight_is_refused_with_its_row():
    for loss in ("high", float("nan"), None):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a", "loss": loss}]
        refuses(
            lambda row={"messages": messages}: Conversation.from_row(row, where="said.jsonl, line 7"),
            DataError,
            "said.jsonl, line 7: the `loss` of a message",
            repr(loss),
        )


@pytest.mark.parametrize("row", [[1], "a text", None])
def test_non_object_row_is_refused(row):
    refuses(lambda: Conversation.from_row(row, where="said.jsonl, line 7"), DataError, "said.jsonl, line 7", repr(row))


@pytest.mark.parametrize("returned", [None, "a text", {"messages": []}])
def test_generator_of_conversations_returns_a_list(returned):
    refuses(lambda: generate_conversations(LiveObject(lambda: returned)), DataError, repr(returned), "a list")


def test_file_of_conversations_may_not_exist(tmp_path):
    for name in ("none.jsonl", "x" * 300):
        refuses(lambda name=name: read_conversations(tmp_path / name), DataError, "there is no file", name)


def test_conversation_ends_with_its_last_assistant_turn():
    assert learnt(encode([*TWO_TURNS, say("user", "thanks")])) == ["5<|im_end|>", "4<|im_end|>"]
    refuses(lambda: encode([say("user", "?"), say("assistant", "a"), say("assistant", "b")]), DataError, "conversation c")


async def test_good_trajectories_are_learnt_token_for_token():
    good, bad = [await run_episode(scripted_context([text]), task(), id=text) for text in ("#### 4", "#### 5")]
    (sample,) = trajectory_samples([good, bad], min_reward=1.0)
    assert np.array_equal(sample.token_ids, good.segments[0].token_ids)
    assert np.array_equal(sample.loss_weights, good.segments[0].loss_weights)
    refuses(lambda: trajectory_samples([bad], min_reward=1.0), DataError, "at least 1")


class Notes(EmptyPolicy):
    """Replaces the policy and records its calls."""

    train_seconds, backend = 0.0, None

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.steps = 0

    def sft_forward_backward(self, samples: Sequence[TrainSample]) -> Metrics:
        self.batches.append([s.id.trajectory for s in samples])
        return {"loss/total": Mean(1.0)}

    def optim_step(self) -> Metrics:
        self.steps += 1
        return {}


def samples(num: int) -> list[TrainSample]:
    one = encode(TWO_TURNS)
    return [one.replace(id=one.id._replace(trajectory=str(i))) for i in range(num)]


def train(num: int, *, seed: int = 0, **settings: Any) -> tuple[Notes, list[int]]:
    notes, steps = Notes(), []
    taken = run_sft(notes, samples(num), SftOptions(**settings), seed=seed, on_step=lambda step, m: steps.append(step))  # type: ignore[arg-type]
    assert taken == notes.steps == len(steps)
    return notes, steps


def test_epoch_visits_each_sample_once():
    notes, steps = train(5, steps=4, batch_size=5)
    assert steps == [1, 2, 3, 4] and all(sorted(batch) == list("01234") for batch in notes.batches)
    assert notes.batches[0] != notes.batches[1]
    assert train(5, steps=4, batch_size=5)[0].batches == notes.batches
    assert train(5, steps=4, batch_size=5, seed=1)[0].batches != notes.batches


def test_batches_run_across_epochs():
    notes, _ = train(3, steps=3, batch_size=2)
    visited = [i for batch in notes.batches for i in batch]
    assert [len(b) for b in notes.batches] == [2, 2, 2] and sorted(visited[:3]) == sorted(visited[3:]) == list("012")


def test_time_limit_ends_training():
    assert train(3, steps=50, batch_size=2, max_seconds=1e-9)[1] == []


def test_resumed_warm_start_has_the_rest_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    spent: list[float] = []

    def takes_40_s(*args: Any, spent_s: float, **kwargs: Any) -> int:
        spent.append(spent_s)
        now[0] += 40.0
        return len(spent)

    monkeypatch.setattr(warm_starting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(warm_starting, "run_sft", takes_40_s)
    for name, value in (("warm_start_samples", []), ("build_policy", Notes()), ("stored_exporter", None)):
        monkeypatch.setattr(warm_starting.build, name, lambda *args, value=value, **kwargs: value)
    sft = SftOptions(steps=9, max_seconds=100.0)
    config: Any = SimpleNamespace(warm_start=sft, seed=0, train=TrainOptions())
    parts: Any = SimpleNamespace(source=SimpleNamespace(config=config))
    observer: Any = SimpleNamespace(end_sft=lambda: None)
    signals: Any = SimpleNamespace(received=[15])
    for _ in range(3):
        with pytest.raises(SystemExit):
            warm_starting.warm_start(parts, observer, signals, folder=tmp_path, again="", on_resume=lambda: None)
        now[0] += 1000.0  # between the runs
    assert spent == [0.0, 40.0, 80.0]
    taken = run_sft(Notes(), samples(3), sft, first_step=2, spent_s=120.0)  # type: ignore[arg-type]
    assert taken == 2, "its time is over"


def test_conversations_without_a_trained_token_are_refused():
    blank = [one.replace(loss_weights=np.zeros(len(one), np.float32)) for one in samples(2)]
    for nothing in ([], blank):
        refuses(
            lambda nothing=nothing: run_sft(Notes(), nothing, SftOptions(steps=1)), DataError, str(len(nothing)), "`loss`"
        )
