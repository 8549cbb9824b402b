"""Exact resume: one harness for every policy, worker count and stopping point.

A stream that is saved, loaded through `torch.load(weights_only=True)` and gone on with must give exactly the batches of
the uninterrupted one: keys and content, the encoder's random numbers included.
"""

import io
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import TextSample, stateless

from helpers.datasets import write_dataset, write_metadataset
from helpers.resuming import (
    BATCHES,
    LENGTHS,
    NoisyEncoder,
    NoisySample,
    PackingEncoder,
    check_resume,
    module,
    through_a_file,
)
from lightning_lengthpool import LengthPoolDataModule
from lightning_lengthpool.cost_models import QuadraticCost
from lightning_lengthpool.data.pools.plain_state import to_plain
from lightning_lengthpool.data.resume import checkpoint
from lightning_lengthpool.ordering.settings import PoolWarmup


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["none", "pool"])
def test_a_resumed_stream_is_the_uninterrupted_one(dataset: Callable[..., Path], policy: str, num_workers: int) -> None:
    """Before, at and after a pool's end (12 samples, six batches) of every worker, and in between."""
    path = dataset(LENGTHS, shards=6)
    workers = max(1, num_workers)
    stops = [0, 1, 5 * workers, 6 * workers, 6 * workers + 1, 7 * workers, 20 * workers]
    check_resume(lambda: module(path, policy=policy, num_workers=num_workers), stops, batches=25 * workers)


OFTEN = {"snapshot_samples": 30}  # so that a short run has several snapshots


@pytest.mark.parametrize(("policy", "num_workers"), [("blocks", 2), ("stream", 1), ("stream", 2), ("stream", 3)])
def test_blocks_and_streams_resume_exactly_with_workers(
    dataset: Callable[..., Path], policy: str, num_workers: int
) -> None:
    path = dataset(LENGTHS, shards=6)
    stops = [6 * num_workers + 1, 16 * num_workers]
    check_resume(lambda: module(path, policy=policy, num_workers=num_workers, **OFTEN), stops, batches=20 * num_workers)


@pytest.mark.parametrize("policy", ["blocks", "stream"])
def test_blocks_and_streams_resume_exactly_at_every_single_batch(dataset: Callable[..., Path], policy: str) -> None:
    path = dataset(LENGTHS)
    check_resume(lambda: module(path, policy=policy, **OFTEN), list(range(0, BATCHES)), batches=BATCHES)


REFERENCE = "tokens,class\n" + "".join(f"{length},{'odd' if length % 2 else 'even'}\n" for length in sorted(LENGTHS))
STOPS = [1, 8, 13, 20, 21, 50]


def by_parity(sample: NoisySample) -> str:
    return "odd" if sample.total_len % 2 else "even"


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_size": 13, "batch_size": 3},
        {"pool_size": 2},
        {"batch_size": None, "max_tokens": 500, "over_budget": "alone"},
        {"batch_size": 3, "max_tokens": 150, "over_budget": "drop"},
        {"reference_lengths": "reference.csv"},
        {"reference_lengths": "reference.csv", "class_fn": by_parity},
        {"batch_size": None, "max_tokens": 1000, "reference_lengths": "reference.csv", "class_fn": by_parity},
        {"shuffle_buffer_size": 20, "max_samples_per_sequence": 4},
        {"batch_size": 1, "pool_size": 30, "cost": QuadraticCost(k=50)},
    ],
    ids="-".join,  # the text of a function would differ between processes
)
@pytest.mark.filterwarnings("ignore:.*over_budget is 'drop'")
def test_a_stream_of_whatever_settings(dataset: Callable[..., Path], tmp_path: Path, settings: dict) -> None:
    path = dataset(LENGTHS, shards=3)
    (tmp_path / "reference.csv").write_text(REFERENCE)
    if "reference_lengths" in settings:
        settings = settings | {"reference_lengths": tmp_path / "reference.csv"}
    check_resume(lambda: module(path, policy="stream", **settings), STOPS)


