"""The process in which verifiers' environments run: this file alone, in an interpreter that has verifiers but not polyturn.

    -> {"id": 1, "do": "load", "env": "my_env", "arguments": {…}, "path": "/project"}  <- {"id": 1, "value": {…}}
    -> {"id": 2, "do": "rollout", "input": {…}, "base_url": …, "api_key": …}           <- {"id": 2, "value": {"reward": 1.0}}
    -> {"cancel": 2}

Requests arrive on standard input and answers leave on standard output, one JSON object per line; the environment's own
prints go to the log. Rollouts run concurrently on one event loop. The environment installs signal handlers and an exit hook
and needs the main thread, so it cannot run in the trainer's process.
"""

import sys
from pathlib import Path

# This folder has a file verifiers.py, which would be imported instead of the package verifiers.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import asyncio  # noqa: E402
import inspect  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # prints go to the log

MODEL_ERRORS = ("EmptyModelResponseError", "InvalidModelResponseError")
"""Names of errors that the model's text causes: the rollout counts, with the environment's score."""
LIMITS = ("limit", "context_full", "context_length_exceeded", "episode_ended")
"""Error codes of the endpoint if a limit of the run ended the episode: the rollout counts, with the environment's score."""


class RefusedRequest(Exception):
    """A request that cannot be answered; the message is the reason."""


class LegacyEnvironment:
    """An environment of verifiers before 0.4: from `load_environment`, with a dataset and a rubric."""

    def __init__(self, verifiers, env, arguments):
        self._env = verifiers.load_environment(env, **arguments)
        if self._env.requires_group_rollouts:
            raise RefusedRequest(
                "the environment scores the rollouts of a group together, but polyturn scores each episode separately"
            )

    async def rows(self, split, first, num):
        dataset = self._env.get_eval_dataset(n=num) if split == "eval" else self._env.get_dataset(n=num)
        return {"rows": dataset.to_list(), "first": 0, "is_trained": False}

    async def rollout(self, input, base_url, api_key, model):
        import openai
        from verifiers.clients import OpenAIChatCompletionsClient

        is_over = False

        class Served(OpenAIChatCompletionsClient):
            async def get_native_response(self, *args, **kwargs):
                nonlocal is_over
                try:
                    return await super().get_native_response(*args, **kwargs)
                except openai.APIStatusError as problem:
                    is_over |= problem.code in LIMITS
                    raise

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=None) as client:
            served = Served(client)
            output = await self._env.run_rollout(
                input, served, model, dict(self._env.sampling_args), state_columns=["stop_condition"]
            )
        return {
            "reward": float(output["reward"] or 0.0),
            "metrics": {k: float(v) for k, v in (output.get("metrics") or {}).items()},
            "stop_condition": output.get("stop_condition"),
            "error": None if is_over else what_failed(output.get("error")),
        }

    async def close(self):
        teardown = self._env._teardown()
        if inspect.isawaitable(teardown):
            await teardown


