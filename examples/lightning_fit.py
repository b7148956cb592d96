"""Lightning: pass the loader to the Trainer as it is. ``python examples/lightning_fit.py [URL]``.

Lightning adds a DistributedSampler to map-style datasets only. Our ``IterableDataset`` splits itself by the rank that
Lightning sets up. ``with_epoch`` gives every rank the same number of batches.
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

BATCH, SAMPLES = 16, 192


class Pictures(lightning.LightningDataModule):
    """The data, made on each rank."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def train_dataloader(self) -> wds.WebLoader:
        """Batches for one rank."""
        dataset = (
            wds.WebDataset(self.url, shardshuffle=1000, seed=0)
            .shuffle(100)
            .decode("torchrgb")
            .to_tuple("jpg", "cls")
            .batched(BATCH)
        )
        steps = SAMPLES // (BATCH * self.trainer.world_size)
        return wds.WebLoader(dataset, batch_size=None, num_workers=1).with_epoch(steps)


class Classifier(lightning.LightningModule):
    """The smallest model that tells colours apart."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _index: int) -> torch.Tensor:
        """Loss of one batch."""
        pictures, labels = batch
        return nn.functional.cross_entropy(self.model(pictures), torch.as_tensor(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main(url: str) -> None:
    """Two epochs on the CPU."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), datamodule=Pictures(url))
    print(f"{trainer.current_epoch} epochs, {trainer.global_step} steps")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder))
