"""Where the time goes: the CPU of a byte and of a sample, layer by layer.

Each row reads the same shards up to one layer, in a process that has read them once before (imports, first touches and
handshakes are paid). A layer costs what its row takes more than the row that it stands on."""

from __future__ import annotations

from rich.table import Table

from benchmarks.bench import Bench, Reading, Row, scenario
from benchmarks.corpus import image_like, tiny

__all__ = ["layers"]

_FLOOR = "kernel"
_LADDER = {
    "kernel: bare recv_into": ("http", _FLOOR, ""),
    "TLS: bare recv_into": ("https", _FLOOR, "kernel: bare recv_into"),
    "HTTP and window": ("http", "engine", "kernel: bare recv_into"),
    "HTTP and window, over TLS": ("https", "engine", "TLS: bare recv_into"),
    "parse headers": ("http", "parse", "HTTP and window"),
    "copy fields": ("http", "copy", "parse headers"),
    "group to samples": ("http", "group", "copy fields"),
    "stage and pipeline": ("http", "pipeline", "group to samples"),
    "filter: shuffle(1000)": ("http", "shuffle", "stage and pipeline"),
    "filter: map": ("http", "map", "stage and pipeline"),
    "to_tuple and batched(64)": ("http", "batch", "stage and pipeline"),
    "hand-over from one worker": ("http", "worker", "to_tuple and batched(64)"),
}
"""By layer: the scheme, what is read, and the row that it stands on."""


def _row(label: str, fields: tuple[str, ...]) -> Row:
    layer = _LADDER[label][1]
    if layer == _FLOOR:
        return Row("recv_into", label)
    return Row("layers", label, {"options": {"layer": layer, "fields": fields}})


def _show(bench: Bench, case: str, samples: int, readings: dict[str, Reading]) -> None:
    table = Table(title=f"{case}: where the time goes", title_justify="left")
    for title in ("layer", "CPU s/GB up to here", "of it this layer", "µs a sample"):
        table.add_column(title, justify="left" if title == "layer" else "right")
    for label, (_, _, below) in _LADDER.items():
        if label in readings and (not below or below in readings):
            here = readings[label]
            own_s = here.cpu_s - (readings[below].cpu_s if below else 0)
            gigabytes = here.size_bytes / 1e9
            cells = (f"{here.cpu_s_per_gb:.3f}", f"{own_s / gigabytes:+.3f}", f"{1e6 * own_s / samples:+.2f}")
            table.add_row(label, *cells)
            shown = f"{cells[0]} s/GB up to here, of it {cells[1]} ({cells[2]} µs a sample)"
            bench.notes.append(f"{case}, {label}: {shown}")
    bench.console.print(table)


@scenario("layers", shards=8, repeat=3)
def layers(bench: Bench) -> None:
    """CPU of a byte and of a sample, layer by layer: images of 100 KB and samples of 200 bytes."""
    cases = (
        ("images", bench.make(image_like, bench.shards, bench.shard_bytes), ("jpg", "cls")),
        ("small samples", bench.make(tiny, bench.shards, 2_500 if bench.quick else 25_000), ("txt", "cls")),
    )
    for case, corpus, fields in cases:
        readings: dict[str, Reading] = {}
        for scheme in ("http", "https"):
            rows = [_row(label, fields) for label, (where, _, _) in _LADDER.items() if where == scheme]
            with bench.serve(corpus, scheme) as source:
                readings = bench.compare(f"layers, {case}", source, "layers", rows, warm=True)
        _show(bench, f"layers, {case}", corpus.samples, readings)
