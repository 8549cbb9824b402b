"""Hooks on a module that mark where a rank's own compute begins and where its gradients are ready."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from lightning_lengthpool.monitor.recorder import StepRecorder


class ComputeHooks:
    """Feed a recorder with the marks of a module's forward and backward passes.

    Every mark carries the number of collectives issued so far, so the recorder sees one that hides the wait wherever
    it runs: in the forward pass, in a hook, or between two gradients of the backward pass. DDP's own reductions,
    launched between two gradients too, are told apart exactly, whatever their number (buckets, unused parameters,
    communication hooks): they are launched in DDP's hook on a gradient, and we count just before and just after it.
    """

    def __init__(self, module: LightningModule, recorder: StepRecorder, is_ddp: bool) -> None:
        self._module, self._recorder, self._is_ddp = module, recorder, is_ddp
        self._forward: list[Any] = []
        self._gradients: list[Any] = []
        self._watched: list[tuple[nn.Parameter, Node | None]] = []

    def start_batch(self) -> None:
        """Own compute begins now, or under DDP, which exchanges buffers before, when the module is entered."""
        recorder = self._recorder
        if not self._is_ddp:
            recorder.start_compute(collectives_issued())
            return
        self._remove(self._forward)

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # `module.compile()` would trace it
        def enter_forward(*_: Any) -> None:  # a closure, for a copy of the module must not copy a callback
            handle.remove()  # only the first call counts; later ones may come from within a compiled graph
            recorder.start_compute(collectives_issued())

        handle = self._module.register_forward_pre_hook(enter_forward)
        self._forward.append(handle)

    def start_backward(self) -> None:
        self._watch_gradients()  # only now, for training_step may have (un)frozen parameters
        self._recorder.start_backward(collectives_issued())

    def end_backward(self) -> None:
        self._recorder.end_backward(collectives_issued())

    def remove(self) -> None:
        """Leave the module as it was."""
        self._remove(self._forward)
        self._remove(self._gradients)
        self._watched = []

    def _watch_gradients(self) -> None:
        """Mark each gradient once it is accumulated, before DDP's hook sees it; anew if parameters were (un)frozen.

        `torch.autograd.graph.register_multi_grad_hook` would give the last one alone, but it keeps all
        gradients alive until then, which costs their memory twice, and makes `torch.autograd.grad` on
        parameters fail.
        """
        params = [param for param in self._module.parameters() if param.requires_grad]
        if [id(param) for param, _ in self._watched] == [id(param) for param in params]:
            return
        self._remove(self._gradients)
        recorder = self._recorder

        def gradient_ready(_: Tensor) -> None:
            recorder.mark_gradient(collectives_issued())

        def reduction_launched(*_: Any) -> None:
            recorder.after_reduction(collectives_issued())

        # DDP's hook sits on the node that accumulates the gradient since the module was wrapped, so ours there is later
        nodes = [get_gradient_edge(param).node if self._is_ddp else None for param in params]
        self._watched = list(zip(params, nodes, strict=True))  # a node lives, and an id is unique, while it is held
        for param, node in self._watched:
            handle = param.register_post_accumulate_grad_hook(gradient_ready)  # type: ignore[no-untyped-call]
            self._gradients.append(handle)
            if node is not None:
                self._gradients.append(node.register_hook(reduction_launched))

    @staticmethod
    def _remove(handles: list[Any]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()


def collectives_issued() -> int | None:
    """How many collectives this process has issued in all its groups; None where torch does not tell."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    try:
        total = 0  # a plain loop, for this runs twice a gradient
        for group in torch.distributed.distributed_c10d._world.pg_map:
            total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        return total
    except (AttributeError, RuntimeError):
        return None
