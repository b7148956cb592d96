"""Hugging Face Trainer: stop in the middle of an epoch and go on with the next batch.

``python examples/transformers_resume.py [URL FOLDER]``, or by ``torchrun``. ``get_train_dataloader`` returns the loader
as it is, and `LoaderCallback` saves the state of all ranks in each checkpoint. The losses are those of one run, to the
last bit.
"""

import os
import sys
import tempfile
from typing import Any

import torch
import transformers
from sampledata import CLASSES, write_pictures
from torch import nn

import wds_async as wds
from wds_async.integrations.transformers import LoaderCallback

BATCH, SAMPLES, STOP = 16, 192, 17


class Classifier(nn.Module):
    """The smallest model that tells colours apart; its dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 16), nn.Dropout(0.2), nn.Linear(16, CLASSES)
        )

    def forward(self, pictures: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scores and loss, as the Trainer wants them."""
        scores = self.layers(pictures)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def inputs(batch: tuple[torch.Tensor, Any]) -> dict[str, torch.Tensor]:
    """The arguments of the model."""
    pictures, labels = batch
    return {"pictures": pictures, "labels": torch.as_tensor(labels)}


class Trainer(transformers.Trainer):
    """The Trainer over a loader of ours, given as ``train_dataset``."""

    def get_train_dataloader(self) -> Any:
        """The loader itself: its dataset is split by ranks already."""
        return self.train_dataset


class Stop(transformers.TrainerCallback):
    """Ends the run where it is to be interrupted."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop."""
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def train(
    url: str, folder: str, stop: int | None = None, resume: bool = False, **options: Any
) -> list[dict[str, float]]:
    """Two epochs, or ``stop`` steps of them, or the rest after the latest checkpoint; the log of all steps."""
    dataset = (
        wds.WebDataset(url, shardshuffle="epoch", seed=0)
        .shuffle(100, seed=0)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
        .batched(BATCH)
        .map(inputs)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=1).with_epoch(SAMPLES // BATCH, all_ranks=True)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        ignore_data_skip=True,  # the loader resumes by itself
        learning_rate=0.1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        **{"save_steps": 5, "num_train_epochs": 2, **options},
    )
    callbacks = [LoaderCallback(), *([Stop(stop)] if stop else [])]
    transformers.set_seed(1)
    trainer = Trainer(Classifier(), arguments, train_dataset=wds.AllRanks(loader), callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    names = ("step", "epoch", "loss", "grad_norm")
    return [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]


def main(url: str, folder: str) -> None:
    """Compare a run that is interrupted with one that is not."""
    stop = STOP // int(os.environ.get("WORLD_SIZE", "1"))
    whole = train(url, f"{folder}/whole")
    begun = train(url, f"{folder}/stopped", stop)
    resumed = train(url, f"{folder}/stopped", resume=True)
    assert begun == whole[:stop]
    assert resumed == whole
    print(f"stopped at step {stop} and resumed: the losses of {len(whole)} steps in one run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*sys.argv[1:3]) if len(sys.argv) > 2 else main(write_pictures(folder + "/shards"), folder)
