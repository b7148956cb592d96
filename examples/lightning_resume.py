"""Lightning: stop in the middle of an epoch and go on with the next batch.

``python examples/lightning_resume.py [URL]``. The Trainer saves and loads the state of every loader that has one
(``state_dict``). Its checkpoint is the first rank's, so `AllRanks` puts the states of all ranks into it. ``with_epoch``
gives the loader a length; without one the Trainer takes a batch ahead, which a checkpoint then counts as seen.
"""

import logging
import sys
import tempfile
import warnings

import torch
from sampledata import CLASSES, write_pictures
from torch import nn

import wds_async as wds

with warnings.catch_warnings():  # of its own imports
    warnings.simplefilter("ignore")
    import lightning

BATCH, SAMPLES, STOP = 16, 192, 17


class Pictures(lightning.LightningDataModule):
    """The data, made on each rank."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def train_dataloader(self) -> wds.AllRanks:
        """Batches for one rank."""
        dataset = (
            wds.WebDataset(self.url, shardshuffle="epoch", seed=0)
            .shuffle(100, seed=0)
            .decode("torchrgb")
            .to_tuple("__key__", "jpg", "cls")
            .batched(BATCH)
        )
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=1)
        return wds.AllRanks(loader.with_epoch(SAMPLES // BATCH, all_ranks=True))


class Classifier(lightning.LightningModule):
    """The smallest model that tells colours apart. ``seen`` are the keys of its batches."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
        self.seen: list[list[str]] = []
        self.stop = stop

    def training_step(self, batch: tuple[list[str], torch.Tensor, torch.Tensor], _index: int) -> torch.Tensor:
        """Loss of one batch."""
        keys, pictures, labels = batch
        self.seen.append(keys)
        return nn.functional.cross_entropy(self.model(pictures), torch.as_tensor(labels))

    def on_train_batch_end(self, *_: object) -> None:
        """Save, as a ModelCheckpoint does, and end the run where it is to be interrupted."""
        if self.global_step == self.stop:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/last.ckpt")
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


def train(url: str, folder: str, stop: int | None = None, checkpoint: str | None = None) -> Classifier:
    """Two epochs on the CPU, or ``stop`` steps of them, or what is left behind ``checkpoint``."""
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    model = Classifier(stop)
    trainer.fit(model, datamodule=Pictures(url), ckpt_path=checkpoint)
    return model


def main(url: str, folder: str) -> None:
    """Compare a run that is interrupted with one that is not."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    whole = train(url, folder)
    begun = train(url, folder, stop=STOP)
    resumed = train(url, folder, checkpoint=f"{folder}/last.ckpt")
    assert begun.seen + resumed.seen == whole.seen
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    print(f"{len(begun.seen)} and {len(resumed.seen)} steps, the same as {len(whole.seen)} in one run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder), folder)
