"""Where a data module stands in its training data: from the loader to the checkpoint and back."""

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_lengthpool.data.pools.plain_state import to_plain
from lightning_lengthpool.data.resume import checkpoint
from lightning_lengthpool.data.resume.signal_guard import SignalGuard
from lightning_lengthpool.data.train_loader import RankState, TrainLoader
from lightning_lengthpool.ranks.data_rank import Agreement, DataRank
from lightning_lengthpool.ranks.store import LAST, Offers, is_distributed, is_rank_zero, patience

STATES = "states"


class DataState:
    """One rank's iterator state, while there is a loader and while there is none.

    `own` is None at the beginning of the data.
    """

    def __init__(self) -> None:
        self.loader: TrainLoader | None = None
        self.handed: Mapping[str, Any] | None = None  # what a trainer's copies of the module have left, to be loaded
        self.is_loaded = False  # from a checkpoint, and nothing was handed out since
        self.settings: dict[str, Any] = {}  # those under which the state is one
        self._recent: tuple[RankState, ...] = ()  # without a loader: after the last batches, to go on from the last
        self._asked: tuple[RankState, ...] = ()  # at the last calls of `save`
        self._whole: Mapping[str, Any] | None = None  # on the writer what a checkpoint held or would hold, ...
        self._whole_own: RankState | None = None  # ... as long as this is this rank's state
        self._offers: Offers | None = None
        self._guard: SignalGuard | None = None
        self._rank = 0

    @property
    def own(self) -> RankState | None:
        """The state after the last batch that was trained on; None at the beginning."""
        state = self.loader.state() if self.loader is not None else next(reversed(self._recent), None)
        return state if state is not None and state.batches else None

    @property
    def dropped(self) -> int:
        """Samples of this rank that were left out so far, because they cost more than max_tokens."""
        own = self.own
        return 0 if own is None else own.dropped

    # ---- loaders

    def attach(
        self,
        loader: TrainLoader,
        settings: dict[str, Any],
        data_rank: DataRank,
        agreement: Agreement,
        trainer: Trainer | None,
    ) -> None:
        """Follow a loader, which goes on from `own`; to be called on all ranks alike."""
        self.loader, self.settings, self._rank = loader, settings, data_rank.rank
        if self._offers is not None:
            self._offers.close()
            self._offers = self._guard = None
        if data_rank.world_size > 1 and is_distributed():
            self._offers = offers = Offers(agreement.token(), self._offer)
            if trainer is not None:

                def tell(boundary: int) -> None:
                    offers.collect(f"save at {boundary}", patience())

                self._guard = SignalGuard(trainer, tell if is_rank_zero() else None)

    def boundary(self) -> None:
        """To be called before each batch, equally often on all ranks."""
        if self._guard is not None:
            self._guard.boundary()

    def close(self) -> None:
        """Stop the loader's workers; the state stays."""
        if self.loader is not None:
            own, self._recent = self.loader.state(), self.loader.recent
            if own is not self._recent[-1]:  # a batch in flight will be handed out again
                self._recent = self._recent[:-1]
            self.is_loaded = self.is_loaded and len(self._recent) == 1
            self.loader.close()
            self.loader = None

    def forget(self) -> None:
        """Go back to the beginning."""
        self._recent, self._whole, self._whole_own, self.handed = (), None, None, None
        if self.loader is not None:
            self.loader.load(None)

    def align(self, agreement: Agreement) -> None:
        """Go back to the last batch that all ranks have trained on: an exception may leave them a batch apart.

        If some rank cannot, a `ValueError` on all ranks alike.
        """
        own = self.own
        batches = 0 if own is None else own.batches
        first = -int(agreement.max(-batches))
        common = [state for state in self._recent if state.batches == first]
        if agreement.ranks_with(bool(first and not common)) or (not first and agreement.ranks_with(bool(batches))):
            raise ValueError(
                f"the ranks stand at different batches in the data (this one at {batches}, another at {first}): they "
                "would train on different lengths at the same step. Go on from a checkpoint (ckpt_path)."
            )
        self._recent = tuple(common)

    # ---- checkpoints

    def save(self, data_rank: DataRank, *, is_writer: bool) -> dict[str, Any]:
        """What a checkpoint holds: all ranks' states, on the rank that writes it; nothing elsewhere."""
        if self.handed is not None:
            return dict(self.handed) if is_writer else {}
        own = self.own
        if own is not None:
            self._asked = (*self._asked[-1:], own)
        if not is_writer:
            return {}
        if own is None:
            return checkpoint.beginning()
        if self._whole is None or own is not self._whole_own:
            return self._collect(own, data_rank)
        return dict(self._whole)

    def finish(self, data_rank: DataRank, *, is_writer: bool) -> None:
        """End the threads at the end of a fit, on all ranks alike; what they had to answer is kept on the writer."""
        own, offers = self.own, self._offers
        if offers is None:
            return
        if is_writer:
            if own is not None:
                self._whole, self._whole_own = self._collect(own, data_rank), own
            offers.collect(LAST, patience())
        else:
            offers.await_last(patience())
        self._offers = self._guard = None

    def _collect(self, own: RankState, data_rank: DataRank) -> dict[str, Any]:
        self._whole = self._whole_own = None  # all ranks' states: they may take much memory
        states = {state.batches: state for state in (*self._recent_states(), own)}
        offers: dict[int, dict[int, Any]] = {data_rank.rank: to_plain(states)}
        for answer in self._answers(own.batches):  # several processes may share a data rank
            offers.setdefault(answer["rank"], {}).update(answer["states"])
        batches, chosen = checkpoint.choose(offers, own.batches, data_rank.world_size)
        return checkpoint.join(self.settings, batches, chosen)

    def _answers(self, batches: int) -> list[Any]:
        """What the other ranks offer; a rank that has not come so far yet is given time."""
        deadline = time.monotonic() + patience()
        while self._offers is not None:
            answers = self._offers.collect(STATES, deadline - time.monotonic())
            newest = [max(answer["states"], default=0) for answer in answers]
            if min(newest, default=batches) >= batches or time.monotonic() >= deadline:
                return answers
            time.sleep(0.05)
        return []

    def load(
        self, saved: Mapping[str, Any], settings: dict[str, Any], rank: int, *, accumulated: int, keep: bool
    ) -> None:
        """Take this rank's state out of a checkpoint; `keep` if it may have to save the same again."""
        own = checkpoint.split(saved, settings, rank, accumulated=accumulated)
        self.settings, self.handed, self.is_loaded = settings, None, True
        self._whole, self._whole_own = saved if keep else None, own
        self._recent = () if own is None else (own,)
        if self.loader is not None:
            self.loader.load(own)

    def _recent_states(self) -> tuple[RankState, ...]:
        loader = self.loader
        return self._recent if loader is None else loader.recent

    def _offer(self, question: str) -> dict[str, Any]:
        """What this rank answers when rank zero saves: it may be a batch ahead, or in the middle of one."""
        if question.startswith("save at") and self._guard is not None:
            self._guard.save_at = int(question.split()[-1])
            return {}
        states = {state.batches: state for state in (*self._asked, *self._recent_states())}
        return {"rank": self._rank, "states": to_plain(states)}

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        """A copy stands where this one stands, without loaders, threads or other ranks."""
        own = self.own
        whole = self._whole if own is self._whole_own else None
        recent = () if own is None else (own,)
        return {"settings": self.settings, "handed": self.handed, "recent": recent, "whole": whole}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.settings, self.handed, self._recent = state["settings"], state["handed"], state["recent"]
        self._whole, self._whole_own = state["whole"], self.own
