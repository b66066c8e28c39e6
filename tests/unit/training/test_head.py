"""The head's scores and gradients against log_softmax in float64."""

import pytest
import torch
from torch import nn

from polyturn.training.head import is_plain, target_scores

S, H, V = 7, 6, 11


def case(*, bias: bool, temperature: bool):
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, dtype=torch.float64)
    hidden = torch.randn(S, H, dtype=torch.float64, requires_grad=True)
    temperature_S = torch.rand(S, dtype=torch.float64) + 0.5 if temperature else None
    return head, hidden, torch.randint(V, (S,)), temperature_S


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