@pytest.mark.parametrize("policy", ["pool", "blocks"])
def test_pools_that_still_grow(dataset: Callable[..., Path], policy: str) -> None:
    path, warmup = dataset(LENGTHS), PoolWarmup(initial=3, flushes=5)
    settings = {"policy": policy, "pool_size": 20, "batch_size": 3, "pool_warmup": warmup, **OFTEN}
    check_resume(lambda: module(path, **settings), list(range(0, 40, 3)), batches=45)


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_size": 0},
        {"pool_size": 1},
        {"pool_size": 5, "batch_size": 3},  # slots that span pools
        {"pool_size": 7, "batch_size": 1},
        {"shuffle_buffer_size": 20},
        {"max_samples_per_sequence": 4},
    ],
)
def test_whatever_the_pool_and_the_data_look_like(dataset: Callable[..., Path], settings: dict) -> None:
    path = dataset(LENGTHS, shards=3)
    check_resume(lambda: module(path, **settings), [1, 8, 13, 20, 21, 50])


@pytest.mark.parametrize("samples", [1, 30, 10_000])
def test_with_a_snapshot_only_every_few_pools(dataset: Callable[..., Path], samples: int) -> None:
    path = dataset(LENGTHS)
    check_resume(lambda: module(path, snapshot_samples=samples), [3, 10, 11, 12, 13, 40])


def test_over_several_passes_of_the_data(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS[:40], shards=2)
    check_resume(lambda: module(path), [15, 16, 17, 47])


