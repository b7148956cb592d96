"""``wds-async convert``: shards to and from TFRecord, MDS and LitData, and to Parquet and folders of images."""

from __future__ import annotations

from typing import Any

import click

from wds_async.cli import running
from wds_async.tools.convert import convert_shards
from wds_async.tools.convert.job import FORMATS

__all__ = ["command"]


@click.command("convert")
@click.argument("inputs", nargs=-1, required=True, metavar="IN...")
@click.argument("output", metavar="OUT")
@click.option("--to", type=click.Choice(FORMATS), help="The new format.  [default: by the suffix of OUT]")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="FIELD[=FEATURE]",
    help="A field of the samples, and its feature in TFRecord, or column or leaf elsewhere.  [default: all]",
)
@click.option(
    "--key",
    metavar="FEATURE",
    help="The feature, column or leaf with the key of a sample.  [default: a running number]",
)
@click.option("--typed", is_flag=True, help="Write cls, index, id and the like as integers (int64_list, int).")
@click.option("--maxsize", help="Begin another shard, file of MDS or chunk beyond so many bytes of fields (64M, 1G).")
@click.option(
    "--maxcount", type=click.IntRange(1), help="Begin another shard, file of MDS or chunk beyond so many samples."
)
@click.option("--row-group", default="64M", show_default=True, help="Bytes of a row group of Parquet.")
@click.option("--job", help="Name of the job's folder.  [default: convert, and the name of a single OUT]")
@running.engine_options
@running.start_options
def command(
    inputs: tuple[str, ...],
    output: str,
    fields: tuple[str, ...],
    job: str | None,
    dry_run: bool,
    yes: bool,
    **options: Any,
) -> None:
    """Convert the files IN, each by a task of its own, to OUT: a folder (out/), or a name with {name} or {task}.

    TFRecord, MDS (of MosaicML Streaming) and chunks of LitData become shards, and shards become these, Parquet, or a
    folder of images for Hugging Face (--to imagefolder). None of TensorFlow, Streaming and LitData is needed. Files of
    TFRecord hold tf.train.Example. A folder with the index.json of MDS or LitData stands for the files in that; it is
    written when all files are.

    Example: wds-async convert 'train.tfrecord-*' shards/ --field jpg=image/encoded --field cls=image/class/label

    Example: wds-async convert s3://b/mds/ shards/
    """  # fmt: skip
    chosen: dict[str, str] = {}
    for one in fields:
        name, _, feature = one.partition("=")
        if not name or name in chosen or name != name.lower():
            raise click.UsageError(f"--field {one}: FIELD=FEATURE, a field in lower case, each field once")
        chosen[name] = feature or name
    job = job or running.job_name("convert", output)
    display = running.ProgressDisplay(job)
    made = convert_shards(list(inputs), output, fields=chosen, job=job, on_progress=display, **options)
    running.run_job(made, display, writes=output, dry_run=dry_run, yes=yes)
