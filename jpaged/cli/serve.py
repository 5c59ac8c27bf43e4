"""`jpaged serve`."""

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from jpaged import __version__
from jpaged.cli import options
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError

if TYPE_CHECKING:
    from jpaged.async_engine import AsyncEngine
    from jpaged.engine_client import EngineInfo
    from jpaged.server import ServerConfig
    from jpaged.tokenizer import Tokenizer

_WHO: Final = "Who is served"
_LIMITS: Final = "Limits"
_TLS: Final = "TLS"
_KEYS_VARIABLE: Final = "JPAGED_API_KEYS"
# By load format, what makes the engine.
MAKERS: Final = {"auto": "jpaged.llm:make_engine", "dummy": "jpaged.cli.random_model:make_random_engine"}

LoadFormat = Annotated[
    str,
    typer.Option(
        "--load-format",
        help="auto reads weights; dummy is random ones and a made-up vocabulary, for load tests: MODEL may then be "
        "a shape too, such as llama-3.1-8b.",
        rich_help_panel="Engine",
    ),
]
TokenBuckets = Annotated[
    str | None,
    typer.Option(
        "--token-buckets",
        help="Tokens of the steps that are compiled, such as 64,512: fewer start sooner, and pad more.",
        rich_help_panel="Engine",
        show_default="by the device",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server as it was asked for on the command line. Fields as in `ServerConfig`."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", envvar=_KEYS_VARIABLE, help="Let in who brings it; may be repeated.", rich_help_panel=_WHO
        ),
    ] = None
    admin_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--admin-key", envvar="JPAGED_ADMIN_KEYS", help="For the admin endpoints; off else.", rich_help_panel=_WHO
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", help="Web page that may call from a browser; * is all.", rich_help_panel=_WHO),
    ] = None
    page: Annotated[bool, typer.Option("--page/--no-page", help="Show the built-in page at /.")] = True
    max_body_bytes: Annotated[int, typer.Option(help="Of one request.", rich_help_panel=_LIMITS)] = 32 * 2**20
    max_total_body_bytes: Annotated[int, typer.Option(help="Of all that are being read.", rich_help_panel=_LIMITS)] = (
        256 * 2**20
    )
    max_requests: Annotated[
        int, typer.Option(help="Sequences that are served or wait; more get 503.", rich_help_panel=_LIMITS)
    ] = 2048
    max_requests_per_key: Annotated[
        int | None, typer.Option(help="Likewise of one key; more get 429.", rich_help_panel=_LIMITS)
    ] = None
    drain_timeout_s: Annotated[
        float, typer.Option(help="Time to end what runs, after SIGTERM.", rich_help_panel=_LIMITS)
    ] = 30.0
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Requests may bring a chat template.")
    ] = False
    vllm_metric_names: Annotated[
        bool, typer.Option("--vllm-metric-names", help="Give every metric under vllm: too.")
    ] = False
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write token ids of prompts into the log.")] = False
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info"
    ssl_keyfile: Annotated[str | None, typer.Option(help="The key.", rich_help_panel=_TLS)] = None
    ssl_certfile: Annotated[str | None, typer.Option(help="The certificate.", rich_help_panel=_TLS)] = None
    ssl_keyfile_password: Annotated[
        str | None, typer.Option(envvar="JPAGED_SSL_KEYFILE_PASSWORD", help="Of the key.", rich_help_panel=_TLS)
    ] = None
    ssl_ca_certs: Annotated[str | None, typer.Option(help="Who signs clients' certificates.", rich_help_panel=_TLS)] = (
        None
    )
    ssl_cert_reqs: Annotated[
        int, typer.Option(help="Clients' certificates: 0 none, 1 optional, 2 required.", rich_help_panel=_TLS)
    ] = 0

    def config(self, models: list[str]) -> "ServerConfig":
        """The server's config.

        Args:
          models: names that the model is served by.

        Raises:
          ConfigError: an option is out of range.
        """
        from jpaged.server.config import ServerConfig

        if not self.api_keys and not os.environ.get(_KEYS_VARIABLE, "x").strip():  # a secret that did not arrive
            raise ConfigError(
                f"{_KEYS_VARIABLE} is set and empty, expected API keys; unset it to serve whoever asks, without keys"
            )
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("api_keys", "admin_keys", "allowed_origins"):
            given[name] = given[name] or ()
        return ServerConfig(models=models, **given)


