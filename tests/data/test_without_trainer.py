"""A plain loop under torchrun: each rank reads its own samples, validates, saves and resumes, without a Trainer."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_ranks
from helpers.resuming import through_a_file
from helpers.training import LENGTHS, data
from lightning_lengthpool.data.resume import checkpoint

VAL = range(1, 14)


def loop(path: str, **given: Any) -> dict[str, Any]:
    """Train, save in the middle, validate, resume."""
    dist.init_process_group("gloo")
    module = data(Path(path), num_workers=1, **given)
    module.setup("fit")
    loader = module.train_dataloader()
    keys, state = [], {}
    time.sleep(dist.get_rank())  # it is asked for a state that it does not have yet
    for batch in loader:
        keys.append(batch["keys"])
        if len(keys) == 4:
            if dist.get_rank() == 0:
                state = module.state_dict()  # on rank zero alone: the others answer, wherever they are
            dist.barrier()
        if len(keys) == 9:
            break
    val = [batch["keys"] for index, batch in enumerate(module.val_dataloader()) if not module.is_repeat(index)]
    module.teardown("fit")
    saved = [state]
    dist.broadcast_object_list(saved)
    again = data(Path(path), num_workers=1, resume="exact", **given)
    again.load_state_dict(through_a_file(saved[0]))
    resumed = [batch["keys"] for _, batch in zip(range(5), again.train_dataloader(), strict=False)]
    again.teardown("fit")
    return {"length": len(loader), "keys": keys, "val": val, "resumed": resumed}


def test_each_rank_trains_on_its_own_samples(dataset: Callable[..., Path]) -> None:
    ranks = run_ranks(loop, 2, path=str(dataset(LENGTHS, val=VAL)))
    keys = [{key for batch in rank["keys"] for key in batch} for rank in ranks]
    assert not keys[0] & keys[1]
    assert sorted(key for rank in ranks for batch in rank["val"] for key in batch) == [f"val{i:06d}" for i in range(13)]
    for rank in ranks:
        assert rank["length"] == 120 // 4
        assert rank["resumed"] == rank["keys"][4:]


def tensor_parallel(path: str) -> Any:
    """Two processes that share one data rank."""
    return loop(path, rank=0, world_size=1)


def same_rank_for_all(path: str) -> Any:
    return loop(path, rank=1, world_size=2)


def test_arguments_say_otherwise(dataset: Callable[..., Path]) -> None:
    one, two = run_ranks(tensor_parallel, 2, path=str(dataset(LENGTHS, val=VAL)))
    assert one == two and one["length"] == 120 // 2
    with pytest.raises(AssertionError, match="rank is 1 on all ranks, and world_size is 2"):
        run_ranks(same_rank_for_all, 2, path=str(dataset(LENGTHS)))


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_what_cannot_be_known_is_refused(
    dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "2")
    path = dataset(LENGTHS, val=VAL)
    module = data(path)
    for ask in (module.train_dataloader, module.val_dataloader, lambda: module.setup("fit"), module.state_dict):
        with pytest.raises(ValueError, match=rf"{name} is '2'.*init_process_group.*rank and world_size"):
            ask()
    given = data(path, rank=1, world_size=2)
    assert len(given.train_dataloader()) == 120 // 4
    monkeypatch.setenv(name, "1")
    assert len(data(path).train_dataloader()) == 120 // 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 1}, "rank is 1 and world_size is None: set both, or neither"),
        ({"world_size": 2}, "rank is None and world_size is 2: set both, or neither"),
        ({"rank": 2, "world_size": 2}, "rank is 2, expected less than world_size, which is 2"),
        ({"rank": -1, "world_size": 2}, "rank is -1, expected an integer of at least 0"),
        ({"rank": 0, "world_size": "2"}, "world_size is '2', expected an integer of at least 1"),
    ],
)
def test_wrong_ranks_are_named(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data(Path("unused"), **given)


def choose(*offers: list[int], wanted: int) -> tuple[int, list[Any]]:
    states = {rank: {batches: batches for batches in own} for rank, own in enumerate(offers)}
    return checkpoint.choose(states, wanted, len(offers))


def test_the_state_after_the_batch_that_the_model_has_seen_is_chosen() -> None:
    assert choose([4, 5], [5, 6], [5], wanted=5) == (5, [5, 5, 5])
    assert choose([4, 5], [3, 4, 5, 6], wanted=4) == (4, [4, 4])
    assert choose([5], [], wanted=5) == (5, [5, None])
    with pytest.warns(UserWarning, match="no common data state exists after batch 5.* from batch 4"):
        assert choose([3, 4, 5], [2, 3, 4], wanted=5) == (4, [4, 4])


def unpicklable() -> int:
    """Whatever lies in the store is not run."""
    from lightning_lengthpool.ranks.store import gather

    class Bomb:
        def __reduce__(self) -> Any:
            return (exit, (3,))

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        import pickle

        dist.distributed_c10d._get_default_store().set("lengthpool/name/1", pickle.dumps(Bomb()))
        return 1
    try:
        gather(torch.zeros(1), 0, 2, "name")
    except Exception as error:
        return "weights_only" in str(error).lower() or "Unsupported" in str(error) or "invalid" in str(error)
    return 0


def test_what_lies_in_the_store_is_not_unpickled() -> None:
    assert run_ranks(unpicklable, 2) == [True, 1]
