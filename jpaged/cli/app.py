"""The command group: its exit codes, its errors in one line, and the list of commands."""

import contextlib
import inspect
import os
import sys
import traceback
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from jpaged import __version__
from jpaged.cli.chat import chat
from jpaged.cli.fetch import fetch
from jpaged.cli.generate import generate
from jpaged.cli.info import info
from jpaged.cli.option_names import flags_of, with_flags
from jpaged.cli.plan import plan
from jpaged.cli.serve import serve
from jpaged.errors import ConfigError, JpagedError, RequestError

EXIT_ERROR: Final = 1
EXIT_REFUSED: Final = 2
EXIT_INTERRUPTED: Final = 128 + 2  # as if SIGINT had ended the process
EXIT_BROKEN_PIPE: Final = 128 + 13  # as if SIGPIPE had


class _Commands(TyperGroup):
    """Turns what a command raises into one line on the error stream and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a reader that has gone is noticed here, not while the interpreter shuts down
            return result
        except KeyboardInterrupt:
            print("jpaged: interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # Whatever is still buffered has no reader either; the interpreter would complain when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if hasattr(error, "format_message"):  # a usage error, which typer shows
                raise
            if ctx.params.get("debug"):
                traceback.print_exc()
            print(f"jpaged: error: {with_flags(_one_line(error), self._flags(ctx))}", file=sys.stderr)
            raise typer.Exit(EXIT_REFUSED if isinstance(error, ConfigError | RequestError) else EXIT_ERROR) from None

    def _flags(self, ctx: Any) -> dict[str, str]:
        """Of the command that was called."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        return {} if command is None else flags_of(command.params)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, JpagedError | NotImplementedError) and text:
        return text
    return f"unexpected {type(error).__name__}: {text} (`jpaged --debug ...` shows where)"


def _reflowed(doc: str | None) -> str:
    """A docstring whose paragraphs are one line each, for the terminal to wrap."""
    paragraphs = inspect.cleandoc(doc or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


app = typer.Typer(
    name="jpaged",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (generate, chat, serve, fetch, info, plan):
    app.command(help=_reflowed(_command.__doc__))(_command)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"jpaged {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 done, 1 something failed, 2 wrong usage or a refused request, 130 interrupted, 141 the "
    "reader of the output went away."
)
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Language models whose KV cache lives in pages, on GPU, TPU and CPU."""


def main() -> None:
    """Runs the command and ends the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets an escape, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app(prog_name="jpaged")
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            # The interpreter's end would wait for threads that compile, half a minute perhaps.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(EXIT_INTERRUPTED)
        raise