_SERVER_DEFAULTS: Final = ServerOptions()


@options.flattened
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Known name, folder of safetensors or Orbax, .gguf file, HF id.")
    ] = options.DEFAULT_MODEL,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name", help="Name in requests and answers; may be repeated.", show_default="MODEL"
        ),
    ] = None,
    server: ServerOptions = _SERVER_DEFAULTS,
    max_num_seqs: options.MaxNumSeqs = 32,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a step, prefill and decode together.", rich_help_panel="Engine", show_default="512"
        ),
    ] = None,
    max_num_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a step in which nobody waits for a next token.",
            rich_help_panel="Engine",
            show_default="as of any",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Who is served first: fcfs, or priority.", rich_help_panel="Engine")
    ] = "fcfs",
    warmup: Annotated[
        str, typer.Option(help="eager compiles all steps at the start, lazy when they come.", rich_help_panel="Engine")
    ] = "eager",
    token_buckets: TokenBuckets = None,
    load_format: LoadFormat = "auto",
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process/--engine-thread",
            help="A process of its own is restarted if it fails, and never waits for the server.",
            rich_help_panel="Engine",
        ),
    ] = True,
    engine: options.EngineOptions = options.ENGINE_DEFAULTS,
    progress: options.Bars = None,
) -> None:
    """Serve a model by OpenAI's API, over HTTP.

    Ends in order at SIGTERM or Ctrl-C: what runs may end within --drain-timeout-s, nothing new begins. A second one
    ends at once. What is asked for and how it went is told to standard error, one JSON object a line, without prompts.
    """
    budgets = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_prefill_tokens": max_num_prefill_tokens}
    config = _engine_config(engine, max_num_seqs, budgets, policy, warmup)
    config = replace(config, token_buckets=parsed_buckets(token_buckets))
    served = server.config(models or [model])
    with listener_of(served) as listener:
        loading = {"dtype": engine.dtype, "weights": engine.weights, "progress": progress}
        recipe = {"model": find_model(model, load_format, progress), "config": config, **loading}
        start(served, recipe, listener, load_format=load_format, own_process=engine_process)


def listener_of(config: "ServerConfig") -> socket.socket:
    """See `jpaged.server.bound`, which it is; imports what the server needs, which may be lacking."""
    require_extra()
    from jpaged.server import bound

    return bound(config)


def find_model(model: str, load_format: str, progress: bool | None) -> str:
    """The path of a model, fetched if need be; what it is called, if it is made up.

    Raises:
      ConfigError: there is no such format.
      FetchError: there is no such model.
    """
    if load_format not in MAKERS:
        raise ConfigError(f"load_format is {load_format!r}, expected one of {', '.join(MAKERS)}")
    if load_format == "dummy":
        from jpaged.model_configs import config_of

        config_of(model)
        return model
    from jpaged.fetch import fetch

    return f"{fetch(model, progress=progress)}"


def parsed_buckets(text: str | None) -> tuple[int, ...] | None:
    """The value of --token-buckets.

    Raises:
      ConfigError: it is no list of integers.

    Example:
      >>> parsed_buckets("64,512")
      (64, 512)
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"token_buckets is {text!r:.80}, expected integers with commas between them") from None


def start(
    config: "ServerConfig", recipe: dict[str, Any], listener: socket.socket, *, load_format: str, own_process: bool
) -> None:
    """Serves until it is told to end.

    Args:
      config: of the server.
      recipe: options of the engine's maker.
      listener: see `listener_of`.
      load_format: which maker that is, of `MAKERS`.
      own_process: whether the engine has a process of its own.
    """
    from jpaged.engine_host import limit_arenas
    from jpaged.server.log import set_up_logging
    from jpaged.tokenizer import Tokenizer

    limit_arenas()
    if load_format == "dummy":
        from jpaged.cli.random_model import random_tokenizer

        tokenizer = random_tokenizer(recipe["model"])
    else:
        tokenizer = Tokenizer.load(recipe["model"])
    set_up_logging(config.log_level)
    maker = MAKERS[load_format]
    run(serve_engine(config, recipe, tokenizer, listener=listener, maker=maker, own_process=own_process))


def run(server: Coroutine[Any, Any, None]) -> None:
    """Runs a server on uvloop where there is one, which takes half the time for an event."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(server)


