"""Keys, limits, clients that leave, engines that fail, and the end of the server."""

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jpaged.server.shared_answer import FRESH_S
from jpaged.structured import DEAD_END, FORM_FAILED, FORM_TOO_COMPLEX, TOO_MANY_WAIT
from tests.server.running import PATIENCE_S, events

TEXT = {"prompt": "ab", "max_tokens": 4}
PATH = "/v1/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(start):
    with start(api_keys=["first-key", "second-key"], admin_keys=["admin-key"], max_requests_per_key=2) as server:
        yield server


# --- keys -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong-key"), {"authorization": "first-key"}, {"authorization": "Basic first-key"}]
)
def test_without_a_key_nobody_is_served(keyed, headers) -> None:
    for method, path in (("POST", PATH), ("POST", "/tokenize"), ("GET", "/v1/models"), ("GET", "/internal/state")):
        response = keyed.http.request(method, path, json=TEXT if method == "POST" else None, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "AuthenticationError"
    for path in ("/health", "/ping", "/version", "/metrics", "/load", "/openapi.json"):
        assert keyed.http.get(path).status_code == 200


def test_keys_never_share_prefixes(keyed) -> None:
    keyed.client.seen.clear()
    for key in ("first-key", "second-key", "admin-key"):
        for salt in (None, "own"):
            body = TEXT | {"cache_salt": salt}
            assert keyed.http.post(PATH, json=body, headers=bearer(key)).status_code == 200
    salts = [seen["cache_salt"] for seen in keyed.client.seen]
    assert len(set(salts)) == 6
    assert None not in salts
    assert not any("key" in salt for salt in salts)
    keyed.http.post(PATH, json=TEXT, headers=bearer("first-key"))
    assert keyed.client.seen[-1]["cache_salt"] == salts[0]


def test_nobody_sees_the_ids_of_others(keyed) -> None:
    keyed.do(keyed.client.gate.clear)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(keyed.http.post, PATH, json=TEXT | {"request_id": "mine"}, headers=bearer("first-key"))
        keyed.wait_until(lambda: keyed.client.num_live == 1)
        time.sleep(FRESH_S)  # another test may have looked just before
        seen = {
            key: keyed.http.get("/internal/state", headers=bearer(key)).json()["requests"][0]["request_id"]
            for key in ("first-key", "second-key", "admin-key")
        }
        keyed.do(keyed.client.gate.set)
        assert waiting.result().status_code == 200
    assert seen == {"first-key": "cmpl-mine", "second-key": None, "admin-key": "cmpl-mine"}


# --- admin ------------------------------------------------------------------------------------------------------------
def test_admin_endpoints(keyed, server) -> None:
    paths = ("/reset_prefix_cache", "/pause", "/resume", "/abort_requests")
    for path in paths:
        assert server.http.post(path).status_code == 404
        assert keyed.http.post(path).status_code == 401
        assert keyed.http.post(path, headers=bearer("first-key")).status_code == 403
    admin = bearer("admin-key")
    keyed.client.seen.clear()
    assert keyed.http.post("/reset_prefix_cache", headers=admin).status_code == 200
    assert keyed.http.post("/pause", json={"mode": "keep", "clear_cache": False}, headers=admin).json() == {
        "is_paused": True
    }
    assert keyed.http.get("/is_paused", headers=admin).json() == {"is_paused": True}
    assert keyed.http.post("/resume", headers=admin).json() == {"is_paused": False}
    assert keyed.client.seen == [{"reset": True}, {"pause": "keep", "clear_cache": False}]
    response = keyed.http.post("/pause", json={"mode": "x"}, headers=admin)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "mode")


def test_abort_by_the_id_of_the_answer(keyed) -> None:
    admin = bearer("admin-key")
    assert keyed.http.post("/abort_requests", json={"request_ids": ["nobody"]}, headers=admin).status_code == 404
    keyed.do(keyed.client.gate.clear)
    try:
        with ThreadPoolExecutor(1) as pool:
            body = TEXT | {"prompt": ["ab", "cd"], "request_id": "mine"}
            waiting = pool.submit(keyed.http.post, PATH, json=body, headers=bearer("first-key"))
            keyed.wait_until(lambda: keyed.client.num_live == 2)
            done = keyed.http.post("/abort_requests", json={"request_ids": ["cmpl-mine"]}, headers=admin)
            choices = waiting.result().json()["choices"]
    finally:
        keyed.do(keyed.client.gate.set)
    assert done.json() == {"num_aborted": 2}
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]


# --- limits -----------------------------------------------------------------------------------------------------------
def test_a_key_has_its_limit(keyed) -> None:
    too_many = keyed.http.post(PATH, json=TEXT | {"n": 3}, headers=bearer("first-key"))
    assert (too_many.status_code, "retry-after" in too_many.headers) == (400, False)  # to come again would not help
    keyed.do(keyed.client.gate.clear)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(keyed.http.post, PATH, json=TEXT | {"n": 2}, headers=bearer("first-key"))
        keyed.wait_until(lambda: keyed.client.num_live == 1)
        response = keyed.http.post(PATH, json=TEXT, headers=bearer("first-key"))
        keyed.do(keyed.client.gate.set)
        assert waiting.result().status_code == 200
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "RateLimitError"
    assert response.headers["retry-after"] == "1"
    assert keyed.http.post(PATH, json=TEXT | {"n": 2}, headers=bearer("first-key")).status_code == 200