class TasksetEnvironment:
    """An environment of verifiers since 0.4: a taskset and an agent, whose harness is a program.

    Each episode loads and serves its own environment, because an environment keeps a client of 1 MB for every address it has
    used.
    """

    def __init__(self, env, arguments):
        import verifiers.v1 as vf

        os.environ["PATH"] = (
            f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"  # for uv, which is next to python
        )
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **arguments.pop("agent", {})}
        self._vf = vf
        self._config = vf.resolve_env_config({"id": "", "taskset": {"id": env, **arguments}, "agent": agent})
        self._taskset = vf.load_environment(self._config).taskset
        self._numbers = itertools.count()

    async def rows(self, split, first, num):
        """Return the first tasks for training, and the tasks from `first` on for evaluation: a taskset has no splits."""
        first = first if split == "eval" else 0
        tasks = list(itertools.islice(iter(self._taskset), first, first + num))
        is_trained = first > 0 and not tasks
        if is_trained:
            first, tasks = 0, list(itertools.islice(iter(self._taskset), num))
        return {"rows": [t.data.model_dump(mode="json") for t in tasks], "first": first, "is_trained": is_trained}

    async def rollout(self, input, base_url, api_key, model):
        vf, kind = self._vf, type(self._taskset).task_type()
        task = kind(kind.data_type().model_validate(input), self._config.taskset.task)
        variable = (
            f"POLYTURN_{next(self._numbers)}_API_KEY"  # programs started by verifiers do not inherit names of this form
        )
        os.environ[variable] = api_key
        try:
            served = vf.load_environment(self._config)
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig())
            async with served.serving():
                episode = await served.run_episode(task, context)
        finally:
            del os.environ[variable]
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        errors = [f"{e.type}: {e.message}" for e in (*episode.errors, *(e for t in traces for e in t.errors))]
        error = None if episode.ok else "; ".join(dict.fromkeys(errors))[:600] or "no reason given"
        if error is not None and any(f"{code!r}" in error.replace('"', "'") for code in LIMITS):
            error = None
        if len(traces) != 1:
            return {"error": error or f"the episode has {len(traces)} trainable agents; polyturn supports one"}
        rewards = {name: reward.score for name, reward in traces[0].rewards.items()}
        return {
            "reward": float(traces[0].reward),
            "metrics": {k: float(v) for k, v in {**rewards, **traces[0].metrics}.items()},
            "stop_condition": traces[0].stop_condition,
            "error": error,
        }

    async def close(self):
        pass


class Worker:
    """Holds the environment and answers requests about it."""

    def __init__(self):
        self.env: Any = None
        self.running = {}

    async def load(self, env, arguments, path):
        try:
            import verifiers
        except ModuleNotFoundError as problem:
            raise RefusedRequest(f"the package {problem.name!r} is not installed in {sys.executable}") from problem
        sys.path.insert(0, path)
        try:
            is_legacy = verifiers.load_environment is not None
        except AttributeError:
            is_legacy = False
        self.env = LegacyEnvironment(verifiers, env, arguments) if is_legacy else TasksetEnvironment(env, arguments)
        return {"version": verifiers.__version__, "is_legacy": is_legacy}

    async def answer(self, request):
        id, kind = request.pop("id"), request.pop("do")
        try:
            if kind not in ("load", "rows", "rollout"):
                raise RefusedRequest(f"there is no request {kind!r}")
            answer = {"value": await getattr(self if kind == "load" else self.env, kind)(**request)}
        except asyncio.CancelledError:
            answer = {"error": "it was cancelled"}
        except RefusedRequest as problem:
            answer = {"error": str(problem)}
        except Exception as problem:  # an environment may raise anything
            traceback.print_exc()
            answer = {
                "error": f"{type(problem).__name__}: {' '.join(str(problem).split())}",
                "is_download": is_download(problem),
            }
        finally:
            self.running.pop(id, None)
        ANSWERS.write(json.dumps({"id": id, **answer}, default=str) + "\n")
        ANSWERS.flush()

    def take(self, line):
        request = json.loads(line)
        if "cancel" in request:
            if request["cancel"] in self.running:
                self.running[request["cancel"]].cancel()
        else:
            self.running[request["id"]] = asyncio.get_running_loop().create_task(self.answer(request))


def what_failed(error):
    """Return the message of a rollout's error, or None if the model caused it."""
    if error is None:
        return None
    text = str(error.get("error_chain_repr") or error) if isinstance(error, dict) else repr(error)
    return None if any(name in text for name in MODEL_ERRORS) else text[:600]


def is_download(problem):
    """Return whether an error came from a failed download."""
    while problem is not None:
        names = {c.__name__ for c in type(problem).__mro__}
        if names & {"ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "HfHubHTTPError"}:
            return True
        problem = problem.__cause__ or problem.__context__
    return False


async def main():
    loop, worker, done = asyncio.get_running_loop(), Worker(), asyncio.Event()

    def read():
        for line in sys.stdin:
            loop.call_soon_threadsafe(worker.take, line)
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=read, daemon=True).start()
    await done.wait()
    for task in list(worker.running.values()):
        task.cancel()
    if worker.env is not None:
        await worker.env.close()


if __name__ == "__main__":
    asyncio.run(main())
