"""The weight of a rank's loss, where ranks hold different numbers of tokens."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def token_share(tokens: Tensor, *, expected: float | None = None, group: ProcessGroup | None = None) -> Tensor:
    """Return what to multiply this rank's mean loss with, so that every token of all ranks counts the same.

    Data parallelism averages gradients over ranks, each of them the gradient of a mean over the rank's own tokens: a
    token on a rank with few counts more. With W ranks, n of all N tokens on this one, and L its loss summed over
    tokens, the share is `W n / N`, and `share * L / n` is `W L / N`: averaged over ranks, the mean over all N tokens.
    So the gradient does not depend on which rank a sample comes to.

    N takes one collective on a scalar. A collective within a step hides from `SyncMonitor` how long a rank computes,
    so call this before the forward pass:

        def on_train_batch_start(self, batch, batch_idx):
            self.share = token_share((batch.labels != -100).sum())  # the tokens that have a loss

        def training_step(self, batch, batch_idx):
            loss = self.mean_loss(batch)
            self.log("train/loss", loss)
            return self.share * loss

    **Accumulated micro-batches**: each is normalised by itself, and Lightning divides by their number, so the gradient
    is the plain mean over micro-batches of what is right for each. Tokens of a micro-batch with fewer of them count
    more, for how many the later ones have is not known yet. With `expected` every token counts the same in all
    micro-batches and steps, and there is no collective, so ranks do not wait for each other at each micro-batch
    either: the gradient is that of the loss summed over all ranks and micro-batches, divided by `expected` and by the
    number of micro-batches; it is larger in a step on more tokens.

    Args:
        tokens: Number of this rank's tokens that the loss is a mean over, 0-dimensional, on the device (it stays
            there: nothing is synchronised with the host). Where it is 0 the loss must be 0 and not NaN; write
            `total / tokens.clamp(min=1)`.
        expected: N as a constant, say the data set's mean number of tokens on all ranks together in a micro-batch. The
            same on all ranks. Default: N is counted.
        group: Of the ranks whose gradients are averaged. Default: all ranks. Under tensor parallelism
            `self.device_mesh["data_parallel"].get_group()`.

    Returns:
        The share, 0-dimensional, in torch's default dtype and on the device of `tokens`: 1 if all ranks have the same
        number of tokens, or if there is only one rank; 0 if this one has none.

    Raises:
        TypeError: If `tokens` is no tensor: a collective needs one, on the right device.
        ValueError: If `expected` is not positive.

    Example:
        >>> token_share(torch.tensor(30))
        tensor(1.)
        >>> token_share(torch.tensor(30), expected=40)
        tensor(0.7500)
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens is {tokens!r}, expected a tensor: torch.tensor(tokens, device=self.device)")
    if expected is not None and not expected > 0:
        raise ValueError(f"expected is {expected}, expected a positive number of tokens")
    counted = tokens.detach()
    ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if expected is not None:
        share = counted * (ranks / expected)
    elif ranks == 1:
        share = counted > 0
    else:
        total = counted.to(torch.float64, copy=True)  # exact up to 2**53 tokens
        dist.all_reduce(total, group=group)
        share = ranks * counted / total.clamp(min=1)
    return share.to(torch.get_default_dtype())
