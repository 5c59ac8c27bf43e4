"""`random_case`: what a client of the soak sends, and what it does while it waits. Mostly what people ask for."""

import json
import random
import string
from dataclasses import dataclass
from typing import Any, Literal

from scripts.serving.work import PATHS, Endpoint

MODEL, VOCAB, MAX_LEN, MAX_BODY_BYTES = "tiny", 259, 256, 1 << 16
API_KEYS, ADMIN_KEY = ("soak-key-of-one", "soak-key-of-two"), "soak-admin-key"
SECRET = "Xylophone"  # in prompts of bad requests; no error may repeat it
_WORDS = ("the", "page", "table", "maps", "each", "sequence", "to", "its", "scattered", "pages", "naïve", "汉字", "🙂")


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
      endpoint, body: of the request; a body of bytes is sent as it is.
      key: of the API; `None`: none is sent.
      refused: the statuses of which one must come; empty: it is answered.
      leaves: when the client leaves: while it sends, after some seconds, or after some events; `None`: not.
      leaves_after: seconds, events, or bytes of the body.
      twice: sent streaming and in one piece, to be compared.
    """

    endpoint: Endpoint
    body: dict[str, Any] | bytes
    key: str | None
    refused: tuple[int, ...] = ()
    leaves: Literal["sending", "waiting", "reading"] | None = None
    leaves_after: float = 0.0
    twice: bool = False

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    @property
    def stream(self) -> bool:
        return isinstance(self.body, dict) and bool(self.body.get("stream"))

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def data(self, name: str, *, stream: bool | None = None) -> bytes:
        """The body's bytes.

        Args:
          name: the request's, part of the answer's id.
          stream: another than the case's own way to be answered.
        """
        if isinstance(self.body, bytes):
            return self.body
        body = {**self.body, "request_id": name}
        if stream is not None:
            body["stream"] = stream
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body).encode()


def random_case(rng: random.Random, *, structured: bool, only_twice: bool = False) -> Case:
    """The next request.

    Args:
      rng: decides everything.
      structured: the server can keep answers to a grammar.
      only_twice: good requests alone, each to be sent twice.
    """
    key = rng.choice(API_KEYS)
    if not only_twice and rng.random() < 0.1:
        return _bad(rng, key)
    endpoint: Endpoint = "chat" if rng.random() < 0.3 else "completions"
    body = _good(rng, endpoint, structured=structured)
    can_stream = not body.keys() & {"use_beam_search", "best_of", "prompt_logprobs"}
    if only_twice and not can_stream:
        return random_case(rng, structured=structured, only_twice=True)
    if only_twice or (can_stream and rng.random() < 0.12):
        return Case(endpoint, body, key, twice=True)
    if can_stream and rng.random() < 0.6:
        body["stream"] = True
    case = Case(endpoint, body, key)
    if rng.random() < 0.25:
        size = len(case.data("soak-0"))
        kind, after = rng.choice(
            [
                ("sending", float(rng.randrange(size))),
                ("waiting", rng.expovariate(1 / 0.03)),
                ("waiting", rng.expovariate(1 / 0.2)),
                ("reading", float(rng.choice([1, 1, 2, 5]))),
            ]
        )
        return Case(endpoint, body, key, leaves=kind, leaves_after=after)  # type: ignore[arg-type]
    return case


def _good(rng: random.Random, endpoint: Endpoint, *, structured: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "top_p": rng.choice([1.0, 0.9]),
        "max_tokens": rng.choice([1, 2, 8, 8, 40]),
        "seed": rng.randrange(2**40),
    }
    if endpoint == "chat":
        turns = rng.choice([1, 1, 3])
        roles = [("user", "assistant")[turn % 2] for turn in range(turns)]
        body["messages"] = [{"role": role, "content": _text(rng, rng.randint(1, 5))} for role in roles]
    else:
        many = rng.random() < 0.1
        prompts = [_prompt(rng) for _ in range(rng.choice([2, 3]) if many else 1)]
        body["prompt"] = [_ids(rng, 9) for _ in prompts] if many else prompts[0]
    if rng.random() < 0.4:
        body |= rng.choice(_extras(rng, endpoint))
    if rng.random() < 0.25:
        body["stop"] = rng.choice([rng.choice(string.printable[:95]), ["e", "t ", "\n"], ["q", "Z"]])
        body["include_stop_str_in_output"] = rng.random() < 0.3
    if body["temperature"] and rng.random() < 0.2:
        body["n"] = rng.choice([2, 3])
        if rng.random() < 0.2:
            body["best_of"] = body["n"] + 1
    elif rng.random() < 0.04:
        kept = {name: body[name] for name in ("model", "messages", "prompt", "max_tokens") if name in body}
        body = {**kept, "use_beam_search": True, "n": 2, "temperature": 0.0}
    elif structured and rng.random() < 0.1:
        kinds: list[dict[str, Any]] = [{"regex": "[a-f]{2,6}"}, {"choice": ["yes", "no", "perhaps"]}]
        body["structured_outputs"] = rng.choice(kinds)
    if rng.random() < 0.3:
        body["cache_salt"] = rng.choice("ab")
    return body


def _extras(rng: random.Random, endpoint: Endpoint) -> list[dict[str, Any]]:
    extras: list[dict[str, Any]] = [
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"frequency_penalty": -0.5, "top_k": 20},
        {"logit_bias": {f"{rng.randrange(VOCAB)}": 5.0}},
        {"min_tokens": 1, "stop_token_ids": [40, 50, 60, 70]},
        {"return_token_ids": True},
        {"prompt_logprobs": 1},
        {"user": "somebody", "metadata": {"of": "the soak"}},
    ]
    if endpoint == "chat":
        return [*extras, {"logprobs": True, "top_logprobs": 2}]
    return [*extras, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1, "max_tokens": 1}]


def _ids(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, most))]


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def _prompt(rng: random.Random) -> list[int] | str:
    if rng.random() < 0.3:
        return _text(rng, rng.randint(1, 12))
    prefix = [3 + rng.randrange(4)] * rng.choice([0, 8, 16, 40])  # few, so that caches are hit
    return prefix + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 7, 8, 9, 31, 64, 65, 150]))]


def _bad(rng: random.Random, key: str) -> Case:
    """What nobody should send: each must be refused, and the next request served."""
    prompt = f"{SECRET} {_text(rng, 3)}"
    good: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
    changes: list[tuple[dict[str, Any], int]] = [
        ({"prompt": [1] * MAX_LEN}, 400),
        ({"prompt": [1, VOCAB]}, 400),
        ({"prompt": []}, 400),
        ({"prompt": {"text": SECRET}}, 400),
        ({"temperature": -1}, 400),
        ({"temperature": "hot"}, 400),
        ({"n": 100_000}, 400),
        ({"n": 2, "temperature": 0}, 400),
        ({"logprobs": 1000}, 400),
        ({"logit_bias": {f"{VOCAB}": 1.0}}, 400),
        ({"min_tokens": 9}, 400),
        ({"stop": ""}, 400),
        ({"use_beam_search": True, "stream": True, "temperature": 0}, 400),
        ({"stream_options": {"include_usage": True}}, 400),
        ({"no_such_parameter": SECRET}, 400),
        ({"structured_outputs": {"regex": "("}}, 400),
        ({"cache_salt": "a/b"}, 400),
        ({"model": "another"}, 404),
    ]
    cases = [Case("completions", {**good, **change}, key, (status,)) for change, status in changes]
    cases += [
        Case("chat", {**chat, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, key, (400,)),
        Case("chat", {**chat, "messages": [{"content": prompt}]}, key, (400,)),
        Case("chat", {**chat, "top_logprobs": 2}, key, (400,)),
        Case("chat", {**chat, "add_generation_prompt": True, "continue_final_message": True}, key, (400,)),
        Case("completions", good, None, (401,)),
        Case("completions", good, "not-a-key-of-this-server", (401,)),
        Case("completions", f'{{"prompt": "{SECRET}"'.encode(), key, (400,)),
        Case("completions", b"\xff\xfe" + SECRET.encode(), key, (400,)),
        Case("completions", b"[" * 20_000, key, (400,)),
        Case("completions", json.dumps({**good, "prompt": SECRET * 10_000}).encode(), key, (413,)),
    ]
    return rng.choice(cases)
