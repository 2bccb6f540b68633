"""DARE's masks belong to the worker, whoever else answers."""

import torch
from rounds import ask, record, reply, tensors

from isoloco_flwr import DARE
from isoloco_flwr.merging import dare
from isoloco_flwr.merging.dare import worker_generator


def test_a_reply_left_out_does_not_change_the_masks_of_the_others():
    sent = {"weight": torch.zeros(8, 8)}
    strategy = DARE(outer_lr=1.0, merge_options={"sparsity": 0.5}, seed=5)
    messages = ask(strategy, record(sent), num_nodes=4)
    values = [torch.full((8, 8), float("nan") if w == 1 else 1.0 + w) for w in range(4)]
    replies = [reply(m, {"weight": v}) for m, v in zip(messages, values, strict=True)]
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert metrics["replies-rejected"] == 1
    good = (0, 2, 3)
    expected = -dare(
        torch.stack([-values[worker] for worker in good]),
        sparsity=0.5,
        generator=[worker_generator(5, 1, worker, "weight") for worker in good],
    )
    assert torch.equal(tensors(arrays)["weight"], expected)
