"""The service's log: short lines for people, or an object a line for machines, on standard error, without secrets."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from wds_async.environment import value
from wds_async.errors import ConfigError
from wds_async.redact import redact

__all__ = ["HumanLines", "JsonLines", "configure", "prepared"]

logger = logging.getLogger("wds_async")
_OTHERS = (logging.getLogger("asyncio"), logging.getLogger("aiohttp"))
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FIELDS = frozenset(("time", "level", "logger", "message", "error"))


def configure(form: str = "human", stream: TextIO | None = None, *, file: str = "", level: str = "") -> None:
    """Send the ``wds_async`` loggers, and warnings of asyncio and aiohttp, to ``stream`` (standard error), or append to
    ``file``, which is opened anew each time: ``form`` is ``"human"`` or ``"json"``.

    The level is ``level``, else that of ``WDS_LOG``, else info. All earlier handlers of these loggers are replaced: the
    process is the service's own. ConfigError for an unknown level, and a file that cannot be opened; then the
    log stays as it was.
    """
    with prepared(form, stream, file=file, level=level) as use:
        use()


@contextlib.contextmanager
def prepared(
    form: str = "human", stream: TextIO | None = None, *, file: str = "", level: str = ""
) -> Iterator[Callable[[], None]]:
    """Yield the function that does what `configure` does with these arguments, and cannot fail: all errors are raised
    before. If it is not called, the log stays as it was."""
    name = "log_level" if level else "WDS_LOG"
    level = (level or value("WDS_LOG") or "info").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"{name}={level.lower()!r} is not a level; write debug, info, warning or error")
    try:
        handler = _Lines(open(file, "a", encoding="utf-8") if file else stream or sys.stderr)  # noqa: SIM115
    except OSError as exn:
        raise ConfigError(f"log_file: {file}: {exn.strerror or exn}") from exn
    handler.closes = bool(file)
    handler.setFormatter(JsonLines() if form == "json" else HumanLines())

    def use() -> None:
        replaced = logger.handlers[:]
        for one in (logger, *_OTHERS):
            one.handlers[:] = [handler]
            one.propagate = False
        logger.setLevel(level)
        for old in replaced:
            old.close()

    try:
        yield use
    finally:
        if handler not in logger.handlers:
            handler.close()


class _Lines(logging.StreamHandler[TextIO]):
    """A stream handler that survives a closed pipe. ``closes``: whether the stream is its own."""

    closes = False

    def close(self) -> None:
        """Close the file, where it is one."""
        super().close()
        if self.closes:
            self.stream.close()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


class _WithoutSecrets(logging.Formatter):
    def trace(self, record: logging.LogRecord) -> list[str]:
        """Return the lines of the record's traceback."""
        if not record.exc_info or not record.exc_info[0]:
            return []
        return [redact(line) for line in self.formatException(record.exc_info).splitlines()]

    def extra(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the fields that came by ``extra``. Libraries that replace the factory of records, as Ray does, add
        names with an underscore to all of them."""
        return {
            key: field for key, field in vars(record).items() if key not in _OF_EVERY_RECORD and not key.startswith("_")
        }


class HumanLines(_WithoutSecrets):
    """``2026-01-31 12:00:00.123 warning audit: message  field=value``. Fields that are mappings are for machines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record in one line, followed by its traceback."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        name = " ".join(filter(None, (record.levelname.lower(), record.name.removeprefix("wds_async").lstrip("."))))
        shown = {key: field for key, field in self.extra(record).items() if not isinstance(field, Mapping)}
        fields = "".join(f"  {key}={redact(str(field))}" for key, field in shown.items())
        line = f"{at}.{int(record.msecs):03} {name}: {redact(record.getMessage())}{fields}"
        return "\n".join([line, *self.trace(record)])


class JsonLines(_WithoutSecrets):
    """``{"time", "level", "logger", "message"}``, with the fields that came by ``extra``, and ``error`` (a
    traceback) where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON. Times are seconds since 1970, UTC."""
        document: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        for key, field in self.extra(record).items():
            document[f"{key}_" if key in _FIELDS else key] = _plain(field)
        if trace := self.trace(record):
            document["error"] = "\n".join(trace)
        return json.dumps(document, ensure_ascii=False)


def _plain(field: Any) -> Any:
    """Return ``field`` as JSON can hold it, without secrets."""
    if field is None or isinstance(field, bool | int | float):
        return field
    if isinstance(field, Mapping):
        return {str(key): _plain(one) for key, one in field.items()}
    return [_plain(one) for one in field] if isinstance(field, list | tuple) else redact(str(field))
