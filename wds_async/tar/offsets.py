"""Where each sample of a plain tar stands: what random access needs to read one without the others."""

from __future__ import annotations

from array import array

from wds_async.errors import DuplicateField
from wds_async.redact import redact
from wds_async.tar.group import admission, base_plus_ext
from wds_async.tar.index import scan

__all__ = ["SampleTable"]


class SampleTable:
    """The samples of one plain tar: ``keys[i]``, and by `fields` where the bytes of sample ``i`` lie.

    A sample is what adjacent members of one key say, as in `group.samples`; names without a field and meta members
    (``__meta__/…``) are passed over. Fields keep their case and have a leading dot, as in ``wids``. A sample of three
    fields takes some 150 bytes of memory.
    """

    __slots__ = ("_firsts", "_names", "_sizes", "_starts", "keys", "url")

    def __init__(self, data: memoryview, url: str) -> None:
        """Walk over the tar in ``data``. Raises ``NotATar``, ``CorruptShard`` and ``TruncatedShard`` with ``url``."""
        self.url = url
        self.keys: list[str] = []
        self._firsts, self._starts, self._sizes = array("q"), array("q"), array("q")
        self._names: list[str] = []
        admit, known, last = admission(), dict[str, str](), None
        pieces = iter((data,))
        for name, start, size in scan(lambda: next(pieces, None), url):
            key, ext = base_plus_ext(name) if admit(name) is not None else (None, None)
            if key is None or ext is None:
                continue
            if key != last:
                last = key
                self.keys.append(key)
                self._firsts.append(len(self._names))
            self._names.append(known.setdefault(ext, f".{ext}"))
            self._starts.append(start)
            self._sizes.append(size)
        self._firsts.append(len(self._names))

    def __len__(self) -> int:
        return len(self.keys)

    def fields(self, i: int) -> dict[str, tuple[int, int]]:
        """``{".jpg": (start, stop)}`` of sample ``i`` (from 0): offsets in bytes in the tar.

        Raises IndexError beyond the last, and ``DuplicateField`` where two members give the sample one field.
        """
        found: dict[str, tuple[int, int]] = {}
        for n in range(self._firsts[i], self._firsts[i + 1]):
            name, start = self._names[n], self._starts[n]
            if name in found:
                raise DuplicateField(
                    f"{redact(self.url)}: the member whose data is at byte {start} gives sample {self.keys[i]!r} the"
                    f" field {name!r} again; it has {list(found)}"
                )
            found[name] = start, start + self._sizes[n]
        return found
