"""Under which settings do the unit tests run?  One torch thread, no window for figures."""

import matplotlib
import torch

# Broken copies of it are made in book/test_sabotage.py, which runs it as well.
collect_ignore_glob = ["book/sample/*.ipynb"]

matplotlib.use("Agg")
torch.set_num_threads(1)
