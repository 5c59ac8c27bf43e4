"""The server's log: one JSON object a line. Prompts and answers are in it only if that is asked for."""

import json
import logging
import sys
import threading
import time
from typing import Any, Final

ACCESS: Final = logging.getLogger("jpaged.access")


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, and the fields that came with it (`fields`)."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_logging(level: str) -> None:
    """Sends all that is logged, warned of, or raised and caught by nobody to the error stream as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: _log_crash("the process", (kind, error, trace))
    threading.excepthook = lambda crash: _log_crash(
        f"the thread {crash.thread.name if crash.thread else '?'}",
        (crash.exc_type, crash.exc_value or crash.exc_type(), crash.exc_traceback),
    )


def _log_crash(what: str, error: Any) -> None:
    if issubclass(error[0], KeyboardInterrupt | SystemExit):  # no crash: somebody ends it
        return
    logging.getLogger("jpaged").critical("%s ended at an exception", what, exc_info=error)


def log_access(message: str, **fields: Any) -> None:
    """One line about a request; fields that are `None` are left out."""
    if ACCESS.isEnabledFor(logging.INFO):
        kept = {name: value for name, value in fields.items() if value is not None}
        ACCESS.info(message, extra={"fields": kept})
