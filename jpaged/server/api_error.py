"""`ApiError`: what a client is told when its request is refused or fails, as the OpenAI API words it."""

import json
import re
from typing import Any, Final

MAX_MESSAGE_CHARACTERS: Final = 2000
MAX_VALUE_CHARACTERS: Final = 80
MAX_PROBLEMS: Final = 10

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# A folder of this machine, in a message that came from deep inside, is nobody's business.
_PATH: Final = re.compile(r"(?<![\w:/.])(?:~|/[\w.+-]+)(?:/[\w.+-]+)+/?")


class ApiError(Exception):
    """Ends a request with an HTTP status and one error object.

    Args:
      status: HTTP status, which is the error's `code` too.
      message: what was got, what was expected, what to do. It is cut to 2,000 characters, and file paths and control
        characters are taken out.
      param: the parameter that is at fault, if it is one.
      retry_after_s: seconds after which another try may help.

    Example:
      >>> ApiError(400, "n is 0", param="n").body()
      b'{"error":{"message":"n is 0","type":"BadRequestError","param":"n","code":400}}'
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after_s: int | None = None):
        super().__init__(status, message, param, retry_after_s)  # all of them: it crosses between processes
        self.status = status
        self.message = sanitised(message)
        self.param = None if param is None else sanitised(param)[:MAX_VALUE_CHARACTERS]
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (self.status, self.message, self.param, self.retry_after_s)

    def as_dict(self) -> dict[str, Any]:
        """The error object, as it goes into an answer or an event."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def body(self) -> bytes:
        return compact_json(self.as_dict())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Beside the content type: when to come again, and how to authenticate."""
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def _made_again(status: int, message: str, param: str | None, retry_after_s: int | None) -> ApiError:
    return ApiError(status, message, param=param, retry_after_s=retry_after_s)


def sanitised(message: str) -> str:
    """A message without paths and control characters, of at most 2,000 characters.

    Example:
      >>> sanitised("cannot read /home/me/models/config.json\\x07, expected JSON")
      'cannot read (path)\ufffd, expected JSON'
    """
    message = message[: 2 * MAX_MESSAGE_CHARACTERS]
    message = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in message)
    message = _PATH.sub("(path)", message)
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[: MAX_MESSAGE_CHARACTERS - 1] + "…"


def shown(value: object) -> str:
    """A client's value for a message: bounded in length, whatever it is, and without looking at all of it.

    Example:
      >>> shown("a" * 1000) == repr("a" * 60) + "…", shown([1] * 10**6), shown({"a": 1}), shown(None)
      (True, 'a list of 1000000', 'an object of 1', 'null')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, str):
        return repr(value[:60]) + ("…" if len(value) > 60 else "")
    if isinstance(value, int) and value.bit_length() > 200:
        return "an integer of more than 60 digits"
    return repr(value)[:MAX_VALUE_CHARACTERS]


def compact_json(value: Any) -> bytes:
    """JSON without spaces, in UTF-8.

    Raises:
      ValueError: a number is NaN or infinite, which JSON has no word for.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
