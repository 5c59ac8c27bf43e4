"""`jpaged serve`: what it refuses, what it decides, how it ends."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cli.conftest import PATIENCE_S, SMALL, started


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-requests", "0"), "--max-requests is 0"),
        (("--policy", "lottery"), "--policy is 'lottery'"),
        (("--warmup", "late"), "--warmup is 'late'"),
        (("--api-key", "short"), "--api-key has a key that is not 8 to 512"),
        (("--served-model-name", ""), "--served-model-name is ['']"),
        (("--ssl-keyfile", __file__, "--ssl-certfile", __file__), "cannot be used"),
        (("--ssl-keyfile", "x"), "both --ssl-keyfile and --ssl-certfile"),
        (("--max-num-batched-tokens", "3"), "at least --max-num-seqs"),
        (
            ("--max-num-batched-tokens", "1024", "--max-num-prefill-tokens", "1023"),
            "--max-num-prefill-tokens is 1023, expected an integer of at least --max-num-batched-tokens (1024)",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(jpaged, options, words) -> None:
    result = jpaged("serve", "/nowhere", *options)
    assert result.exit_code == 2, result.output
    assert words in result.stderr


def test_a_taken_port_is_refused_before_anything_is_loaded(jpaged) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = jpaged("serve", "/nowhere", "--port", taken.getsockname()[1])
    assert result.exit_code == 2, result.output
    assert "Address already in use; choose another --host or --port" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_log_ends_no_server(monkeypatch) -> None:
    from jpaged.cli.serve import say

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("listening")
        with contextlib.suppress(OSError):  # what is left in its buffer
            full.close()


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_of_keys_opens_nothing(jpaged, monkeypatch, empty) -> None:
    monkeypatch.setenv("JPAGED_API_KEYS", empty)
    result = jpaged("serve", "/nowhere")
    assert result.exit_code == 2, result.output
    assert "JPAGED_API_KEYS is set and empty" in result.stderr
    assert "is set and empty" not in jpaged("serve", "/nowhere", "--api-key", "a-long-key").stderr


def test_keys_are_not_shown() -> None:
    from jpaged.cli.serve import ServerOptions

    config = ServerOptions(api_keys=["secret-key"], admin_keys=["secret-admin"]).config(["tiny"])
    assert config.api_keys == ("secret-key",)
    assert "secret" not in repr(config)


def ask(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def test_serves_until_it_is_told_to_end(tiny_folder: Path) -> None:
    options = ("--port", "0", "--warmup", "lazy", "--no-progress", "--served-model-name", "tiny")
    options += ("--max-num-batched-tokens", "256", "--max-num-prefill-tokens", "1024")
    with started("serve", tiny_folder, *options, *SMALL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        told = []
        for line in server.stderr:
            told.append(line)
            if line.startswith("listening at "):
                break
        url = told[-1].split()[-1]
        assert any("pages" in line and "--num-pages" in line for line in told)
        budgets = "256 tokens a step (--max-num-batched-tokens), 1024 of prompts alone (--max-num-prefill-tokens)"
        assert any(line.endswith(f"{budgets}\n") for line in told)
        answer = ask(f"{url}/v1/completions", {"model": "tiny", "prompt": "ab", "max_tokens": 3, "temperature": 0})
        assert answer["usage"]["completion_tokens"] == 3
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(f"{url}/v1/completions", {"prompt": "ab", "top_p": 7})
        server.send_signal(signal.SIGTERM)
        _, rest = server.communicate(timeout=PATIENCE_S)
        assert server.returncode == 0, rest
        assert '"message": "draining"' in rest
        assert "Traceback" not in rest
