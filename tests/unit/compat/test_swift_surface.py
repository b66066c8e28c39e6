"""`import swift...` without ms-swift: every name that its users' files import, of this release and of the 3.x ones."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyturn import compat
from polyturn.batching.loss_scale import build_loss_scale, loss_scale
from polyturn.compat.swift.adapter import SwiftScheduler
from polyturn.compat.swift.base import MultiTurnScheduler, RolloutScheduler
from polyturn.compat.swift.loss_scale import LossScale, loss_scale_map
from polyturn.compat.swift.schedulers import ThinkingModelTipsScheduler
from polyturn.compat.swift.shapes import check_scheduler
from polyturn.compat.swift.template import ContextType
from polyturn.core.errors import ConfigError
from polyturn.infra.plugins import import_attr, load_plugins
from polyturn.rollout.run_episode import run_episode
from polyturn.serving.outputs import reward_rows, rollout_outputs
from polyturn.serving.rollout_protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    InferRequest,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from polyturn.testing.episodes import scripted_context, task, tiny_codec
from support.compat_parts import again, play_swift, sampled, stepping
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # a process has to start

NAMES = {
    "swift.rollout.multi_turn": "RolloutScheduler MultiTurnScheduler GYMScheduler OpenEnvScheduler MathTipsScheduler "
    "ThinkingModelTipsScheduler multi_turns Messages",
    "swift.rollout": "multi_turns RolloutScheduler MultiTurnScheduler envs Env",
    "swift.plugin": "multi_turns MultiTurnScheduler Env envs ContextManager context_managers ORM AsyncORM orms rm_plugins",
    "swift.plugin.multi_turn": "MultiTurnScheduler multi_turns ThinkingModelTipsScheduler MathTipsScheduler",
    "swift.plugin.orm": "ORM AsyncORM orms MathAccuracy",
    "swift.plugin.loss_scale": "LossScale loss_scale_map",
    "swift.plugin.loss_scale.loss_scale": "LossScale loss_scale_map",
    "swift.plugin.context_manager": "ContextManager context_managers",
    "swift.infer_engine": "RequestConfig InferRequest TransformersEngine RolloutInferRequest",
    "swift.infer_engine.protocol": "RolloutInferRequest RequestConfig ChatCompletionResponseChoice RolloutOutput "
    "ChatMessage ChatCompletionResponse UsageInfo Function ChatCompletionMessageToolCall InferRequest",
    "swift.rewards": "ORM AsyncORM orms rm_plugins PRM prms",
    "swift.rewards.orm": "ORM AsyncORM orms MathAccuracy",
    "swift.rewards.rm_plugin": "DefaultRMPlugin rm_plugins",
    "swift.rollout.gym_env": "Env envs ContextManager context_managers SimpleMathEnv",
    "swift.template": "Messages Template Tool ContextType",
    "swift.utils": "get_logger to_device remove_response",
    "swift.loss_scale": "LossScale loss_scale_map",
    "swift.llm.template.template.utils": "ThinkingTemplate",
    "swift.llm.template.utils": "ContextType",
    "swift.llm": "RequestConfig InferRequest PtEngine Template ContextType to_device RolloutInferRequest",
    "swift.llm.infer.protocol": "RolloutInferRequest ChatCompletionResponseChoice RolloutOutput RequestConfig",
}


@pytest.fixture(autouse=True)
def _as_if_never_imported() -> Iterator[None]:
    compat.uninstall("swift")
    yield
    compat.uninstall("swift")


def test_every_documented_name_is_there() -> None:
    assert compat.install("swift")
    missing = [
        f"{module}.{name}"
        for module, names in NAMES.items()
        for name in names.split()
        if getattr(importlib.import_module(module), name, None) is None
    ]
    assert missing == []
    old, new = (importlib.import_module(f"swift.{name}").multi_turns for name in ("plugin", "rollout.multi_turn"))
    assert old is new
    assert set(old) >= {"math_tip_trick", "gym_scheduler", "openenv_scheduler", "thinking_tips_scheduler"}
    rewards = "accuracy format react_format cosine repetition soft_overlong toolbench math thinking_tips"
    assert set(importlib.import_module("swift.rewards").orms) >= set(rewards.split())
    assert "math_env" in importlib.import_module("swift.rollout").envs


def test_name_that_is_not_offered_is_an_error() -> None:
    compat.install("swift")
    with pytest.raises(ModuleNotFoundError, match=r"polyturn, which stands in for swift, does not offer it"):
        importlib.import_module("swift.trainers")


def test_plugin_file_that_imports_swift_installs_it(tmp_path: Path) -> None:
    file = tmp_path / "wants_swift.py"
    file.write_text("from swift.plugin import MultiTurnScheduler\nclass Mine(MultiTurnScheduler):\n    pass\n")
    assert import_attr(f"{file}:Mine").__name__ == "Mine"
    compat.uninstall("swift")
    assert load_plugins([file])[0].Mine.__name__ == "Mine"


def test_requests_and_outputs_are_checked() -> None:
    with pytest.raises(AssertionError):
        InferRequest("hello")  # type: ignore[arg-type]
    assert InferRequest([], images="a.png").images == ["a.png"]  # type: ignore[arg-type]
    assert RequestConfig(stop=None).stop == []
    response = ChatCompletionResponse("m", [], UsageInfo(1, 2, 3))
    output = RolloutOutput(response=response, response_token_ids=[1, 2], rollout_infos={"images": "a.png"})
    assert output.response_token_ids == [[1, 2]]
    assert output.rollout_infos["images"] == ["a.png"]
    assert output.response is response
    assert sorted(output.model_dump()) == [
        "messages", "prompt_logprobs", "response", "response_loss_mask", "response_token_ids", "rollout_infos",
        "rollout_logprobs",
    ]  # fmt: skip
    refuses(lambda: RolloutOutput(response=response, response_token_ids=None), ValueError, "response_token_ids")


def test_request_can_be_printed_and_loses_its_reply() -> None:
    said = [{"role": "user", "content": "x" * 1500}, {"role": "assistant", "content": "no"}]
    request = RolloutInferRequest(
        messages=said, images=["A" * 2000, "a.png"], data_dict={"text": "y" * 1200, "b": "z" * 1200}
    )
    shown = request.to_printable()
    assert shown["images"] == [f"<<<base64:{'A' * 50}..>>>", "a.png"]
    assert shown["messages"] == said and shown["data_dict"]["text"] == "y" * 1200
    assert shown["data_dict"]["b"] == f"<<<base64:{'z' * 50}..>>>"
    assert InferRequest.remove_response(request.messages) == "no" and len(request.messages) == 1
    assert InferRequest.remove_response(request.messages) is None


async def test_engine_and_base_class_offer_what_all_releases_use() -> None:
    seen: dict[str, object] = {}

    class Uses(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            engine = self.infer_engine
            for name in ("tokenizer", "template.tokenizer", "default_template.tokenizer", "processor", "template.processor"):
                at = engine
                for part in name.split("."):
                    at = getattr(at, part)
                seen[name] = at
            assert self.get_response_token_data(infer_request, response_choice)[0] == response_choice.token_ids
            ids, mask, logprobs = self.prepare_response_continuation(response_choice)
            assert len(ids) == len(mask) == len(logprobs)
            self.set_assistant_message_token_ids(infer_request, ids)
            snapshots = self.snapshot_and_materialize_assistant_messages(infer_request)
            assert infer_request.messages[-1]["content"].startswith("a b")
            self.restore_assistant_message_snapshots(snapshots)
            assert infer_request.messages[-1]["content"] == ids
            infer_request.messages.append({"role": "user", "content": "Again."})
            assert not self.append_assistant_completion(type(infer_request)([{"role": "user", "content": "?"}]), "x")
            return {"infer_request": infer_request}

    context = scripted_context(["a b", "c"], scheduler=SwiftScheduler(Uses, max_turns=2), rewards={"*": lambda t: 1.0})
    trajectory = await run_episode(context, task(), id="e")
    assert trajectory.error is None and len(seen) == 5
    assert set(map(id, seen.values())) == {id(context.codec.tokenizer)}
    assert len(trajectory.segments) == 1, "ids in place of a reply's text are the reply"
    assert [m.text for m in trajectory.messages][1:] == ["a b", "Again.", "c"]


async def test_ids_in_place_of_a_reply_can_be_continued() -> None:
    class Continues(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            self.set_assistant_message_token_ids(infer_request, response_choice.token_ids[:-1])
            return {"infer_request": infer_request}

    context = scripted_context(
        ["a b", "c d"], scheduler=SwiftScheduler(Continues, max_turns=2), rewards={"*": lambda t: 1.0}
    )
    trajectory = await run_episode(context, task(), id="e")
    assert reward_rows(trajectory)[0]["messages"][-1]["content"] == "a bc d"


def test_module_refuses_other_programs() -> None:
    line = [sys.executable, "-m", "polyturn.compat.swift", "deploy", "--model", "m"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "`swift deploy` is not available here" in done.stderr


class OnlyAnswers(LossScale):
    def get_loss_scale(self, context: str, **kwargs: object) -> tuple[list[str], list[float]]:
        at = context.find("####")
        return [context[:at], context[at:]], [0.0, 2.0]


class LastRound(LossScale):
    def get_loss_scale(
        self, context: str, kind: ContextType, is_last: bool, *, query: str | None = None
    ) -> tuple[list[str], list[float]]:
        if kind == ContextType.RESPONSE:
            return [context], [float(is_last)]
        return super().get_loss_scale(context, kind, is_last, query=query)


@pytest.mark.parametrize("name", ["base", "base+ignore_empty_think", "last_round+base", "of_the_last_round", "only_answers"])
async def test_loss_scale_of_ms_swift_becomes_weights(name: str) -> None:
    loss_scale_map["only_answers"] = OnlyAnswers
    loss_scale_map.update(of_the_last_round=LastRound)
    trajectory = await run_episode(scripted_context(["so #### 4"]), task(), id="e")
    (segment,) = trajectory.segments
    scale = build_loss_scale(name, decode=tiny_codec().decode)
    assert scale is not None
    weights = scale.weights(trajectory, segment)
    if name != "only_answers":
        assert (weights == segment.loss_weights).all()
    else:
        trained = tiny_codec().decode(segment.token_ids[weights > 0])
        assert "#### 4" in trained
        assert "so" not in trained


async def test_strategy_of_a_plug_in_replaces_a_shipped_one() -> None:
    trajectory = await run_episode(scripted_context(["so #### 4"]), task(), id="e")
    (segment,) = trajectory.segments
    shipped = loss_scale.resolve("ignore_think_prefix")
    try:
        loss_scale_map["ignore_think_prefix"] = OnlyAnswers
        scale = build_loss_scale("ignore_think_prefix", decode=tiny_codec().decode)
        assert scale is not None
        assert "so" not in tiny_codec().decode(segment.token_ids[scale.weights(trajectory, segment) > 0])
    finally:
        dict.__setitem__(loss_scale_map, "ignore_think_prefix", LossScale)
        loss_scale.register("ignore_think_prefix", replace=True)(shipped)


async def test_loss_scale_gets_the_query_of_each_reply() -> None:
    queries: list[str | None] = []

    class Sees(LossScale):
        def get_loss_scale(self, context: str, *, query: str | None = None) -> tuple[list[str], list[float]]:
            queries.append(query)
            return [context], [1.0]

    class Asks(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
            if current_turn == 1:
                infer_request.messages += [{"role": "tool", "content": "4"}, {"role": "user", "content": "Sure?"}]
            else:
                infer_request.messages[-1]["content"] += " But"
            return {"infer_request": infer_request}

    loss_scale_map["sees"] = Sees
    context = scripted_context(["a", "b", "c"], scheduler=SwiftScheduler(Asks, max_turns=3), rewards={"*": lambda t: 1.0})
    trajectory = await run_episode(context, task("Why?"), id="e")
    scale = build_loss_scale("sees", decode=tiny_codec().decode)
    assert scale is not None
    scale.weights(trajectory, trajectory.segments[0])
    assert queries == ["Why?", "4Sure?", "4Sure?"]


async def test_loss_scale_gets_replies_without_end_token() -> None:
    replies: list[str] = []

    class LeavesOutFirst(LossScale):
        def get_loss_scale(self, context: str, **kwargs: Any) -> tuple[list[str], list[float]]:
            replies.append(context)
            return [context], [float(context != "a")]

    loss_scale_map["leaves_out_first"] = LeavesOutFirst
    trajectory = await play_swift(stepping(), ["a", "b"], max_turns=2)
    codec = tiny_codec()
    scale = build_loss_scale("leaves_out_first", decode=codec.decode, stop_token_ids=codec.stop_token_ids)
    assert scale is not None
    weights = scale.weights(trajectory, trajectory.segments[0])
    assert replies == ["a", "b"]
    assert codec.decode(trajectory.segments[0].token_ids[weights > 0]) == "b<|im_end|>"  # as the reply, so its end token


class OwnCall(LossScale):
    def __call__(self, contexts: Any, types: Any, messages: Any) -> Any:
        return contexts, [0.0] * len(contexts)


class OwnFile(LossScale):
    loss_scale_config = "mine.json"


@pytest.mark.parametrize(("strategy", "names"), [(OwnCall, "__call__"), (OwnFile, "loss_scale_config")])
async def test_loss_scale_without_get_loss_scale_is_refused(strategy: Any, names: str) -> None:
    loss_scale_map["own"] = strategy
    trajectory = await run_episode(scripted_context(["a"]), task(), id="e")
    scale = build_loss_scale("own", decode=tiny_codec().decode)
    assert scale is not None
    refuses(lambda: scale.weights(trajectory, trajectory.segments[0]), ConfigError, "'own'", names)


@pytest.mark.parametrize(
    ("name", "text", "left_out"),
    [
        ("react", "Thought: a\nObservation: b\nThought: c", [" b\n"]),
        ("react", "Observation:Observation: b Next: c", ["", " b Next: c"]),
        ("alpha_umi", "Thought: a\nObservation: b\nNext: c", [" b\n"]),
        ("agentflan", "Observation: b\nName: c", [" b\n"]),
        ("qwen", "✿ARGS✿: a\n✿RESULT✿: b\n✿RETURN✿: c", [" b\n"]),
    ],
)
def test_results_that_the_model_writes_are_left_out(name: str, text: str, left_out: list[str]) -> None:
    pieces, weights = loss_scale_map[name]().get_loss_scale(text)
    assert "".join(pieces) == text
    assert [p for p, w in zip(pieces, weights, strict=True) if not w] == left_out


@pytest.mark.parametrize(
    ("query", "weights"),
    [
        (None, [1.0, 1.0, 0.0]),
        ("Call a tool.", [1.0, 1.0, 0.0]),
        ("What is the tool you want to use?", [3.0]),
        ("And: What are the required parameter names for this tool?", [3.0]),
    ],
)
def test_agentflan_trains_answers_about_calls(query: str | None, weights: list[float]) -> None:
    pieces, found = loss_scale_map["agentflan"]().get_loss_scale("a Observation: b", query=query)
    assert "".join(pieces) == "a Observation: b" and found == weights


def test_helpers_of_an_own_loop_take_what_they_like() -> None:
    class Own(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any: ...

        def step(self, text: str) -> str:
            return text

        def check_finished(self) -> bool:
            return True

    class Steps(MultiTurnScheduler):
        def step(self, text: str) -> str:
            return text

    check_scheduler(Own, where="mine")
    refuses(lambda: check_scheduler(Steps, where="mine"), ConfigError, "Steps.step")


class Wraps(MultiTurnScheduler):
    """Prepares its requests, and looks at the outputs, around the base class's `async_infer`."""

    async def async_infer(self, infer_requests: list[Any], request_config: Any, **kwargs: Any) -> list[Any]:
        for request in infer_requests:
            request.messages[-1]["content"] += " Think."
        outputs = await super().async_infer(infer_requests, request_config, use_tqdm=False, **kwargs)
        for output in outputs:
            output.rollout_infos["seen"] = True
        return outputs

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Any:
        return again(infer_request, response_choice, current_turn)


