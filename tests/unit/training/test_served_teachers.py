"""Teachers behind endpoints: a scripted server of each route answers with the log-probabilities of a model of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from polyturn.algorithms.options import ServedTeacherOptions, ServedTeachersOptions
from polyturn.core.errors import ConfigError, DataError, EngineError, TrainingError
from polyturn.core.media import Media
from polyturn.core.sample import SampleId, TrainSample
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.testing.episodes import tiny_codec
from polyturn.training.served_teachers import ServedTeachers, check_served_teachers, teacher_of
from support.models import tiny_model
from support.refusals import refuses
from support.scripted_server import scripted_server

KINDS = ["vllm", "sglang"]
VOCAB = len(tiny_codec().tokenizer)
Change = Callable[[str, Any], Any]
"""(path, reply) -> another reply, or a pair of an HTTP status and a reply."""


class Server:
    """Scores ids with a model, on both routes."""

    def __init__(self, seed: int) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.model = tiny_model(VOCAB, hidden=16, spread=0.3, seed=seed).double()

    def logprobs(self, ids: list[int]) -> list[float]:
        """[T - 1] of ids 1 and later, from one whole row."""
        with torch.no_grad():
            rows = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0], -1)
        return [float(rows[t - 1, ids[t]]) for t in range(1, len(ids))]

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append((path, body))
        if path == "/v1/models":
            return {"data": [{"id": "big", "max_model_len": 64}]}
        if path == "/tokenize":
            assert body["model"] == "big" and body["add_special_tokens"] is False
            return {"tokens": tiny_codec().tokenizer.encode(body["prompt"], add_special_tokens=False)}
        ids = body["prompt" if path == "/v1/completions" else "input_ids"]
        if max(ids) >= VOCAB:
            return 400, {"error": f"token id {max(ids)} is out of vocabulary"}
        scores = [None, *self.logprobs(ids)]
        if path == "/v1/completions":
            assert body["model"] == "big" and body["max_tokens"] == 1
            entries = [None if s is None else {str(i): {"logprob": s}} for s, i in zip(scores, ids, strict=True)]
            return {"choices": [{"prompt_logprobs": entries}]}
        start = body["logprob_start_len"]
        triples = [[s, i, None] for s, i in zip(scores, ids, strict=True)][start:]
        triples[0][0] = None
        return {"meta_info": {"input_token_logprobs": triples}}


@contextlib.contextmanager
def served(change: Change = lambda path, reply: reply, *, seed: int = 3) -> Iterator[Server]:
    server = Server(seed)
    with scripted_server(lambda path, body: change(path, server.answer(path, body))) as server.url:
        yield server


def sample(name: str, roles: str, *, group: str = "g", **changes: Any) -> TrainSample:
    """p is a prompt, a a trained token, o an observation."""
    rng = np.random.default_rng(len(roles))
    weights = np.array([r == "a" for r in roles], np.float32)
    fields: dict[str, Any] = {
        "id": SampleId(group, name, 0),
        "token_ids": rng.integers(0, VOCAB, len(roles)),
        "loss_weights": weights,
        "turn_ids": np.zeros(len(roles)),
        "old_logprobs": -weights * rng.random(len(roles)),
        "advantages": weights * 0.5,
    }
    return TrainSample(**fields | changes)


def group(name: str = "g", *, source: str = "math") -> TrajectoryGroup:
    return TrajectoryGroup(id=name, task=Task(id=f"row-{name}", prompt=(), data_source=source), trajectories=())


def teachers(*made: ServedTeacherOptions, **options: Any) -> ServedTeachers:
    return ServedTeachers(ServedTeachersOptions(teachers=made, **options), wait_s=0.001)


def no_score(samples: Any) -> Any:
    raise AssertionError("the samples bring the policy's log-probabilities")


def check(one: ServedTeachers, **options: Any) -> None:
    tokenizer = tiny_codec().tokenizer
    given: dict[str, Any] = {"load_tokenizer": lambda name: tokenizer, "max_context": 63}
    check_served_teachers(one, tokenizer, **given | options)


@pytest.mark.parametrize("kind", KINDS)
def test_advantage_is_the_negative_reverse_kl_of_each_token(kind: Any) -> None:
    samples = [sample("t0", "ppaaooap"), sample("t1", "paoo"), sample("t2", "ppoo")]
    with served() as server:
        one = teachers(ServedTeacherOptions(url=server.url, kind=kind), coef=0.75, advantage_coef=2.0)
        out, metrics = one.apply([group()], samples, score=no_score)
        gaps = []
        for before, after in zip(samples, out, strict=True):
            teacher_T = [0.0, *server.logprobs(before.token_ids.tolist())]
            want = np.zeros(len(before))
            for t in (t for t in range(len(before)) if before.loss_weights[t]):
                gaps.append(teacher_T[t] - before.old_logprobs[t])  # type: ignore[index]
                want[t] = 2.0 * 0.5 - 0.75 * (before.old_logprobs[t] - teacher_T[t])  # type: ignore[index]
            np.testing.assert_allclose(after.advantages, want, atol=1e-5)
    assert metrics["policy/teacher_gap"].value == pytest.approx(np.mean(gaps), abs=1e-5)
    assert metrics["buffer/samples_taught"].value == 2, "of the third no token is trained"


def test_row_is_scored_by_the_teacher_of_its_data_source() -> None:
    samples = [sample("t0", "ppaa", group="g0"), sample("t0", "ppaaa", group="g1")]
    with served() as of_math, served() as of_rest:
        one = teachers(
            ServedTeacherOptions(url=of_math.url, data_sources=("math",)),
            ServedTeacherOptions(url=of_rest.url, kind="sglang"),
        )
        one.apply([group("g0"), group("g1", source="code")], samples, score=no_score)
    assert [len(b["prompt"]) for p, b in of_math.asked if p == "/v1/completions"] == [4]
    assert [len(b["input_ids"]) for p, b in of_rest.asked if p == "/generate"] == [5]


def test_row_without_a_teacher_is_refused() -> None:
    options = ServedTeachersOptions(teachers=(ServedTeacherOptions(url="http://localhost:1", data_sources=("math",)),))
    refuses(lambda: teacher_of(group(source="code").task, options), DataError, "'row-g'", "'code'", "'math'")


@pytest.mark.parametrize("sources", [((), ()), (("a", "b"), ("b",))])
def test_two_teachers_of_one_row_are_refused(sources: Any) -> None:
    made = tuple(ServedTeacherOptions(url="http://localhost:1", data_sources=s) for s in sources)
    refuses(lambda: ServedTeachersOptions(teachers=made), ConfigError, "two teachers")


def test_url_without_scheme_is_refused() -> None:
    refuses(lambda: ServedTeacherOptions(url="localhost:8000"), ConfigError, "'localhost:8000'")


def test_failed_request_is_sent_again() -> None:
    left = [3]

    def busy(path: str, reply: Any) -> Any:
        if path == "/v1/completions" and left[0]:
            left[0] -= 1
            return 503, {}
        return reply

    with served(busy) as server:
        _, metrics = teachers(ServedTeacherOptions(url=server.url)).apply([group()], [sample("t", "ppa")], score=no_score)
    assert metrics["buffer/samples_taught"].value == 1 and left == [0]


def test_teacher_that_stays_away_ends_the_step_with_its_url() -> None:
    with served(lambda path, reply: (500, {}) if path == "/v1/completions" else reply) as server:
        one = teachers(ServedTeacherOptions(url=server.url))
        refuses(lambda: one.apply([group()], [sample("t", "ppa")], score=no_score), EngineError, server.url)
    assert len([path for path, _ in server.asked if path == "/v1/completions"]) == 6


def replaced(value: Any) -> Callable[[Any], Any]:
    """Return a change of the last log-probability of an answer."""

    def change(reply: Any) -> Any:
        if "choices" in reply:
            entry = next(iter(reply["choices"][0]["prompt_logprobs"][-1].values()))
            entry["logprob"] = value
        else:
            reply["meta_info"]["input_token_logprobs"][-1][0] = value
        return reply

    return change


def shortened(reply: Any) -> Any:
    entries = reply["choices"][0]["prompt_logprobs"] if "choices" in reply else reply["meta_info"]["input_token_logprobs"]
    del entries[-1]
    return reply


BAD: dict[str, Callable[[Any], Any]] = {
    "positive": replaced(0.5),
    "null": replaced(None),
    "infinite": replaced(float("-inf")),
    "text": replaced("-1"),
    "too few": shortened,
    "none": lambda reply: {"choices": [{"text": ""}], "meta_info": {}},
    "no object": lambda reply: [],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", BAD)
def test_unusable_answer_names_the_url(kind: Any, bad: str) -> None:
    with served(lambda path, reply: BAD[bad](reply) if path in {"/generate", "/v1/completions"} else reply) as server:
        one = teachers(ServedTeacherOptions(url=server.url, kind=kind))
        refuses(lambda: one.apply([group()], [sample("t", "ppaa")], score=no_score), EngineError, server.url)


def test_ids_that_were_not_sent_are_refused() -> None:
    def other(path: str, reply: Any) -> Any:
        if path == "/generate":
            reply["meta_info"]["input_token_logprobs"][-1][1] = -7
        return reply

    with served(other) as server, pytest.raises(EngineError, match="-7"):
        teachers(ServedTeacherOptions(url=server.url, kind="sglang")).apply([group()], [sample("t", "pa")], score=no_score)


def test_sample_with_media_is_refused() -> None:
    shown = sample("t7", "pa", media=(Media(kind="image", source="a.png"),))
    with pytest.raises(TrainingError, match="t7"):
        teachers(ServedTeacherOptions(url="http://localhost:1")).apply([group()], [shown], score=no_score)


# What is asked of a server before the run starts.


@pytest.mark.parametrize("kind", KINDS)
def test_fitting_teacher_is_taken(kind: Any) -> None:
    with served() as server:
        check(teachers(ServedTeacherOptions(url=server.url, kind=kind)))


def test_unreachable_teacher_is_refused() -> None:
    with served() as server:
        url = server.url
    refuses(lambda: check(teachers(ServedTeacherOptions(url=url))), ConfigError, url)


UNFIT: dict[str, tuple[Change, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "no logprobs": (lambda path, r: {"choices": [{"text": "a"}]} if path == "/v1/completions" else r, {}, {}, ()),
    "other vocabulary": (lambda path, r: {"tokens": [5, *r["tokens"][1:]]} if path == "/tokenize" else r, {}, {}, ()),
    "smaller vocabulary": (
        *(lambda path, r: (400, {"error": "out of vocabulary"}) if path == "/generate" else r, {"kind": "sglang"}, {}),
        ("out of vocabulary",),
    ),
    "tokenizer of another size": (
        *(lambda path, r: r, {"tokenizer": "theirs"}, {"load_tokenizer": lambda name: [0, 1, 2]}, ("'theirs'", "3 tokens")),
    ),
    "shorter context": (lambda path, r: r, {}, {"max_context": 64}, ("64 tokens", "65")),
    "models in another form": (
        lambda path, r: ["big"] if path == "/v1/models" else r,
        {},
        {},
        ("without a list of models",),
    ),
    "context in words": (
        *(lambda path, r: {"data": [{"id": "big", "max_model_len": "long"}]} if path == "/v1/models" else r, {}, {}),
        ("without a list of models", "'long'"),
    ),
    "unknown model": (lambda path, r: r, {"model": "bigger"}, {}, ("['big']", "'bigger'")),
}
"""What is wrong -> (what the server answers, options of the teacher, options of the run, words beside its address)."""


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_teacher_is_refused(case: str) -> None:
    change, options, of_run, words = UNFIT[case]
    with served(change) as server:
        one = teachers(ServedTeacherOptions(url=server.url, **options))
        refuses(lambda: check(one, **of_run), ConfigError, *words or (server.url,))


def test_tokenizer_folder_stands_for_a_missing_route() -> None:
    with served(lambda path, reply: (404, {}) if path == "/tokenize" else reply) as server:
        refuses(lambda: check(teachers(ServedTeacherOptions(url=server.url))), ConfigError, "set `tokenizer`")
        check(teachers(ServedTeacherOptions(url=server.url, tokenizer="theirs")))


def test_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    refuses(
        lambda: teachers(ServedTeacherOptions(url="http://localhost:1", api_key_env="TEACHER_KEY")),
        ConfigError,
        "TEACHER_KEY",
    )
