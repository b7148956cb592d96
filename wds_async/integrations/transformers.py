"""Hugging Face's Trainer: the state of the training loader in its checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from wds_async import AllRanks
from wds_async.errors import ConfigError, StateError

__all__ = ["LoaderCallback"]

FILE_NAME = "loader_state.json"
"""File in the folder of a checkpoint."""


class LoaderCallback(TrainerCallback):  # type: ignore[misc] # its package is not read where types are checked
    """Callback of a ``transformers.Trainer``: save the state of the training loader in each checkpoint, and resume it.

    ``get_train_dataloader`` of the Trainer returns the loader as `AllRanks`, the same object each time. It has a length
    (`WebLoader.with_epoch`), a multiple of ``gradient_accumulation_steps``. ``TrainingArguments`` have
    ``ignore_data_skip=True``: a loader that resumes begins after the batches that it delivered, and the Trainer must
    not skip as many again. ConfigError otherwise, when the training begins.

    ``checkpoint`` is the folder that is given to ``train(resume_from_checkpoint=...)``; by default the folder of the
    same step in ``output_dir``. StateError if it contains no state of a loader.
    """

    def __init__(self, checkpoint: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint = checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the state if the Trainer resumes from a checkpoint."""
        loader = kwargs.get("train_dataloader")
        if not isinstance(loader, AllRanks):
            raise ConfigError(
                f"get_train_dataloader returned a {type(loader).__name__}, which has no state of all ranks: let it "
                "return wds.AllRanks(loader), the same object each time"
            )
        if not args.ignore_data_skip:
            raise ConfigError(
                "a loader that resumes begins after the batches that it delivered, and the Trainer would skip as many "
                "again: set TrainingArguments(ignore_data_skip=True)"
            )
        if _batches(loader) % args.gradient_accumulation_steps:
            raise ConfigError(
                f"an epoch of {_batches(loader)} batches is no multiple of gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}, and a Trainer that resumes would miss its last step: give "
                "with_epoch a multiple"
            )
        if state.global_step:
            path = Path(self._checkpoint or _folder(args, state)) / FILE_NAME
            if not path.is_file():
                raise StateError(
                    f"{path} does not exist: resume from a checkpoint with the state of a loader. If that is not in "
                    "output_dir, give its folder to LoaderCallback(checkpoint=...) too"
                )
            loader.load_state_dict(json.loads(path.read_text(encoding="utf-8")))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Correct the epoch in the logs: after resuming, the Trainer counts batches from 0."""
        batches = _batches(kwargs["train_dataloader"])
        epoch, steps = divmod(state.global_step, batches // args.gradient_accumulation_steps)
        state.epoch = epoch + steps * args.gradient_accumulation_steps / batches

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the states of all ranks into the checkpoint. The Trainer calls it on every rank."""
        saved = json.dumps(kwargs["train_dataloader"].state_dict())
        if args.should_save:
            path = Path(_folder(args, state)) / FILE_NAME
            path.with_suffix(".new").write_text(saved, encoding="utf-8")
            os.replace(path.with_suffix(".new"), path)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _batches(loader: Any) -> int:
    """Return the batches of an epoch. ConfigError where they are not known."""
    try:
        return len(loader)
    except TypeError as exn:
        raise ConfigError(
            "the loader has no length, by which the Trainer counts epochs: give it one by loader.with_epoch(batches)"
        ) from exn
