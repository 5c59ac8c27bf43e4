"""`ServerConfig`: everything the HTTP server is told; frozen, checked when it is made."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jpaged.errors import ConfigError

_COUNTS = {
    "max_body_bytes": 1024,
    "max_total_body_bytes": 1024,
    "max_requests": 1,
    "max_prompts": 1,
    "max_n": 1,
}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP server.

    Attributes:
      host: address to listen on. Beyond this machine only if it is changed, and then better with API keys and TLS.
      port: 0 takes a free one.
      models: names that the model is served by; the first one is in the answers.
      api_keys: keys that clients must bring (`Authorization: Bearer KEY`); none: everybody is served. Prefixes are
        never shared between two keys.
      admin_keys: keys for the admin endpoints, which do not exist without one. They are good for all else too.
      max_body_bytes: of one request.
      max_total_body_bytes: of all bodies that are being read; more are told to come again (503).
      body_timeout_s: for a body to come.
      max_requests: prompts and answers that are served or wait at once, counted as sequences; more are told to come
        again (503).
      max_requests_per_key: likewise of one key (429); `None`: no limit of its own.
      max_prompts: prompts in one request.
      max_n: answers to a prompt; never more than the engine runs at once.
      reading_timeout_s: for a large request to be parsed, put through the chat template and tokenized.
      drain_timeout_s: after SIGTERM, requests have so long to end; then they are ended.
      keep_alive_s: a connection on which no request comes, or not its whole head, is closed after it.
      send_timeout_s: a client that reads nothing of its answer for so long is dropped, and its request ends.
      trust_request_chat_template: requests may bring their own chat template. It runs sandboxed and bounded.
      vllm_metric_names: give every metric under `vllm:` too.
      allowed_origins: web pages that may call from a browser (CORS); "*": all.
      page: show the built-in page at `/`.
      log_prompts: write prompts into the log.
      log_level: "debug", "info", "warning" or "error".
      ssl_keyfile, ssl_certfile, ssl_keyfile_password, ssl_ca_certs, ssl_cert_reqs: TLS, as uvicorn takes them.

    Example:
      >>> ServerConfig(models=("tiny",), port=0).is_local
      True
      >>> ServerConfig(models=("tiny",), max_requests=0)
      Traceback (most recent call last):
      ...
      jpaged.errors.ConfigError: max_requests is 0, expected an integer of at least 1
    """

    models: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = field(default=(), repr=False)
    admin_keys: Sequence[str] = field(default=(), repr=False)
    max_body_bytes: int = 32 * 2**20
    max_total_body_bytes: int = 256 * 2**20
    body_timeout_s: float = 60.0
    max_requests: int = 2048
    max_requests_per_key: int | None = None
    max_prompts: int = 1024
    max_n: int = 128
    reading_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    keep_alive_s: float = 30.0
    send_timeout_s: float = 60.0
    trust_request_chat_template: bool = False
    vllm_metric_names: bool = False
    allowed_origins: Sequence[str] = ()
    page: bool = True
    log_prompts: bool = False
    log_level: str = "info"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = int(ssl.CERT_NONE)

    def __post_init__(self) -> None:
        for name in ("models", "api_keys", "admin_keys", "allowed_origins"):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, str) and value for value in values):
                raise ConfigError(f"{name} is {_masked(name, values)}, expected a list of non-empty strings")
            object.__setattr__(self, name, tuple(values))
        if not self.models:
            raise ConfigError("models is empty, expected at least the name that the model is served by")
        for name in ("api_keys", "admin_keys"):
            for key in getattr(self, name):
                if not 8 <= len(key) <= 512 or not key.isascii() or not key.isprintable() or " " in key:
                    raise ConfigError(
                        f"{name} has a key that is not 8 to 512 printable ASCII characters without spaces"
                    )
        for name, least in _COUNTS.items():
            _require_int(name, getattr(self, name), least)
        if self.max_requests_per_key is not None:
            _require_int("max_requests_per_key", self.max_requests_per_key, 1)
            if not self.api_keys:
                raise ConfigError("max_requests_per_key is set, but there are no api_keys")
        _require_int("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"port is {self.port}, expected an integer in [0, 65535]")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host is {self.host!r}, expected an address")
        for name in ("body_timeout_s", "reading_timeout_s", "drain_timeout_s", "keep_alive_s", "send_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 86400:
                raise ConfigError(f"{name} is {value!r}, expected seconds in [0, 86400]")
        if not self.send_timeout_s:
            raise ConfigError("send_timeout_s is 0, expected more: it would drop whoever is slower than the server")
        for name in ("trust_request_chat_template", "vllm_metric_names", "log_prompts", "page"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected True or False")
        levels = ("debug", "info", "warning", "error")
        if self.log_level not in levels:
            raise ConfigError(f"log_level is {self.log_level!r}, expected one of {', '.join(levels)}")
        self._check_tls()

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile")
        others = ("ssl_keyfile_password", "ssl_ca_certs")
        for name in others:
            if self.ssl_certfile is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} is set without ssl_certfile, so there is no TLS")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name} is {path!r}, which is no file")
        modes = [int(mode) for mode in ssl.VerifyMode]
        if self.ssl_cert_reqs not in modes:
            raise ConfigError(f"ssl_cert_reqs is {self.ssl_cert_reqs!r}, expected one of {modes}")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"ssl_cert_reqs is {self.ssl_cert_reqs}, expected ssl_ca_certs with it: else no client's certificate "
                "could be checked, and nobody would be let in"
            )

    @property
    def is_local(self) -> bool:
        """Only programs of this machine can connect."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


def _require_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}, expected an integer of at least {least}")


def _masked(name: str, values: object) -> str:
    return "wrong" if name.endswith("_keys") else f"{values!r:.80}"
