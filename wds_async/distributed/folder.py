"""Folder of a job: what the job is, its inputs, and a record of each finished task, each created only if absent.

``OUT/_wds/JOB/`` holds ``job.json``, ``inputs.jsonl.zst``, ``00042.json`` for each finished task, ``00042.failed.json``
for a task that failed in every attempt, and ``finished.json``, the list of shards, once all tasks have a record.
Nothing else says what is finished.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from wds_async import zstd
from wds_async.distributed.tasks import Input, Record, record_bytes, record_of
from wds_async.errors import ConfigError, JobChanged, JobFailed, ShardNotFound, UrlError
from wds_async.redact import redact
from wds_async.shardlists.jobs import entries_of
from wds_async.storage.listing.expand import folder_entries
from wds_async.storage.options import StorageOptions
from wds_async.storage.removal import remove
from wds_async.storage.sink import publish, publish_new
from wds_async.tar.index import shard_list
from wds_async.transfer.reader import open_shards

__all__ = ["FolderContents", "JobFolder", "job_url", "output_folder", "read_objects"]

KIND = "wds-job-v1"
_RECORD = re.compile(r"(\d{5,})(\.failed)?\.json")
_SHOWN = 300


def output_folder(template: str) -> str:
    """Return the folder of an output template: what stands before its first ``{``, up to the last ``/``; "" for the
    working directory, else with the ``/``. UrlError for a template with a query before it, and without a bucket."""
    head = template.partition("{")[0]
    folder = head[: head.rfind("/") + 1]
    if "?" in folder:
        raise UrlError(f"{redact(template)}: the outputs need a folder that is the same for all of them")
    if "://" in template and not folder.partition("://")[2].strip("/"):
        raise UrlError(f"{redact(template)}: name the bucket; only what is below it may differ between outputs")
    return folder


def job_url(out: str, job: str) -> str:
    """Return the URL of the folder of ``job`` below ``out``, without a slash at its end. ConfigError for a name that is
    no single component."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job):
        raise ConfigError(f"job={job!r}: letters, digits, '.', '_' and '-', and a letter or digit first")
    return f"{out}_wds/{job}"


@dataclass
class FolderContents:
    """Contents of a job's folder, from one listing."""

    begun: bool = False
    """True if ``job.json`` is there."""
    has_inputs: bool = False
    """True if ``inputs.jsonl.zst`` is there."""
    complete: bool = False
    """True if ``finished.json`` is there."""
    finished: set[int] = field(default_factory=set)
    """Numbers of the tasks with a record."""
    failed: set[int] = field(default_factory=set)
    """Numbers of the tasks without one that failed in every attempt of a runner."""


class JobFolder:
    """The folder ``url`` of a job. ``options`` are for the store's client. It can be pickled."""

    def __init__(self, url: str, options: Mapping[str, Any] | StorageOptions | None = None) -> None:
        self.url = url.rstrip("/")
        self.options = StorageOptions(options)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {redact(self.url)}>"

    @property
    def out(self) -> str:
        """The folder of the outputs, with a slash at its end; "" for the working directory."""
        return self.url.rpartition("_wds/")[0]

    def contents(self) -> FolderContents:
        """Return what the folder holds, by one listing; nothing where there is no such folder."""
        contents = FolderContents()
        try:
            for entry in folder_entries(f"{self.url}/", options=self.options):
                name = entry.url.rpartition("/")[2]
                if (match := _RECORD.fullmatch(name)) is not None:
                    (contents.failed if match[2] else contents.finished).add(int(match[1]))
                contents.begun = contents.begun or name == "job.json"
                contents.has_inputs = contents.has_inputs or name == "inputs.jsonl.zst"
                contents.complete = contents.complete or name == "finished.json"
        except ShardNotFound:
            return contents
        contents.failed -= contents.finished
        return contents

    def finished(self) -> set[int]:
        """Return the numbers of the tasks that have a record, by one listing."""
        return self.contents().finished

    def document(self) -> dict[str, Any]:
        """Return ``job.json``. ConfigError for what is no job, ShardNotFound where it is missing."""
        data = next(read_objects([f"{self.url}/job.json"], self.options))
        try:
            document = json.loads(data)
        except ValueError as exn:
            raise ConfigError(f"{redact(self.url)}/job.json: not valid JSON ({exn})") from exn
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise ConfigError(f"{redact(self.url)}/job.json: not the description of a job ({KIND})")
        return document

    def compare(self, document: Mapping[str, Any], inputs: Iterable[Input] = ()) -> None:
        """Raise JobChanged where ``job.json`` is not ``document``; it says what differs, also which of ``inputs``."""
        there = self.document()
        differences = list(_differences(there, {"kind": KIND, **_plain(document)}))
        if not differences:
            return
        with contextlib.suppress(ShardNotFound):
            differences[:0] = _changed_inputs(self.inputs(), inputs)
        differences.sort(key=lambda text: not text.startswith("work."))  # what was changed, before what follows of it
        # The identities follow from what else differs.
        differences = [text for text in differences if not text.startswith("ids is ")] or differences
        raise JobChanged(
            f"{redact(self.url)} holds another job: {'; '.join(differences[:5])}. Give this one a name of its own"
            " (job=, --job), or drop the records of that one and begin again (overwrite=True, --overwrite)"
        )

    def create(self, document: Mapping[str, Any], inputs: Iterable[Input] = (), *, overwrite: bool = False) -> bool:
        """Begin the job that ``document`` (JSON) describes; return False where it is there already. JobChanged where
        another job is, unless ``overwrite``: then its records are removed first."""
        contents = self.contents()
        if contents.begun and overwrite:
            try:
                self.compare(document)
            except JobChanged:
                self._clear()
                contents = FolderContents()
        text, new = json.dumps({"kind": KIND, **document}, sort_keys=True, indent=1) + "\n", False
        if not contents.begun:
            new = publish_new(f"{self.url}/job.json", text.encode("ascii"), self.options)
        if not new:
            self.compare(document)
        if not contents.has_inputs:  # also where a runner died between the two
            publish(f"{self.url}/inputs.jsonl.zst", _packed(inputs), self.options)
        return new

    def commit(self, record: Record) -> bool:
        """Create the record of a finished task; return False where there is one."""
        return publish_new(self._name(record.task), record_bytes(record), self.options)

    def record(self, number: int) -> Record:
        """Return the record of a finished task. ShardNotFound where there is none."""
        return next(self.records([number]))

    def records(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records of the tasks ``numbers``, in their order, read many at once."""
        asked: list[int] = []

        def names() -> Iterator[str]:
            for number in numbers:
                asked.append(number)
                yield self._name(number)

        for place, data in enumerate(read_objects(names(), self.options)):
            yield record_of(data, self._name(asked[place]))

    def note_failure(self, number: int, error: str, attempts: int) -> None:
        """Write down why a task failed, for people; it is not a record."""
        text = json.dumps({"task": number, "error": redact(error), "attempts": attempts}, indent=1) + "\n"
        publish(self._name(number, ".failed"), text.encode("ascii"), self.options)

    def failures(self, numbers: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Yield number and error of the failed tasks ``numbers`` (of `contents`)."""
        listed = list(numbers)
        for number, data in zip(
            listed, read_objects([self._name(number, ".failed") for number in listed], self.options), strict=True
        ):
            yield number, str(json.loads(data).get("error", ""))

    def inputs(self) -> list[Input]:
        """Return the inputs that the job was planned with."""
        data = next(read_objects([f"{self.url}/inputs.jsonl.zst"], self.options))
        lines = zstd.unpacked(data).splitlines()
        return [Input(*json.loads(line)) for line in lines]

    def finish(self, tasks: int, ids: Iterable[str] | None = None) -> bool:
        """Write ``finished.json``, the list of the shards of all ``tasks``; return False where it is there already.
        ``ids``: those that the records must have, in order. JobFailed where records are missing, or of another job."""
        contents = self.contents()
        if contents.complete:
            return False
        if missing := sorted(set(range(tasks)) - contents.finished)[:10]:
            raise JobFailed(f"{redact(self.url)}: not finished; the tasks {missing} (and maybe more) have no record")
        shards: list[dict[str, Any]] = []
        expected = None if ids is None else iter(ids)
        for record in self.records(range(tasks)):
            if expected is not None and record.id != (wanted := next(expected)):
                raise JobFailed(
                    f"{self._name(record.task)}: the record of another job ({record.id}, not {wanted}): another runner"
                    " was at work here. Run this job again with overwrite=True"
                )
            shards += entries_of(map(asdict, record.outputs))
        name = self.url.rpartition("/")[2]
        return publish_new(f"{self.url}/finished.json", shard_list(shards, name).encode("ascii"), self.options)

    def _name(self, number: int, suffix: str = "") -> str:
        return f"{self.url}/{number:05d}{suffix}.json"

    def _clear(self) -> None:
        entries = [entry.url for entry in folder_entries(f"{self.url}/", options=self.options)]
        last = f"{self.url}/job.json"  # while it is there, no other runner takes the rest for its own
        first = [url for url in entries if not url.endswith(("/", "/job.json"))]
        remove(first, self.options)
        remove([last], self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.options)


def read_objects(urls: Iterable[str], options: Mapping[str, Any] | StorageOptions | None = None) -> Iterator[bytes]:
    """Yield the bytes of small objects, in order, read many at once."""
    with open_shards(urls, options=StorageOptions(options)) as reader:
        for stream in reader:
            pieces = []
            while (piece := stream.read()) is not None:
                pieces.append(bytes(piece))
            yield b"".join(pieces)


def _packed(inputs: Iterable[Input]) -> bytes:
    """Return the inputs as compressed lines of JSON, without secrets."""
    return zstd.packed(json.dumps([redact(one.url), one.size, one.version]).encode() + b"\n" for one in inputs)


def _plain(document: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(document))
    return plain


def _differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    """Yield what differs between two JSON values, in words."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in sorted(there.keys() | here.keys()):
            yield from _differences(there.get(name), here.get(name), f"{path}.{name}" if path else name)
    elif there != here:
        yield f"{path} is {_short(there)} there and {_short(here)} here"


def _changed_inputs(there: Iterable[Input], here: Iterable[Input]) -> Iterator[str]:
    """Yield what differs between the inputs of two jobs, in words, up to the first one that has another name."""
    for number, (one, other) in enumerate(zip(there, here, strict=False)):
        if one.url != redact(other.url):
            yield f"input {number} is {one.url} there and {redact(other.url)} here"
            return
        if (one.size, one.version) != (other.size, other.version):
            was, now = (f"{each.size} bytes, version {each.version or 'unknown'}" for each in (one, other))
            yield f"{one.url} was replaced: it had {was}, and has {now}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
