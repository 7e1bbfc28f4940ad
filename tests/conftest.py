"""Under which settings do the unit tests run?  One torch thread, no window for figures."""

import matplotlib
import pytest
import torch

# Broken copies of it are made in book/test_sabotage.py, which runs it as well.
collect_ignore_glob = ["book/sample/*.ipynb"]

matplotlib.use("Agg")
torch.set_num_threads(1)


@pytest.fixture
def one_process():
    """A process group of this process alone, as DistributedDataParallel asks for one."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
