"""`EventParser`: server-sent events out of pieces of a body.

Reference: https://html.spec.whatwg.org/multipage/server-sent-events.html, the part that APIs for text use: the data of
events; names, ids and comments are passed over.
"""


class EventParser:
    """Finds events, however their bytes are split.

    Example:
      >>> parser = EventParser()
      >>> [parser.feed(part) for part in (b'data: {"a"', b": 1}\\n", b"\\ndata: x\\n\\n: comment\\n\\ndata: [DO")]
      [[], [], [b'{"a": 1}', b'x']]
      >>> parser.rest
      b'data: [DO'
    """

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end in `data`."""
        if b"\r" in data or self.rest.endswith(b"\r"):
            return self._feed_foreign(data)
        *blocks, self.rest = (self.rest + data).split(b"\n\n")
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:  # nearly always
                events.append(block[6:])
            elif (event := _data(block)) is not None:
                events.append(event)
        return events

    def _feed_foreign(self, data: bytes) -> list[bytes]:
        # "\r" at the very end may be half of "\r\n": it waits.
        data = self.rest + data
        held = b"\r" if data.endswith(b"\r") else b""
        data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        self.rest = b""
        events = self.feed(data)
        self.rest += held
        return events


def _data(block: bytes) -> bytes | None:
    """The data of an event; `None`: it has none."""
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
