"""The built-in page in a real browser, on a real engine; where there is no Chromium, how to get one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.chromium import Chromium, chromium, find_chromium
from tests.server.running import Running, running

PATH = find_chromium()
pytestmark = pytest.mark.skipif(
    PATH is None,
    reason="there is no Chromium here: install one (Debian, Ubuntu: apt-get install chromium), or name it in CHROMIUM",
)
ENTER = ("Enter", 13)
HEALTH = "document.querySelector('#health').textContent"
ANSWER = "document.querySelector('.answers')?.innerText ?? ''"
USED = "Number(document.querySelector('#legend .used b').textContent)"
CELL = "document.querySelector('#cell').textContent"
IDLE = "document.querySelector('#stop').disabled"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium(str(PATH)) as browser:
        browser.look(width=1280, height=900)
        yield browser


@pytest.fixture(scope="module")
def real(tokenizer) -> Iterator[Running]:
    """A model that says bytes at random until it is stopped, or 8,192 tokens are full."""
    from jpaged import CacheConfig, Engine, EngineConfig, SchedulerConfig
    from jpaged.async_engine import AsyncEngine
    from jpaged.engine_thread import EngineThread
    from tests.fakes import tiny_llama

    config = EngineConfig(
        cache=CacheConfig(num_pages=1025, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=8192),
        token_buckets=(32,),
        compilation_cache=False,
    )
    model = tiny_llama(vocab_size=259, max_position_embeddings=8192)
    engine = Engine(model, config, tokenizer=tokenizer, eos_token_ids=())

    async def make() -> AsyncEngine:
        client = AsyncEngine(EngineThread(engine))
        await client.start()
        return client

    with running(make, tokenizer) as server:
        yield server


@pytest.fixture
def page(browser: Chromium, real: Running) -> Iterator[Chromium]:
    """The page, which sees the pool; at the end nothing went wrong in it, and it asked nobody but its server."""
    opened(browser, real)
    yield browser
    assert browser.problems == []
    assert all(url.startswith(real.url) for url in browser.requested), browser.requested


def opened(browser: Chromium, server: Running, health: str = "ready") -> None:
    browser.open(server.url)
    browser.problems.clear()
    browser.requested.clear()
    browser.wait_for(f"{HEALTH} === '{health}'")


def ask(page: Chromium, text: str, **fields: Any) -> None:
    for name, value in fields.items():
        page.evaluate(f"document.querySelector('#{name.replace('_', '-')}').value = {json.dumps(str(value))}")
    page.type("#prompt", text)
    page.press(*ENTER)


def test_an_answer_streams_and_stop_frees_its_pages(page: Chromium, real: Running) -> None:
    page.wait_for("document.querySelector('#model').value === 'tiny'")
    assert page.evaluate(USED) == 0
    before = page.screenshot("#pool")
    ask(page, "Hello")
    first = page.wait_for(ANSWER)
    page.wait_for(f"({ANSWER}).length > {len(first)}")  # it grows: it streams
    page.wait_for(f"{USED} > 1 && document.querySelectorAll('#requests tr').length === 1")
    assert page.screenshot("#pool") != before
    page.wait_for("document.querySelector('#requests td')?.textContent === 'decode'")
    assert real.do(lambda: real.client.num_live) == 1
    page.click("#stop")
    real.wait_until(lambda: real.client.num_live == 0)
    page.wait_for(f"{IDLE} && {USED} === 0 && document.querySelectorAll('#requests tr').length === 0")
    assert "stopped" in page.evaluate("document.querySelector('.facts').textContent")
    assert real.do(real.client.report).finished == {"abort": 1}


def test_several_answers_share_the_pages_of_their_prompt(page: Chromium) -> None:
    ask(page, "Which pages will you share? " * 4, answers=2, temperature=1, max_tokens=6000)
    page.wait_for("Number(document.querySelector('#legend .shared b').textContent) > 0")
    page.click("#colours label:last-child")
    box = page.evaluate("document.querySelector('#pool').getBoundingClientRect().toJSON()")
    page.move(box["x"] + 5, box["y"] + 5)
    page.wait_for(f"{CELL} === 'Page 0: null'")
    page.evaluate("document.querySelector('#pool').focus()")
    state = page.evaluate("fetch('internal/state').then((answer) => answer.json())")
    shared = state["pages"].index("2")
    for _ in range(shared):
        page.press("ArrowRight", 39)
    page.wait_for(f"{CELL} === 'Page {shared}: shared; held by this chat'")
    assert page.evaluate("document.querySelectorAll('#requests .held').length") == 1
    page.click("#stop")
    page.wait_for(f"{IDLE} && document.querySelectorAll('.answers p').length === 2")


def test_an_answer_ends_and_the_conversation_goes_on(page: Chromium, real: Running) -> None:
    ask(page, "<b>one</b>", max_tokens=5)
    page.wait_for("/cut at the token limit · .*5 tokens in/.test(document.querySelector('.facts').textContent)")
    assert page.evaluate("document.querySelector('.said').innerText") == "<b>one</b>"
    ask(page, "two", system="Be brief.")
    page.wait_for(f"document.querySelectorAll('.answers').length === 2 && {IDLE}")
    page.click("#clear")
    assert page.evaluate("document.querySelector('#log').childElementCount") == 0


def test_errors_are_told_in_words(page: Chromium) -> None:
    ask(page, "Hi", temperature=7)
    told = page.wait_for("document.querySelector('#error:not([hidden])')?.textContent")
    assert told.startswith("Temperature is 7")
    assert page.evaluate("document.querySelector('#prompt').value") == "Hi"  # to be sent again
    page.problems.clear()  # the console repeats the status of the refusal


def test_events_are_read_however_they_are_cut(page: Chromium) -> None:
    text = 'data: {"a": "é"}\r\n\r\ndata:x\n\n: no event\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n'
    for size in (1, 2, 3, 1000):
        found = page.evaluate(
            "import('./static/sse.js').then(async ({ events }) => {"
            f" const bytes = new TextEncoder().encode({json.dumps(text)}), found = [];"
            " const stream = new ReadableStream({ start(to) {"
            f" for (let at = 0; at < bytes.length; at += {size}) to.enqueue(bytes.slice(at, at + {size})); to.close();"
            " } });"
            " for await (const data of events(stream)) found.push(data); return found; })"
        )
        assert found == ['{"a": "é"}', "x", "1\n2", "[DONE]"]


def test_a_key_is_asked_for(browser: Chromium, start) -> None:
    with start(api_keys=("a-key-of-mine",)) as server:
        opened(browser, server, "needs a key")
        assert browser.evaluate("document.querySelector('#settings').open")
        browser.type("#key", "a-key-of-mine")
        browser.press(*ENTER)
        browser.wait_for(f"{HEALTH} === 'ready' && document.querySelector('#model').value === 'tiny'")
        ask(browser, "Hi", max_tokens=20)
        browser.wait_for(f"{IDLE} && ({ANSWER}).includes('user')")
        assert browser.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
    browser.wait_for(f"{HEALTH} === 'out of reach'")


def test_fits_a_phone(browser: Chromium, real: Running) -> None:
    browser.look(width=360, height=700)
    opened(browser, real)
    assert browser.evaluate("document.documentElement.scrollWidth") == 360
    browser.look(width=1280, height=900)
