"""The outer optimizer: one step on the global parameters along a pseudo-gradient."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.sgd import sgd

__all__ = ["OuterOptimizer"]


class OuterOptimizer:
    """SGD, heavy-ball or Nesterov on named parameters (`torch.optim` does the arithmetic).

    Parameters
    ----------
    lr : float
        Outer learning rate, > 0.
    momentum : float
        Outer momentum, 0 <= momentum < 1; 0 is plain SGD.
    nesterov : bool
        Nesterov's momentum in place of heavy-ball; without momentum the two are the same.

    Raises
    ------
    ValueError
        If a value is out of range.

    Notes
    -----
    DiLoCo (arXiv 2311.08105) takes this step with the mean of the workers' pseudo-gradients,
    IsoLoCo (arXiv 2607.03011) with an isotropic one. As in `torch.optim.SGD` the first momentum
    buffer is the first pseudo-gradient itself.
    """

    def __init__(self, lr: float, momentum: float = 0.0, nesterov: bool = False) -> None:
        if not 0 < lr < float("inf"):
            raise ValueError(f"outer learning rate {lr!r}: allowed is a number > 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"outer momentum {momentum!r}: allowed is 0 <= momentum < 1")
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self._momentum_buffers: dict[str, Tensor] = {}

    def step(self, parameter: Tensor, pseudo_gradient: Tensor, name: str) -> Tensor:
        """Take the outer step of one parameter.

        Parameters
        ----------
        parameter : Tensor
            Global values; left as they are.
        pseudo_gradient : Tensor
            Merged pseudo-gradient of the same shape.
        name : str
            Key of the parameter's momentum.

        Returns
        -------
        Tensor
            The new values, in the pseudo-gradient's dtype and on its device.
        """
        start = parameter.to(pseudo_gradient, copy=True)
        return self._sgd(start, pseudo_gradient, name, self.lr)

    def step_transformed(
        self,
        parameter: Tensor,
        pseudo_gradient: Tensor,
        name: str,
        transform: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Take the outer step with a transform between momentum and learning rate.

        The order `orthogonalize="update"`: momentum first, then Iso-C. Arguments and result are
        those of `step`; `transform` maps the momentum's direction to the direction stepped along.
        """
        # One SGD step of rate 1 from zero is minus the direction that momentum gives.
        direction = -self._sgd(torch.zeros_like(pseudo_gradient), pseudo_gradient, name, 1.0)
        return parameter.to(pseudo_gradient, copy=True).add_(transform(direction), alpha=-self.lr)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the momentum buffers by parameter name (not copied); empty without momentum."""
        return dict(self._momentum_buffers)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all momentum buffers by copies of those given."""
        self._momentum_buffers = {name: buffer.clone() for name, buffer in state.items()}

    @torch.no_grad()
    def _sgd(self, start: Tensor, pseudo_gradient: Tensor, name: str, lr: float) -> Tensor:
        # The function behind the optimizer's class: the state that lasts is the buffer alone, so
        # that a step never holds more than one parameter beside it.
        buffer = self._momentum_buffers.get(name)
        buffers = [None if buffer is None else buffer.to(start)]
        sgd(
            [start],
            [pseudo_gradient],
            buffers,
            foreach=False,
            weight_decay=0.0,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
        )
        if buffers[0] is not None:
            self._momentum_buffers[name] = buffers[0]
        return start