def test_the_server_has_its_limit(start) -> None:
    with start(max_requests=2, max_body_bytes=4096) as server:
        server.do(server.client.gate.clear)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.http.post, PATH, json=TEXT | {"n": 2})
            server.wait_until(lambda: server.client.num_live == 1)
            response = server.http.post(PATH, json=TEXT)
            server.do(server.client.gate.set)
            assert waiting.result().status_code == 200
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert server.http.post(PATH, json=TEXT | {"prompt": ["a"] * 3}).status_code == 400
        assert server.http.post(PATH, json=TEXT).status_code == 200
        text = server.http.get("/metrics").text
        assert 'jpaged:admission_rejections_total{reason="queue_full"} 1.0' in text

        response = server.http.post(PATH, json=TEXT | {"prompt": "x" * 5000})
        assert (response.status_code, response.json()["error"]["code"]) == (413, 413)
        pieces = (b"x" * 1000 for _ in range(10))
        response = server.http.post(PATH, content=pieces, headers={"content-type": "application/json"})
        assert response.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_the_whole_answer_may_ask_again(start, stream) -> None:
    """There is room, its id is free, and it is counted."""
    with start(max_requests=1, admin_keys=["admin-key"]) as server:
        for number in range(1, 21):
            body = TEXT | {"stream": stream, "request_id": "mine"}
            assert server.http.post(PATH, json=body).status_code == 200
            assert server.http.get("/load").json() == {"server_load": 1}
            counted = f'jpaged:http_responses_total{{path="{PATH}",status="200"}} {number}.0'
            assert counted in server.http.get("/metrics").text
            asked = {"json": {"request_ids": ["cmpl-mine"]}, "headers": bearer("admin-key")}
            assert server.http.post("/abort_requests", **asked).status_code == 404
        assert {seen["request_id"] for seen in server.client.seen} == {"cmpl-mine"}


def test_slow_bodies_and_many_large_ones(start) -> None:
    with start(body_timeout_s=0.1, max_total_body_bytes=8192) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
            connection.sendall(head.encode() + b"{")
            assert b" 408 " in connection.recv(65536)
        response = server.http.post(PATH, json=TEXT | {"prompt": "x" * 9000})
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert server.http.post(PATH, json=TEXT).status_code == 200


