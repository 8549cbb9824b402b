"""Hooks on a module that mark where a rank's own compute begins and where its gradients are ready."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_lengthpool.recorder import StepRecorder


class ComputeHooks:
    """Feed a recorder with the marks of a module's forward and backward passes.

    Args:
        module: The module that is trained.
        recorder: Where the marks go.
        is_ddp: DDP exchanges buffers before the module's own forward pass, so compute begins with the latter.
    """

    def __init__(self, module: LightningModule, recorder: StepRecorder, is_ddp: bool) -> None:
        self._module, self._recorder = module, recorder
        self._forward: list[Any] = []
        self._gradients: list[Any] = []
        self._trained: list[int] = []
        if is_ddp:

            def enter_forward(*_: Any) -> None:  # a closure, for a copy of the module must not copy a callback
                recorder.start_compute(collectives_issued())

            self._forward.append(module.register_forward_pre_hook(enter_forward))

    def watch_gradients(self) -> None:
        """Mark each gradient once it is accumulated, before DDP's hook sees it; anew if parameters were (un)frozen.

        `torch.autograd.graph.register_multi_grad_hook` would give the last one alone, but it keeps all
        gradients alive until then, which costs their memory twice, and makes `torch.autograd.grad` on
        parameters fail.
        """
        params = [param for param in self._module.parameters() if param.requires_grad]
        if self._trained == (trained := [id(param) for param in params]):
            return
        for handle in self._gradients:
            handle.remove()
        recorder = self._recorder

        def gradient_ready(_: Tensor) -> None:
            recorder.mark_gradient()

        self._gradients = [param.register_post_accumulate_grad_hook(gradient_ready) for param in params]
        self._trained = trained

    def remove(self) -> None:
        """Leave the module as it was."""
        for handle in (*self._forward, *self._gradients):
            handle.remove()
        self._forward, self._gradients, self._trained = [], [], []


def collectives_issued() -> int | None:
    """How many collectives this process has issued in all its groups; None where torch does not tell."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    try:
        groups = torch.distributed.distributed_c10d._world.pg_map
        return sum(group._get_sequence_number_for_group() for group in groups)
    except (AttributeError, RuntimeError):
        return None
