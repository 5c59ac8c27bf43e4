"""The load test: arrivals, requests, the parsing of answers however they are split, figures, and whole runs."""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.errors import ConfigError
from jpaged.lengths import Lengths
from jpaged.tokenizer import Tokenizer
from scripts import bench_serving, render_benchmarks
from scripts.serving import tables as serving_tables
from scripts.serving.arrivals import random_arrivals, traced_arrivals
from scripts.serving.http_client import CutOffError, Dechunker, HttpClient
from scripts.serving.load import Share, Target, run_load
from scripts.serving.measures import percentiles_ms, read_objective, summarise
from scripts.serving.record import Record
from scripts.serving.sse import EventParser
from scripts.serving.work import Prompts, make_work, pick_rows, read_lengths
from tests.fake_openai_server import FakeServer
from tests.server.tiny_model import write_tokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# Arrivals


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_random_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = random_arrivals(100_000, 5.0, rng(), burstiness=burstiness)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(random_arrivals(50_000, 2.0, rng()))
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(gaps, quantile) == pytest.approx(-np.log(1 - quantile) / 2, rel=0.05)


def test_a_seed_gives_the_same_arrivals_and_another_one_others() -> None:
    assert (random_arrivals(9, 1.0, rng(1)) == random_arrivals(9, 1.0, rng(1))).all()
    assert (random_arrivals(9, 1.0, rng(1)) != random_arrivals(9, 1.0, rng(2)))[1:].all()
    assert len(random_arrivals(1, 1.0, rng())) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: random_arrivals(2, 0.0, rng()), "rate is 0.0"),
        (lambda: random_arrivals(2, float("nan"), rng()), "rate is nan"),
        (lambda: random_arrivals(2, 1.0, rng(), burstiness=-1.0), "burstiness is -1.0"),
        (lambda: traced_arrivals(None), "have no times"),
        (lambda: traced_arrivals(np.zeros(2), scale=0.0), "scale is 0.0"),
    ],
)
def test_impossible_arrivals_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


# Requests


def test_uniform_lengths_reach_both_ends() -> None:
    lengths = read_lengths("uniform:3-5+1-2", rng())
    assert set(lengths.prompt_tokens.tolist()) == {3, 4, 5}
    assert set(lengths.output_tokens.tolist()) == {1, 2}
    for wrong in ("uniform:5-3+1-1", "uniform:5+1", "uniform:1-2+3-x"):
        with pytest.raises(ConfigError, match="uniform"):
            read_lengths(wrong, rng())


def test_rows_are_drawn_once_each_by_weight_or_in_order() -> None:
    lengths = Lengths(source="x", prompt_tokens=np.arange(1, 6), output_tokens=np.ones(5))
    assert sorted(pick_rows(lengths, 5, rng(), in_order=False).tolist()) == [0, 1, 2, 3, 4]
    assert len(pick_rows(lengths, 50, rng(), in_order=False)) == 50
    assert pick_rows(lengths, 3, rng(), in_order=True).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="6 requests were asked for"):
        pick_rows(lengths, 6, rng(), in_order=True)
    weighted = Lengths(source="x", prompt_tokens=[1, 2], output_tokens=[1, 1], weights=[1.0, 9.0])
    assert pick_rows(weighted, 5000, rng(), in_order=False).mean() == pytest.approx(0.9, abs=0.02)


def test_prompts_have_exact_lengths_and_share_what_they_should() -> None:
    prompts = Prompts(vocab_size=100, shared_tokens=5)
    first, second = prompts.make(20, 0, 0), prompts.make(30, 0, 1)
    assert (len(first), len(second)) == (20, 30)
    assert first[:5] == second[:5]
    assert first[5:20] != second[5:20]
    assert first == prompts.make(20, 0, 0) != prompts.make(20, 1, 0)
    assert min(first) >= 3
    assert max(first) < 100
    assert len(prompts.make(2, 0, 0)) == 2


