from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from megatron.energon import OCRSample
from torch.utils.data import DataLoader

from helpers.ranks import run_ranks
from lightning_lengthpool.demo.build import render
from lightning_lengthpool.demo.model import OcrModel
from lightning_lengthpool.demo.task_encoder import IGNORED, OcrBatch, OcrTaskEncoder

TEXTS = [
    "def f(x):\n    return x + 1",
    "def g(self, name, value):\n    self.values[name] = value",
    "def h(): pass",
]


def make_batch(*texts: str) -> OcrBatch:
    encoder = OcrTaskEncoder()
    samples = [OCRSample(__key__=text, __restore_key__=(), image=render(text), text=text.encode()) for text in texts]
    return encoder.batch([encoder.postencode_sample(encoder.preencode_sample(sample)) for sample in samples])


def make_loader(batches: list[OcrBatch]) -> DataLoader:
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


@pytest.fixture
def model() -> OcrModel:
    torch.manual_seed(0)
    return OcrModel()


class DataModule(LightningDataModule):
    """Evaluates on a list of batches, some of which are repeats."""

    def __init__(self, batches: list[OcrBatch], repeats: set[int]) -> None:
        super().__init__()
        self.batches, self.repeats = batches, repeats

    def is_repeat(self, batch_idx: int) -> bool:
        return batch_idx in self.repeats

    def val_dataloader(self) -> DataLoader:
        return make_loader(self.batches)

    test_dataloader = train_dataloader = val_dataloader


def make_trainer(root: Path, devices: int = 1, **kwargs) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **kwargs,
    )


def test_the_model_is_small_and_has_no_buffers(model: OcrModel):
    assert 100_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert list(model.buffers()) == []


def test_every_parameter_gets_a_gradient(model: OcrModel):
    model.loss(make_batch(*TEXTS))[0].backward()  # otherwise DDP waits for ever
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_the_loss_goes_down(model: OcrModel, tmp_path: Path):
    seed_everything(0, verbose=False)
    batches = [make_batch(text) for text in TEXTS]
    before = model.loss(make_batch(*TEXTS))[0].item()
    trainer = make_trainer(tmp_path, max_epochs=10, limit_val_batches=0)
    trainer.fit(model, DataModule(batches, set()))
    after = model.loss(make_batch(*TEXTS))[0].item()
    assert trainer.global_step == 30
    assert before > 5 and after < 3
    assert "train/loss" in trainer.logged_metrics


def test_one_rank_trains_on_its_own_loss(model: OcrModel, tmp_path: Path):
    batch = make_batch(*TEXTS)
    loss = model.loss(batch)[0]
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    trainer = make_trainer(tmp_path, max_steps=1)
    model.hparams.lr = 0.0
    trainer.fit(model, make_loader([batch]))
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    assert trainer.logged_metrics["train/loss"] == loss


def test_padding_does_not_change_the_loss(model: OcrModel):
    together, count = model.loss(make_batch(*TEXTS))
    alone = [model.loss(make_batch(text)) for text in TEXTS]
    assert count == sum(map(len, TEXTS)) == sum(n for _, n in alone)
    assert together.item() == pytest.approx(sum((loss * n).item() for loss, n in alone) / count.item(), rel=1e-5)


def test_what_stands_in_the_padding_does_not_matter(model: OcrModel):
    batch = make_batch(*TEXTS)
    is_padding = torch.arange(batch.tokens.shape[1]) >= batch.total_len[:, None]
    assert is_padding.any() and not (batch.labels[is_padding] != IGNORED).any()
    other = replace(batch, tokens=batch.tokens.masked_fill(is_padding, 65))
    assert model.loss(other)[0].item() == pytest.approx(model.loss(batch)[0].item(), rel=1e-6)


def test_the_picture_influences_the_output(model: OcrModel):
    batch = make_batch(*TEXTS)
    blank = replace(batch, patches=torch.zeros_like(batch.patches))
    is_text = batch.labels != IGNORED
    assert (model(batch)[is_text] - model(blank)[is_text]).abs().max() > 1e-3


