"""OpenTelemetry: spans for every episode, its turns, and the requests and calls of each turn.

    episode g5/2 ─┬─ turn 0 ─┬─ chat                    gen_ai.operation.name, gen_ai.usage.output_tokens
                  │          └─ execute_tool search     gen_ai.tool.name, error.type
                  └─ turn 1 ─── interaction gsm8k

The spans are created from the recorded times of a step, so the rollout itself is not instrumented. OTEL_TRACES_EXPORTER
(console, otlp, none) and the OTEL_EXPORTER_OTLP_ variables determine the destination. All tool calls of a turn begin when
its completion ends, because only their durations are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from polyturn.core.errors import ConfigError
from polyturn.core.trajectory import SpanSource, Trajectory, TrajectoryGroup, Turn
from polyturn.tracking.base import RunInfo, RunTracker


class OtelTracker(RunTracker):
    def __init__(self, run: RunInfo, *, exporter: str | SpanExporter | None = None) -> None:
        """Open the exporters.

        Args:
            run: The run.
            exporter: console, otlp, another installed exporter, several separated by commas, or none. The default is
                OTEL_TRACES_EXPORTER, or otlp if that is not set.

        Raises:
            ConfigError: an exporter is not installed.
        """
        about = {"service.name": run.environ.get("OTEL_SERVICE_NAME", "polyturn"), "polyturn.run": run.name}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        if isinstance(exporter, SpanExporter):
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        else:
            wanted = exporter or run.environ.get("OTEL_TRACES_EXPORTER", "otlp")
            for name in (n.strip() for n in wanted.split(",")):
                if name != "none":
                    self._provider.add_span_processor(BatchSpanProcessor(_exporter(name, run)))
        self._tracer = self._provider.get_tracer("polyturn")

    def log_groups(self, step: int, split: str, groups: Sequence[TrajectoryGroup]) -> None:
        """Export the episodes of a step."""
        for group in groups:
            for trajectory in group.trajectories:
                _episode(self._tracer, trajectory, step=step, split=split, group=group.id)
        self._provider.force_flush(10_000)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _exporter(name: str, run: RunInfo) -> SpanExporter:
    protocol = run.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", run.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    )
    installed_name = f"otlp_proto_{'grpc' if protocol == 'grpc' else 'http'}" if name == "otlp" else name
    exporters = {point.name: point for point in entry_points(group="opentelemetry_traces_exporter")}
    if installed_name not in exporters:
        raise ConfigError(
            f"the span exporter {name!r} is not installed (installed: {', '.join(sorted(exporters))}); otlp is part of "
            "opentelemetry-exporter-otlp-proto-http"
        )
    exporter: SpanExporter = exporters[installed_name].load()()
    return exporter


def _episode(tracer: Tracer, trajectory: Trajectory, *, step: int, split: str, group: str) -> None:
    timed = [turn for turn in trajectory.turns if "start" in turn.timings]
    if not timed:
        return
    attributes: dict[str, str | int | float] = {
        "polyturn.trajectory": trajectory.id,
        "polyturn.group": group,
        "polyturn.task": trajectory.task.id,
        "polyturn.step": step,
        "polyturn.split": split,
        "polyturn.stop_reason": trajectory.stop_reason.value,
        "polyturn.turns": len(trajectory.turns),
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.usage.output_tokens": trajectory.num_sampled_tokens,
    }
    if trajectory.reward is not None:
        attributes["polyturn.reward"] = trajectory.reward.total
    began, ended = timed[0].timings["start"], max(_end(turn) for turn in timed)
    episode = tracer.start_span(f"episode {trajectory.id}", attributes=attributes, start_time=_ns(began))
    if trajectory.is_failed:
        episode.set_status(Status(StatusCode.ERROR, trajectory.error or trajectory.stop_reason.value))
    for turn in timed:
        _turn(tracer, episode, trajectory, turn)
    episode.end(_ns(ended))


def _turn(tracer: Tracer, episode: Span, trajectory: Trajectory, turn: Turn) -> None:
    begin, times = turn.timings["start"], turn.timings
    inside = set_span_in_context(episode)
    span = tracer.start_span(f"turn {turn.index}", context=inside, start_time=_ns(begin))
    if turn.score is not None:
        span.set_attribute("polyturn.score", turn.score)
    within = set_span_in_context(span)

    sampled = [trajectory.span(ref) for ref in turn.spans if trajectory.span(ref).source is SpanSource.SAMPLED]
    chat = tracer.start_span("chat", context=within, start_time=_ns(begin))
    chat.set_attributes(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.output_tokens": sum(len(s) for s in sampled),
            "gen_ai.response.finish_reasons": [turn.finish_reason.value],
        }
    )
    generated = begin + times.get("generate", 0.0)
    chat.end(_ns(generated))
    for result in turn.tool_results:
        tool = tracer.start_span(f"execute_tool {result.name}", context=within, start_time=_ns(generated))
        tool.set_attributes(
            {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": result.name, "gen_ai.tool.call.id": result.call_id}
        )
        if result.error is not None:
            tool.set_attribute("error.type", result.error)
            tool.set_status(Status(StatusCode.ERROR, result.error))
        tool.end(_ns(generated + result.duration_s))
    if "interaction" in times:
        interaction = trajectory.task.interaction
        tools_end = generated + times.get("tools", 0.0)
        name = "interaction" if interaction is None else f"interaction {interaction.name}"
        answer = tracer.start_span(name, context=within, start_time=_ns(tools_end))
        answer.end(_ns(tools_end + times["interaction"]))
    span.end(_ns(_end(turn)))


def _end(turn: Turn) -> float:
    return turn.timings["start"] + sum(turn.timings.get(name, 0.0) for name in ("generate", "tools", "interaction"))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
