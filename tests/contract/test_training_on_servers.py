"""`engine.kind` is one line: the same run trains on servers that it starts, verifies and stops."""

import pytest
import torch
from engine_servers import READY_S, interpreter, needs_server, on_servers

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tracking.jsonl import read_metrics
from support.forked import Forked
from support.models import tiny_model
from support.runs import SEVERAL_TURNS, call_command, write_tiny_run

WIDER = ("model.init.hidden_size=64", "model.init.head_dim=32", "model.init.intermediate_size=64")
"""The heads of the tiny run are narrower than vLLM's attention accepts."""


def settings_for(kind, folder):
    """Return the settings of the tiny run on servers of this kind."""
    launch = [f"engine.launch.python={interpreter(kind)}", f"engine.launch.log={folder / 'server.log'}"]
    return [*WIDER, f"engine.kind={kind}", "engine.num_slots=null", *launch, f"engine.launch.ready_timeout_s={READY_S}"]


def train(kind, folder, *settings):
    """Train the tiny run on servers of this kind; return its output."""
    called = call_command(main, "train", write_tiny_run(folder), *settings_for(kind, folder), *settings)
    log = folder / "server.log"
    assert called.code == 0, called.err + (log.read_text()[-2000:] if log.exists() else "")
    return called.err + called.out


def metrics_of(folder, key="loss/total"):
    return [m for m in read_metrics(folder / "runs" / "tiny" / "metrics.jsonl") if key in m]


def sampled_versions(folder):
    """Return the policy versions of the sampled spans of all trajectories."""
    trajectories = open_store(folder / "runs" / "tiny").trajectories()
    spans = [span for t in trajectories for segment in t.segments for span in segment.spans]
    return {span.policy_version for span in spans if span.logprobs is not None}


@pytest.mark.parametrize(
    ("kind", "replicas", "transport"),
    [
        pytest.param("vllm", 1, "auto", marks=pytest.mark.engines),
        pytest.param("sglang", 2, "gloo", marks=pytest.mark.engines),
        pytest.param("vllm", 2, "auto", marks=[pytest.mark.engines, pytest.mark.slow]),
    ],
)
def test_run_trains_on_servers_that_it_starts(kind, replicas, transport, tmp_path):
    needs_server(kind)
    settings = ["train.steps=2", f"engine.launch.replicas={replicas}", f"engine.weights={transport}"]
    printed = train(kind, tmp_path, *settings)
    assert "the weights arrive" in printed
    assert f"tensors are compared now and whenever replica {replicas - 1}" in printed
    steps = metrics_of(tmp_path, "engine/replicas_live")
    assert [(m["engine/replicas_live"], m["engine/lost"]) for m in steps] == [(replicas, 0)] * 2
    assert sampled_versions(tmp_path) == {0, 1, 2}, "of the first step, the second, and the evaluation after it"


@pytest.mark.parametrize("kind", on_servers())
def test_adapter_is_sent_alone(kind, tmp_path):
    needs_server(kind)
    (weights := tmp_path / "weights").mkdir()
    lora = ["model.lora={rank: 4, alpha: 16}", f"engine.weights_folder={weights}"]
    lora += ["engine.weights=adapter"] if kind == "vllm" else []
    printed = train(kind, tmp_path, "train.steps=2", "train.optim.lr=0.05", *lora)
    assert "the weights arrive" in printed and "merged" not in printed
    steps = metrics_of(tmp_path)
    assert len(steps) == 2
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps), "the server samples from what is trained"
    assert sampled_versions(tmp_path) == {0, 1, 2}
    assert not list(weights.iterdir())


@pytest.mark.engines
def test_run_trains_on_the_tokens_that_top_p_kept(tmp_path):
    needs_server("vllm")
    sampling = "rollout.sampling={temperature: 0.9, top_p: 0.7, keep_support: true}"
    train("vllm", tmp_path, sampling, "train.steps=2")
    steps = metrics_of(tmp_path)
    assert len(steps) == 2
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps)


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(("update", "workers"), [("abort_resume", 1), ("abort_resume", 2), ("in_flight", 2)])
def test_server_samples_beside_training(update, workers, tmp_path):
    needs_server("vllm")
    beside = [f"engine.update={update}", f"cluster.workers.count={workers}"]
    beside += ["train.max_staleness=1", "train.oversample=1", "train.dynamic_sampling=1"]
    train("vllm", tmp_path, *beside, "train.steps=4", "evaluation.data=null", "rollout.limits.max_tokens_per_turn=64")
    steps = metrics_of(tmp_path)
    assert [m["step"] for m in steps] == [1, 2, 3, 4]
    assert max(m["buffer/staleness"] for m in steps) <= 1
    fresh = [m for m in steps if m["buffer/staleness"] == 0]
    assert all(m["policy/rollout_difference"] < 1e-4 for m in fresh)


