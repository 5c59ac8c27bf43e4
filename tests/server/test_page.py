"""The built-in page: its routes and headers, and that its files and what they ask for fit together."""

import re
import time
from pathlib import Path

import pytest

from jpaged.server.page import page_routes
from jpaged.server.shared_answer import FRESH_S

STATIC = Path(__file__).parents[2] / "jpaged" / "server" / "static"
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def test_every_file_has_a_route() -> None:
    expected = {"/" if name == "index.html" else f"/static/{name}" for name in SOURCES}
    assert {route.path for route in page_routes()} == expected


@pytest.mark.parametrize("name", SOURCES)
def test_files_and_headers(server, name: str) -> None:
    path = "/" if name == "index.html" else f"/static/{name}"
    response = server.http.get(path)
    assert (response.status_code, response.text) == (200, SOURCES[name])
    headers = response.headers
    assert headers["content-type"] == TYPES[Path(name).suffix]
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert headers["cache-control"] == "no-cache"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) == {"'none'", "'self'"}, "no other host, nothing inline"
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'")
    assert server.http.head(path).headers["etag"] == headers["etag"]


@pytest.mark.parametrize(
    ("known", "status"), [("{}", 304), ("W/{}", 304), ('"old", {}', 304), ("*", 304), ('"old"', 200), ("", 200)]
)
def test_a_file_that_is_known_is_not_sent_again(server, known: str, status: int) -> None:
    etag = server.http.get("/").headers["etag"]
    response = server.http.get("/", headers={"if-none-match": known.format(etag)})
    assert (response.status_code, response.content == b"") == (status, status == 304)
    assert response.headers["etag"] == etag
    assert "content-security-policy" in response.headers


def test_nothing_else_is_served(server) -> None:
    for path in ("/static/", "/static/app.py", "/static/../page.py", "/static/%2e%2e/page.py", "/static/page.py"):
        assert server.http.get(path).status_code == 404
    assert server.http.post("/").status_code == 405


def test_the_page_needs_no_key_and_can_be_left_out(start) -> None:
    with start(api_keys=("a-key-of-mine",)) as server:
        assert server.http.get("/").status_code == 200
        assert server.http.get("/internal/state").status_code == 401
        state = server.http.get("/internal/state", headers={"authorization": "Bearer a-key-of-mine"})
        assert state.status_code == 200
    with start(page=False) as server:
        assert server.http.get("/").status_code == server.http.get("/static/page.js").status_code == 404
        assert server.http.get("/internal/state").status_code == 200


def test_names_no_other_host_and_nothing_inline() -> None:
    for name, text in SOURCES.items():
        hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", text)) - {"www.w3.org"}  # the name of SVG
        assert not hosts, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|localStorage", text), (
            name
        )
    page = SOURCES["index.html"]
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", page)
    for address in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert address.removeprefix("static/") in SOURCES  # relative: it works under a proxy's prefix too


def test_what_scripts_name_exists() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', SOURCES["index.html"]))
    for name, text in SOURCES.items():
        if name.endswith(".js"):
            assert set(re.findall(r'byId\("([\w-]+)"\)', text)) <= ids
            for names, module in re.findall(r'import \{ ([^}]+) \} from "\./([\w.]+)"', text):
                for one in names.split(", "):
                    assert re.search(rf"export (?:async )?(?:class|const|function\*?) {one}\b", SOURCES[module]), one


def test_every_field_has_a_label() -> None:
    page = SOURCES["index.html"]
    labelled = set(re.findall(r'<label[^>]* for="([\w-]+)"', page))
    for label in re.findall(r"<label[^>]*>.*?</label>", page, re.DOTALL):
        labelled |= set(re.findall(r'<(?:input|select|textarea)[^>]* id="([\w-]+)"', label))
    assert labelled == set(re.findall(r'<(?:input|select|textarea)[^>]* id="([\w-]+)"', page))


def test_the_state_has_what_the_page_shows(server) -> None:
    server.do(server.client.gate.clear)
    with server.http.stream("POST", "/v1/completions", json={"prompt": "ab", "max_tokens": 9, "stream": True}):
        server.wait_until(lambda: server.client.num_live == 1)
        time.sleep(FRESH_S)  # another test may have looked just before
        state = server.http.get("/internal/state").json()
        server.do(server.client.gate.set)
    server.wait_until(lambda: server.client.num_live == 0)
    assert state.keys() >= {"model", "info", "stats", "is_paused", "pages", "requests"}
    assert re.fullmatch("4[0-3]*", state["pages"]), "a digit a page, the null page first"
    counters = {one or other for one, other in re.findall(r'past, "(\w+)"|stats\.(\w+)', SOURCES["history.js"])}
    assert len(counters) > 8
    assert counters <= state["stats"].keys()
    assert state["stats"]["now"].keys() >= {"pages_used", "tokens_held", "page_size"}
    assert set(re.findall(r"info\.(\w+)", SOURCES["page.js"] + SOURCES["history.js"])) <= state["info"].keys()
    (request,) = state["requests"]
    shown = {"request_id", "status", "num_prompt_tokens", "num_computed_tokens", "num_output_tokens"}
    assert request.keys() == shown | {"num_preemptions", "age_s", "num_pages", "pages"}, (
        "sizes alone, never what is said"
    )
    assert request["pages"] == [[1]]
