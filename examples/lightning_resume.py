"""Lightning: stop in the middle of an epoch and go on with the next batch.

``python examples/lightning_resume.py [URL FOLDER]``, or by ``torchrun``. The Trainer saves and loads the state of the
``LightningDataModule``; its checkpoint is the first rank's, so `AllRanks` puts the states of all ranks into it. (The
Trainer also saves states of loaders by itself, but loads none after the end of an epoch.) ``with_epoch`` gives the
loader a length; without one, the Trainer takes a batch ahead, which a checkpoint then counts as seen.
"""

import logging
import os
import sys
import tempfile
import warnings
from typing import Any

import torch
from sampledata import CLASSES, write_pictures
from torch import nn

import wds_async as wds

with warnings.catch_warnings():  # of its own imports
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

BATCH, SAMPLES, SAVE_EVERY, STOP = 16, 192, 3, 17


class Pictures(lightning.LightningDataModule):
    """The data, made on each rank, and where it is."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def setup(self, stage: str) -> None:
        """Make the loader, whose state may be loaded before it is asked for."""
        dataset = (
            wds.WebDataset(self.url, shardshuffle="epoch", seed=0)
            .shuffle(100, seed=0)
            .decode("torchrgb")
            .to_tuple("__key__", "jpg", "cls")
            .batched(BATCH)
        )
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=1)
        self.loader = wds.AllRanks(loader.with_epoch(SAMPLES // BATCH, all_ranks=True))

    def train_dataloader(self) -> wds.AllRanks:
        """Batches for one rank."""
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        """Where the loaders of all ranks are."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, on as many ranks as before or another number."""
        self.loader.load_state_dict(state_dict)


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
        """End the run where it is to be interrupted."""
        self.trainer.should_stop |= self.global_step == self.stop

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


def train(url: str, folder: str, stop: int | None = None, checkpoint: str | None = None) -> Classifier:
    """Two epochs on the CPU, or ``stop`` steps of them, or what is left behind ``checkpoint``."""
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=2,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        logger=False,
        callbacks=ModelCheckpoint(folder, every_n_train_steps=SAVE_EVERY, save_last=True),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    torch.manual_seed(0)
    model = Classifier(stop)
    trainer.fit(model, datamodule=Pictures(url), ckpt_path=checkpoint)
    return model


def main(url: str, folder: str) -> None:
    """Compare a run that is interrupted with one that is not."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    whole = train(url, f"{folder}/whole")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    stop = STOP // ranks
    saved = stop - stop % SAVE_EVERY
    begun = train(url, f"{folder}/stopped", stop=stop)
    resumed = train(url, f"{folder}/stopped", checkpoint="last")
    assert begun.seen[:saved] + resumed.seen == whole.seen
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    print(f"stopped at step {stop}, gone on behind step {saved}: the same as {len(whole.seen)} steps in one run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*sys.argv[1:3]) if len(sys.argv) > 2 else main(write_pictures(folder + "/shards"), folder)
