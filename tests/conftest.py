import os

# Two processes that each take every core only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    # Those that take minutes first, so that two processes that share the files end together.
    items.sort(key=lambda item: not {"e2e", "simulations"} & set(item.path.parts))


@pytest.fixture(autouse=True)
def _flower_identity() -> None:
    """Flower builds messages only inside a task; tests that build them by hand pose as one."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = 1
    TaskIdentity.task_id = 1
    TaskIdentity.node_id = 1
