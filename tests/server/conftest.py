"""One server on a fake engine for all tests that change nothing about it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.tiny_model import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path):
    from jpaged.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def start(tokenizer):
    """Starts a server on a fake engine: `with start(max_requests=1) as server: ...`."""
    from tests.server.fake_client import FakeClient
    from tests.server.running import running

    async def make() -> FakeClient:
        return FakeClient(tokenizer)

    def begin(**settings):
        return running(make, tokenizer, **settings)

    return begin


@pytest.fixture(scope="session")
def shared(start) -> Iterator:
    with start() as server:
        yield server


@pytest.fixture
def server(shared):
    """The shared server, as if it had just started."""
    shared.client.seen.clear()
    yield shared
    assert shared.do(lambda: shared.client.num_live) == 0, "a test left a request behind"
