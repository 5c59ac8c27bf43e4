"""Messages arrive whole, once and in order, however the bytes are cut; each end learns that the other is gone."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.engine_link import ClientLink, EngineLink, FrameReader, frame
from tests.client_driver import run, until

messages_of_all_kinds = st.lists(
    st.one_of(st.none(), st.integers(), st.text(), st.binary(max_size=3000), st.tuples(st.integers(), st.floats(0, 1))),
    max_size=12,
)


@given(messages_of_all_kinds, st.lists(st.integers(1, 4000), max_size=40))
def test_cuts_do_not_matter(messages, cuts):
    data = b"".join(map(frame, messages))
    reader, received = FrameReader(), []
    for size in cuts:
        received += reader.feed(data[:size])
        data = data[size:]
    assert received + reader.feed(data) == messages
    assert reader.feed(b"") == []


@contextlib.asynccontextmanager
async def linked(**options):
    """A client's and an engine's end, what the client received, and whether it lost the other one."""
    ours, theirs = socket.socketpair()
    received, lost = [], asyncio.Event()
    client = ClientLink(received.append, lost.set)
    await asyncio.get_running_loop().create_connection(lambda: client, sock=ours)
    engine = EngineLink(theirs, **options)
    try:
        yield client, engine, received, lost
    finally:
        client.close()
        await asyncio.to_thread(engine.close)
        await lost.wait()


def test_both_ways():
    async def main():
        async with linked() as (client, engine, received, lost):
            heard = []
            reader = threading.Thread(target=lambda: heard.extend(engine.messages()))
            reader.start()
            big = bytes(3 << 20)  # more than a socket's buffer
            for i in range(100):
                client.send((i, big if i == 50 else None))
                engine.send((i, big if i == 50 else None))
            await until(lambda: len(received) == 100 and len(heard) == 100)
            assert [i for i, _ in received] == [i for i, _ in heard] == list(range(100))
            assert received[50] == heard[50] == (50, big)
            client.close()
            await lost.wait()
            await asyncio.to_thread(reader.join)  # the engine's end has noticed
            client.send("nobody hears it")
            engine.send("nobody hears it")

    run(main())


def test_the_client_notices_that_the_engine_is_gone():
    async def main():
        async with linked() as (client, engine, received, lost):
            engine.send("last words")
            await asyncio.to_thread(engine.close)
            await lost.wait()
            assert received == ["last words"]
            client.send("too late")

    run(main())


def test_a_late_client_makes_the_engine_wait_and_loses_nothing():
    async def main():
        async with linked(max_unsent=2) as (_, engine, received, _):
            sent = 0

            def send():
                nonlocal sent
                for i in range(40):
                    engine.send((i, bytes(1 << 18)))
                    sent += 1

            sender = threading.Thread(target=send)
            sender.start()
            seen = -1
            while seen != sent:  # this blocks the event loop, so the client reads nothing
                seen = sent
                time.sleep(0.05)
            assert sent < 40
            engine.greet()  # would never return if it waited
            await until(lambda: len(received) == 40)
            sender.join()
            assert [i for i, _ in received] == list(range(40))

    run(main())


def test_a_sign_of_life_is_an_empty_message():
    async def main():
        async with linked() as (_, engine, received, _):
            engine.greet()
            await until(lambda: received == [[]])

    run(main())


def test_a_message_that_does_not_pickle_is_the_callers_fault():
    with pytest.raises((AttributeError, TypeError)):
        frame(lambda: None)
