"""The demo's energon task encoder: a picture and its text become one sequence of patches and bytes."""

import io
import struct

import numpy as np
import torch
from megatron.energon import Batch, DefaultTaskEncoder, OCRSample, Sample, edataclass, stateless
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

BOS = 256  # stands before the first byte; 0 to 255 are the bytes themselves
IMAGE = 257  # stands for a patch
IGNORED = -100  # a label that the loss leaves out


@edataclass
class PooledSample(Sample):
    """What waits in the pool: small, for the picture is still compressed, but of known length."""

    png: bytes
    text: bytes
    total_len: int


@edataclass
class EncodedSample(Sample):
    """One sequence of `total_len` tokens: P patches, then as many positions as the text has bytes."""

    patches: Tensor  # [P, patch * patch] float32, 0 paper to 1 ink
    tokens: Tensor  # [total_len] int64: IMAGE P times, BOS, and the text's bytes but the last
    positions: Tensor  # [total_len, 2] int64: row and column, of a patch or of the byte to be written
    labels: Tensor  # [total_len] int64: the byte to be written, IGNORED on the patches
    total_len: int


@edataclass
class OcrBatch(Batch):
    """Encoded samples, padded on the right to the longest one, of length L."""

    patches: Tensor  # [sum of P, patch * patch] float32, of all samples in turn, not padded
    tokens: Tensor  # [B, L] int64
    positions: Tensor  # [B, L, 2] int64
    labels: Tensor  # [B, L] int64, IGNORED on patches and padding
    total_len: Tensor  # [B] int64


class OcrTaskEncoder(DefaultTaskEncoder[OCRSample, EncodedSample, OcrBatch, OcrBatch]):
    """Encodes samples in two stages, so that the pool holds compressed pictures.

    `preencode_sample` runs before the pool and only measures: a picture's size stands in the PNG's header.
    `postencode_sample` runs after the pool and decodes.

    Args:
        patch: Height and width of a patch in pixels.
        max_length: The most tokens of a sample, patches and bytes together; longer texts are cut.

    Raises:
        ValueError: `patch` is smaller than 1 or `max_length` than 2.
    """

    decoder = None  # energon hands over the members' bytes as they are

    def __init__(self, patch: int = 16, max_length: int = 4096) -> None:
        super().__init__()
        if patch < 1 or max_length < 2:
            raise ValueError(f"patch={patch} must be at least 1 and max_length={max_length} at least 2.")
        self.patch = patch
        self.max_length = max_length

    @stateless
    def preencode_sample(self, sample: OCRSample) -> PooledSample:
        """Measures `total_len`, the sum of patches and text bytes, and cuts the text to fit `max_length`."""
        rows, columns = self._grid(sample.image, sample.__key__)
        room = self.max_length - rows * columns
        if room < 1:
            raise ValueError(
                f"Sample {sample.__key__!r} has {rows * columns} patches, which leaves no room for text: "
                f"raise max_length (now {self.max_length}) or patch (now {self.patch}), or shrink the image."
            )
        text = sample.text[:room]
        total_len = rows * columns + len(text)
        return PooledSample.derive_from(sample, png=sample.image, text=text, total_len=total_len)

    @stateless
    def postencode_sample(self, sample: PooledSample) -> EncodedSample:
        """Cuts the picture into patches and lays out the sequence."""
        rows, columns = self._grid(sample.png, sample.__key__)
        pixels = np.array(Image.open(io.BytesIO(sample.png)).convert("L"))
        page = np.zeros((rows * self.patch, columns * self.patch), dtype=np.float32)
        page[: pixels.shape[0], : pixels.shape[1]] = 1 - pixels / 255
        tiles = page.reshape(rows, self.patch, columns, self.patch).swapaxes(1, 2)
        patches = tiles.reshape(rows * columns, self.patch**2)

        text = np.frombuffer(sample.text, dtype=np.uint8).astype(np.int64)
        tokens = np.concatenate((np.full(len(patches), IMAGE), [BOS], text))[:-1]
        labels = np.concatenate((np.full(len(patches), IGNORED), text))
        positions = np.concatenate((np.indices((rows, columns)).reshape(2, -1).T, _text_positions(text)))
        return EncodedSample.derive_from(
            sample,
            patches=torch.from_numpy(patches),
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            labels=torch.from_numpy(labels),
            total_len=sample.total_len,
        )

    @stateless
    def batch(self, samples: list[EncodedSample]) -> OcrBatch:
        """Pads and stacks; B samples of at most L tokens cost B * L."""
        return OcrBatch.from_samples(
            samples,
            patches=torch.cat([sample.patches for sample in samples]),
            tokens=pad_sequence([sample.tokens for sample in samples], batch_first=True),
            positions=pad_sequence([sample.positions for sample in samples], batch_first=True),
            labels=pad_sequence([sample.labels for sample in samples], batch_first=True, padding_value=IGNORED),
            total_len=torch.tensor([sample.total_len for sample in samples]),
        )

    def _grid(self, png: bytes, key: str) -> tuple[int, int]:
        """Returns the rows and columns of patches that cover a PNG, reading only its header."""
        if png[:8] != b"\x89PNG\r\n\x1a\n":
            raise ValueError(f"Sample {key!r}: its image is not a PNG but starts with {png[:8]!r}.")
        width, height = struct.unpack(">II", png[16:24])
        return -(-height // self.patch), -(-width // self.patch)


def _text_positions(text: np.ndarray) -> np.ndarray:
    """Returns the line and column at which each byte stands, [len(text), 2], from the bytes before it."""
    index = np.arange(len(text))
    after_newline = np.concatenate(([False], text == ord("\n")))[:-1]
    line_start = np.maximum.accumulate(np.where(after_newline, index, 0))
    return np.stack((np.cumsum(after_newline), index - line_start), axis=1)
