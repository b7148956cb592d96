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

__all__ = ["Finding", "command"]

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
        """True if samples are lost or wrong; False for what is only unusual."""
        return self.kind in ("broken", "key", "name")


@click.command("check")
@click.argument("url", nargs=-1, required=True)
@click.option("--verbose", is_flag=True, help="Show every error, not only the first of identical ones.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, the summary last.")
def command(*, url: tuple[str, ...], verbose: bool, as_json: bool) -> None:
    """Read all shards completely and report what is wrong with them.

    Reported are broken or truncated shards, repeated keys (duplicate samples, or files of one sample that are not next
    to each other), members without a field name, empty archives, and samples that are unlike the others. Of identical
    errors only the first is shown, and their number at the end.

    The exit status is 1 if samples are lost or wrong.

    Example: wds-async check 'train-{000..099}.tar'
    """
    survey, errors, repeats = _Survey(), 0, terminal.Repeats()
    for finding in survey.findings(shards.expand(url)):
        errors += finding.error
        if as_json:
            terminal.say(json.dumps(asdict(finding)))
        elif verbose or not repeats.seen(f"{finding.kind} {finding.text}", finding.shard):
            kind = click.style(finding.kind, fg="red" if finding.error else "yellow", bold=True)
            terminal.say(f"{kind}  {finding.shard}  {finding.text}")
    for line in repeats.lines():
        terminal.say(line)
    if as_json:
        summary = {"shards": survey.shards, "samples": survey.samples, "bytes": survey.container_bytes}
        click.echo(json.dumps({**summary, "errors": errors}))
    else:
        read = f"{shards.counted(survey.shards, 'shard')}, {shards.counted(survey.samples, 'sample')}"
        size = shards.human(survey.container_bytes)
        click.echo(f"{read}, {size}: {shards.counted(errors, 'error')}", err=True)
    click.get_current_context().exit(1 if errors else 0)


@dataclass
class _Survey:
    """The shards that were read so far."""

    shards: int = 0
    samples: int = 0
    payload_bytes: int = 0
    container_bytes: int = 0
    kinds: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Samples by their fields, sorted."""
    seen: dict[int, int] = field(default_factory=dict)
    """Hash of a key to the number of its shard."""

    def findings(self, urls: Iterable[str]) -> Iterator[Finding]:
        """Yield what is wrong in each shard, then what only the whole shows."""
        with reader.open_shards(urls) as opened:
            for stream in opened:
                yield from self._of_shard(stream)
                self.shards += 1
        if len(self.kinds) > 1:
            (usual, _), *others = self.kinds.most_common()
            text = "; ".join(f"{count} have {', '.join(names) or 'none'}" for names, count in others[:_NAMED_AT_MOST])
            more = f"; and {len(others) - _NAMED_AT_MOST} more kinds" if len(others) > _NAMED_AT_MOST else ""
            yield Finding("fields", "all shards", f"most samples have {', '.join(usual)}; {text}{more}")
        if self.samples and self.payload_bytes < _SMALL_SHARE * self.container_bytes:
            share = 1 - self.payload_bytes / self.container_bytes
            cure = "fewer fields a sample, or .tar.zst, would cure that"
            yield Finding("overhead", "all shards", f"{share:.0%} of the bytes are headers and padding: {cure}")

    def _of_shard(self, stream: reader.ShardStream) -> Iterator[Finding]:
        where, before = redact(stream.url), self.samples
        nameless: list[str] = []
        repeated: list[str] = []
        duplicates: list[Exception] = []
        source: ByteSource | None = None

        def read() -> memoryview | None:
            piece = stream.read()
            self.container_bytes += 0 if piece is None else len(piece)
            return piece

        def members() -> Iterator[parse.Member]:
            nonlocal source
            source = ByteSource(decompress.plain(read, stream.url), stream.url, stream.is_open_ended)
            for member in parse.members_of(source):
                if group.base_plus_ext(member[0])[0] is None:
                    nameless.append(member[0])
                yield member

        def skip(exn: Exception) -> bool:
            duplicates.append(exn)
            return True

        try:
            for sample in group.samples(members(), stream.url, on_error=skip):
                self.samples += 1
                names = tuple(sorted(name for name in sample if not name.startswith("__")))
                self.kinds[names] += 1
                self.payload_bytes += sum(len(sample[name]) for name in names)
                if self._again(sample["__key__"]):
                    repeated.append(sample["__key__"])
        except WdsError as exn:
            yield Finding("broken", where, f"{exn} ({self.samples - before} good samples before)")
        if source is not None:
            source.drop()
            if source.empty:
                yield Finding("empty", where, "the archive is empty: it ends without a member")
        yield from (Finding("key", where, str(exn)) for exn in duplicates)
        if repeated:
            text = f"{_some(repeated)} came before: files of one sample do not stand together, or it is there twice"
            yield Finding("key", where, text)
        if nameless:
            yield Finding("name", where, f"{_some(nameless)} without a field name (key.field): readers pass over them")

    def _again(self, key: str) -> bool:
        number = hash(key)
        if number in self.seen:
            return True
        if len(self.seen) >= _KEYS_AT_MOST:  # then only keys that come again within a shard can be found
            self.seen = {number: shard for number, shard in self.seen.items() if shard == self.shards}
        self.seen[number] = self.shards
        return False


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED_AT_MOST])
    return shown if len(names) <= _NAMED_AT_MOST else f"{shown} and {len(names) - _NAMED_AT_MOST} more"
