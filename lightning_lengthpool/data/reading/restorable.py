"""energon's wrappers whose samples energon 7.4 cannot restore in some cases: the same ones, with that put right."""

import inspect
from collections.abc import Iterator
from typing import Any

from megatron.energon import SavableDataset
from megatron.energon.flavors.base_dataset import add_sample_restore_key, set_sample_restore_key
from megatron.energon.wrappers import MapDataset, PackingDataset


def make_restorable(wrapper: SavableDataset) -> None:
    """Let the samples of one of energon's wrappers be restored."""
    if type(wrapper) is MapDataset and inspect.isgeneratorfunction(wrapper.map_fn):
        wrapper.__class__ = _RestorableGenerator
    elif type(wrapper) is PackingDataset:
        wrapper.__class__ = _RestorablePacks


class _RestorablePacks(PackingDataset):
    """energon's packing, whose packs can be restored also if `postencode_sample` has made their samples.

    energon 7.4 takes the packing's own part off the keys of such samples twice, and then fails.
    """

    def restore_sample(self, restore_key: Any) -> Any:
        try:
            return super().restore_sample(restore_key)
        except AssertionError:
            pack, index, *samples = restore_key
            sample = super().restore_sample((pack, index, *((*key[:2], *key) for key in samples)))
            return set_sample_restore_key(sample, *restore_key[1:], src=self)


_RestorablePacks.__name__ = PackingDataset.__name__  # which stands in the keys


class _RestorableGenerator(MapDataset):
    """energon's map of a generator, which goes on in the middle of a sample with the random numbers of its beginning.

    energon 7.4 saves the next sample's index and takes it for the one that is under way: the samples then have other
    restore keys, and `@stateless(restore_seeds=True)` another seed.
    """

    _generator_sample_key: Any
    _generator_offset: int | None

    def __iter__(self) -> Iterator[Any]:
        if self._generator_sample_key is not None:
            yield from self._rest_of_sample(self._generator_offset or 0)
        yield from super().__iter__()

    def _rest_of_sample(self, done: int) -> Iterator[Any]:
        sample, index = self.dataset.restore_sample(self._generator_sample_key), self._sample_index.current_idx - 1
        with self._map_failure_handler.handle_errors(sample):
            with self._sample_index.ctx(index):
                several = self.map_fn(sample)
            for number, (_, one) in enumerate(self._sample_index.iter_ctx(several, index)):
                if number >= done:
                    self._generator_offset = number + 1
                    yield add_sample_restore_key(one, index, number, src=self)
        self._generator_sample_key = self._generator_offset = None


_RestorableGenerator.__name__ = MapDataset.__name__  # which stands in the keys
