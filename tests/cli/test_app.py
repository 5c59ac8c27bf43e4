"""Exit codes, one-line errors, and a start without jax."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import PATIENCE_S, ROOT, SMALL, started


def test_help_names_the_commands_and_the_exit_codes(jpaged) -> None:
    result = jpaged("--help")
    assert result.exit_code == 0
    for word in ("generate", "chat", "fetch", "info", "130"):
        assert word in result.stdout


@pytest.mark.parametrize("name", ["generate", "chat", "fetch", "info"])
def test_every_command_has_help(jpaged, name: str) -> None:
    result = jpaged(name, "--help")
    assert result.exit_code == 0
    assert f"jpaged {name}" in result.stdout


def test_version(jpaged) -> None:
    from jpaged import __version__

    assert jpaged("--version").stdout == f"jpaged {__version__}\n"


def test_the_command_starts_without_jax() -> None:
    code = "import sys, jpaged.cli; sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S).returncode == 0


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [
        (["generate", "x", "--temperature", "3"], 2, "--temperature is 3.0"),
        (["generate", "x", "--top-p", "nan"], 2, "--top-p is nan"),
        (["generate", "x", "--max-tokens", "0"], 2, "--max-tokens is 0"),
        (["generate", "x", "--stop", ""], 2, "stop holds ''"),
        (["generate", "x", "--page-size", "12"], 2, "--page-size is 12"),
        (["generate", "x", "--max-num-seqs", "0"], 2, "--max-num-seqs is 0"),
        (["generate", "x", "y", "--stream"], 2, "--stream"),
        (["generate", "x", "--stream", "--json"], 2, "--stream"),
        (["generate", "caf\udce9"], 2, "not valid UTF-8 at character 3"),
        (["chat", "--min-p", "2"], 2, "--min-p is 2.0"),
        (["generate", "x", "--dtype", "int8"], 2, "--dtype is 'int8'"),
        (["generate", "x", "--weights", "int4"], 2, "weights is 'int4', expected one of int8, fp8"),
        (["info", "--dtype", "float31"], 2, "dtype is 'float31'"),
        (["chat", "--implementation", "cuda"], 2, "implementation is 'cuda'"),
        (["info", "--num-pages", "1"], 2, "--num-pages is 1"),
        (["generate", "x", "--model", "./no-such-model"], 1, "no-such-model"),
        (["chat", "--model", "./no-such-model"], 1, "no-such-model"),
        (["info", "./no-such-model"], 1, "no-such-model"),
        (["fetch", "./no-such-model"], 1, "no-such-model"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(jpaged, args: list[str], exit_code: int, words: str) -> None:
    result = jpaged(*args)
    assert result.exit_code == exit_code
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("jpaged: error: ")
    assert words in line


@pytest.mark.parametrize("args", [["generate", "--no-such-option"], ["no-such-command"], ["fetch"]])
def test_wrong_usage_is_exit_code_2(jpaged, args: list[str]) -> None:
    result = jpaged(*args)
    assert result.exit_code == 2
    assert "Usage: jpaged" in result.stderr


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", "the prompt is empty"), ("x" * 300, "300")],
)
def test_a_refused_request_is_exit_code_2(jpaged, tiny_folder: Path, prompt: str, words: str) -> None:
    result = jpaged("generate", prompt, "--model", tiny_folder, *SMALL)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_damaged_checkpoint_is_exit_code_1(jpaged, tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    result = jpaged("generate", "x", "--model", tmp_path)
    assert result.exit_code == 1
    assert "model.safetensors" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_debug_shows_where_an_error_came_from(jpaged) -> None:
    result = jpaged("--debug", "generate", "x", "--temperature", "3")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "_check_numbers" in result.stderr


def test_an_unexpected_error_is_one_line_too(jpaged, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Path:
        raise OverflowError("some\nbug")

    monkeypatch.setattr("jpaged.fetch.fetch", fail)
    result = jpaged("fetch", "x")
    assert result.exit_code == 1
    assert result.stderr == "jpaged: error: unexpected OverflowError: some bug (`jpaged --debug ...` shows where)\n"


def test_ctrl_c_is_one_line_and_exit_code_130(tiny_folder: Path) -> None:
    args = ("generate", "x", "--model", tiny_folder, "--stream", "--max-tokens", "60000")
    with started(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it generates
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert errors == "jpaged: interrupted\n"


INTERRUPTED = """
import sys, threading
import jpaged.cli
threading.Thread(target=threading.Event().wait).start()  # as one that compiles: it does not look at signals
sys.modules["jpaged.cli.app"].app = lambda **_: sys.exit(130)
print("told", end="")
jpaged.cli.main()
"""


def test_after_ctrl_c_no_thread_is_waited_for() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    child = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert (child.returncode, child.stdout) == (130, "told")


def test_a_reader_that_goes_away_is_quiet(tiny_folder: Path) -> None:
    args = ("generate", "x", "--model", tiny_folder, "--stream", "--max-tokens", "60000")
    with started(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=PATIENCE_S) == 141
