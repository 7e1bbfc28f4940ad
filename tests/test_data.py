import doctest

import pytest
import torch

import bpkit.data
from bpkit.data import digits


def test_examples():
    assert doctest.testmod(bpkit.data).failed == 0


def test_split_is_complete_scaled_and_repeatable():
    data = digits()
    assert data.train_images.shape == (1400, 64)
    assert data.test_images.shape == (397, 64)
    assert data.train_images.dtype == torch.float64
    assert data.train_labels.dtype == torch.int64
    images = torch.cat([data.train_images, data.test_images])
    labels = torch.cat([data.train_labels, data.test_labels])
    assert (images.min(), images.max()) == (0, 1)
    # scikit-learn's page gives the number of images per digit: about 180, 1797 in all.
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert all(torch.equal(first, second) for first, second in zip(data, digits(), strict=True))
    # The split the book's numbers were measured on.
    assert data.test_labels[:8].tolist() == [0, 6, 0, 3, 4, 0, 6, 0]


def test_images_keep_their_labels():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    known = {tuple(image): label for image, label in zip(images / 16, labels, strict=True)}
    data = digits()
    found = [known[tuple(image)] for image in data.test_images.tolist()]
    assert found == data.test_labels.tolist()


def test_seed_size_and_dtype_are_the_callers():
    data = digits(dtype=torch.float32, test_size=100, seed=1)
    assert data.test_images.shape == (100, 64)
    assert data.test_images.dtype == torch.float32
    assert not torch.equal(data.train_labels[:100], digits(seed=2).train_labels[:100])


def test_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    digits()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("test_size", [0, 1797, -1])
def test_impossible_size_is_refused(test_size):
    with pytest.raises(ValueError, match="between 1 and 1796"):
        digits(test_size=test_size)
