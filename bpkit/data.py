"""Which data does the book train on?  Introduced in chapter 2.

scikit-learn's handwritten digits: 1,797 images of 8 × 8 pixels, part of the package, so nothing is
downloaded (https://scikit-learn.org/stable/modules/generated/sklearn.datasets.load_digits.html).
"""

from typing import NamedTuple

import torch

__all__ = ["Digits", "digits"]


class Digits(NamedTuple):
    """Images of shape (N, 64) with pixels in [0, 1], and labels of shape (N,), int64, 0 to 9."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def digits(dtype: torch.dtype = torch.float64, test_size: int = 397, seed: int = 0) -> Digits:
    """The digits, shuffled and split; torch's global random state is left alone.

    Args:
        dtype: of the images.
        test_size: how many of the 1,797 are set aside.
        seed: of the shuffling.

    Returns:
        :class:`Digits`.

    >>> digits().train_images.shape, digits().test_images.shape
    (torch.Size([1400, 64]), torch.Size([397, 64]))
    """
    from sklearn.datasets import load_digits

    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    if not 0 < test_size < len(images):
        raise ValueError(f"test_size must be between 1 and {len(images) - 1}, got {test_size}")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order].to(dtype) / 16, labels[order].long()
    train = len(images) - test_size
    return Digits(images[:train], labels[:train], images[train:], labels[train:])
