"""The outer step is torch's SGD on named parameters."""

import pytest
import torch

from isoloco_flwr.outer import OuterOptimizer

SETTINGS = [(1.0, 0.0, False), (0.7, 0.9, True), (1.8, 0.8, True), (0.5, 0.9, False)]


@pytest.mark.parametrize(("lr", "momentum", "nesterov"), SETTINGS)
def test_several_steps_equal_one_torch_optimizer(lr, momentum, nesterov):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=nesterov)
    outer = OuterOptimizer(lr, momentum, nesterov)
    values = parameter.detach().clone()
    for _ in range(4):
        gradient = torch.randn(4, 3, generator=generator)
        parameter.grad = gradient.clone()
        sgd.step()
        before = values.clone()
        stepped = outer.step(values, gradient, "weight")
        assert torch.equal(values, before)
        values = stepped
        assert torch.equal(values, parameter.detach())


def test_the_transform_comes_between_momentum_and_learning_rate():
    outer = OuterOptimizer(0.5, 0.9, nesterov=True)
    start, first, second = torch.zeros(2), torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    values = outer.step_transformed(start, first, "w", torch.sign)
    values = outer.step_transformed(values, second, "w", torch.sign)
    momentum = 0.9 * first + second
    expected = -0.5 * torch.sign(first * 1.9) - 0.5 * torch.sign(second + 0.9 * momentum)
    torch.testing.assert_close(values, expected)


def test_momentum_belongs_to_its_name_and_survives_a_reload():
    outer = OuterOptimizer(1.0, 0.5)
    zero, one = torch.zeros(1), torch.ones(1)
    outer.step(zero, one, "a")
    fresh = OuterOptimizer(1.0, 0.5)
    fresh.load_state_dict(outer.state_dict())
    assert fresh.step(zero, one, "a").item() == -1.5
    assert fresh.step(zero, one, "b").item() == -1.0
    # The copy is its own: the original has not moved on.
    assert outer.state_dict()["a"].item() == 1.0


def test_without_momentum_nothing_is_kept():
    outer = OuterOptimizer(1.0, nesterov=True)
    outer.step(torch.zeros(1), torch.ones(1), "a")
    assert outer.state_dict() == {}


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_learning_rate_is_shown(lr):
    with pytest.raises(ValueError, match=f"{lr!r}.*> 0"):
        OuterOptimizer(lr)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_bad_momentum_is_shown(momentum):
    with pytest.raises(ValueError, match=f"{momentum!r}.*< 1"):
        OuterOptimizer(1.0, momentum)