# --- clients that leave -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"]])
def test_a_client_that_leaves_ends_its_requests(server, stream, prompt) -> None:
    server.do(server.client.gate.clear)
    before = server.client.finished.get("abort", 0)
    count = 1 if isinstance(prompt, str) else len(prompt)
    body = json.dumps(TEXT | {"stream": stream, "prompt": prompt}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        server.wait_until(lambda: server.client.num_live == count)
    server.wait_until(lambda: server.client.num_live == 0)
    server.do(server.client.gate.set)
    assert server.client.finished["abort"] == before + count


def test_who_sends_no_request_and_who_reads_nothing_is_dropped(start, monkeypatch) -> None:
    from jpaged.server import run

    def bound(config, bound=run.bound):
        listener = bound(config)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(run, "bound", bound)
    monkeypatch.setattr(run, "_LEAST_REQUEST_S", 0.1)
    with start(keep_alive_s=0, send_timeout_s=0.1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for sent in (b"", b"GET /health HTTP/1.1\r\nHos"):
            with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
                connection.sendall(sent)
                assert connection.recv(1) == b""
        body = json.dumps(TEXT | {"stream": True, "n": 8, "max_tokens": 250, "logprobs": 5, "temperature": 1}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            server.wait_until(lambda: server.client.num_live == 1)
            server.wait_until(lambda: server.client.num_live == 0)
        assert server.client.finished == {"abort": 1}


# --- engines that fail ------------------------------------------------------------------------------------------------
def test_a_failed_request(server) -> None:
    server.client.fails_next = "the model produced NaN"
    response = server.http.post(PATH, json=TEXT)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the model produced NaN"
    server.client.fails_next = "the model produced NaN"
    response = server.http.post(PATH, json=TEXT | {"stream": True})
    assert response.status_code == 200
    assert [event["error"]["code"] for event in events(response)] == [500]
    assert server.http.post(PATH, json=TEXT).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        ("structured.regex is refused: no", 400, "structured_outputs.regex is refused: no"),
        (DEAD_END, 400, DEAD_END),
        (f"{FORM_TOO_COMPLEX}: states", 400, f"{FORM_TOO_COMPLEX}: states"),
        (TOO_MANY_WAIT, 503, TOO_MANY_WAIT),
        (f"{FORM_FAILED} (regex): x", 500, f"{FORM_FAILED} (regex): x"),
    ],
)
def test_a_form_that_cannot_be_compiled_or_followed(server, error, status, words) -> None:
    """Whose fault it is decides: OpenAI's clients send again what ended with 500."""
    body = TEXT | {"structured_outputs": {"regex": "a"}}
    for stream in (False, True):  # nothing of the answer was sent yet
        server.client.fails_next = error
        response = server.http.post(PATH, json=body | {"stream": stream})
        told = response.json()["error"]
        assert (response.status_code, told["code"], told["message"]) == (status, status, words)
        assert told["param"] == (None if status == 500 else "structured_outputs")
        assert ("retry-after" in response.headers) == (status == 503)
    server.client.fails_next = error
    body = TEXT | {"response_format": {"type": "json_object"}}
    assert server.http.post(PATH, json=body).json()["error"]["param"] == (None if status == 500 else "response_format")


def test_a_failed_engine(start) -> None:
    with start() as server:
        server.client.failure = "a step failed"
        response = server.http.post(PATH, json=TEXT)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        events_ = events(server.http.post(PATH, json=TEXT | {"stream": True}))
        assert events_[-1]["error"] == {
            "message": "a step failed",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
        server.client.state = "restarting"
        for path in ("/health", "/ping", "/internal/state"):
            assert server.http.get(path).status_code == 503
        assert server.http.post(PATH, json=TEXT).status_code == 503
        assert "jpaged:engine_up 0.0" in server.http.get("/metrics").text
        server.client.state, server.client.failure = "ready", None
        assert server.http.get("/health").status_code == 200


# --- the end ----------------------------------------------------------------------------------------------------------
def test_what_runs_may_end_and_nothing_new_begins(start) -> None:
    with start(drain_timeout_s=PATIENCE_S) as server, ThreadPoolExecutor(1) as pool:
        server.do(server.client.gate.clear)
        waiting = pool.submit(server.http.post, PATH, json=TEXT | {"stream": True})
        server.wait_until(lambda: server.client.num_live == 1)
        server.stop()
        with httpx.Client(base_url=server.url, trust_env=False) as other:
            while other.get("/health").status_code == 200:
                time.sleep(0.001)
            response = other.post(PATH, json=TEXT)
        assert response.status_code == 503
        assert "about to end" in response.json()["error"]["message"]
        server.do(server.client.gate.set)
        assert len(events(waiting.result())) == 4
    assert server.client.state == "closed"


def test_what_does_not_end_in_time_is_ended(start) -> None:
    with start(drain_timeout_s=0) as server, ThreadPoolExecutor(1) as pool:
        server.do(server.client.gate.clear)
        waiting = pool.submit(server.http.post, PATH, json=TEXT)
        server.wait_until(lambda: server.client.num_live == 1)
        server.stop()
        assert waiting.result().json()["choices"][0]["finish_reason"] == "abort"


def test_a_port_that_is_taken_is_named(start, server) -> None:
    from jpaged.errors import ConfigError

    with (
        pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1, port \d+: .*--port"),
        start(port=httpx.URL(server.url).port),
    ):
        pass


# --- the log ----------------------------------------------------------------------------------------------------------
def lines(caplog) -> list:
    """About requests that were served."""
    return [record for record in caplog.records if record.name == "jpaged.access" and record.msg == "request"]


def test_the_log_holds_no_prompt(server, caplog) -> None:
    from jpaged.server.log import JsonLines

    with caplog.at_level(logging.INFO, "jpaged.access"):
        server.http.post(PATH, json={"prompt": "secret", "max_tokens": 2, "request_id": "mine"})
        # The line comes after the answer, and other tests' lines may come as late.
        server.wait_until(lambda: any(record.fields["request_id"] == "cmpl-mine" for record in lines(caplog)))
    (record,) = [record for record in lines(caplog) if record.fields["request_id"] == "cmpl-mine"]
    line = json.loads(JsonLines().format(record))
    assert line["request_id"] == "cmpl-mine"
    assert (line["status"], line["prompt_tokens"], line["completion_tokens"], line["tenant"]) == (200, 6, 2, "anybody")
    assert "secret" not in json.dumps(line)
    assert not any(isinstance(value, list) for value in line.values())


def test_prompts_are_logged_where_that_is_asked_for(start, caplog) -> None:
    with caplog.at_level(logging.INFO, "jpaged.access"), start(log_prompts=True) as server:
        server.http.post(PATH, json={"prompt": [5, 6], "max_tokens": 1})
    (record,) = lines(caplog)
    assert [list(ids) for ids in record.fields["prompt_token_ids"]] == [[5, 6]]


def test_many_at_once(server) -> None:
    """Requests of several threads do not meet; ids that clients choose alike are kept apart."""
    barrier = threading.Barrier(8)

    def ask(number: int) -> str:
        barrier.wait(PATIENCE_S)
        body = {"prompt": chr(97 + number), "max_tokens": 8, "request_id": "same"}
        return server.http.post(PATH, json=body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(8)))
    assert texts == [chr(97 + number) * 8 for number in range(8)]