def require_extra() -> None:
    """Raises ConfigError if a package of the extra "server" is lacking."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; the server needs pip install 'jpaged[server]'")


def _engine_config(
    asked: options.EngineOptions, max_num_seqs: int, budgets: dict[str, int | None], policy: str, warmup: str
) -> EngineConfig:
    config = asked.config(max_num_seqs=max_num_seqs)
    changed: dict[str, Any] = {name: budget for name, budget in budgets.items() if budget is not None}
    changed["policy"] = policy
    return replace(config, scheduler=replace(config.scheduler, **changed), warmup=warmup)  # type: ignore[arg-type]


async def serve_engine(
    config: "ServerConfig",
    recipe: dict[str, Any],
    tokenizer: "Tokenizer",
    *,
    listener: socket.socket,
    maker: str,
    own_process: bool,
) -> None:
    from jpaged.engine_host import collect_seldom, freeze_objects
    from jpaged.server import serve as serve_http

    def ready(url: str) -> None:
        freeze_objects()
        collect_seldom()
        say(f"listening at {url}")

    async with _client(recipe, maker, own_process=own_process, log_level=config.log_level) as client:
        say(_decided(config, client.info))
        await serve_http(config, client, tokenizer, listener=listener, on_ready=ready)


def _client(recipe: dict[str, Any], maker: str, *, own_process: bool, log_level: str) -> "AsyncEngine":
    from jpaged.async_engine import AsyncEngine

    if own_process:
        from jpaged.engine_process import EngineProcess, EngineRecipe

        log = {"prepare": "jpaged.server.log:set_up_logging", "prepare_options": {"level": log_level}}
        return AsyncEngine(EngineProcess(EngineRecipe(maker=maker, options=recipe, **log)))
    from jpaged.engine_host import call
    from jpaged.engine_thread import EngineThread

    return AsyncEngine(EngineThread(call(maker, recipe)))


def say(text: str) -> None:
    """Tells whoever started the server."""
    with contextlib.suppress(OSError):  # a full disk under the log, or nobody who reads it, ends no server
        print(text, file=sys.stderr, flush=True)


def _decided(config: "ServerConfig", info: "EngineInfo") -> str:
    """What was decided, and by which option it changes."""
    tokens = (info.num_pages - 1) * info.page_size
    prefill = info.max_num_prefill_tokens
    of_prompts = "" if prefill is None else f", {prefill} of prompts alone (--max-num-prefill-tokens)"
    keys = f"{len(config.api_keys)} API keys" if config.api_keys else "no API key is needed (--api-key)"
    rows = {
        "model": ", ".join(config.models),
        "attention": f"{info.implementation} on {info.device} ({info.implementation_reason})",
        "pages": f"{info.num_pages - 1:,} of {info.page_size} tokens in {info.dtype}: {tokens:,} tokens (--num-pages)",
        "context": f"{info.max_model_len:,} tokens of prompt and answer (--max-model-len)",
        "at once": f"{info.max_num_seqs} sequences (--max-num-seqs), {info.max_num_batched_tokens} tokens a step "
        f"(--max-num-batched-tokens){of_prompts}",
        "order": "by priority" if info.policy == "priority" else "of arrival (--policy)",
        "prefix cache": "on" if info.prefix_cache else "off",
        "waiting": f"{config.max_requests:,} sequences at the most (--max-requests)",
        "clients": f"{keys}; admin endpoints {'on' if config.admin_keys else 'off (--admin-key)'}",
    }
    lines = [f"jpaged {__version__}", *(f"  {name:<14}{value}" for name, value in rows.items())]
    if not config.is_local and not config.api_keys:
        lines.append(f"  warning       whoever reaches {config.host} is served: there is no API key")
    if not config.is_local and config.scheme == "http":
        lines.append("  warning       keys and prompts go over the network in clear: there is no TLS (--ssl-certfile)")
    return "\n".join(lines)