def test_text_prompts_have_exact_lengths_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    prompts = Prompts(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    for count in (1, 7, 40):
        text = prompts.make(count, 0, count)
        assert isinstance(text, str)
        assert len(tokenizer.encode(text)) == count


def test_bodies_say_what_was_asked_for() -> None:
    lengths = Lengths(source="x", prompt_tokens=[4], output_tokens=[0])
    (work,) = make_work(
        lengths,
        [0],
        Prompts(vocab_size=9),
        endpoint="completions",
        model="m",
        stream=True,
        seed=0,
        due_s=np.array([1.5]),
        extra={"top_k": 3, "ignore_eos": None},
    )
    body = json.loads(work.body)
    assert len(body.pop("prompt")) == 4
    assert body == {
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }
    assert work.due_s == 1.5
    with pytest.raises(ConfigError, match="chats need text"):
        make_work(lengths, [0], Prompts(vocab_size=9), endpoint="chat", model="m", stream=True, seed=0)


# Bytes


def split(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


places = st.lists(st.integers(0, 10_000), max_size=12)


@settings(max_examples=50)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), places)
def test_chunks_are_found_however_they_are_split(chunks: list[bytes], where: list[int]) -> None:
    data = b"".join(b"%x;name=value\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    data += b"0\r\ntrailer: x\r\n\r\n"
    dechunker = Dechunker()
    parts = [dechunker.feed(part) for part in split(data, where)]
    assert b"".join(parts) == b"".join(chunks)
    assert dechunker.is_done


def test_wrong_frames_are_named() -> None:
    with pytest.raises(CutOffError, match="'hello'"):
        Dechunker().feed(b"hello\r\n")


texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=50)
@given(st.lists(texts, max_size=6), places, st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_are_found_however_they_are_split(events: list[str], where: list[int], line_end: bytes) -> None:
    blocks = [
        b": a comment\n\ndata: " + event.encode() + b"\n\nevent: x\ndata:two\ndata: lines\n\n" for event in events
    ]
    parser = EventParser()
    found = [event for part in split(b"".join(blocks).replace(b"\n", line_end), where) for event in parser.feed(part)]
    if line_end == b"\r" and events:  # the last "\r" may be half of a line end that is still to come
        found += parser.feed(b": end")
    assert found == [wanted for event in events for wanted in (event.encode(), b"two\nlines")]


# Figures


def record(index: int, due_s: float, event_s: list[float], **more: Any) -> Record:
    values = {"num_output_tokens": len(event_s), "num_prompt_tokens": 10, "end_s": event_s[-1] if event_s else due_s}
    return Record(index, due_s, due_s, event_s, **{**values, **more})


def test_percentiles_are_numpys_in_milliseconds() -> None:
    seconds = rng().random(1000).tolist()
    figures = percentiles_ms(seconds)
    assert figures is not None
    for p in (50, 90, 95, 99):
        assert figures[f"p{p}"] == pytest.approx(1e3 * np.percentile(seconds, p), abs=1e-3)
    assert percentiles_ms([]) is None


def test_figures_of_requests_that_one_can_do_by_hand() -> None:
    records = [
        record(0, 0.0, [0.1, 0.2, 0.4]),
        record(1, 1.0, [1.5, 2.0]),
        record(2, 1.0, [2.0]),
        record(3, 1.0, [], error="http 503", message="too many"),
    ]
    shares = [Share(records=records, cpu_s=1.6, wall_s=2.0, lags_s=[0.001])]
    figures = summarise(shares, {"ttft": 0.5, "tpot": 0.2})
    assert figures["answered"] == 3
    assert figures["errors"] == {"http 503": 1}
    assert figures["first_messages"] == {"http 503": "too many"}
    assert figures["wall_s"] == 2.0
    assert figures["output_tokens"] == 6
    assert figures["output_tokens_per_s"] == 3.0
    assert figures["ttft_ms"]["mean"] == pytest.approx(1e3 * (0.1 + 0.5 + 1.0) / 3, abs=1e-3)
    assert figures["tpot_ms"]["mean"] == pytest.approx(1e3 * (0.15 + 0.5) / 2)
    assert figures["itl_ms"]["max"] == 500
    assert figures["e2e_ms"]["max"] == 1000
    assert figures["good_fraction"] == 0.25  # the first one alone keeps both
    assert figures["goodput_requests_per_s"] == 0.5
    assert figures["client"]["is_bottleneck"]
    assert figures["client"]["busiest_fraction"] == 0.8


@pytest.mark.parametrize("text", ["ttft", "ttft=x", "ttft=0", "itl=1", "ttft=1,ttft=2", ""])
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the objective is"):
        read_objective(text)


# Runs


def load(server: FakeServer, count: int, *, behaviour: str = "", stream: bool = True, **options: Any) -> list[Record]:
    lengths = Lengths(source="x", prompt_tokens=[4], output_tokens=[5])
    due_s = options.pop("due_s", None)
    works = make_work(
        lengths,
        np.zeros(count, int),
        Prompts(vocab_size=9),
        endpoint="completions",
        model="m",
        stream=stream,
        seed=0,
        due_s=due_s,
        extra={"behaviour": behaviour},
    )
    target = Target(url=server.url, path="/v1/completions", timeout_s=options.pop("timeout_s", 30.0))
    return [one for share in run_load(target, works, **options) for one in share.records]


def test_a_closed_loop_keeps_its_concurrency_and_its_connections() -> None:
    with FakeServer() as server:
        records = load(server, 24, concurrency=3)
        assert server.most_at_once == 3
        assert server.num_connections == 3
    assert sorted(one.index for one in records) == list(range(24))
    assert all(one.error is None and one.num_output_tokens == 5 and len(one.event_s) == 5 for one in records)
    assert all(one.num_prompt_tokens == 4 for one in records)


def test_due_requests_are_sent_in_time_and_not_before(server: FakeServer) -> None:
    due_s = np.array([0.0, 0.05, 0.1])
    records = sorted(load(server, 3, concurrency=None, due_s=due_s), key=lambda one: one.index)
    gaps = np.diff([one.due_s for one in records])
    assert gaps == pytest.approx([0.05, 0.05])
    assert all(one.sent_s >= one.due_s - 0.002 for one in records)  # the resolution of uvloop is 1 ms


def test_several_processes_share_the_requests(server: FakeServer) -> None:
    records = load(server, 6, concurrency=4, processes=2)
    assert sorted(one.index for one in records) == list(range(6))
    assert all(one.error is None for one in records)


@pytest.mark.parametrize(
    ("behaviour", "error", "words"),
    [
        ("busy", "http 503", "too many"),
        ("cut off", "cut off", "in the middle"),
        ("fails", "failed in the stream", "it broke"),
        ("hangs", "timeout", "after 0.3 s"),
    ],
)
def test_errors_are_told_apart(server: FakeServer, behaviour: str, error: str, words: str) -> None:
    limits = {"timeout_s": 0.3} if behaviour == "hangs" else {}
    records = load(server, 2, concurrency=2, behaviour=behaviour, **limits)
    assert [one.error for one in records] == [error] * 2
    assert words in records[0].message


def test_no_server_is_an_error_too(server: FakeServer) -> None:
    target = Target(url="http://127.0.0.1:9", path="/v1/completions")
    lengths = Lengths(source="x", prompt_tokens=[4], output_tokens=[5])
    works = make_work(lengths, [0], Prompts(vocab_size=9), endpoint="completions", model="m", stream=False, seed=0)
    ((one,),) = (share.records for share in run_load(target, works, concurrency=1))
    assert one.error == "no connection"


def test_an_answer_in_one_piece_has_no_time_per_token(server: FakeServer) -> None:
    (one,) = load(server, 1, concurrency=1, stream=False)
    assert one.error is None
    assert one.num_output_tokens == 5
    assert one.tpot_s is None


def test_a_connection_that_ended_while_idle_is_replaced(server: FakeServer) -> None:
    async def run() -> list[int]:
        client = HttpClient(server.url)
        statuses = [(await client.get("/health"))[0]]
        client._idle[0][1].close()  # as if the server had ended it
        statuses.append((await client.get("/health"))[0])
        client.close()
        return statuses

    assert asyncio.run(run()) == [200, 200]


def test_wrong_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a URL"):
        HttpClient("localhost:8000")


def test_the_whole_command(server: FakeServer, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    plot, kept = tmp_path / "plot.png", tmp_path / "records.jsonl"
    words = f"--url {server.url} --rate 100,200 --requests 10 --lengths uniform:2-5+2-4 --objective ttft=5,tpot=5"
    monkeypatch.setattr(sys, "argv", ["bench_serving", *words.split(), "--plot", f"{plot}", "--records", f"{kept}"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    assert bench_serving.main() == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = printed["results"]
    assert printed["script"] == "bench_serving"
    assert (results["model"], results["server"]) == ("fake", "nobody")
    assert [run["load"] for run in results["runs"]] == ["100 requests/s", "200 requests/s"]
    assert all(run["answered"] == 10 and run["good_fraction"] == 1 for run in results["runs"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(kept.read_text().splitlines()) == 20


def test_every_run_is_a_row() -> None:
    figures = summarise([Share(records=[record(0, 0.0, [0.1])], cpu_s=0.1, wall_s=1.0, lags_s=[])])
    results = {
        "server": "x 1",
        "model": "m",
        "server_device": None,
        "lengths": "fixed",
        "stream": True,
        "runs": [{"load": name, **figures} for name in ("1 at once", "2 at once")],
    }
    made = render_benchmarks.Record("serving-x", "bench_serving", "abc", "2026-01-02", "a CPU", "3.11", {}, results)
    header, _, *rows = serving_tables.load_table([made]).splitlines()
    assert len(rows) == 2
    assert {line.count("|") for line in (header, *rows)} == {header.count("|")}
    assert "| 2 at once | 10.00 |" in rows[1]
