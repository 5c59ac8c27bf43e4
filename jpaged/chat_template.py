"""Renders chat messages into a prompt by the model's own template (Jinja, sandboxed)."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jpaged.errors import ChatTemplateError, RequestError

# A template comes with a checkpoint, as the weights do. The sandbox keeps it from running code; these limits keep it
# from running away by accident, or by a conversation made for it. They cover output, ranges, operators, turns of loops
# and the time, not every filter that makes a long text.
MAX_RENDERED_CHARACTERS: Final = 16 * 2**20
MAX_RANGE_ITEMS: Final = 100_000
MAX_LOOP_TURNS: Final = 5_000_000
MAX_RENDER_S: Final = 10.0
_TURNS_A_LOOK: Final = 256  # at the clock

# Ends the message that is to be continued. The vertical tab shows whether the template trims white space at the end.
_END: Final = "\N{NULL}end of the final message\N{NULL}"
_TRIMMED: Final = "\v"


class ChatTemplate:
    """One compiled template.

    Args:
      text: the template's source.
      special_tokens: "bos_token" and the like -> text; templates use them by these names.

    Raises:
      ChatTemplateError: the template has a syntax error.

    Example:
      >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
      >>> template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
      '<user>Hi'
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._variables = meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template has a syntax error in line {error.lineno}: {error}") from error
        except (TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Renders messages into text; the arguments are those of `Tokenizer.apply_chat_template`.

        Raises:
          RequestError: the messages or tools are malformed, or a variable is not one that the template uses.
          ChatTemplateError: the template refused them (its own words are in the error), failed, or ran away.
        """
        messages = check_messages(messages)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both set: the final message is continued, or a "
                "new one begun; set one of them to False"
            )
        if tools:
            variables["tools"] = _plain(_check_tools(tools), "tools")
        unused = sorted(name for name in variables if name not in self._variables)
        if unused:
            raise RequestError(
                f"this model's chat template does not use {', '.join(unused)}; it uses "
                f"{', '.join(sorted(self._variables)) or 'no variables'}"
            )
        if continue_final_message:
            messages[-1]["content"] += _END + _TRIMMED
        text = self._render(
            self._special_tokens
            | _plain(variables, "the variables of the chat template")
            | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        )
        return _cut(text) if continue_final_message else text

    def _render(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        bounds = _Bounds()
        try:
            for piece in self._template.generate(variables, range=bounds.ranged, **{_BOUNDS: bounds}):
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise SecurityError(f"its text is longer than {MAX_RENDERED_CHARACTERS} characters")
                pieces.append(piece)
        except _Refused as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        except Exception as error:  # a template can raise anything, as any program
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return "".join(pieces)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Checks chat messages and returns a plain copy, in which every content is a string.

    Contents that are lists of text parts are joined by line breaks. Entries that are `None` are dropped, as clients
    send them for "not given"; a message with tool calls may be without content.

    Raises:
      RequestError: a message is malformed, or holds something that is not text.

    Example:
      >>> check_messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
      [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {messages!r:.80}, expected a non-empty list of role/content dicts")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] is {message!r:.80}, expected a dict with role and content")
        plain = {key: value for key, value in message.items() if value is not None}
        role = plain.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"messages[{index}] has the role {role!r}, expected a string such as 'user'")
        content = plain.get("content", "" if plain.get("tool_calls") else None)
        checked.append(_plain(plain | {"content": _text(content, index)}, f"messages[{index}]"))
    return checked


def _text(content: object, index: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise RequestError(
            f"messages[{index}] has the content {content!r:.80}, expected a string or a list of text parts"
        )
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"messages[{index}] has a content part of type {kind!r}, expected {{'type': 'text', 'text': ...}}: "
                "this model reads text only"
            )
        parts.append(text)
    return "\n".join(parts)


def _check_tools(tools: object) -> list[dict[str, Any]]:
    if not isinstance(tools, str | bytes) and isinstance(tools, Sequence):
        checked = [dict(tool) for tool in tools if isinstance(tool, Mapping)]
        if len(checked) == len(tools):
            return checked
    raise RequestError(f"tools is {tools!r:.80}, expected a list of JSON schemas (dicts)")


def _plain(value: Any, what: str) -> Any:
    """A copy made of JSON values alone, so that a template meets no objects with methods."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} cannot be written as JSON: {error}") from error


def _cut(text: str) -> str:
    """Cuts a rendered chat after its final message's own text."""
    at = text.rfind(_END)
    if at < 0:
        raise ChatTemplateError("the chat template leaves out the final message, so it cannot be continued")
    kept = text[at + len(_END) :].startswith(_TRIMMED)
    return text[:at] if kept else text[:at].rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Refused(TemplateError):
    """The template called `raise_exception`."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's words for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# What the template's loops find the bounds of their rendering by. A template that gives the name to something else
# fails.
_BOUNDS: Final = "_bounds"


class _Bounds:
    """What one rendering may still do; all its ranges and loops count together, nested ones in full."""

    def __init__(self) -> None:
        self._items_left, self._turns_left = MAX_RANGE_ITEMS, MAX_LOOP_TURNS
        self._deadline_s = time.monotonic() + MAX_RENDER_S

    def ranged(self, *bounds: int) -> range:
        """`range`, with a limit on the items."""
        items = range(*bounds)
        self._items_left -= len(items)
        if self._items_left < 0:
            raise SecurityError(f"its ranges have more than {MAX_RANGE_ITEMS} items")
        return items

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, with a limit on their number and on the time."""
        for item in items:
            self._turns_left -= 1
            if self._turns_left < 0:
                raise SecurityError(f"its loops take more than {MAX_LOOP_TURNS} turns")
            if self._turns_left % _TURNS_A_LOOK == 0 and time.monotonic() > self._deadline_s:
                raise SecurityError(f"it takes longer than {MAX_RENDER_S:g} s")
            yield item


class _Generator(CodeGenerator):
    """Compiles `~` to a call of the environment, as the sandbox does for the other operators, and counts loops."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counted = nodes.EnvironmentAttribute("counted")
        node.iter = nodes.Call(counted, [nodes.ContextReference(), node.iter], [], None, None)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that also refuses operators whose result could fill the memory."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            size = _size(left) + _size(right)
        elif isinstance(left, int) and isinstance(right, int):  # in bits
            size = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        else:  # a text or list, repeated
            times = max((abs(side) for side in (left, right) if isinstance(side, int)), default=0)
            size = max(_size(left), _size(right)) * times
        self._check_size(operator, size)
        return super().call_binop(context, operator, left, right)

    def counted(self, context: Context, items: Iterable[Any]) -> Iterator[Any]:
        return context[_BOUNDS].counted(items)

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        texts = [str(part) for part in parts]
        self._check_size("~", sum(map(len, texts)))
        return "".join(texts)

    def _check_size(self, operator: str, size: int) -> None:
        if size > MAX_RENDERED_CHARACTERS:
            raise SecurityError(f"a result of {operator} is too large")


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0
