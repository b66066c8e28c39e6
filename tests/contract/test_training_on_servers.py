"""`engine.kind` is one line: the same run trains on a server that it starts, verifies and stops."""

import subprocess
import sys

import pytest
import torch
from engine_servers import READY_S, interpreter, why_not

from polyturn.cli.main import main
from polyturn.store.stored_run import open_store
from polyturn.testing.tiny_models import tiny_tokenizer
from polyturn.tracking.jsonl import read_metrics
from support.models import tiny_model
from support.runs import SEVERAL_TURNS, call_command, write_tiny_run

WIDER = ("model.init.hidden_size=64", "model.init.head_dim=32", "model.init.intermediate_size=64")
"""The heads of the tiny run are narrower than vLLM's attention knows."""


@pytest.mark.parametrize(
    ("kind", "replicas", "way"),
    [("vllm", 1, "auto"), ("sglang", 2, "gloo"), pytest.param("vllm", 2, "auto", marks=pytest.mark.slow)],
)
def test_a_run_trains_on_servers_that_it_starts_and_stops(kind, replicas, way, tmp_path):
    if (reason := why_not(kind)) is not None:
        pytest.skip(reason)
    log = tmp_path / "server.log"
    called = call_command(
        main,
        *("train", write_tiny_run(tmp_path), *WIDER, "train.steps=2"),
        *(
            f"engine.kind={kind}",
            "engine.num_slots=null",
            f"engine.launch.python={interpreter(kind)}",
            f"engine.launch.log={log}",
        ),
        *(f"engine.launch.replicas={replicas}", f"engine.launch.ready_timeout_s={READY_S}", f"engine.weights={way}"),
    )
    assert called.code == 0, called.err + log.read_text()[-2000:]
    assert "the weights arrive" in called.err + called.out
    assert f"tensors are compared after every sync, of replica {replicas - 1}" in called.err + called.out
    trajectories = list(open_store(tmp_path / "runs" / "tiny").trajectories())
    versions = {
        span.policy_version for t in trajectories for s in t.segments for span in s.spans if span.logprobs is not None
    }
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "engine/replicas_live" in m]
    assert [(m["engine/replicas_live"], m["engine/lost"]) for m in steps] == [(replicas, 0)] * 2
    assert versions == {0, 1, 2}  # the first step's, the second's, and the evaluation after it


def test_an_adapter_is_sent_alone_and_the_server_samples_from_what_is_trained(tmp_path):
    if (reason := why_not("vllm")) is not None:
        pytest.skip(reason)
    log, folder = tmp_path / "server.log", tmp_path / "weights"
    folder.mkdir()
    called = call_command(
        main,
        *(
            "train",
            write_tiny_run(tmp_path),
            *WIDER,
            "train.steps=2",
            "train.optim.lr=0.05",
            "model.lora={rank: 4, alpha: 16}",
        ),
        *("engine.kind=vllm", "engine.num_slots=null", "engine.weights=adapter", f"engine.weights_folder={folder}"),
        *(f"engine.launch.python={interpreter('vllm')}", f"engine.launch.log={log}"),
        f"engine.launch.ready_timeout_s={READY_S}",
    )
    assert called.code == 0, called.err + log.read_text()[-2000:]
    assert "the weights arrive" in called.err + called.out
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss/total" in m]
    assert len(steps) == 2 and all(m["policy/rollout_difference"] < 1e-4 for m in steps)
    spans = [s for t in open_store(tmp_path / "runs" / "tiny").trajectories() for one in t.segments for s in one.spans]
    assert {s.policy_version for s in spans if s.logprobs is not None} == {0, 1, 2}
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_server_samples_beside_training_with_what_is_suspended_and_cut_off_counted(tmp_path):
    if (reason := why_not("vllm")) is not None:
        pytest.skip(reason)
    called = call_command(
        main,
        *("train", write_tiny_run(tmp_path), *WIDER, "train.steps=4", "evaluation.data=null"),
        *(
            "engine.kind=vllm",
            "engine.num_slots=null",
            f"engine.launch.python={interpreter('vllm')}",
            "engine.update=abort_resume",
        ),
        *(
            "train.max_staleness=1",
            "train.oversample=1",
            "train.dynamic_sampling=1",
            "rollout.limits.max_tokens_per_turn=64",
        ),
    )
    assert called.code == 0, called.err
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss/total" in m]
    assert [m["step"] for m in steps] == [1, 2, 3, 4]
    assert max(m["buffer/staleness"] for m in steps) == 1
    assert sum(m.get("buffer/groups_left_over", 0) for m in steps) > 0
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps if m["buffer/staleness"] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_further_policy_on_a_server_of_its_own_plays_the_user_of_an_embedded_one(kind, tmp_path):
    if (reason := why_not(kind)) is not None:
        pytest.skip(reason)
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
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss/total" in m]
    assert len(steps) == 2 and all(m["policies/guest/tokens"] > 0 for m in steps)
    trajectories = list(open_store(tmp_path / "runs" / "tiny").trajectories())
    assert all(t.error is None and t.turns[0].info["user_policy"] == "guest" for t in trajectories)


