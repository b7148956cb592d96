"""``wds-async check``: read shards from end to end and say what a training run would stumble over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

import click

from wds_async.cli import shards, terminal
from wds_async.errors import WdsError
from wds_async.redact import redact
from wds_async.tar import decompress, group, parse
from wds_async.tar.source import ByteSource
from wds_async.transfer import reader

__all__ = ["Finding", "Survey", "command"]

_KEYS_AT_MOST = 2_000_000
_NAMED_AT_MOST = 3
_SMALL_SHARE = 0.7


@dataclass(frozen=True)
class Finding:
    """One thing: ``kind`` is ``broken`` (a shard cannot be read to its end), ``key`` (a key that comes again), ``name``
    (members that no reader sees), ``empty`` (an archive without members), ``fields`` (samples unlike the others) or
    ``overhead``; all but the last three are errors."""

    kind: str
    shard: str
    text: str

    @property
    def error(self) -> bool:
        """Whether samples are lost or wrong, and not only unusual."""
        return self.kind in ("broken", "key", "name")


@dataclass
class Survey:
    """What was read so far."""

    shards: int = 0
    samples: int = 0
    payload_bytes: int = 0
    container_bytes: int = 0
    kinds: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Samples by their fields, sorted."""
    seen: dict[int, int] = field(default_factory=dict)
    """Hash of a key to the number of its shard."""


@click.command("check")
@click.argument("url", nargs=-1, required=True)
@click.option("--verbose", is_flag=True, help="Show every error, and not only the first of equal ones.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, the summary last.")
def command(*, url: tuple[str, ...], verbose: bool, as_json: bool) -> None:
    """Read all shards and report what is wrong: broken or truncated shards, keys that come again (files of one sample
    that do not stand together, or samples that are there twice), members without a field, empty archives, samples
    unlike the others. Of equal errors the first is shown, and a line for the others at the end.

    The status is 1 where samples are lost or wrong.

    Example: wds-async check 'train-{000..099}.tar'
    """
    survey, errors, repeats = Survey(), 0, terminal.Repeats()
    for finding in _findings(shards.expand(url), survey):
        errors += finding.error
        if as_json:
            terminal.say(json.dumps(asdict(finding)))
        elif verbose or not repeats.seen(f"{finding.kind} {finding.text}", finding.shard):
            terminal.say(_line(finding))
    for line in repeats.lines():
        terminal.say(line)
    summary = {"shards": survey.shards, "samples": survey.samples, "bytes": survey.container_bytes, "errors": errors}
    if as_json:
        click.echo(json.dumps(summary))
    else:
        size = shards.human(survey.container_bytes)
        counts = [_counted(survey.shards, "shard"), _counted(survey.samples, "sample"), size]
        click.echo(f"{', '.join(counts)}: {_counted(errors, 'error')}", err=True)
    click.get_current_context().exit(1 if errors else 0)


def _findings(urls: Iterable[str], survey: Survey) -> Iterator[Finding]:
    with reader.open_shards(urls) as opened:
        for stream in opened:
            yield from _of_shard(stream, survey)
            survey.shards += 1
    yield from _of_all(survey)


def _of_shard(stream: reader.ShardStream, survey: Survey) -> Iterator[Finding]:
    where, before = redact(stream.url), survey.samples
    nameless: list[str] = []
    repeated: list[str] = []
    container = _Counted(stream)
    source: ByteSource | None = None
    duplicates: list[Exception] = []

    def members() -> Iterator[parse.Member]:
        nonlocal source
        source = ByteSource(decompress.plain(container.read, stream.url), stream.url, stream.is_open_ended)
        for member in parse.members_of(source):
            if group.base_plus_ext(member[0])[0] is None:
                nameless.append(member[0])
            yield member

    def pass_over(exn: Exception) -> bool:
        duplicates.append(exn)
        return True

    try:
        for sample in group.samples(members(), stream.url, on_error=pass_over):
            survey.samples += 1
            names = tuple(sorted(name for name in sample if not name.startswith("__")))
            survey.kinds[names] += 1
            survey.payload_bytes += sum(len(sample[name]) for name in names)
            if _again(sample["__key__"], survey):
                repeated.append(sample["__key__"])
    except WdsError as exn:
        yield Finding("broken", where, f"{exn} ({survey.samples - before} good samples before)")
    if source is not None:
        source.drop()
        if source.empty:
            yield Finding("empty", where, "the archive is empty: it ends without a member")
    survey.container_bytes += container.size
    yield from (Finding("key", where, str(exn)) for exn in duplicates)
    if repeated:
        text = f"{_some(repeated)} came before: files of one sample do not stand together, or it is there twice"
        yield Finding("key", where, text)
    if nameless:
        yield Finding("name", where, f"{_some(nameless)} without a field name (key.field): readers pass over them")


class _Counted:
    """A shard's bytes, counted as they pass."""

    def __init__(self, stream: reader.ShardStream) -> None:
        self._stream = stream
        self.size = 0

    def read(self) -> memoryview | None:
        piece = self._stream.read()
        self.size += 0 if piece is None else len(piece)
        return piece


def _again(key: str, survey: Survey) -> bool:
    number = hash(key)
    if number in survey.seen:
        return True
    if len(survey.seen) >= _KEYS_AT_MOST:  # then only keys that come again within a shard can be found
        survey.seen = {known: shard for known, shard in survey.seen.items() if shard == survey.shards}
    survey.seen[number] = survey.shards
    return False


def _of_all(survey: Survey) -> Iterator[Finding]:
    """What only the whole shows."""
    if len(survey.kinds) > 1:
        (usual, _), *others = survey.kinds.most_common()
        text = "; ".join(f"{count} have {', '.join(names) or 'none'}" for names, count in others[:_NAMED_AT_MOST])
        more = f"; and {len(others) - _NAMED_AT_MOST} more kinds" if len(others) > _NAMED_AT_MOST else ""
        yield Finding("fields", "all shards", f"most samples have {', '.join(usual)}; {text}{more}")
    if survey.samples and survey.payload_bytes < _SMALL_SHARE * survey.container_bytes:
        share = 1 - survey.payload_bytes / survey.container_bytes
        text = f"{share:.0%} of the bytes are headers and padding: fewer fields a sample, or .tar.zst, would cure that"
        yield Finding("overhead", "all shards", text)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED_AT_MOST])
    return shown if len(names) <= _NAMED_AT_MOST else f"{shown} and {len(names) - _NAMED_AT_MOST} more"


def _counted(count: int, what: str) -> str:
    return f"{f'{count:,}' if count else 'no'} {what}{'' if count == 1 else 's'}"


def _line(finding: Finding) -> str:
    colour = "red" if finding.error else "yellow"
    return f"{click.style(finding.kind, fg=colour, bold=True)}  {finding.shard}  {finding.text}"
