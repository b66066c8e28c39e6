"""The head's scores and gradients against log_softmax in float64, and compiled against not compiled."""

import copy
import functools
import itertools
import logging
import shutil

import pytest
import torch
from torch import nn

from polyturn.training.head import SWITCH, Fusion, compiles_on, is_plain, target_scores

S, H, V = 7, 6, 11


def case(*, bias: bool, temperature: bool, size: int = S):
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, dtype=torch.float64)
    hidden = torch.randn(size, H, dtype=torch.float64, requires_grad=True)
    temperature_S = torch.rand(size, dtype=torch.float64) + 0.5 if temperature else None
    return head, hidden, torch.randint(V, (size,)), temperature_S


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("entropy_grad", [None, False, True])
def test_scores_and_gradients_are_those_of_log_softmax(bias: bool, temperature: bool, entropy_grad: bool | None):
    head, hidden, targets, temperature_S = case(bias=bias, temperature=temperature)
    weights = torch.randn(2, S, dtype=torch.float64)

    logits = head(hidden) / (1 if temperature_S is None else temperature_S[:, None])
    logprobs = logits.log_softmax(-1)
    expected = logprobs.gather(1, targets[:, None])[:, 0], -(logprobs * logprobs.exp()).sum(-1)
    loss = (expected[0] * weights[0]).sum() + (expected[1] * weights[1]).sum() * bool(entropy_grad)
    gradients = torch.autograd.grad(loss, [hidden, *head.parameters()])

    scores = target_scores(head, hidden, targets, temperature_S, entropy_grad=entropy_grad, chunk=3)
    torch.testing.assert_close(scores.logprobs_S, expected[0], atol=1e-12, rtol=0)
    loss = (scores.logprobs_S * weights[0]).sum()
    if entropy_grad is None:
        assert scores.entropy_S is None
    else:
        torch.testing.assert_close(scores.entropy_S, expected[1], atol=1e-12, rtol=0)
        assert scores.entropy_S.requires_grad is entropy_grad
        loss = loss + (scores.entropy_S * weights[1]).sum() if entropy_grad else loss
    torch.testing.assert_close(torch.autograd.grad(loss, [hidden, *head.parameters()]), gradients, atol=1e-12, rtol=0)


def test_bfloat16_weights_give_float32_scores():
    head, hidden, targets, _ = case(bias=False, temperature=False)
    head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    scores = target_scores(head, hidden, targets, None, entropy_grad=True, chunk=4)
    expected = head(hidden).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert scores.logprobs_S.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs_S, expected, atol=2e-2, rtol=0)
    scores.logprobs_S.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_large_logits_keep_the_precision_of_log_softmax():
    head, hidden, targets, _ = case(bias=True, temperature=False)
    with torch.no_grad():
        head.bias += 1e4
    exact = head(hidden).log_softmax(-1)
    scores = target_scores(head.float(), hidden.detach().float(), targets, None, entropy_grad=False, chunk=4)
    torch.testing.assert_close(scores.logprobs_S, exact.gather(1, targets[:, None])[:, 0].float(), atol=5e-3, rtol=0)
    torch.testing.assert_close(scores.entropy_S, -(exact * exact.exp()).sum(-1).float(), atol=5e-3, rtol=0)


def test_adapter_on_the_head_is_not_plain():
    class Wrapped(nn.Linear):
        """A head with an adapter."""

    assert is_plain(nn.Linear(2, 3)) and not is_plain(Wrapped(2, 3)) and not is_plain(None)


@pytest.mark.parametrize("entropy_grad", [None, True])
def test_scores_over_a_support_are_those_of_its_logits_alone(entropy_grad: bool | None):
    head, hidden, targets, temperature_S = case(bias=True, temperature=True)
    weights = torch.randn(2, S, dtype=torch.float64)
    supports = [sorted({int(target), 0, (3 * i) % V}) for i, target in enumerate(targets)]
    supports[2] = []  # the whole vocabulary
    support_SK = torch.tensor([ids + [-1] * (4 - len(ids)) for ids in supports])

    logits = head(hidden) / temperature_S[:, None]
    rows = [logits[i, ids or slice(None)].log_softmax(-1) for i, ids in enumerate(supports)]
    chosen = [
        row[ids.index(int(target)) if ids else target] for row, ids, target in zip(rows, supports, targets, strict=True)
    ]
    expected = torch.stack(chosen), torch.stack([-(row * row.exp()).sum() for row in rows])
    loss = (expected[0] * weights[0]).sum() + (expected[1] * weights[1]).sum() * bool(entropy_grad)
    gradients = torch.autograd.grad(loss, [hidden, *head.parameters()])

    scores = target_scores(head, hidden, targets, temperature_S, support_SK, entropy_grad=entropy_grad, chunk=3)
    torch.testing.assert_close(scores.logprobs_S, expected[0], atol=1e-12, rtol=0)
    loss = (scores.logprobs_S * weights[0]).sum()
    if entropy_grad:
        torch.testing.assert_close(scores.entropy_S, expected[1], atol=1e-12, rtol=0)
        loss = loss + (scores.entropy_S * weights[1]).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, [hidden, *head.parameters()]), gradients, atol=1e-12, rtol=0)


