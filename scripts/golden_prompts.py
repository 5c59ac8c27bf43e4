"""The prompts of the golden values: 24 to continue, one text to score. All original text; chosen before any result.

4 long ones (over 1,500 tokens: an inventory, a server log, a story, a Python module), 4 multi-byte ones, 4 multi-turn
chats, 12 short ones. The long ones are written out by loops over word lists without any random numbers, so that they
are the same everywhere. `make_golden.py` writes text and token ids into the JSON, which is what the tests read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

SCORED_TEXT = (
    "The ferry left the harbour a little after six, when the fog was still lying on the water. "
    "Nobody on deck spoke. Somewhere behind us a bell rang twice, and then the town was gone."
)


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text` to continue as it is, or `messages` for the chat template.

    Attributes:
      name: unique, in words.
      kind: "long", "multibyte", "multiturn" or "short".
    """

    name: str
    kind: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None


def _chat(*turns: str, system: str | None = None) -> tuple[dict[str, str], ...]:
    """Turns of user and assistant in alternation, the user first."""
    roles = ("user", "assistant")
    head = ({"role": "system", "content": system},) if system is not None else ()
    return head + tuple({"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns))


# --- long -------------------------------------------------------------------------------------------------------------
_ROOMS = ("lamp room", "watch room", "oil store", "boat shed", "kitchen", "cellar", "signal loft")
_THINGS = ("brass lanterns", "coils of tarred rope", "tins of wick oil", "signal flags", "spare lenses", "log books")
_STATES = ("in good order", "slightly rusted", "wrapped in canvas", "due for repair", "counted twice")


def _inventory() -> str:
    """A list whose every line says how many of what stands where."""
    lines = ["Inventory of the lighthouse at Grey Point, written out by the keeper before the winter.", ""]
    for i in range(73):
        room, thing, state = _ROOMS[i % 7], _THINGS[(i * 5 + i // 7) % 6], _STATES[(i * 3 + i // 11) % 5]
        lines.append(f"Item {i + 1}: {3 + (i * 7) % 23} {thing} in the {room}, {state}.")
    lines += ["", "The keeper then added a short remark on what must be bought in spring:"]
    return "\n".join(lines)


_ROUTES = ("/orders", "/orders/17", "/login", "/images/map.png", "/search?q=kettle", "/health")
_LEVELS = ("INFO", "INFO", "DEBUG", "INFO", "WARNING", "INFO", "ERROR")


def _log() -> str:
    """A log of a web server, its clock rising, with a warning and an error now and then."""
    lines = ["# access log of shop-3, newest entry last"]
    for i in range(55):
        clock = 36_000 + i * 13 + (i * i) % 7
        stamp = f"{clock // 3600:02d}:{clock // 60 % 60:02d}:{clock % 60:02d}"
        level, route = _LEVELS[i % 7], _ROUTES[(i * 5) % 6]
        status = {"ERROR": 500, "WARNING": 404}.get(level, 200)
        lines.append(f"{stamp} {level} GET {route} {status} {12 + (i * 37) % 91} ms worker={i % 4}")
    lines += ["# end of log", "", "Summary of the log above, in plain words:"]
    return "\n".join(lines)


_WHO = ("the miller", "a young surveyor", "the widow from the bridge", "a tired postman", "the schoolmaster")
_DID = (
    "carried a basket of pears up the lane",
    "counted the lamps along the quay",
    "asked the way to the old observatory",
    "mended a fence that the storm had broken",
    "read aloud from a letter that had no date",
    "waited under the chestnut tree until it rained",
)
_SO = (
    "and nobody thanked them for it",
    "which made the children laugh",
    "although the road was already dark",
    "and wrote the number down in a small green book",
)
_WHEN = ("In the morning", "A little later", "On the third day", "When the bells rang", "Before supper", "That night")


def _story() -> str:
    """A village story whose sentences never repeat in quite the same way."""
    paragraphs = ["The Green Book", "There was once a village that kept its whole memory in a small green book."]
    for part in range(11):
        sentences = []
        for i in range(part * 5, part * 5 + 5):
            who, did, so = _WHO[(i * 3 + part) % 5], _DID[(i * 5 + part) % 6], _SO[(i + part) % 4]
            sentences.append(f"{_WHEN[(i * 7 + part) % 6]} {who} {did}, {so}.")
        sentences.append(f"That was page {part + 1} of the book, and the ink was {('blue', 'black', 'red')[part % 3]}.")
        paragraphs.append(" ".join(sentences))
    paragraphs.append("Then, on the last page, somebody had written")
    return "\n\n".join(paragraphs)


_UNITS = (("metre", "foot", 3.28084), ("kilogram", "pound", 2.20462), ("litre", "gallon", 0.264172))
_EXTRAS = ("rounded", "checked", "of_list", "in_words", "as_table", "per_day", "or_none")


def _functions() -> Iterator[str]:
    for i in range(20):
        unit, other, factor = _UNITS[i % 3]
        extra = _EXTRAS[i // 3]
        yield (
            f"def {unit}_to_{other}_{extra}(value: float, digits: int = {i % 5}) -> float:\n"
            f'    """Convert {unit}s to {other}s ({extra.replace("_", " ")})."""\n'
            f"    if value < 0:\n"
            f'        raise ValueError("{unit}s cannot be negative")\n'
            f"    return round(value * {factor * (i + 1):.4f} / {i + 1}, digits)\n"
        )


def _module() -> str:
    """A Python module of much the same functions, cut off at the start of the last one."""
    head = '"""Conversions between units of length, weight and volume."""\n\nimport math\n'
    return "\n\n".join([head, *_functions()]) + "\n\ndef mile_to_kilometre(value: float) -> float:\n"


# --- multi-byte: by code point where the look of a character would mislead a reader ----------------------------------
_EMOJI = (
    "Weather report in emoji: Monday \u2600\ufe0f, Tuesday \u26c8\ufe0f, Wednesday \U0001f308. "
    "The family \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 waves \U0001f44b\U0001f3fd and says"
)
_ARABIC = (
    "\u0627\u0644\u0633\u0644\u0627\u0645 \u0639\u0644\u064a\u0643\u0645\u060c \u0643\u064a\u0641 "
    "\u062d\u0627\u0644\u0643 \u0627\u0644\u064a\u0648\u0645\u061f means in English:"
)
# e + acute, u + diaeresis, o + dot below + circumflex, n + tilde, and a Devanagari word with its vowel signs
_COMBINING = (
    "Cafe\u0301 mu\u0308de Vie\u0323\u0302t man\u0303ana \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35: letters with combining marks are"
)
_CJK = "東京は日本の首都です。北京是中国的首都。서울은 대한민국의 수도입니다. In English:"

PROMPTS: tuple[Prompt, ...] = (
    Prompt("long_inventory", "long", text=_inventory()),
    Prompt("long_log", "long", text=_log()),
    Prompt("long_story", "long", text=_story()),
    Prompt("long_module", "long", text=_module()),
    Prompt("cjk", "multibyte", text=_CJK),
    Prompt("emoji", "multibyte", text=_EMOJI),
    Prompt("arabic", "multibyte", text=_ARABIC),
    Prompt("combining_marks", "multibyte", text=_COMBINING),
    Prompt(
        "chat_garden",
        "multiturn",
        messages=_chat(
            "My tomatoes have yellow leaves. What should I check first?",
            "Check the soil: if it stays wet for days, the roots get too little air.",
            "It was wet indeed. How often should I water them from now on?",
            "About twice a week, and only when the top of the soil is dry.",
            "Thanks. Can I plant basil next to them?",
        ),
    ),
    Prompt(
        "chat_pirate",
        "multiturn",
        messages=_chat(
            "Where is the treasure?",
            "Buried under the third palm, matey.",
            "And how do I get there?",
            system="You are a pirate. Answer in one sentence.",
        ),
    ),
    Prompt(
        "chat_python",
        "multiturn",
        messages=_chat(
            "Write a Python function that adds two numbers.",
            "```python\ndef add(a, b):\n    return a + b\n```",
            "Now make it work for any number of arguments.",
        ),
    ),
    Prompt(
        "chat_multibyte",
        "multiturn",
        messages=_chat(
            "How do you say good morning in Japanese?",
            "おはよう \N{SUNRISE}",
            "And in Greek?",
            "Καλημέρα!",
            "Which of the two is longer? \N{THINKING FACE}",
            system="You help travellers to learn a few words.",
        ),
    ),
    Prompt("one_token", "short", text="The"),
    Prompt("capital", "short", text="The capital of France is"),
    Prompt("boiling", "short", text="Question: At what temperature does water boil at sea level?\nAnswer:"),
    Prompt("sum", "short", text="12 + 30 = 42\n7 + 8 = 15\n23 + 19 ="),
    Prompt("product", "short", text="To multiply 17 by 23 by hand, we first"),
    Prompt("fibonacci", "short", text="def fibonacci(n: int) -> int:\n    "),
    Prompt("sql", "short", text="-- the ten customers with the most orders\nSELECT customer_id,"),
    Prompt("json", "short", text='{"name": "kettle", "price": 24.5, "tags": ["kitchen", "steel"], "stock":'),
    Prompt("whitespace", "short", text="  \n\n\t1\t 2  \n\t3   4\n\n"),
    Prompt("list", "short", text="Things to pack for a week in the mountains:\n1. boots\n2. a map\n3."),
    Prompt("chat_short", "short", messages=_chat("Give me three names for a grey cat.")),
    Prompt(
        "chat_maths",
        "short",
        messages=_chat("A train goes 60 km in 45 minutes. What is its speed in km/h?", system="Answer step by step."),
    ),
)
