"""On-policy distillation from teachers behind endpoints: a server scores the tokens that the policy sampled.

    sample [ prompt | sampled, observed, sampled ]  -- its ids, over HTTP -->  log teacher(y_t | x, y_<t) at sampled tokens
    advantage_t <- advantage_coef * advantage_t - coef * (log policy(y_t | x, y_<t) - log teacher(y_t | x, y_<t))

    vllm      POST /v1/completions {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
              -> choices[0].prompt_logprobs = [null, {"17": {"logprob": -0.3, …}}, …], one for each id
    sglang    POST /generate {"input_ids": ids, "return_logprob": true, "logprob_start_len": s}
              -> meta_info.input_token_logprobs = [[null, id, …], [-0.3, id, …], …], one for each id from s on

Ids are sent instead of text, so the teacher reads exactly what the policy read. Each row goes to the teacher of its
`data_source`. A request without an answer is repeated. If it still fails, the step fails with the URL; no sample is left
out.

Source: On-Policy Distillation (Thinking Machines Lab 2025): the reverse KL of each sampled token as its negative advantage,
with discount 0. prime-rl's `opd`, slime's on-policy distillation and TRL's server distillation also use a server; NeMo RL
(MOPD) also has several teachers. Agarwal et al. 2024 (GKD) compare whole distributions, for which a server would have to
send the vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyturn.algorithms.options import ServedTeacherOptions, ServedTeachersOptions
from polyturn.algorithms.teacher_advantage import Score, taught, untaught
from polyturn.core.arrays import Floats, Ids
from polyturn.core.errors import ConfigError, DataError, EngineError, EngineLostError, TrainingError, one_line
from polyturn.core.metrics import Mean, Metrics, Sum
from polyturn.core.sample import TrainSample
from polyturn.core.secrets import bearer, token_from
from polyturn.core.task import Task
from polyturn.core.trajectory import TrajectoryGroup
from polyturn.engines.http_client import HttpClient
from polyturn.engines.request_limits import read_logprobs
from polyturn.infra.aio import first_error, in_own_loop
from polyturn.infra.retries import retried

TRIES = 6
"""Number of tries to score one sample, over half a minute."""
PROBE = 'def f(x):\n    return x ** 2  # 12345, naïve café, 你好, Привет 🙂\n\n\t"quoted"  '
"""A text that tokenizers with different vocabularies encode differently."""


class ServedTeacher:
    """A client of one server that scores ids."""

    def __init__(self, options: ServedTeacherOptions, *, wait_s: float = 1.0) -> None:
        """Prepare a client; no request is sent yet.

        Args:
            options: Address and route of the server.
            wait_s: Seconds before the second try; doubled for each further try.

        Raises:
            ConfigError: the environment lacks the key that `api_key_env` names.
        """
        self.options = options
        key = token_from({"token_env": options.api_key_env}, where="algorithm.served_teachers: api_key_env")
        self._client = HttpClient(options.url, headers=bearer(key), timeout_s=options.timeout_s)
        self._wait_s = wait_s
        self._model = options.model
        self._read = _READERS[options.kind]

    @property
    def url(self) -> str:
        """Its address."""
        return self._client.url

    @property
    def has_model(self) -> bool:
        """Whether the model's name is known."""
        return self._model is not None

    async def score(self, ids: Ids, start: int) -> Floats:
        """Return [len(ids) - start] the log-probability of each id from `start` on, given all ids before it.

        Raises:
            EngineError: the server cannot be reached, refuses, or returns an invalid reply.
        """
        ask, read = self._read
        path, body = ask(ids, start, self._model)
        reply = await retried(
            lambda: self._client.post(path, body),
            again=lambda problem: isinstance(problem, EngineLostError),
            tries=TRIES,
            wait_s=self._wait_s,
        )
        try:
            return read_scores(read(reply, ids, start), num=len(ids) - start)
        except (LookupError, TypeError, ValueError, AttributeError) as problem:
            raise EngineError(
                f"the teacher at {self.url} answered {path} without the log-probabilities of {len(ids) - start} prompt "
                f"tokens ({one_line(problem)})"
            ) from problem

    async def find_model(self) -> int | None:
        """Get the model's name, if it is not configured, and return its context in tokens; None if the server does not
        report it.

        Raises:
            EngineError: the server cannot be reached, returns an invalid reply, or does not serve the model.
        """
        reply = await self._client.get("/v1/models")
        try:
            models = {str(one.get("id")): one.get("max_model_len") for one in (reply or {}).get("data") or []}
            lengths = {name: None if length is None else int(length) for name, length in models.items()}
        except (TypeError, ValueError, AttributeError) as problem:
            raise EngineError(f"{self.url}/v1/models answered without a list of models ({one_line(problem)})") from problem
        if not models or self._model not in (None, *models):
            raise EngineError(
                f"{self.url} serves {sorted(models) or 'no model'}, and the teacher's model is {self._model!r}"
            )
        self._model = self._model or next(iter(models))
        return lengths[self._model]

    async def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text by the server's tokenizer, without special tokens.

        Raises:
            EngineError: the server has no /tokenize, or returns an invalid reply.
        """
        reply = await self._client.post("/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": False})
        try:
            return [int(token) for token in reply["tokens"]]
        except (LookupError, TypeError, ValueError) as problem:
            raise EngineError(f"{self.url}/tokenize answered without `tokens` ({one_line(problem)})") from problem

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class ServedTeachers:
    """Adds the scores of served teachers to advantages."""

    def __init__(self, options: ServedTeachersOptions, *, wait_s: float = 1.0) -> None:
        """Use the teachers of `options`; `wait_s` is the wait before the second try of a request.

        Raises:
            ConfigError: the environment lacks the key of a server.
        """
        self._options = options
        self.teachers = tuple(ServedTeacher(one, wait_s=wait_s) for one in options.teachers)

    def apply(
        self, groups: Sequence[TrajectoryGroup], samples: Sequence[TrainSample], *, score: Score
    ) -> tuple[list[TrainSample], Metrics]:
        """Return the samples with changed advantages, and the metrics of the step.

        Raises:
            DataError: a row has a `data_source` without a teacher.
            EngineError: a server cannot be reached, refuses, or returns an invalid reply.
            TrainingError: a sample shows media.
        """
        tasks = {g.id: g.task for g in groups}
        questions = [
            _Question.of(s, self.teachers[teacher_of(tasks[s.id.group], self._options)]) for s in samples if s.num_weighted
        ]
        answers = iter(in_own_loop(lambda: self._score_all(questions)))
        out, gap_sum, num_tokens = [], 0.0, 0
        for sample in samples:
            if not sample.num_weighted:
                out.append(untaught(sample, self._options))
                continue
            taught_sample = taught(sample, next(answers), self._options)
            out.append(taught_sample.sample)
            gap_sum, num_tokens = gap_sum + taught_sample.gap_sum, num_tokens + sample.num_weighted
        return out, {"policy/teacher_gap": Mean(gap_sum, num_tokens), "buffer/samples_taught": Sum(len(questions))}

    async def _score_all(self, questions: Sequence[_Question]) -> list[Floats]:
        slots = {one: asyncio.Semaphore(one.options.max_concurrent) for one in self.teachers}

        async def score(one: _Question) -> Floats:
            async with slots[one.teacher]:
                scores = await one.teacher.score(one.ids, one.start)
            return np.concatenate([np.zeros(one.start), scores, np.zeros(one.length - len(one.ids))]).astype(np.float32)

        try:
            with first_error():
                for teacher in {one.teacher for one in questions}:
                    if not teacher.has_model:
                        await teacher.find_model()
                async with asyncio.TaskGroup() as tasks:
                    answers = [tasks.create_task(score(one)) for one in questions]
        finally:
            for teacher in self.teachers:
                await teacher.close()
        return [answer.result() for answer in answers]


class _Question(NamedTuple):
    """A request to a teacher: the ids of a sample up to its last trained token, and the first index to score."""

    teacher: ServedTeacher
    ids: Ids
    start: int
    length: int
    """Length of the whole sample, in tokens."""

    @classmethod
    def of(cls, sample: TrainSample, teacher: ServedTeacher) -> _Question:
        if sample.media:
            raise TrainingError(
                f"sample {sample.id} shows media, which cannot be sent to a served teacher as ids; leave such rows "
                "out, or use algorithm.loss.distill"
            )
        trained = np.flatnonzero(sample.loss_weights)
        return cls(teacher, sample.token_ids[: trained[-1] + 1], int(trained[0]), len(sample))


def teacher_of(task: Task, options: ServedTeachersOptions) -> int:
    """Return the index of a row's teacher: the one with its data source, else the one without data sources.

    Raises:
        DataError: no teacher has its data source, and all teachers have some.
    """
    sources = [one.data_sources for one in options.teachers]
    teacher = next((i for i, names in enumerate(sources) if task.data_source in names), None)
    teacher = next((i for i, names in enumerate(sources) if not names), None) if teacher is None else teacher
    if teacher is None:
        raise DataError(
            f"row {task.id!r} has the data source {task.data_source!r}, but the teachers of algorithm.served_teachers "
            f"have {sorted(n for names in sources for n in names)}; add it to a teacher, or leave out data_sources of "
            "one"
        )
    return teacher


def read_scores(values: Sequence[Any], *, num: int) -> Floats:
    """Return [num] the log-probabilities of a server's answer.

    Raises:
        ValueError: they are not `num` finite numbers up to 0.
    """
    if len(values) != num:
        raise ValueError(f"{len(values)} log-probabilities")
    scores = read_logprobs(values)
    if not np.isfinite(scores).all():
        raise ValueError("a log-probability that is not finite")
    return np.minimum(scores, np.float32(0.0))


# The two routes. A request has a path and a body; a reply has a log-probability for each id from `start` on.


def _ask_vllm(ids: Ids, start: int, model: str | None) -> tuple[str, Mapping[str, Any]]:
    return "/v1/completions", {
        "model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0,
    }  # fmt: skip


def _read_vllm(reply: Any, ids: Ids, start: int) -> list[Any]:
    entries = reply["choices"][0]["prompt_logprobs"]
    if len(entries) != len(ids):
        raise ValueError(f"{len(entries)} entries for {len(ids)} ids")
    return [entry[str(token)]["logprob"] for token, entry in zip(ids[start:].tolist(), entries[start:], strict=True)]


def _ask_sglang(ids: Ids, start: int, model: str | None) -> tuple[str, Mapping[str, Any]]:
    # The first entry has no log-probability, so request one token more.
    return "/generate", {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}, "return_logprob": True,
        "logprob_start_len": max(start - 1, 0),
    }  # fmt: skip


def _read_sglang(reply: Any, ids: Ids, start: int) -> list[Any]:
    entries = reply["meta_info"]["input_token_logprobs"][1:]
    if (ids_scored := [int(entry[1]) for entry in entries]) != ids[start:].tolist():
        raise ValueError(f"entries of the ids {ids_scored[:5]}… for {ids[start : start + 5].tolist()}…")
    return [entry[0] for entry in entries]


_READERS = {"vllm": (_ask_vllm, _read_vllm), "sglang": (_ask_sglang, _read_sglang)}


def check_served_teachers(
    teachers: ServedTeachers, tokenizer: Any, *, load_tokenizer: Callable[[str], Any], max_context: int
) -> None:
    """Raise if a teacher cannot be reached, does not return log-probabilities, or has another vocabulary.

    Args:
        teachers: The teachers.
        tokenizer: The policy's Hugging Face tokenizer.
        load_tokenizer: Loads the tokenizer of a folder or hub id.
        max_context: Largest length of a sample, in tokens.

    Raises:
        ConfigError: the first problem, with the URL.
    """

    async def check_all() -> None:
        for one in teachers.teachers:
            try:
                await _check(one, tokenizer, load_tokenizer=load_tokenizer, max_context=max_context)
            except EngineError as problem:
                raise ConfigError(f"algorithm.served_teachers: {one.url} cannot teach: {problem}") from problem
            finally:
                await one.close()

    in_own_loop(check_all)


async def _check(teacher: ServedTeacher, tokenizer: Any, *, load_tokenizer: Callable[[str], Any], max_context: int) -> None:
    length = await teacher.find_model()
    if length is not None and length <= max_context:
        raise ConfigError(
            f"algorithm.served_teachers: the teacher at {teacher.url} has a context of {length} tokens, and scoring a "
            f"sample needs {max_context + 1}; lower rollout.limits.max_context, or start the teacher with a longer context"
        )
    # Models of one family differ most often in the control tokens of conversations.
    text = PROBE + "".join(map(str, tokenizer.all_special_tokens))
    own = tokenizer.encode(text, add_special_tokens=False)
    size = len(tokenizer)
    if teacher.options.tokenizer is not None:
        other = load_tokenizer(teacher.options.tokenizer)
        if len(other) != size:
            raise ConfigError(
                f"algorithm.served_teachers: the tokenizer {teacher.options.tokenizer!r} of the teacher at {teacher.url} "
                f"has {len(other)} tokens and the model's {size}; log-probabilities of the same ids can only be compared "
                "between models with the same tokenizer"
            )
        its = other.encode(text, add_special_tokens=False)
    else:
        try:
            its = await teacher.tokenize(text)
        except EngineLostError:
            raise
        except EngineError as problem:
            raise EngineError(f"{problem}; set `tokenizer` of the teacher to the folder of its tokenizer") from problem
    if list(its) != list(own):
        at = next((i for i, pair in enumerate(zip(its, own, strict=False)) if pair[0] != pair[1]), min(len(its), len(own)))
        raise ConfigError(
            f"algorithm.served_teachers: the teacher at {teacher.url} has another vocabulary: it encodes a probe text "
            f"as {len(its)} ids with {list(its[at : at + 3])} at {at}, and the model as {len(own)} with "
            f"{list(own[at : at + 3])}; use a teacher with the same tokenizer"
        )
    # The last id detects a vocabulary that is too small; the reply shows whether there are log-probabilities.
    await teacher.score(np.array([*own[:8], max(tokenizer.get_vocab().values())], np.int32), 1)