class Asserts(Wraps):
    """Compares the requests of a group."""

    async def async_infer(self, infer_requests: list[Any], request_config: Any, **kwargs: Any) -> list[Any]:
        assert len(infer_requests) > 1
        return await super().async_infer(infer_requests, request_config, **kwargs)


class Shares(Wraps):
    """Runs equal requests once."""

    async def async_infer(self, infer_requests: list[Any], request_config: Any, **kwargs: Any) -> list[Any]:
        outputs = await super().async_infer(infer_requests[:1], request_config, **kwargs)
        return outputs * len(infer_requests)


@pytest.mark.parametrize("scheduler", [Asserts, Shares])
def test_scheduler_of_whole_groups_is_refused_before_the_run(scheduler: type[MultiTurnScheduler]) -> None:
    with pytest.raises(ConfigError, match=rf"{scheduler.__name__}\.async_infer"):
        SwiftScheduler(scheduler).check_task(task())


class AssertsWithTokenizer(Asserts):
    """Reads the engine's tokenizer first."""

    async def async_infer(self, infer_requests: list[Any], request_config: Any, **kwargs: Any) -> list[Any]:
        assert self.tokenizer is not None
        return await super().async_infer(infer_requests, request_config, **kwargs)


class MadeWithTokenizer(Shares):
    """Is made with the run's tokenizer, so it cannot be made before the run."""

    def __init__(self, *args: Any, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(*args, tokenizer=tokenizer, **kwargs)


@pytest.mark.parametrize("scheduler", [AssertsWithTokenizer, MadeWithTokenizer])
async def test_scheduler_of_whole_groups_is_refused_in_its_first_run(scheduler: type[MultiTurnScheduler]) -> None:
    driver = SwiftScheduler(scheduler)
    driver.check_task(task())
    with pytest.raises(ConfigError, match=rf"{scheduler.__name__}\.async_infer .* whole group"):
        await run_episode(scripted_context(["a"], scheduler=driver), task(), id="g0/0")


async def test_batches_that_sample_themselves_run() -> None:
    class Samples(Wraps):
        async def async_infer(self, infer_requests: list[Any], request_config: Any, **kwargs: Any) -> list[Any]:
            response = await self.infer_engine.infer_async(infer_requests[0], request_config)
            reply = {"role": "assistant", "content": response.choices[0].message.content}
            return [RolloutOutput(response=response, messages=[*infer_requests[0].messages, reply])]

    SwiftScheduler(Samples).check_task(task())
    trajectory = await play_swift(Samples, ["a"])
    assert [trajectory.error, trajectory.turns[0].message.text] == [None, "a"]


async def test_wrapper_of_single_requests_runs() -> None:
    SwiftScheduler(Wraps).check_task(task())
    trajectory = await play_swift(Wraps, ["a", "b"], max_turns=2)
    assert trajectory.error is None
    assert trajectory.messages[0].text.endswith(" Think.")
    assert all(set(weights) == {1.0} for _, weights in sampled(trajectory))
    (output,) = rollout_outputs(trajectory)
    assert output.rollout_infos["seen"] is True


class BareEngine:
    """An engine of a script outside a run, which answers or fails."""

    def __init__(self, problem: BaseException | None = None) -> None:
        self.problem = problem

    async def infer_async(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        if self.problem is not None:
            raise self.problem
        message = ChatMessage(role="assistant", content="4")
        choice = ChatCompletionResponseChoice(index=0, message=message, finish_reason="stop", token_ids=[1])
        return ChatCompletionResponse("m", [choice], UsageInfo(1, 1, 2))


@pytest.mark.parametrize("problem", [None, ValueError("engine"), asyncio.CancelledError()])
@pytest.mark.parametrize("base", [RolloutScheduler, MultiTurnScheduler, ThinkingModelTipsScheduler])
async def test_hooks_are_called_on_every_exit_of_a_bare_engine(base: Any, problem: BaseException | None) -> None:
    calls: list[Any] = []

    class Mine(base):  # type: ignore[misc]
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            return {"infer_request": infer_request}

        async def on_trajectory_start(self, requests: list[Any]) -> None:
            calls.append([one.uuid for one in requests])

        async def on_trajectory_end(self, requests: list[Any], error: BaseException | None = None) -> None:
            calls.append(([one.uuid for one in requests], error))

    prompt: Any = [{"role": "user", "content": "2+2?"}]
    request = RolloutInferRequest(messages=prompt, data_dict={"solution": "4"}, uuid="u")
    with contextlib.suppress(ValueError, asyncio.CancelledError):
        await Mine(BareEngine(problem), 2).run(request, RequestConfig())
    assert calls == [["u"], (["u"], problem)]


def test_images_of_infos_are_handed_over_in_base64(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"png")
    response = ChatCompletionResponse("m", [], UsageInfo(1, 2, 3))
    given = [str(file), b"png", {"bytes": b"png"}, {"bytes": None, "path": str(file)}, "cG5n", "https://x/y.png"]
    infos = RolloutOutput(response=response, rollout_infos={"images": given}).rollout_infos
    assert infos["images"] == ["cG5n", "cG5n", "cG5n", "cG5n", "cG5n", "https://x/y.png"]
