"""The demo's model: a small causal transformer that reads a picture and writes its text, byte by byte."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_lengthpool.demo.task_encoder import IGNORED, IMAGE, OcrBatch
from lightning_lengthpool.loss import token_share


class OcrModel(LightningModule):
    """Next-byte prediction over a sequence of image patches and text bytes.

    The model has no buffers: DDP would broadcast them at every step, and a collective within the step hides
    which rank is slow.

    Args:
        dim: Width of the model; a multiple of 4 and of `heads`.
        layers: Number of transformer blocks.
        heads: Attention heads of each block.
        lr: Peak learning rate of AdamW.
        warmup: Steps over which the learning rate rises to `lr`.
        patch: Height and width of a patch in pixels, as in the task encoder.

    Raises:
        ValueError: `dim` is not a multiple of 4 and of `heads`.
    """

    def __init__(
        self,
        dim: int = 96,
        layers: int = 2,
        heads: int = 4,
        lr: float = 2e-3,
        warmup: int = 20,
        patch: int = 16,
    ) -> None:
        super().__init__()
        if dim % 4 or dim % heads:
            raise ValueError(f"dim={dim} must be a multiple of 4 and of heads={heads}.")
        self.save_hyperparameters()
        self.embed_patches = nn.Linear(patch * patch, dim)
        self.embed_tokens = nn.Embedding(IMAGE + 1, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256)

    def forward(self, batch: OcrBatch) -> Tensor:
        """Returns the logits of the next byte, [B, L, 256]."""
        x = self.embed_tokens(batch.tokens)
        is_patch = (batch.tokens == IMAGE).unsqueeze(-1)
        x = x.masked_scatter(is_patch, self.embed_patches(batch.patches).to(x.dtype))
        x = x + encode_positions(batch.positions, x.shape[-1]).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: OcrBatch) -> tuple[Tensor, Tensor]:
        """Returns the mean cross-entropy in nats per byte of text, and the number of those bytes, both []."""
        count = (batch.labels != IGNORED).sum()
        logits, labels = self(batch).flatten(0, 1), batch.labels.flatten()
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total / count.clamp(min=1), count

    def on_train_batch_start(self, batch: OcrBatch, batch_idx: int) -> None:
        """Counts the bytes of all ranks, before the forward pass so that `SyncMonitor` can tell each rank's compute."""
        self._share = token_share((batch.labels != IGNORED).sum())

    def training_step(self, batch: OcrBatch, batch_idx: int) -> Tensor:
        """Returns the loss, weighted so that each byte of all ranks counts the same.

        Logs it without that weight as `train/loss`, of this rank alone: a sync would hide the skew.
        """
        loss, _ = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return self._share * loss

    def validation_step(self, batch: OcrBatch, batch_idx: int) -> None:
        """Logs `val/loss`, the mean over all bytes of all ranks."""
        self._log_eval("val/loss", batch, batch_idx)

    def test_step(self, batch: OcrBatch, batch_idx: int) -> None:
        """Logs `test/loss`, the mean over all bytes of all ranks."""
        self._log_eval("test/loss", batch, batch_idx)

    def _log_eval(self, name: str, batch: OcrBatch, batch_idx: int) -> None:
        loss, count = self.loss(batch)
        is_repeat = getattr(getattr(self.trainer, "datamodule", None), "is_repeat", None)
        # a rank that is short of batches repeats one, to keep in step; each sample counts once
        weight = 0 if is_repeat is not None and is_repeat(batch_idx) else int(count)
        self.log(name, loss, batch_size=weight, on_step=False, on_epoch=True, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Returns AdamW with a linear warm-up per step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / max(1, self.hparams["warmup"]))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Block(nn.Module):
    """A pre-norm transformer block with causal attention.

    Padding stands on the right, where no real token looks, so no mask is needed.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, L, dim] to [B, L, dim]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def encode_positions(positions: Tensor, dim: int) -> Tensor:
    """Returns the sines and cosines of rows and columns [..., 2] at `dim / 4` frequencies, [..., dim]."""
    count = dim // 4
    steps = torch.arange(count, dtype=torch.float32, device=positions.device)
    frequencies = 1000.0 ** -(steps / count)
    angles = positions.unsqueeze(-1) * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(-2)
