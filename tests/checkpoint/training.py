"""A training that reads batches and writes each down with the state behind it. It goes on from the state in its
folder, if there is one."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_async as wds
from tests.checkpoint.pipelines import PIPELINES, shown

EPOCHS = 2


def save(folder: Path, state: dict[str, Any]) -> None:
    aside = folder / "state.new"
    aside.write_text(json.dumps(state))
    os.replace(aside, folder / "state.json")


def main(folder: Path, name: str, workers: int, method: str, urls: list[str]) -> None:
    kw = {"multiprocessing_context": method} if workers else {}
    loader = wds.WebLoader(PIPELINES[name](urls), batch_size=None, num_workers=workers, **kw)
    epoch, lines = 0, 0
    if (folder / "state.json").exists():
        saved = json.loads((folder / "state.json").read_text())
        loader.load_state_dict(saved["loader"])
        epoch, lines = saved["epoch"], saved["lines"]
    with (folder / "batches").open("r+" if lines else "w") as out:
        out.seek(0)
        kept = "".join(out.readlines()[:lines]) if lines else ""
        out.seek(0)
        out.truncate()
        out.write(kept)
        while epoch < EPOCHS:
            for batch in loader:
                out.write(f"{epoch} {shown([batch])[0]}\n")
                out.flush()
                lines += 1
                save(folder, {"loader": loader.state_dict(), "epoch": epoch, "lines": lines})
            epoch += 1
    (folder / "done").touch()


def seeded(folder: Path, name: str, workers: int, method: str, urls: list[str]) -> None:
    """Run `main` with the same random numbers in each process."""
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    main(folder, name, workers, method, urls)
