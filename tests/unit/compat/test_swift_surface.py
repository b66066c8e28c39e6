"""`import swift...` without ms-swift: every name that its users' files import, of this release and of the 3.x ones."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from polyturn import compat
from polyturn.batching.loss_scale import build_loss_scale
from polyturn.compat.swift.loss_scale import LossScale, REACTLossScale, loss_scale_map
from polyturn.compat.swift.template import ContextType
from polyturn.core.plugins import load_plugins
from polyturn.core.registry import import_attr
from polyturn.rollout.run_episode import run_episode
from polyturn.testing.episodes import scripted_context, task, tiny_codec

NAMES = {
    "swift.rollout.multi_turn": "RolloutScheduler MultiTurnScheduler GYMScheduler OpenEnvScheduler MathTipsScheduler "
    "ThinkingModelTipsScheduler multi_turns Messages",
    "swift.rollout": "multi_turns RolloutScheduler MultiTurnScheduler envs Env",
    "swift.plugin": "multi_turns MultiTurnScheduler Env envs ContextManager context_managers ORM AsyncORM orms rm_plugins",
    "swift.plugin.multi_turn": "MultiTurnScheduler multi_turns ThinkingModelTipsScheduler MathTipsScheduler",
    "swift.plugin.orm": "ORM AsyncORM orms MathAccuracy",
    "swift.plugin.loss_scale": "LossScale loss_scale_map",
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
    for module, names in NAMES.items():
        found = importlib.import_module(module)
        assert all(getattr(found, name) is not None for name in names.split())


def test_one_registry_stands_under_all_its_names() -> None:
    compat.install("swift")
    old, new = (importlib.import_module(f"swift.{name}").multi_turns for name in ("plugin", "rollout.multi_turn"))
    assert old is new
    assert set(old) >= {"math_tip_trick", "gym_scheduler", "openenv_scheduler", "thinking_tips_scheduler"}
    assert set(importlib.import_module("swift.rewards").orms) >= {
        "accuracy", "format", "react_format", "cosine", "repetition", "soft_overlong", "toolbench", "math", "thinking_tips"
    }  # fmt: skip
    assert "math_env" in importlib.import_module("swift.rollout").envs


def test_a_name_that_is_not_offered_says_what_is() -> None:
    compat.install("swift")
    with pytest.raises(ModuleNotFoundError, match=r"polyturn, which stands in for swift, does not offer it"):
        importlib.import_module("swift.trainers")


def test_a_class_and_a_plug_in_that_need_swift_bring_it_along(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "wants_swift.py"
    file.write_text("from swift.plugin import MultiTurnScheduler\nclass Mine(MultiTurnScheduler):\n    pass\n")
    assert import_attr(f"{file}:Mine").__name__ == "Mine"
    compat.uninstall("swift")
    assert load_plugins([file])[0].Mine.__name__ == "Mine"


def test_requests_and_outputs_check_what_they_check_there() -> None:
    from polyturn.serving.protocol import (
        ChatCompletionResponse,
        InferRequest,
        RequestConfig,
        RolloutOutput,
        UsageInfo,
    )

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
    with pytest.raises(ValueError, match="response_token_ids"):
        RolloutOutput(response=response, response_token_ids=None)


def test_a_request_can_be_printed_and_loses_its_reply() -> None:
    from polyturn.serving.protocol import InferRequest, RolloutInferRequest

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


async def test_the_engine_and_the_base_class_have_what_files_of_all_releases_use() -> None:
    from polyturn.compat.swift.adapter import SwiftScheduler
    from polyturn.compat.swift.base import MultiTurnScheduler

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


async def test_the_loss_scale_base_trains_everything() -> None:
    trajectory = await run_episode(scripted_context(["so 4"]), task(), id="e")
    (segment,) = trajectory.segments
    for name in ("base", "base+ignore_empty_think", "last_round+base"):
        scale = build_loss_scale(name, decode=tiny_codec().decode)
        assert scale is not None and (scale.weights(trajectory, segment) == segment.loss_weights).all()


def test_the_program_is_reached_as_a_module_and_refuses_what_is_not_here() -> None:
    line = [sys.executable, "-m", "polyturn.compat.swift", "deploy", "--model", "m"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "`swift deploy` is not available here" in done.stderr


async def test_a_loss_scale_of_a_plug_in_becomes_a_mask() -> None:
    class OnlyAnswers(LossScale):
        def get_loss_scale(self, context: str, **kwargs: object) -> tuple[list[str], list[float]]:
            at = context.find("####")
            return [context[:at], context[at:]], [0.0, 2.0]

    loss_scale_map["only_answers"] = OnlyAnswers
    trajectory = await run_episode(scripted_context(["so #### 4"]), task(), id="e")
    (segment,) = trajectory.segments
    scale = build_loss_scale("only_answers", decode=tiny_codec().decode)
    assert scale is not None
    weights = scale.weights(trajectory, segment)
    assert "#### 4" in tiny_codec().decode(segment.token_ids[weights > 0])
    assert "so" not in tiny_codec().decode(segment.token_ids[weights > 0])


async def test_a_loss_scale_that_asks_for_the_context_type_gets_it() -> None:
    class LastRound(LossScale):
        def get_loss_scale(
            self, context: str, context_type: ContextType, is_last_round: bool, **kwargs: object
        ) -> tuple[list[str], list[float]]:
            if context_type == ContextType.RESPONSE:
                return [context], [float(is_last_round)]
            return super().get_loss_scale(context, context_type, is_last_round, **kwargs)

    loss_scale_map["of_the_last_round"] = LastRound
    trajectory = await run_episode(scripted_context(["so #### 4"]), task(), id="e")
    (segment,) = trajectory.segments
    scale = build_loss_scale("of_the_last_round", decode=tiny_codec().decode)
    assert scale is not None
    assert (scale.weights(trajectory, segment) == segment.loss_weights).all()


def test_what_a_model_writes_as_an_observation_is_left_out_by_react() -> None:
    pieces, weights = REACTLossScale().get_loss_scale("Thought: a\nObservation: b\nThought: c")
    assert "".join(pieces) == "Thought: a\nObservation: b\nThought: c"
    assert [p for p, w in zip(pieces, weights, strict=True) if not w] == [" b"]
