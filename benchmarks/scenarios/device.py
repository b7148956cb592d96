"""Images a second on a GPU, and the CPU time that they take: decoded there, or by the CPU and copied."""

from __future__ import annotations

import gc
import importlib.util
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Table

from benchmarks.bench import Bench, scenario
from benchmarks.corpus import Corpus, photos

__all__ = ["compare", "main", "ways"]

BATCH = 64
SIZE = 224


def ways() -> dict[str, Callable[[Any], Iterable[Any]]]:
    """Return, by name, functions from URLs to batches of images on the GPU, each 3 x 224 x 224."""
    import wds_async as wds  # noqa: PLC0415

    def raw(url: Any) -> Any:
        return wds.WebDataset(url, shardshuffle=False)

    def on_cpu(url: Any, **loader: Any) -> Iterable[Any]:
        dataset = raw(url).decode("torchrgb8", size=SIZE, crop="random").to_tuple("jpg", "cls").batched(BATCH)
        return wds.WebLoader(dataset, batch_size=None, device="cuda", **loader)  # type: ignore[no-any-return]

    def on_gpu(url: Any, **loader: Any) -> Iterable[Any]:
        batches = wds.WebLoader(raw(url).batched(BATCH), batch_size=None, **loader)
        return batches.decode_batch("jpg", "cuda", size=SIZE, crop="random").to_tuple("jpg", "cls")  # type: ignore[no-any-return]

    found: dict[str, Callable[[Any], Iterable[Any]]] = {
        "CPU, 8 workers": lambda url: on_cpu(url, num_workers=8),
        "CPU, 8 threads": lambda url: on_cpu(url, threads=8),
        "GPU (decode_batch)": on_gpu,
        "GPU (decode_batch), 2 workers": lambda url: on_gpu(url, num_workers=2),
    }
    if importlib.util.find_spec("nvidia.dali") is not None:
        found["GPU (DALI)"] = _dali
    return found


def _dali(url: Any) -> Iterable[Any]:
    from nvidia.dali import fn, pipeline_def, types  # noqa: PLC0415
    from nvidia.dali.plugin.pytorch import DALIGenericIterator  # noqa: PLC0415

    import wds_async as wds  # noqa: PLC0415

    @pipeline_def(batch_size=BATCH, num_threads=8, device_id=0)
    def pipeline(source: Any) -> Any:
        files, labels = fn.external_source(source, num_outputs=2, cycle="raise")
        images = fn.decoders.image(files, device="mixed", output_type=types.RGB)
        return fn.transpose(fn.random_resized_crop(images, size=SIZE), perm=[2, 0, 1]), labels.gpu()

    source = wds.dali_source(url, "jpg cls", BATCH, shardshuffle=False)
    for (batch,) in DALIGenericIterator([pipeline(source)], ["images", "labels"], auto_reset=True):
        yield batch["images"], batch["labels"]


def _cpu_s() -> float:
    """Return the seconds of CPU of this process and of those that it has ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _read(way: Callable[[Any], Iterable[Any]], url: str) -> dict[str, float]:
    """Return the images a second behind the first batch, and the milliseconds of CPU of each of all images."""
    import torch  # noqa: PLC0415 (two seconds that --help need not take)

    cpu, began, count, first = _cpu_s(), 0.0, 0, 0
    for images, *_ in way(url):
        if images.device.type != "cuda" or tuple(images.shape[1:]) != (3, SIZE, SIZE):
            raise AssertionError(f"{tuple(images.shape)} on {images.device}")
        count += len(images)
        if not began:  # processes have started, and libraries are loaded
            torch.cuda.synchronize()
            began, first = time.perf_counter(), count
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    gc.collect()  # ends workers
    return {"images": count, "images_per_s": (count - first) / wall, "cpu_ms": 1e3 * (_cpu_s() - cpu) / count}


def compare(bench: Bench, case: str, corpus: Corpus) -> Table:
    """Read ``corpus`` in each way in turn, and return the medians as a table."""
    url = [str(bench.root / name) for name in corpus.names]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways()}
    for turn in range(bench.repeat + 1):
        for name, way in ways().items():
            reading = _read(way, url)
            if turn:  # the first one of each loads libraries
                found[name].append(reading)
                bench.raw.append({"case": case, "label": name, **reading})
    table = Table("way", "images/s", "CPU ms/image", title=case, title_justify="left")
    for name, readings in found.items():
        rate, cpu = (statistics.median(one[figure] for one in readings) for figure in ("images_per_s", "cpu_ms"))
        table.add_row(name, f"{rate:,.0f}", f"{cpu:.3f}")
    return table


@scenario("device", repeat=3)
def main(bench: Bench) -> None:
    """Photographs of 400 x 400, and noise, from local files to batches of 64 x 3 x 224 x 224 on a GPU."""
    warnings.simplefilter("ignore")
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        bench.notes.append("this machine has no GPU: nothing was measured")
        return
    bench.notes.append(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for noisy in (False, True):
        corpus = bench.make(photos, 2 if bench.quick else 8, 1024, noisy=noisy)
        bench.console.print(compare(bench, "noise, 87 KB" if noisy else "photo-like, 40 KB", corpus))