def test_each_sample_of_a_batch_gets_its_own_picture(model: OcrModel):
    together = model(make_batch(*TEXTS))
    for row, text in enumerate(TEXTS):
        alone = model(make_batch(text))[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=1e-4, atol=1e-4)


def test_no_byte_sees_itself_or_a_later_one(model: OcrModel):
    batch, other = make_batch("def f(x): pass"), make_batch("def f(x): pass")
    patches, byte = len(batch.patches), 5
    other.tokens[0, patches + byte + 1] = ord("!")  # the input that follows once byte 5 is written
    assert torch.equal(model(batch)[:, : patches + byte + 1], model(other)[:, : patches + byte + 1])
    assert not torch.equal(model(batch)[:, patches + byte + 1], model(other)[:, patches + byte + 1])


@pytest.mark.parametrize("stage", ["val", "test"])
def test_evaluation_weighs_by_bytes_and_leaves_out_repeats(model: OcrModel, tmp_path: Path, stage: str):
    batches = [make_batch(text) for text in TEXTS]
    trainer = make_trainer(tmp_path)
    evaluate = trainer.validate if stage == "val" else trainer.test
    (result,) = evaluate(model, datamodule=DataModule([*batches, batches[1]], {3}), verbose=False)
    assert result == {f"{stage}/loss": pytest.approx(model.loss(make_batch(*TEXTS))[0].item(), rel=1e-5)}
    (counted,) = evaluate(model, datamodule=DataModule([*batches, batches[1]], set()), verbose=False)
    assert counted[f"{stage}/loss"] != pytest.approx(result[f"{stage}/loss"], rel=1e-5)


def test_evaluation_needs_no_data_module(model: OcrModel, tmp_path: Path):
    (result,) = make_trainer(tmp_path).validate(model, make_loader([make_batch(TEXTS[0])]), verbose=False)
    assert result["val/loss"] == pytest.approx(model.loss(make_batch(TEXTS[0]))[0].item(), rel=1e-5)


def test_a_sample_without_text_has_no_loss(model: OcrModel):
    batch = make_batch(TEXTS[0])
    loss, count = model.loss(replace(batch, labels=torch.full_like(batch.labels, IGNORED)))
    assert loss.item() == count.item() == 0


def test_a_width_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match="dim=30 .* heads=4"):
        OcrModel(dim=30)


def train_and_validate(root: Path) -> tuple[list[torch.Tensor], float]:
    """Runs on each of two ranks; returns the gradients of one step, on all texts, and the loss of a validation.

    Rank 0 trains on one text and rank 1 on two; rank 1 has one batch to rank 0's two to validate, and repeats it.
    """
    torch.manual_seed(0)
    trainer = make_trainer(root, devices=2, strategy="ddp", use_distributed_sampler=False, max_steps=1)
    model = OcrModel(lr=0.0)
    trainer.fit(model, make_loader([make_batch(*(TEXTS[1:] if trainer.global_rank else TEXTS[:1]))]))
    gradients = [parameter.grad.cpu() for parameter in model.parameters()]
    texts, repeats = ((TEXTS[:2], set()), ([TEXTS[2]] * 2, {1}))[trainer.global_rank]
    data = DataModule([make_batch(text) for text in texts], repeats)
    trainer = make_trainer(root, devices=2, strategy="ddp", use_distributed_sampler=False)
    return gradients, trainer.validate(model, datamodule=data, verbose=False)[0]["val/loss"]


def test_two_ranks_count_every_byte_the_same(model: OcrModel, tmp_path: Path):
    loss = model.loss(make_batch(*TEXTS))[0]
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for gradients, val_loss in run_ranks(train_and_validate, 2, root=tmp_path):
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
        assert val_loss == pytest.approx(loss.item(), rel=1e-5)
