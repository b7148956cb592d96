"""A rank of a training that gets its batches from a feed, as a process that may be killed: ``feed_trainer FEED RANK
WORLD_SIZE EPOCHS FOLDER [STATE]``. It writes a line for each batch, and a state after every fourth step."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

SAVES_EVERY = 4


def save(folder: Path, rank: str, step: int, state: dict[str, Any]) -> None:
    new = folder / f"new-{rank}"
    new.write_text(json.dumps(state))
    os.replace(new, folder / f"state-{step:05d}-{rank}")


def main(feed: str, rank: str, world_size: str, epochs: str, folder: str, state: str = "") -> None:
    loader = pickle.loads(Path(feed).read_bytes()).loader(int(rank), int(world_size))
    step = epoch = 0
    if state:
        saved = json.loads(Path(state).read_text())
        loader.load_state_dict(saved["feed"])
        step, epoch = saved["step"], saved["epoch"]
    with Path(folder, f"log-{rank}").open("a") as log:
        for number in range(epoch, int(epochs)):
            for keys, *_ in loader:
                log.write(json.dumps([number, step, list(keys)]) + "\n")
                log.flush()
                step += 1
                time.sleep(0.002)
                if step % SAVES_EVERY == 0:
                    save(Path(folder), rank, step, {"feed": loader.state_dict(), "step": step, "epoch": number})
        log.write('"end"\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