def compiled(backend):
    """Return a fusion that refuses graph breaks."""
    torch.compiler.reset()
    return Fusion(functools.partial(torch.compile, backend=backend, fullgraph=True))


def results(case, *, fusion, entropy_grad, dtype, chunk=3):
    """Return the scores of a case in `dtype`, and the gradients of a weighted sum of them."""
    head, hidden, targets, temperature_S = case
    head, hidden = copy.deepcopy(head).to(dtype), hidden.detach().to(dtype).requires_grad_()
    weights = torch.linspace(-1, 1, 2 * len(targets), dtype=dtype).view(2, -1)
    temperature_S = None if temperature_S is None else temperature_S.to(torch.promote_types(dtype, torch.float32))
    support_SK = torch.stack([targets, targets.clamp(min=1) - 1, (targets + 3) % V], 1) if len(targets) % 2 else None
    options = {"entropy_grad": entropy_grad, "chunk": chunk, "fusion": fusion}
    scores = target_scores(head, hidden, targets, temperature_S, support_SK, **options)
    loss = (scores.logprobs_S * weights[0]).sum()
    if entropy_grad:
        loss = loss + (scores.entropy_S * weights[1]).sum()
    loss.backward()
    return [*(one for one in scores if one is not None), hidden.grad, *(p.grad for p in head.parameters())]


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_head_gives_the_results_of_the_plain_one(backend: str, dtype: torch.dtype):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    fusion = compiled(backend)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    temperatures = (False, True) if backend == "aot_eager" else (True,)
    for entropy_grad, temperature, size in itertools.product((None, False, True), temperatures, (S, S + 1)):
        one = case(bias=True, temperature=temperature, size=size)  # an odd number of targets has supports
        options = {"entropy_grad": entropy_grad, "dtype": dtype}
        plain, fused = (results(one, fusion=fusion_or_none, **options) for fusion_or_none in (None, fusion))
        torch.testing.assert_close(fused, plain, atol=tolerance, rtol=0)


def test_ragged_chunks_are_compiled_once():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    fusion = compiled(counting)
    for size in range(2, 22):
        one = case(bias=False, temperature=True, size=2 * size)
        results(one, fusion=fusion, entropy_grad=True, dtype=torch.float32, chunk=7)
    assert len(graphs) == 2, "one forward and one backward"
    before = len(graphs)
    for size in range(22, 42):
        one = case(bias=False, temperature=True, size=2 * size)
        results(one, fusion=fusion, entropy_grad=True, dtype=torch.float32, chunk=9)
    assert len(graphs) == before


def test_head_that_cannot_be_compiled_runs_plainly(caplog):
    def failing(graph, inputs):
        raise RuntimeError("no compiler here")

    fusion, one = compiled(failing), case(bias=False, temperature=True)
    options = {"entropy_grad": True, "dtype": torch.float64}
    with caplog.at_level(logging.WARNING, logger="polyturn.training.head"):
        fused = [results(one, fusion=fusion, **options) for _ in range(2)]
    plain = results(one, fusion=None, **options)
    torch.testing.assert_close(fused, [plain, plain], atol=1e-12, rtol=0)
    assert [record.message.count("no compiler here") for record in caplog.records] == [1]


def test_head_is_compiled_on_gpus_only(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    assert compiles_on(torch.device("cuda")) and not compiles_on(torch.device("cpu"))
    monkeypatch.setenv(SWITCH, "0")
    assert not compiles_on(torch.device("cuda"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_agrees_with_ligers(temperature: float):
    """Liger's chunked function for policies, which takes one temperature for all targets."""
    ops = pytest.importorskip("liger_kernel.ops", reason="needs liger-kernel and triton")
    head, hidden, targets, _ = case(bias=False, temperature=False)
    head, hidden = head.float(), hidden.detach().float().requires_grad_()
    weights = torch.linspace(-1, 1, 2 * S).view(2, S)
    inputs, both = (hidden, head.weight), []
    nll, entropy = ops.LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden, head.weight, targets, temperature, -100, 1, True
    )
    scores = target_scores(head, hidden, targets, torch.full((S,), temperature), entropy_grad=True, chunk=3)
    for logprobs_S, entropy_S in ((-nll, entropy), scores):
        loss = (logprobs_S * weights[0]).sum() + (entropy_S * weights[1]).sum()
        both.append([logprobs_S, entropy_S, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(*both, atol=1e-5, rtol=0)
