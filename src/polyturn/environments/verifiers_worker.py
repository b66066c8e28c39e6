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
import inspect  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402
from typing import Any  # noqa: E402

ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # whatever is printed goes to the log

ANSWERED_ALL_THE_SAME = ("EmptyModelResponseError", "InvalidModelResponseError")
"""Errors that the model's text brings about: the environment's own score stands."""
LIMITS = ("limit", "context_full", "context_length_exceeded", "episode_ended")
"""Codes of the endpoint where a limit of the run ended the episode: what the environment scores then, stands."""


class RefusedRequest(Exception):
    """A request that cannot be answered, with a sentence."""


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
        try:
            load_environment = verifiers.load_environment
        except AttributeError as problem:
            raise RefusedRequest(
                f"verifiers {verifiers.__version__} has no load_environment; the environments that it loads are those of 0.1"
            ) from problem
        sys.path.insert(0, path)
        self.env = load_environment(env, **arguments)
        if self.env.requires_group_rollouts:
            raise RefusedRequest("it scores the rollouts of a group together, and here each episode is scored by itself")
        return {"version": verifiers.__version__, "kind": type(self.env).__name__}

    async def rows(self, split, num):
        dataset = self.env.get_eval_dataset(n=num) if split == "eval" else self.env.get_dataset(n=num)
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
            state = await self.env.run_rollout(
                input, served, model, dict(self.env.sampling_args), state_columns=["stop_condition"]
            )
        return {
            "reward": float(state["reward"] or 0.0),
            "metrics": {k: float(v) for k, v in (state.get("metrics") or {}).items()},
            "stop_condition": state.get("stop_condition"),
            "error": None if is_over else what_failed(state.get("error")),
        }

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
        teardown = worker.env._teardown()
        if inspect.isawaitable(teardown):
            await teardown


if __name__ == "__main__":
    asyncio.run(main())
