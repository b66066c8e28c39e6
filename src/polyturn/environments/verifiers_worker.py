"""The process in which verifiers' environments run: this file alone, in an interpreter that has verifiers and not polyturn.

    -> {"id": 1, "do": "load", "env": "my_env", "arguments": {…}, "path": "/project"}  <- {"id": 1, "value": {…}}
    -> {"id": 2, "do": "rollout", "input": {…}, "base_url": …, "api_key": …}           <- {"id": 2, "value": {"reward": 1.0}}
    -> {"cancel": 2}

One JSON object a line, requests on standard input, answers on standard output, which the environment's own prints do not
reach. Rollouts run side by side on one event loop. The environment installs signal handlers and an exit hook, and wants the
main thread, which is one reason why it does not run in the trainer's process.
"""

import sys
from pathlib import Path

sys.path[:] = [
    p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent
]  # it has a file verifiers.py

import asyncio  # noqa: E402
import contextlib  # noqa: E402
import inspect  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # whatever is printed goes to the log

ANSWERED_ALL_THE_SAME = ("EmptyModelResponseError", "InvalidModelResponseError")
"""Errors that the model's text brings about: the environment's own score stands."""
EPISODES = 100
"""Episodes of one environment of tasksets, whose clients take about 1 MB each."""
LIMITS = ("limit", "context_full", "context_length_exceeded", "episode_ended")
"""Codes of the endpoint where a limit of the run ended the episode: what the environment scores then, stands."""


class RefusedRequest(Exception):
    """A request that cannot be answered, with a sentence."""


class LegacyEnvironment:
    """An environment of `load_environment`, with a dataset and a rubric; verifiers before 0.4."""

    def __init__(self, verifiers, env, arguments):
        self._env = verifiers.load_environment(env, **arguments)
        if self._env.requires_group_rollouts:
            raise RefusedRequest("it scores the rollouts of a group together, and here each episode is scored by itself")

    async def rows(self, split, num):
        dataset = self._env.get_eval_dataset(n=num) if split == "eval" else self._env.get_dataset(n=num)
        return dataset.to_list()

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
            found = await self._env.run_rollout(
                input, served, model, dict(self._env.sampling_args), state_columns=["stop_condition"]
            )
        return {
            "reward": float(found["reward"] or 0.0),
            "metrics": {k: float(v) for k, v in (found.get("metrics") or {}).items()},
            "stop_condition": found.get("stop_condition"),
            "error": None if is_over else what_failed(found.get("error")),
        }

    async def close(self):
        teardown = self._env._teardown()
        if inspect.isawaitable(teardown):
            await teardown


class TasksetEnvironment:
    """A taskset and an agent, whose harness is a program; verifiers from 0.4 on.

    It keeps a client for every address that was asked, and each episode has an address of its own. So a new environment
    takes over after `EPISODES`, and the old one is closed behind its last episode.
    """

    def __init__(self, env, arguments):
        import verifiers.v1 as vf

        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"  # for uv, beside python
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **arguments.pop("agent", {})}
        self._vf = vf
        self._config = vf.resolve_env_config({"id": "", "taskset": {"id": env, **arguments}, "agent": agent})
        self._taskset = vf.load_environment(self._config).taskset
        self._numbers = itertools.count()
        self._served = None

    async def rows(self, split, num):
        return [task.data.model_dump(mode="json") for task in itertools.islice(iter(self._taskset), num)]

    async def rollout(self, input, base_url, api_key, model):
        vf, kind = self._vf, type(self._taskset).task_type()
        task = kind(kind.data_type().model_validate(input), self._config.taskset.task)
        variable = f"POLYTURN_{next(self._numbers)}_API_KEY"  # programs that verifiers starts do not inherit such names
        os.environ[variable] = api_key
        try:
            async with self._serving() as served:
                client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
                context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig())
                episode = await served.run_episode(task, context)
        finally:
            del os.environ[variable]
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        errors = [f"{e.type}: {e.message}" for e in (*episode.errors, *(e for t in traces for e in t.errors))]
        error = None if episode.ok else "; ".join(dict.fromkeys(errors))[:600] or "it gives no reason"
        if error is not None and any(f"{code!r}" in error.replace('"', "'") for code in LIMITS):
            error = None
        if len(traces) != 1:
            names = [trace.agent.name for trace in traces]
            return {"error": error or f"its episode has the trainable agents {names}, and here an episode has one"}
        rewards = {name: reward.score for name, reward in traces[0].rewards.items()}
        return {
            "reward": float(traces[0].reward),
            "metrics": {k: float(v) for k, v in {**rewards, **traces[0].metrics}.items()},
            "stop_condition": traces[0].stop_condition,
            "error": error,
        }

    @contextlib.asynccontextmanager
    async def _serving(self):
        served = self._served
        if served is None or served.num_begun >= EPISODES:
            served = self._served = ServedEnvironment(self._vf.load_environment(self._config))
        served.num_begun += 1
        served.num_running += 1
        try:
            await asyncio.shield(served.ready)
            yield served.env
        finally:
            served.num_running -= 1
            if served is not self._served and not served.num_running:
                await served.close()

    async def close(self):
        if self._served is not None:
            await self._served.close()


class ServedEnvironment:
    """An environment that serves, from the first of its episodes to the last."""

    def __init__(self, env):
        self.env = env
        self.num_begun = self.num_running = 0
        self.ready = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._serving = asyncio.ensure_future(self._serve())

    async def _serve(self):
        try:
            async with self.env.serving():
                self.ready.set_result(None)
                await self._over.wait()
        except Exception as problem:
            if self.ready.done():
                raise
            self.ready.set_exception(problem)

    async def close(self):
        self._over.set()
        await self._serving


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

    async def rows(self, split, num):
        return await self.env.rows(split, num)

    async def rollout(self, input, base_url, api_key, model):
        return await self.env.rollout(input, base_url, api_key, model)

    async def answer(self, request):
        id, kind = request.pop("id"), request.pop("do")
        try:
            if kind not in ("load", "rows", "rollout"):
                raise RefusedRequest(f"there is no request {kind!r}")
            answer = {"value": await getattr(self, kind)(**request)}
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
    """Return the message for the error that a rollout ended with; None if the model caused it."""
    if error is None:
        return None
    text = str(error.get("error_chain_repr") or error) if isinstance(error, dict) else repr(error)
    return None if any(name in text for name in ANSWERED_ALL_THE_SAME) else text[:600]


def is_download(problem):
    """Return whether it failed because something could not be fetched."""
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