@pytest.mark.slow
def test_a_server_takes_new_weights_in_flight_and_nothing_that_was_sampled_is_lost(tmp_path):
    """Weights change under running completions, groups are carried over and replayed, ratios to the engine are corrected."""
    if (reason := why_not("vllm")) is not None:
        pytest.skip(reason)
    called = call_command(
        main,
        *("train", write_tiny_run(tmp_path), *WIDER, "train.steps=6", "evaluation.data=null"),
        *(
            "engine.kind=vllm",
            "engine.num_slots=null",
            f"engine.launch.python={interpreter('vllm')}",
            "engine.update=in_flight",
        ),
        *("train.max_staleness=2", "train.oversample=1", "train.leftover=carry", "train.replay=0.5"),
        *("algorithm.loss.correction={reject: {seq_mean_k1: [0.5, 2.0]}}", "warm_start.conversations=null"),
        *("model.init.max_position_embeddings=2048", "rollout.limits={max_turns: 2, max_tokens_per_turn: 512}"),
    )
    assert called.code == 0, called.err
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss/total" in m]
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5, 6]
    assert 1 <= max(m["buffer/staleness"] for m in steps) <= 2
    assert not any("buffer/groups_left_over" in m for m in steps) and sum(m["buffer/groups_replayed"] for m in steps) > 0
    assert all(0 < m["policy/correction_effective_share"] <= 1 for m in steps)
    trained = list(open_store(tmp_path / "runs" / "tiny").trajectories(split="train"))
    versions = [
        {
            span.policy_version
            for s in t.segments
            for span in s.spans
            if span.turn == turn.index and span.logprobs is not None
        }
        for t in trained
        for turn in t.turns
    ]
    assert any(len(seen) > 1 for seen in versions), "no completion crossed an update"


@pytest.mark.slow
def test_two_ranks_train_beside_a_server(tmp_path):
    if (reason := why_not("vllm")) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "polyturn", "train", str(write_tiny_run(tmp_path)), "--nproc", "2", *WIDER]
    engine = ["engine.kind=vllm", "engine.num_slots=null", f"engine.launch.python={interpreter('vllm')}"]
    called = subprocess.run([*command, *engine, "train.steps=2"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert called.returncode == 0, called.stderr[-3000:]
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss/total" in m]
    assert [m["step"] for m in steps] == [1, 2]
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_run_on_a_ray_cluster_trains_on_two_servers_on_nodes_of_their_own(kind, tmp_path):
    if (reason := why_not(kind)) is not None:
        pytest.skip(reason)
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'polyturn[ray]'")
    nodes = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"trainer": 2}, "include_dashboard": False}
    )
    for _ in range(2):
        nodes.add_node(num_cpus=1, resources={"server": 1, "worker": 1})
    try:
        called = call_command(
            main,
            *("train", write_tiny_run(tmp_path), "--ray", nodes.address, *WIDER, "train.steps=2"),
            *(
                f"engine.kind={kind}",
                "engine.num_slots=null",
                f"engine.launch.python={interpreter(kind)}",
                f"engine.launch.log={tmp_path / 'log'}",
            ),
            *("train.distributed.ranks=2", "cluster.rank_resources={trainer: 1}"),
            *("cluster.engines={count: 2, resources: {server: 1}}", "cluster.workers={count: 2, resources: {worker: 1}}"),
        )
    finally:
        nodes.shutdown()
    assert called.code == 0, called.err
    assert "the weights arrive at 2 servers" in called.err + called.out
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "engine/replicas_live" in m]
    assert [(m["engine/replicas_live"], m["engine/lost"]) for m in steps] == [(2, 0)] * 2
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.launch={replicas: 2}", "on a cluster set cluster.engines.count to 2"),
        ('engine.launch={devices: ["0"]}', "on a cluster Ray says which GPUs a server gets"),
        ("engine.weights=ipc", "engine.weights is ipc, which needs trainer and server on one GPU"),
        ("engine.update=wait", "weights arrive in flight"),
        ("engine.update=sleep", "there are 1 ranks of 0 GPUs and 1 servers of 0; set cluster.rank_resources to GPU: 1"),
    ],
)
def test_what_is_for_one_machine_is_refused_on_a_cluster_before_anything_is_started(setting, said, tmp_path):
    given = ("--ray", "auto", "--dry-run", "engine.kind=vllm", "engine.num_slots=null", setting)
    called = call_command(main, "train", write_tiny_run(tmp_path), *given)
    assert called.code == 2 and said in " ".join((called.err + called.out).split()), called.err


def test_a_server_that_is_not_installed_is_one_sentence(tmp_path):
    called = call_command(main, "train", write_tiny_run(tmp_path), "engine.kind=vllm", "engine.num_slots=null")
    assert called.code == 2
    assert "vllm is not installed here; set engine.launch.python" in " ".join((called.err + called.out).split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is no mistake")
def test_a_group_over_nccl_without_a_gpu_is_refused_before_anything_is_started(tmp_path):
    called = call_command(
        main, "train", write_tiny_run(tmp_path), "engine.kind=vllm", "engine.num_slots=null", "engine.weights=nccl"
    )
    assert called.code == 2
    assert "engine.weights is nccl, which needs a GPU here" in " ".join((called.err + called.out).split())


def test_top_p_with_vllm_is_refused_before_anything_is_started(tmp_path):
    called = call_command(
        main, "train", write_tiny_run(tmp_path), "engine.kind=vllm", "engine.num_slots=null", "rollout.sampling.top_p=0.9"
    )
    assert called.code == 2
    assert "vLLM's logprobs are then those after the cut" in " ".join((called.err + called.out).split())