@pytest.mark.slow
@pytest.mark.parametrize("kind", on_servers())
def test_second_policy_on_its_own_server_plays_the_user(kind, tmp_path):
    needs_server(kind)
    tokenizer = tiny_tokenizer(vocab_size=320)
    tiny_model(tokenizer, hidden=64, layers=1, max_positions=512).save_pretrained(tmp_path / "guest")
    tokenizer.save_pretrained(tmp_path / "guest")
    launch = f"launch: {{python: {interpreter(kind)}, log: {tmp_path / 'server.log'}}}"
    user = "{policy: guest, goal: Hear it., instructions: '{goal}', stop_marker: null, max_tokens: 6, temperature: 0.7}"
    entry = f"{{name: coach, class_name: polyturn.interactions.simulated_user.SimulatedUser, config: {user}}}"
    called = call_command(
        main,
        *("train", write_tiny_run(tmp_path), *SEVERAL_TURNS, "train.steps=2", "evaluation.data=null"),
        f"policies={{guest: {{model: guest, engine: {{kind: {kind}, {launch}}}}}}}",
        f"rollout.interactions=[{entry}]",
    )
    assert called.code == 0, called.err + (tmp_path / "server.log").read_text()[-2000:]
    steps = metrics_of(tmp_path)
    assert len(steps) == 2
    assert all(m["policies/guest/tokens"] > 0 for m in steps)
    for trajectory in open_store(tmp_path / "runs" / "tiny").trajectories():
        assert trajectory.error is None
        assert trajectory.turns[0].info["user_policy"] == "guest"


@pytest.mark.engines
@pytest.mark.slow
def test_weights_arrive_in_flight(tmp_path):
    """Weights change under running completions, groups are carried over and replayed, ratios to the engine are corrected."""
    needs_server("vllm")
    train(
        *("vllm", tmp_path, "train.steps=6", "evaluation.data=null", "engine.update=in_flight"),
        *("train.max_staleness=2", "train.oversample=1", "train.leftover=carry", "train.replay=0.5"),
        *("algorithm.loss.correction={reject: {seq_mean_k1: [0.5, 2.0]}}", "warm_start.conversations=null"),
        *("model.init.max_position_embeddings=2048", "rollout.limits={max_turns: 2, max_tokens_per_turn: 512}"),
    )
    steps = metrics_of(tmp_path)
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5, 6]
    assert max(m["buffer/staleness"] for m in steps) <= 2
    assert not any("buffer/groups_left_over" in m for m in steps)
    assert sum(m["buffer/groups_replayed"] for m in steps) > 0
    assert all(0 < m["policy/correction_effective_share"] <= 1 for m in steps)


@pytest.mark.engines
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_two_ranks_train_beside_a_server(transport, tmp_path):
    needs_server("vllm")
    settings = [*settings_for("vllm", tmp_path), "train.steps=2", f"engine.weights={transport}"]
    run = Forked("train", write_tiny_run(tmp_path), "--nproc", 2, *settings, cwd=tmp_path)
    try:
        assert run.wait(400) == 0, run.err[-3000:]
    finally:
        run.kill()
    steps = metrics_of(tmp_path)
    assert [m["step"] for m in steps] == [1, 2]
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", on_servers())
def test_ray_run_trains_on_servers_on_two_nodes(kind, tmp_path):
    needs_server(kind)
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'polyturn[ray]'")
    head = {"num_cpus": 2, "resources": {"trainer": 2}, "include_dashboard": False}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=1, resources={"server": 1, "worker": 1})
    try:
        printed = train(
            *(kind, tmp_path, "--ray", nodes.address, "train.steps=2"),
            *("train.distributed.ranks=2", "cluster.rank_resources={trainer: 1}"),
            *("cluster.engines={count: 2, resources: {server: 1}}", "cluster.workers={count: 2, resources: {worker: 1}}"),
        )
    finally:
        nodes.shutdown()
    assert "the weights arrive at 2 servers" in printed
    steps = metrics_of(tmp_path, "engine/replicas_live")
    assert [(m["engine/replicas_live"], m["engine/lost"]) for m in steps] == [(2, 0)] * 2
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps)


ON_A_CLUSTER = ("--ray", "auto", "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ON_A_CLUSTER, "engine.launch={replicas: 2}"), "cluster.engines.count"),
        ((*ON_A_CLUSTER, 'engine.launch={devices: ["0"]}'), "Ray assigns GPUs to servers"),
        ((*ON_A_CLUSTER, "engine.weights=ipc"), "engine.weights is ipc"),
        ((*ON_A_CLUSTER, "engine.update=sleep"), "set cluster.rank_resources to GPU: 1"),
        ((), "set engine.launch.python"),
        (("rollout.sampling.top_p=0.9",), "add keep_support: true"),
        pytest.param(
            *(("engine.weights=nccl",), "engine.weights is nccl, which needs a GPU for the trainer"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is not a mistake"),
        ),
    ],
)
def test_impossible_server_settings_are_refused_before_a_start(arguments, words, tmp_path):
    settings = ("engine.kind=vllm", "engine.num_slots=null", *arguments)
    called = call_command(main, "train", write_tiny_run(tmp_path), *settings)
    assert called.code == 2
    assert words in " ".join((called.err + called.out).split())
