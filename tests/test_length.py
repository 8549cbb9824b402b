from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_lengthpool.length import sample_length


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ({"total_len": 7, "tokens": [1, 2]}, 7),
        ({"tokens": [1, 2]}, 2),
        (SimpleNamespace(total_len=torch.tensor(9)), 9),
        (SimpleNamespace(tokens=torch.zeros(4)), 4),
        (SimpleNamespace(total_len=None, tokens=np.zeros(3)), 3),
        ({"total_len": np.float32(2.5)}, 2.5),
        ({"total_len": 0}, 0),
    ],
)
def test_length_is_total_len_else_the_number_of_tokens(sample: Any, length: float) -> None:
    assert sample_length(sample) == length


def test_a_length_fn_comes_first() -> None:
    assert sample_length({"total_len": 7, "image": "abc"}, lambda sample: len(sample["image"])) == 3


def test_a_sample_without_a_length_is_named_with_what_it_has() -> None:
    with pytest.raises(ValueError, match=r"sample 'a/1' .*neither 'total_len' nor 'tokens', only .*'image'.*length_fn"):
        sample_length({"__key__": "a/1", "image": 0})


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "12", True, [3]])
def test_a_length_that_is_no_length_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"sample 'a/1' has the length .*total_len.*expected a finite number"):
        sample_length({"__key__": "a/1", "total_len": value})
