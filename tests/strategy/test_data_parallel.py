"""DiLoCo with one inner SGD step and outer SGD of rate 1 is data-parallel SGD."""

import math

import torch
from rounds import LoopbackGrid, record, tensors

from isoloco_flwr import LocalSGD
from isoloco_flwr.pretraining.inner_loop import run_inner_steps
from isoloco_flwr.pretraining.loss import next_token_loss
from isoloco_flwr.pretraining.model import build_model
from isoloco_flwr.pretraining.optimizers import build_inner_optimizer

WORKERS, ROUNDS, BATCH, LR = 4, 3, 2, 0.5


def batch(worker, step):
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randint(257, (BATCH, 17), generator=generator)


def model():
    return build_model("demo", vocabulary_size=257, seed=0)


def test_one_inner_step_is_data_parallel_sgd():
    def work(worker, sent, config):
        local = model()
        local.load_state_dict(sent)
        step = config["server-round"] - 1
        run_inner_steps(
            local,
            build_inner_optimizer("sgd", local, lr=LR),
            lambda _: batch(worker, step),
            first_step=0,  # of a run of one step, whose learning rate is the peak
            steps=1,
            total_steps=1,
            clip_norm=math.inf,
        )
        return local.state_dict()

    result = LocalSGD(outer_lr=1.0, fraction_evaluate=0.0).start(
        LoopbackGrid(WORKERS, work), record(model().state_dict()), num_rounds=ROUNDS
    )
    parallel = model()
    start = parallel.state_dict()["lm_head.weight"].clone()
    sgd = torch.optim.SGD(parallel.parameters(), lr=LR)
    for step in range(ROUNDS):
        together = torch.cat([batch(worker, step) for worker in range(WORKERS)])
        sgd.zero_grad()
        next_token_loss(parallel, together).backward()
        sgd.step()
    state = parallel.state_dict()
    for name, value in tensors(result.arrays).items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-7)
    assert (state["lm_head.weight"] - start).norm() > 0.01
