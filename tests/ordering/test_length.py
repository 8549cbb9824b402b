from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.energon import Sample, edataclass

from lightning_lengthpool.ordering.length import sample_length


@edataclass
class TextOnly(Sample):
    text: str


class Slotted:
    __slots__ = ("image", "unset")

    def __init__(self) -> None:
        self.image = 0


class Pair(NamedTuple):
    image: int
    label: int


class Encoding:
    """As the tokenizers' own: it has a length and no items."""

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ({"total_len": 7, "tokens": [1, 2]}, 7),
        ({"tokens": [1, 2]}, 2),
        ({"tokens": [1, 2], "input_ids": [1, 2, 3]}, 2),
        ({"tokens": None, "input_ids": [1, 2, 3]}, 3),
        (UserDict(input_ids=torch.zeros(5)), 5),
        (SimpleNamespace(input_ids=np.zeros(5)), 5),
        (SimpleNamespace(total_len=torch.tensor(9)), 9),
        (SimpleNamespace(total_len=torch.tensor([9])), 9),
        (SimpleNamespace(tokens=torch.zeros(4)), 4),
        (SimpleNamespace(total_len=None, tokens=np.zeros(3)), 3),
        ({"total_len": np.float32(2.5)}, 2.5),
        ({"total_len": 0}, 0),
        ({"tokens": []}, 0),
        ({"tokens": torch.zeros(0)}, 0),
        ({"tokens": [torch.tensor(1), torch.tensor(2)]}, 2),
        ({"tokens": ("a", "b", "c")}, 3),
        ({"tokens": b"abcd"}, 4),
        ({"tokens": Encoding()}, 6),
    ],
)
def test_length_is_total_len_else_the_number_of_tokens_or_input_ids(sample: Any, length: float) -> None:
    assert sample_length(sample) == length


def test_a_length_fn_comes_first() -> None:
    assert sample_length({"total_len": 7, "image": "abc"}, lambda sample: len(sample["image"])) == 3


@pytest.mark.parametrize("field", ["tokens", "input_ids"])
@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (torch.zeros(1, 12), r"shape \(1, 12\)"),
        (torch.zeros(1, 0), r"shape \(1, 0\)"),
        (np.zeros((12, 1)), r"shape \(12, 1\)"),
        (torch.zeros(2, 3, 4), r"shape \(2, 3, 4\)"),
        (torch.tensor(5), r"shape \(\)"),
        (np.array(5), r"shape \(\)"),
        (5, r"a int of shape \(\)"),
        ([[1, 2, 3]], r"shape \(1, 3\)"),
        ([torch.zeros(7)], r"shape \(1, 7\)"),
        (((1, 2), (3, 4)), r"shape \(2, 2\)"),
        ([[]], r"shape \(1, 0\)"),
        ("some text", "a str"),
        ({"input_ids": [1, 2, 3]}, "a dict"),
        (iter([1]), "a list_iterator"),
    ],
)
def test_tokens_that_are_not_in_one_dimension_are_named(field: str, value: Any, shape: str) -> None:
    with pytest.raises(ValueError, match=rf"sample 'a/1' has '{field}' .*{shape}.*expected one dimension.*length_fn"):
        sample_length({"__key__": "a/1", field: value})


@pytest.mark.parametrize(
    ("sample", "fields"),
    [
        ({"__key__": "a/1", "image": 0}, "'__key__', 'image'"),
        (TextOnly(__key__="a/1", __restore_key__=(), text="b"), ".*'__key__', .*'text'"),
        (SimpleNamespace(__key__="a/1", image=0, label=1), "'__key__', 'image', 'label'"),
        (Slotted(), "'image'"),
        (Pair(0, 1), "'image', 'label'"),
        ("text", "no fields"),
    ],
)
def test_a_sample_without_a_length_is_named_with_the_fields_that_it_has(sample: Any, fields: str) -> None:
    key = "'a/1'" if not isinstance(sample, (Slotted, Pair, str)) else "None"
    words = rf"sample {key} .* neither 'total_len' nor 'tokens' nor 'input_ids', only {fields}\. .*length_fn"
    with pytest.raises(ValueError, match=words):
        sample_length(sample)


@pytest.mark.parametrize(
    "value",
    [-1, float("nan"), float("inf"), "12", True, [3], 2j, torch.tensor(-1), torch.tensor(True)],
)
def test_a_length_that_is_no_length_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"sample 'a/1' has the length .*total_len.*expected a finite number"):
        sample_length({"__key__": "a/1", "total_len": value})


@pytest.mark.parametrize("value", [torch.tensor([3, 4]), np.array([3, 4]), np.zeros((2, 1)), torch.zeros(0)])
@pytest.mark.parametrize("is_field", [True, False])
def test_a_length_of_several_numbers_is_named_with_its_shape(value: Any, is_field: bool) -> None:
    def own_length(sample: dict) -> Any:
        return sample["value"]

    shape = str(tuple(value.shape)).replace("(", r"\(").replace(")", r"\)")
    origin = "total_len" if is_field else "own_length"
    sample = {"__key__": "a/1", "total_len" if is_field else "value": value}
    with pytest.raises(ValueError, match=rf"sample 'a/1' has a length of shape {shape} \(from .*{origin}\)"):
        sample_length(sample, None if is_field else own_length)
