"""The backend for every other filesystem of fsspec: ranges through its ``_cat_file``, always with an explicit end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from wds_async.storage.base import Access, Answer, Backend, Call, Description, Entry, Fault, Location, Verdict
from wds_async.storage.deadlines import with_deadline
from wds_async.storage.file_servers import explain_session, put_by_rename, renames_exclusively, user_of
from wds_async.storage.filesystems import Filesystems, protocols
from wds_async.storage.http.backend import explain_exception
from wds_async.storage.local import explain_os_error
from wds_async.storage.options import NO_OPTIONS, Options

__all__ = ["GenericBackend", "explain_foreign", "reads_local_files"]

# The first four are this machine's files, git and dvc a repository among them; the last two read what a file elsewhere
# names, which may be any file.
_LOCAL = frozenset({"", "file", "local", "asynclocal", "git", "dvc", "generic", "reference"})

_NO_CREDENTIALS = frozenset(
    {"ClientAuthenticationError", "DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError"}
)
_CREDENTIALS_ADVICE = (
    "Give credentials as the store's own tools take them (AWS_* or a profile, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_*), or make the objects public and read them by https."
)


def reads_local_files(url: str) -> bool:
    """Return whether a URL for fsspec ends at this machine's files."""
    return not _LOCAL.isdisjoint(protocols(url))


def explain_foreign(exn: BaseException, user: str = "") -> Fault:
    """Explain an exception of a filesystem of fsspec that was used as ``user``."""
    cause = exn.__cause__  # fsspec's HTTP turns every failure into a missing file
    if isinstance(exn, FileNotFoundError) and isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        return explain_foreign(cause, user)
    if isinstance(exn, FileNotFoundError | PermissionError | IsADirectoryError):
        return explain_os_error(exn)
    if type(exn).__name__ in _NO_CREDENTIALS:  # of packages that are not imported for their names
        return Fault(Verdict.DENIED, f"{type(exn).__name__}: {exn}".rstrip("."), _CREDENTIALS_ADVICE)
    fault = explain_session(exn, user) or explain_exception(exn)
    if fault.verdict is Verdict.FATAL and isinstance(exn, OSError):
        return Fault(Verdict.TRANSIENT, fault.reason, fault.advice)
    return fault


class GenericBackend(Backend):
    """Backend of all fsspec filesystems without a store's folder."""

    def __init__(
        self,
        call: Call,
        options: Options = NO_OPTIONS,
        *,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
    ) -> None:
        self._filesystems = Filesystems(
            call, options, connect_timeout_s=connect_timeout_s, stall_timeout_s=stall_timeout_s
        )
        self._options = options

    async def access(self, location: Location) -> Access:
        return await self._filesystems.ranges(location.target)

    def entries(self, location: Location) -> AsyncIterator[Entry]:
        return self._filesystems.entries(location.target)

    async def describe(self, location: Location) -> Description:
        name = location.scheme
        return Description(f"fsspec's {name}", "", "what its filesystem finds", False, f"{name} has no direct requests")

    def classify(self, outcome: Answer | BaseException, location: Location) -> Fault:
        if isinstance(outcome, Answer):
            return Fault(Verdict.FATAL, f"the store answered {outcome.status}")
        return explain_foreign(outcome, user_of(location.target, self._options))

    async def create(self, location: Location, data: bytes) -> bool:
        filesystem, path = await self._filesystems.find(location.target)
        try:
            if renames_exclusively(filesystem):
                allowed_s = self._filesystems.range_s(len(data))
                return await self._filesystems.take(filesystem, allowed_s, put_by_rename, filesystem, path, data)  # type: ignore[no-any-return]
            if filesystem.protocol != "memory":
                return await super().create(location, data)
            await self._filesystems.ask(filesystem, "pipe_file", path, data, mode="create")
        except FileExistsError:
            return False
        return True

    async def remove(self, location: Location) -> None:
        filesystem, path = await self._filesystems.find(location.target)
        with contextlib.suppress(FileNotFoundError):
            await self._filesystems.ask(filesystem, "rm_file", path)

    async def certainly_creates(self, location: Location) -> bool:
        return True

    async def close(self) -> None:
        await with_deadline(self._filesystems.close(), self._filesystems.question_s)