def test_at_every_single_batch(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    check_resume(lambda: module(path), list(range(0, BATCHES)), batches=BATCHES)


def test_from_a_blend(dataset: Callable[..., Path], tmp_path: Path) -> None:
    one, two = dataset(LENGTHS[:60]), dataset(LENGTHS[60:])
    blend = tmp_path / "blend.yaml"
    entries = "".join(f"      - {{path: {path.name}, weight: 0.5}}\n" for path in (one, two))
    blend.write_text(
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{entries}"
    )
    check_resume(lambda: module(blend), [4, 20, 33])
    check_resume(lambda: module(blend, policy="stream"), [4, 20, 33])


@pytest.mark.parametrize(
    ("num_workers", "changes"),
    [
        (0, {}),
        (2, {}),
        (0, {"policy": "stream"}),
        (0, {"policy": "stream", "batch_size": None, "max_tokens": 1000, "over_budget": "alone"}),
    ],
)
def test_with_packing(dataset: Callable[..., Path], num_workers: int, changes: dict) -> None:
    path = dataset(LENGTHS)
    settings = {"packing_buffer_size": 9, "batch_size": 1, "pool_size": 6, "num_workers": num_workers} | changes
    check_resume(lambda: module(path, encoder=PackingEncoder(bad=False), **settings), [2, 9, 14])


# ---- epochs, and what is in between


@pytest.mark.parametrize("position", [0, 1, 9, 10, 11, 25])
def test_an_epoch_that_was_saved_in_the_middle_has_what_remains_of_it(
    dataset: Callable[..., Path], position: int
) -> None:
    path = dataset(LENGTHS)
    make = lambda: module(path, virtual_epoch_length=10)  # noqa: E731
    first = make()
    loader = first.train_dataloader()
    batches = 0
    while batches < position:
        for _ in loader:
            batches += 1
            if batches == position:
                break
    second = make()
    second.load_state_dict(through_a_file(first.state_dict()))
    loader = second.train_dataloader()
    assert len(loader) == 10 and len(list(loader)) == (10 - position % 10) and len(list(loader)) == 10


def test_saving_needs_no_worker(dataset: Callable[..., Path]) -> None:
    """Before the first batch, soon after a restore, after the end, and with workers that were killed."""
    import os
    import signal

    path = dataset(LENGTHS)
    part = module(path, num_workers=2)
    assert part.state_dict() == checkpoint.beginning()
    loader = part.train_dataloader()
    assert through_a_file(part.state_dict()) == checkpoint.beginning()
    stream = iter(loader)
    for _ in range(7):
        next(stream)
    state = part.state_dict()
    for worker in loader._loader._iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
    assert part.state_dict() == state
    part.teardown("fit")
    assert part.state_dict() == state

    again = module(path, num_workers=2)
    again.load_state_dict(state)
    assert again.state_dict() == state  # before there is a loader
    again.train_dataloader()
    assert again.state_dict() == state  # before a worker has started
    again.teardown("fit")
    assert again.state_dict() == state


def test_another_fit_and_a_reloaded_loader_go_on(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    whole = [batch for _, batch in zip(range(30), module(path).train_dataloader(), strict=False)]
    part = module(path, num_workers=0)
    got = []
    for batches in (7, 11, 12):
        stream = iter(part.train_dataloader())  # without a teardown: reload_dataloaders_every_n_epochs
        got += [next(stream) for _ in range(batches)]
    assert got == whole


@pytest.mark.parametrize("policy", ["pool", "stream"])
def test_the_state_is_keys_only_and_does_not_grow(dataset: Callable[..., Path], policy: str) -> None:
    path = dataset(LENGTHS)
    part = module(path, pool_size=50, policy=policy)
    stream = iter(part.train_dataloader())
    sizes = []
    for _ in range(400):
        next(stream)
        file = io.BytesIO()
        torch.save(part.state_dict(), file)
        sizes.append(file.tell())
    assert max(sizes[200:]) < 1.3 * max(sizes[:200]) and max(sizes) < 100_000


# ---- another shape


def test_a_streams_state_is_a_few_numbers_and_a_snapshot_comes_every_pool(
    dataset: Callable[..., Path],
) -> None:
    part = module(dataset(LENGTHS), policy="stream", pool_size=50, snapshot_samples=1)
    loader = part.train_dataloader()
    stream = iter(loader)
    snapshots, states = [], []
    for _ in range(200):
        next(stream)
        (worker,) = loader.state().workers
        snapshots.append(worker.pool.snapshot)
        states.append(worker.pool)
    assert len(set(map(id, snapshots))) == pytest.approx(200 * 2 / 50, abs=2)
    assert max(state.slots for state in states) <= 25 and max(len(state.again) for state in states) <= 5


@pytest.mark.parametrize(
    ("before", "after"), [((1, 2), (2, 1)), ((1, 4), (2, 2)), ((2, 2), (4, 1)), ((4, 1), (1, 4)), ((2, 1), (2, 0))]
)
def test_each_logical_workers_stream_goes_on_in_another_shape(
    dataset: Callable[..., Path], before: tuple[int, int], after: tuple[int, int]
) -> None:
    path = dataset(LENGTHS, shards=4)

    def ranks(shape: tuple[int, int]) -> list[LengthPoolDataModule]:
        settings = {"num_workers": shape[1], "world_size": shape[0], "encoder": KeyEncoder()}
        return [module(path, rank=rank, **settings) for rank in range(shape[0])]

    def streams(modules: list[LengthPoolDataModule], each: int) -> list[list[list[str]]]:
        """The next batches of every logical worker."""
        found = []
        for part in modules:
            workers = max(1, part.source.num_workers)
            stream = iter(part._state.loader or part.train_dataloader())
            batches = [next(stream) for _ in range(each * workers)]
            found += [batches[worker::workers] for worker in range(workers)]
        return found

    old = ranks(before)
    streams(old, 8)
    states = [part._state.own for part in old]
    expected = streams(old, 10)
    saved = checkpoint.join(old[0]._state.settings, 8 * max(1, before[1]), to_plain(states))
    new = ranks(after)
    for part in new:
        part.load_state_dict(through_a_file(saved))
    assert streams(new, 10) == expected
    for part in old + new:
        part.teardown("fit")


def test_another_shape_with_other_random_numbers_is_no_exact_resume(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS, shards=4)
    state = saved_state(path, batches=8, num_workers=2)
    other = {"num_workers": 1, "rank": 0, "world_size": 2}
    with pytest.raises(ValueError, match="num_workers 2, and now it is 1.*NoisyEncoder.preencode_sample, .*other rand"):
        module(path, resume="exact", **other).load_state_dict(state)
    with pytest.warns(UserWarning, match="the data do not go on exactly.*NoisyEncoder.preencode_sample"):
        module(path, **other).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(path, num_workers=2, resume="exact").load_state_dict(state)


def test_a_streams_workers_agree_again_in_another_shape(dataset: Callable[..., Path]) -> None:
    """A worker's number is part of the draws: two workers of one rank become two ranks, which must draw the same."""
    path = dataset(LENGTHS, shards=4)
    settings = {"policy": "stream", "encoder": KeyEncoder(bad=False), "batch_size": 1, "pool_size": 24}
    settings = settings | {"max_samples_per_sequence": None, **OFTEN}
    state = saved_state(path, batches=2 * 40, num_workers=2, **settings)

    def lengths(rank: int, ranks: int, num_workers: int, state: dict) -> tuple[list[int], dict]:
        part = module(path, num_workers=num_workers, rank=rank, world_size=ranks, **settings)
        part.load_state_dict(state)
        stream = iter(part.train_dataloader())
        got = [LENGTHS[int(next(stream)[0][-6:])] for _ in range(50 * num_workers)]
        own, saved = part._state.own, part._state.settings
        part.teardown("fit")
        return got, through_a_file(checkpoint.join(saved, own.batches, [to_plain(own)]))

    (one, first), (two, second) = (lengths(rank, 2, 1, state) for rank in range(2))
    assert np.corrcoef(np.log(one), np.log(two))[0, 1] > 0.9
    together, _ = lengths(0, 1, 2, state)
    assert abs(np.corrcoef(np.log(together[::2]), np.log(together[1::2]))[0, 1]) < 0.4
    # and back again: the places that were saved after the change are exact as well
    both = first | {"ranks": first["ranks"] + second["ranks"]}
    back, _ = lengths(0, 1, 2, both)
    again, _ = lengths(0, 1, 2, both)
    assert back == again and abs(np.corrcoef(np.log(back[::2]), np.log(back[1::2]))[0, 1]) < 0.4


class KeyEncoder(NoisyEncoder):
    @stateless
    def batch(self, samples: list[NoisySample]) -> list[str]:
        return [sample.__key__ for sample in samples]

    @stateless
    def encode_batch(self, batch: list[str]) -> list[str]:
        return batch


def saved_state(path: Path, batches: int = 5, **settings: Any) -> dict[str, Any]:
    part = module(path, **settings)
    stream = iter(part.train_dataloader())
    for _ in range(batches):
        next(stream)
    state = part.state_dict()
    part.teardown("fit")
    return through_a_file(state)


def test_unequal_counts_name_the_next_step_at_which_it_can_be_done(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    state = saved_state(path, batches=5, num_workers=2)
    part = module(path, num_workers=1, rank=0, world_size=2)
    with pytest.raises(
        ValueError, match=r"after 5 batches.*2 workers stood at unequal counts.*step 6, .*every 2 steps"
    ):
        part.load_state_dict(state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_workers": 3}, r"1 ranks x 1 workers, and now there are 1 x 3.*stays 1"),
        ({"policy": "none"}, r"policy 'pool', and now it is 'none'"),
        ({"pool_size": 13}, r"pool_size 12, and now it is 13"),
        ({"seed": 7}, r"seed 42, and now it is 7"),
        ({"batch_size": 3}, r"batch_size 2, and now it is 3"),
        ({"shuffle_buffer_size": 5}, r"shuffle_buffer_size None, and now it is 5"),
        ({"cost": QuadraticCost(k=9)}, r"cost None, and now it is '.*QuadraticCost\(.*9"),
        ({"pool_warmup": PoolWarmup(2, 3)}, r"pool_warmup None, and now it is 'PoolWarmup\(initial=2, flushes=3\)'"),
        ({"policy": "stream", "max_tokens": 900}, r"max_tokens None, and now it is 900"),
    ],
)
def test_what_does_not_fit_is_named_with_the_way_out(dataset: Callable[..., Path], changed: dict, message: str) -> None:
    path = dataset(LENGTHS)
    with pytest.raises(ValueError, match=message + r".*resume: fresh"):
        module(path, **changed).load_state_dict(saved_state(path))


def half(sample: NoisySample) -> float:
    return sample.total_len / 2


def test_another_length_function_is_named(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    with pytest.raises(ValueError, match="saved with length_fn None, and now it is 'half'"):
        module(path, length_fn=half).load_state_dict(saved_state(path))


def test_before_the_first_batch_any_settings_fit(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    part = module(path, policy="none")
    part.load_state_dict(saved_state(path, batches=0))
    assert next(iter(part.train_dataloader())) == next(iter(module(path, policy="none").train_dataloader()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("version"), "it lacks 'version'"),
        (lambda state: state.update(version=1), "is of version 1, and this release reads version 3"),
        (lambda state: state.update(version="2"), "it['version'] is '2', expected int"),
        (lambda state: state.pop("ranks"), "it lacks 'ranks'"),
        (lambda state: state.update(ranks={}), "it['ranks'] is {}, expected a list"),
        (lambda state: state.update(ranks=[None]), "it['ranks'][0] is None, expected a dict"),
        (lambda state: state.update(ranks=state["ranks"] * 2), "it has the states of 2 ranks, expected 1"),
        (lambda state: state.update(settings=None), "it['settings'] is None, expected dict"),
        (lambda state: state["settings"].pop("num_workers"), "it['settings'] lacks 'num_workers'"),
        (lambda state: state["ranks"][0].pop("workers"), "it['ranks'][0] lacks 'workers'"),
        (lambda state: state["ranks"][0].update(workers=[]), "rank 0 has 0 workers after 5 batches, expected 1"),
        (lambda state: state["ranks"][0].update(batches=4), "rank 0 has 1 workers after 4 batches, expected 1 after 5"),
        (lambda state: state["ranks"][0]["workers"][0].pop("pool"), "it['ranks'][0]['workers'][0] lacks 'pool'"),
        (lambda state: state["ranks"][0]["workers"][0].update(slots=None), "['slots'] is None, expected int"),
    ],
)
def test_a_malformed_state_is_one_error(dataset: Callable[..., Path], damage: Any, message: str) -> None:
    path = dataset(LENGTHS)
    state = saved_state(path)
    damage(state)
    with pytest.raises(ValueError, match=f"data state in the checkpoint.*{re.escape(message)}.*resume: fresh"):
        module(path).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("policy", "damage"),
    [
        ("pool", lambda worker: worker["pool"]["snapshot"].pop("data")),
        ("pool", lambda worker: worker["pool"]["snapshot"].update(data={"__class__": "Other"})),
        ("pool", lambda worker: worker["pool"].pop("index")),
        ("pool", lambda worker: worker.update(__object__="Path")),
        ("stream", lambda worker: worker["pool"]["snapshot"].pop("costs")),
        ("stream", lambda worker: worker["pool"]["snapshot"].update(history=5)),
        ("stream", lambda worker: worker["pool"].update(slots="many")),
    ],
)
def test_a_workers_malformed_state_is_named_with_its_rank(
    dataset: Callable[..., Path], num_workers: int, policy: str, damage: Any
) -> None:
    path = dataset(LENGTHS)
    state = saved_state(path, policy=policy, num_workers=num_workers)
    damage(state["ranks"][0]["workers"][0])
    part = module(path, policy=policy, num_workers=num_workers)
    with pytest.raises(ValueError, match="rank 0, worker 0: its part of the data state.*cannot be restored.*fresh"):
        part.load_state_dict(state)
        next(iter(part.train_dataloader()))
    part.teardown("fit")


@pytest.mark.parametrize("nothing", [[1], 5, "state", {"weights": 1}])
def test_what_is_no_state_at_all_is_the_same_error(dataset: Callable[..., Path], nothing: Any) -> None:
    with pytest.raises(ValueError, match=r"data state in the checkpoint.*resume: fresh"):
        module(dataset(LENGTHS)).load_state_dict(nothing)


def test_another_reference_is_named(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path, file = dataset(LENGTHS), tmp_path / "reference.csv"
    file.write_text("tokens\n5\n50\n")
    settings = {"policy": "stream", "reference_lengths": file}
    state = saved_state(path, **settings)
    file.write_text("tokens\n50\n5.0\n")
    module(path, **settings).load_state_dict(state)  # the same lengths in another order
    file.write_text("tokens\n50\n6\n")
    with pytest.raises(
        ValueError, match=r"reference_lengths '2 lengths \(.*, and now it is '2 lengths .*resume: fresh"
    ):
        module(path, **settings).load_state_dict(state)


def test_numpys_numbers_are_numbers(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    module(path).load_state_dict(saved_state(path, batch_size=np.int64(2), pool_size=np.int32(12)))


def test_another_data_set_is_named(dataset: Callable[..., Path]) -> None:
    state = saved_state(dataset(LENGTHS))
    with pytest.raises(ValueError, match="had 150 samples in 1 shards, and now has 149 samples .*'resume: fresh'"):
        module(dataset(LENGTHS[:149])).load_state_dict(state)
    module(dataset(LENGTHS[:149]), resume="fresh").load_state_dict(state)


def test_what_changed_in_a_metadataset_is_named(dataset: Callable[..., Path], tmp_path: Path) -> None:
    one, two = dataset(LENGTHS).name, dataset(LENGTHS).name

    def blend(weight: float, subset: str) -> Path:
        entries = f"{{path: {one}, weight: {weight}}}, {{path: {two}, weight: 1, subset: {{range: {subset}}}}}"
        return write_metadataset(tmp_path / "blend.yaml", f"{{blend: [{entries}]}}")

    path = blend(3, "[0%, 50%]")
    state = saved_state(path)
    module(path).load_state_dict(state)
    blend(1, "[50%, 100%]")
    with pytest.raises(
        ValueError, match=r"blend weight 0.75, and now has 0.5;.* subset \[0%, 50%\], and now has \[50%"
    ):
        module(path).load_state_dict(state)


def test_shards_with_other_contents_are_named(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    state = saved_state(path)
    shutil.rmtree(path)
    write_dataset(path, [*LENGTHS[:-2], LENGTHS[-1], LENGTHS[-2]])
    with pytest.raises(ValueError, match=f"'train-000000.tar' of data set '{path.name}' has other contents"):
        module(path).load_state_dict(state)


def test_the_same_data_set_at_another_place_is_the_same(dataset: Callable[..., Path], tmp_path: Path) -> None:
    path = dataset(LENGTHS)
    state = saved_state(path)
    path.rename(tmp_path / "elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(tmp_path / "elsewhere").load_state_dict(state)
    with pytest.warns(UserWarning, match="was made again since the "):
        module(dataset(LENGTHS)).load_state_dict(state)


def test_fresh_starts_from_the_beginning_whatever_was_saved(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    part = module(path, policy="none", resume="fresh")
    part.load_state_dict(saved_state(path))
    whole = module(path, policy="none").train_dataloader()
    assert next(iter(part.train_dataloader())) == next(iter(whole))


# ---- encoders that cannot be restored


class ForgetfulEncoder(KeyEncoder):
    def preencode_sample(self, sample: TextSample) -> NoisySample:
        return NoisySample.derive_from(sample, total_len=int(sample.text), noise=())


@pytest.mark.filterwarnings("ignore:.*is not marked @stateless")
def test_exact_refuses_an_encoder_that_cannot_be_restored(dataset: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"resume is 'exact'.*ForgetfulEncoder\.preencode_sample.*'approximate'"):
        module(dataset(LENGTHS), encoder=ForgetfulEncoder(), resume="exact").setup("fit")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("snapshot", [1, 10_000])
def test_approximate_goes_on_with_the_next_pool(dataset: Callable[..., Path], num_workers: int, snapshot: int) -> None:
    path = dataset(LENGTHS)
    settings = {"snapshot_samples": snapshot, "encoder": ForgetfulEncoder(bad=False), "num_workers": num_workers}
    whole = [batch for _, batch in zip(range(48), module(path, **settings).train_dataloader(), strict=False)]
    workers = max(1, num_workers)
    state = saved_state(path, batches=9 * workers, **settings)  # in the middle of each worker's second pool
    part = module(path, **settings)
    part.load_state_dict(state)
    stream = iter(part.train_dataloader())
    with pytest.warns(UserWarning, match=r"go on approximately.*up to 11 samples.*ForgetfulEncoder\.preencode_sample"):
        first = next(stream)
    assert [first, *(next(stream) for _ in range(12 * workers - 1))] == whole[12 * workers : 24 * workers]
    part.teardown("fit")


def test_an_approximate_stream_loses_what_was_held_at_the_snapshot(dataset: Callable[..., Path]) -> None:
    path = dataset(LENGTHS)
    settings = {"encoder": ForgetfulEncoder(bad=False), "policy": "stream", **OFTEN}
    whole = [batch for _, batch in zip(range(10), module(path, **settings).train_dataloader(), strict=False)]
    state = saved_state(path, batches=10, **settings)
    part = module(path, **settings)
    part.load_state_dict(state)
    stream = iter(part.train_dataloader())
    with pytest.warns(UserWarning, match=r"go on approximately.*up to 11 samples.*ForgetfulEncoder\.preencode_sample"):
        following = [next(stream) for _ in range(50)]
    before, after = ([key for batch in run for key in batch] for run in (whole, following))
    assert not set(before) & set(after) and len(set(after)) == len(after)
    state = through_a_file(part.state_dict())
    part.teardown("fit")
    part = module(path, **settings)
    part.load_state_dict(state)  # after the loss there is a state as good as any
    with pytest.warns(UserWarning, match="go on approximately"):
        assert not {key for key in next(iter(part.train_dataloader()))} & {*before, *after}


def test_approximate_with_packing_starts_over_and_says_so(dataset: Callable[..., Path]) -> None:
    class ForgetfulPacker(PackingEncoder):
        def pack_selected_samples(self, samples: list[NoisySample]) -> NoisySample:
            return samples[0]

    path = dataset(LENGTHS)
    settings = {"encoder": ForgetfulPacker(bad=False), "packing_buffer_size": 9, "batch_size": 1}
    part = module(path, **settings)
    part.load_state_dict(saved_state(path, **settings))
    with pytest.warns(
        UserWarning, match="packing buffer cannot be restored either, and the data start from the beginning"
    ):
        next(iter(part.train_dataloader()))
