"""torch.distributed.checkpoint: two ranks stop in the middle of an epoch, and one goes on with what they had left.

``python examples/dcp_resume.py`` starts ``torchrun --nproc_per_node=N examples/dcp_resume.py URL FOLDER`` twice. A
loader is one of the objects with a ``state_dict`` that ``dcp.save`` and ``dcp.load`` take, beside model and optimizer.
`AllRanks` puts the states of all ranks into one entry: without it the ranks would write theirs under the same names.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sampledata import CLASSES, write_pictures
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import wds_async as wds

BATCH, STOP = 8, 5


def main(url: str, folder: str) -> None:
    """One rank: the epoch from its beginning to step `STOP`, or from the checkpoint to its end."""
    dist.init_process_group("gloo")
    dataset = (
        wds.WebDataset(url, shardshuffle="epoch", seed=0)
        .shuffle(100, seed=0)
        .decode("torchrgb")
        .to_tuple("__key__", "jpg", "cls")
        .batched(BATCH)
    )
    loader = wds.AllRanks(wds.WebLoader(dataset, batch_size=None, num_workers=1))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seen: list[str] = []
    resume = Path(folder, ".metadata").exists()
    if resume:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments, "loader": loader}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step, (keys, pictures, labels) in enumerate(loader, 1):
        nn.functional.cross_entropy(model(pictures), torch.as_tensor(labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += keys
        if not resume and step == STOP:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments, "loader": loader}, checkpoint_id=folder)
            break
    name = f"{'resumed' if resume else 'begun'}-{dist.get_rank()}.txt"
    Path(folder, name).write_text("\n".join(seen))
    dist.barrier()
    dist.destroy_process_group()


def start(url: str, folder: str, ranks: int) -> None:
    """Run this program with ``ranks`` ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    subprocess.run([*torchrun, __file__, url, folder], env=quiet, check=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1], sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            url = write_pictures(f"{folder}/shards")
            start(url, folder, ranks=2)
            start(url, folder, ranks=1)
            lists = [path.read_text().split() for path in sorted(Path(folder).glob("*.txt"))]
            everything = sorted(key for keys in lists for key in keys)
            assert everything == [f"{number:06d}" for number in range(192)]
            print(f"{len(lists[0])} and {len(lists[1])} samples on two ranks, the other {len(lists[2])} on one")
