"""A tiny model folder, and ways to run the command: in this process, in another one, on a terminal."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny_vocabs import CHATML, byte_alphabet

ROOT = Path(__file__).parents[2]
# A pool that is made in no time, and room for the tests' prompts.
SMALL = ("--max-num-seqs", "4", "--num-pages", "65", "--max-model-len", "256")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 259 tokens (3 special ones and the bytes), its tokenizer and template.

    It has a long context and no end-of-sequence token, so that an answer ends only where a test says so.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from jpaged.models import export_safetensors
    from tests.fakes import tiny_llama

    folder = tmp_path_factory.mktemp("model") / "tiny"
    export_safetensors(tiny_llama(vocab_size=259, max_position_embeddings=65536), folder)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*special, *byte_alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def loaded() -> dict:
    """Models and engines that tests in this process share, by how they were asked for: each compiles its steps once."""
    return {}


@pytest.fixture
def jpaged(loaded: dict, monkeypatch: pytest.MonkeyPatch):
    """Runs the command in this process: `jpaged("generate", "Hi", input="...")`."""
    from jpaged.cli import app
    from jpaged.cli.options import EngineOptions

    load = EngineOptions.load

    def load_once(self: EngineOptions, model: str, **options):
        key = (self, model, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = load(self, model, **options)
        return loaded[key]

    monkeypatch.setattr(EngineOptions, "load", load_once)

    def run(*args: str | Path, input: str | bytes | None = None):
        return CliRunner().invoke(app, [str(arg) for arg in args], input=input, catch_exceptions=False)

    return run


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "jpaged.cli", *map(str, args)]


@contextlib.contextmanager
def started(*args: str | Path, **options) -> Iterator[subprocess.Popen]:
    """The command in a process of its own, ended at the latest with the block."""
    with subprocess.Popen(command(*args), cwd=ROOT, **options) as process:
        try:
            yield process
        finally:
            process.kill()


# No process of these tests is silent for so long, even on a busy machine.
PATIENCE_S = 180

# A fresh session has no terminal for Ctrl-C to come from: takes the standard input, and becomes what follows.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """The command on a terminal of its own.

    Attributes:
      shown: everything that it has written.
    """

    def __init__(self, *args: str | Path):
        self.shown = ""
        self._seen = 0
        self._fd, inner = pty.openpty()
        ends = {"stdin": inner, "stdout": inner, "stderr": inner}
        argv = [sys.executable, "-c", _TAKE_TERMINAL, *command(*args)]
        self._process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True, **ends)
        os.close(inner)

    def wait_for(self, text: str) -> str:
        """Reads until `text` comes, after what was waited for before; gives what came up to there."""
        while (at := self.shown.find(text, self._seen)) < 0:
            assert self._read(), f"ended before {text!r}: {self.shown[self._seen :]!r}"
        before, self._seen = self.shown[self._seen : at], at + len(text)
        return before

    def wait_for_more(self) -> None:
        """Reads until something comes, whatever it is, after what was waited for before."""
        while len(self.shown) == self._seen:
            assert self._read(), "ended before anything came"
        self._seen = len(self.shown)

    def type(self, text: str) -> None:
        """Types text; \\x03 is Ctrl-C, \\x04 is Ctrl-D."""
        os.write(self._fd, text.encode())

    def interrupt(self) -> int:
        """Types Ctrl-C at a prompt until the command ends; gives its exit code.

        Once is not enough: Python's `input` shows the prompt, then waits for input, and misses a signal in between.
        """
        self.type("\x03")
        while self._process.poll() is None:
            if not select.select([self._fd], [], [], 5)[0]:
                self.type("\x03")
            elif not self._read():
                break
        return self.exit_code()

    def exit_code(self) -> int:
        """Waits for the end."""
        while self._read():
            pass
        return self._process.wait()

    def _read(self) -> bool:
        ready, _, _ = select.select([self._fd], [], [], PATIENCE_S)
        assert ready, f"nothing came for {PATIENCE_S} s after {self.shown!r}"
        try:
            chunk = os.read(self._fd, 65536)
        except OSError:  # Linux's way to say that the other side has closed
            return False
        self.shown += chunk.decode(errors="replace")
        return bool(chunk)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts the command on a terminal: `terminal("chat", ...)`."""
    opened: list[Terminal] = []

    def start(*args: str | Path) -> Terminal:
        opened.append(Terminal(*args))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
