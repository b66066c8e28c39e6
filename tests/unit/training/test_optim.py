"""The optimizer: schedule, decay, clipping, and gradients that are not finite."""

import math

import pytest
import torch

from polyturn.core.errors import ConfigError, TrainingError
from polyturn.core.metrics import reduce
from polyturn.training.optim import Optimizer, OptimSettings, lr_factor
from polyturn.training.options import ScheduleOptions
from support.refusals import refuses


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.ones(2, 2))
        self.norm = torch.nn.Parameter(torch.ones(2))


COSINE = ScheduleOptions(name="cosine")


def set_grad(net: Net, value: float) -> None:
    for p in net.parameters():
        p.grad = torch.full_like(p, value)


def test_schedule_warms_up_and_falls():
    cosine = OptimSettings(warmup_steps=2, schedule=ScheduleOptions(name="cosine", total_steps=6, min_lr_ratio=0.1))
    assert [lr_factor(s, cosine) for s in range(7)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55, 0.1 + 0.9 * (1 - math.cos(math.pi / 4)) / 2, 0.1]
    )
    linear = OptimSettings(warmup_steps=0, schedule=ScheduleOptions(name="linear", total_steps=4))
    assert [lr_factor(s, linear) for s in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [lr_factor(s, OptimSettings(warmup_steps=4)) for s in (0, 3, 4, 99)] == [0.25, 1.0, 1.0, 1.0]


def test_only_matrices_decay():
    net = Net()
    optimizer = Optimizer(net, OptimSettings(lr=0.1, weight_decay=0.5))
    set_grad(net, 0.0)
    optimizer.step()
    assert net.matrix.tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert net.norm.tolist() == [1.0, 1.0]


def test_offloaded_optimizer_takes_the_same_steps():
    nets = [Net().to(torch.bfloat16) for _ in range(2)]
    optimizers = [Optimizer(net, OptimSettings(lr=0.01, offload=net is nets[1])) for net in nets]
    for value in (0.5, -2.0, 3.0):
        for net, optimizer in zip(nets, optimizers, strict=True):
            for _ in range(2):  # two micro-batches
                set_grad(net, value)
                optimizer.collect()
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    kept = [tensor for tensors in optimizers[1].sections().values() for tensor in tensors.values()]
    assert kept and all(tensor.device.type == "cpu" for tensor in kept)


def test_offload_without_masters_is_refused():
    refuses(lambda: Optimizer(Net(), OptimSettings(offload=True)), ConfigError, "offload", "float32")


def test_step_is_adam_and_reports_the_norm():
    """The first step of Adam moves by lr against the sign, whatever the size of the gradient (Kingma and Ba 2015)."""
    net = Net()
    optimizer = Optimizer(net, OptimSettings(lr=0.1, weight_decay=0.0, max_grad_norm=1.0))
    set_grad(net, 10.0)
    metrics = reduce(optimizer.step())
    assert metrics["loss/grad_norm"] == pytest.approx(10 * math.sqrt(6)) and metrics["loss/grad_norm_clipped"] == 1.0
    assert metrics["loss/lr"] == 0.1
    assert net.norm.tolist() == pytest.approx([0.9, 0.9], abs=1e-5)
    assert all(p.grad is None for p in net.parameters())


def test_gradient_that_is_not_finite_names_the_tensor():
    net = Net()
    optimizer = Optimizer(net, OptimSettings(lr=0.1, max_skipped=0))
    set_grad(net, 1.0)
    net.norm.grad[0] = float("nan")
    refuses(lambda: optimizer.step(), TrainingError, "step 0", "'norm'", "1", "2", "optim.lr")
    assert net.matrix.tolist() == [[1.0, 1.0]] * 2
    assert net.norm.grad is None


def test_step_that_is_not_finite_is_skipped_and_counted():
    net = Net()
    optimizer = Optimizer(net, OptimSettings(lr=0.1))
    set_grad(net, float("inf"))
    assert reduce(optimizer.step())["loss/skipped_steps"] == 1
    assert net.matrix.tolist() == [[1.0, 1.0]] * 2
    assert optimizer.step_count == 1
    set_grad(net, 1.0)
    assert reduce(optimizer.step())["loss/skipped_steps"] == 0


def test_run_ends_after_bad_steps_in_a_row():
    """A good step in between starts the count again, and a resumed run goes on counting."""
    net = Net()
    optimizer = Optimizer(net, OptimSettings(lr=0.1, max_skipped=2))
    for value in (math.inf, math.nan, 1.0, math.nan, math.nan):
        set_grad(net, value)
        optimizer.step()
    later = Optimizer(net, OptimSettings(lr=0.1, max_skipped=2))
    later.load_state_dict(optimizer.state_dict())
    set_grad(net, math.nan)
    refuses(lambda: later.step(), TrainingError, "norm is nan at optimizer step 5", "steps skipped before it: 2")


def test_spoiled_step_is_skipped_with_its_reason():
    net = Net()
    optimizer = Optimizer(net, OptimSettings(lr=0.1, max_skipped=1))
    set_grad(net, 1.0)
    optimizer.spoil("the loss is not finite")
    assert reduce(optimizer.step())["loss/skipped_steps"] == 1
    assert net.matrix.tolist() == [[1.0, 1.0]] * 2
    set_grad(net, 1.0)
    optimizer.spoil("the loss is not finite again")
    refuses(lambda: optimizer.step(), TrainingError, "not finite again; steps skipped before it: 1")
    refuses(lambda: OptimSettings(max_skipped=-1), ConfigError, "max_skipped is -1")


def test_state_loads_into_other_settings():
    net = Net()
    optimizer = Optimizer(net, OptimSettings(lr=0.1))
    set_grad(net, 1.0)
    optimizer.step()
    other = Optimizer(Net(), OptimSettings(lr=0.5, weight_decay=0.0))
    other.load_state_dict(optimizer.state_dict())
    set_grad(net, 1.0)
    assert other.step_count == 1
    assert reduce(other.step())["loss/lr"] == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 2.5}, "warmup_steps is 2.5"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    refuses(lambda: OptimSettings(**options), ConfigError, message)
    refuses(lambda: ScheduleOptions(name="exponential"), ConfigError, "'exponential'")


def test_schedule_takes_the_length_of_the_run():
    refuses(lambda: Optimizer(Net(), OptimSettings(schedule=COSINE)), ConfigError, "total_steps")
    refuses(lambda: Optimizer(Net(), OptimSettings(warmup_steps=0.1)), ConfigError, "warmup_steps is 0.1")
    found = OptimSettings(schedule=COSINE, warmup_steps=0.1).over(50)
    assert (found.warmup_steps, found.schedule.total_steps) == (5, 50)
    assert OptimSettings(warmup_steps=9).over(3).schedule.total_steps == 10
    assert OptimSettings(warmup_steps=1, lr=0.0).over(50).warmup_steps == 1, "one step, not all of them"
    assert OptimSettings(schedule=ScheduleOptions(total_steps=80), warmup_steps=0.1).over(50).warmup_steps == 8


def test_schedule_of_several_updates_a_step_ends_with_the_run():
    run = OptimSettings(schedule=COSINE, warmup_steps=2).over(10, updates=4)
    factors = [lr_factor(update, run) for update in range(41)]
    assert factors[7] == factors[8] == 1.0 and factors[3] == 0.5, "two steps are eight updates"
    assert 0.4 < factors[24] < 0.6 and factors[39] > 0 == factors[40]
