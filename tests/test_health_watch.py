"""`/health` is asked while something else goes on, and what steps took is told."""

import http.client
import multiprocessing
import threading

from scripts.serving import against_offline, health
from scripts.serving.health import HealthWatch
from tests.fake_openai_server import FakeServer


def test_health_is_asked_by_another_process(monkeypatch) -> None:
    with FakeServer() as server, HealthWatch(server.url, interval_s=0.001) as watch:
        pass
    figures = watch.figures()
    assert figures["asked"] == len(watch.seconds)
    assert all(0 < seconds < 60 for seconds in watch.seconds)
    assert not [fault for fault in watch.faults if "says" not in fault]
    asked, ours, theirs = threading.Event(), *multiprocessing.Pipe()

    class Connection(http.client.HTTPConnection):
        def close(self) -> None:
            super().close()
            asked.set()

    monkeypatch.setattr(http.client, "HTTPConnection", Connection)
    asking = threading.Thread(target=health._ask, args=(theirs, "127.0.0.1:9", 0.01))  # the port of no server
    asking.start()
    assert ours.recv() == "ready"
    assert asked.wait(60)
    ours.send("end")
    seconds, faults = ours.recv()
    asking.join()
    assert (seconds, "ConnectionRefusedError" in faults[0]) == ([], True)


def test_what_steps_took_is_told_of_the_steps_between() -> None:
    before = {"num_steps": 10, **dict.fromkeys(against_offline._PHASES, 1.0)}
    after = {"num_steps": 30, **dict.fromkeys(against_offline._PHASES, 1.5)}
    told = against_offline._phases(before, after, wall_s=2.0)
    assert (told["steps"], told["ms_per_step"]) == (20, 100.0)
    assert set(told["phases_ms"].values()) == {25.0}
