"""`jpaged chat`."""

import signal
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer

from jpaged.cli import options
from jpaged.cli.conversation import Conversation
from jpaged.cli.waiting import waiting
from jpaged.errors import RequestError
from jpaged.request import Output, SamplingParams

if TYPE_CHECKING:
    from jpaged.engine import Engine

COMMANDS = "/reset forgets what was said, /quit or Ctrl-D leaves, Ctrl-C stops an answer"

_SAMPLING_DEFAULTS: Final = options.SamplingOptions(max_tokens=512)


@options.flattened
def chat(
    system: Annotated[str | None, typer.Option(help="A system message; by default the chat template's own.")] = None,
    model: options.Model = options.DEFAULT_MODEL,
    sampling: options.SamplingOptions = _SAMPLING_DEFAULTS,
    asked: options.EngineOptions = options.ENGINE_DEFAULTS,
    progress: options.Bars = None,
) -> None:
    """Talk with a model; answers come as they are written.

    /reset forgets what was said, /quit or Ctrl-D leaves (exit code 0). Ctrl-C during an answer stops that answer and
    keeps what came of it; at the prompt it leaves (exit code 130). When the conversation outgrows the context, the
    oldest turns are dropped, and a line says so; half of the context, or --max-tokens if less, is left for the answer.
    A line that is to begin with / is typed with a space before it. From a pipe, each line is a question.
    """
    params = sampling.params()
    if system is not None:
        options.checked_text(system, "--system")
    # A decode, a short question, a chunk of a long one: few shapes, since each is compiled the first time.
    llm = asked.load(model, max_num_seqs=1, progress=progress, token_buckets=(1, 64, 512))
    assert llm.tokenizer is not None  # an LLM that was loaded has one
    longest = llm.engine.pool_plan.max_model_len
    conversation = Conversation(
        llm.tokenizer, max_prompt_tokens=longest - min(sampling.max_tokens, longest // 2), system=system
    )
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - gives `input` its line editing

        _say(f"{model}: {llm.engine.pool_plan}\n{COMMANDS}")
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            print()
            raise
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not valid UTF-8: {error.reason}") from None
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            conversation.reset()
            _say("forgotten")
        elif line.startswith("/"):
            _say(f"unknown command {line.split()[0]}; {COMMANDS}; with a space before it, the line is a question")
        elif line.strip():
            try:
                _take_turn(line.strip(), conversation, llm.engine, params, progress)
            except RequestError as error:
                _say(f"jpaged: error: {error}")
    if interactive:
        print()


def _say(text: str) -> None:
    """A remark that is no answer: to the error stream."""
    print(text, file=sys.stderr, flush=True)


def _take_turn(
    question: str, conversation: Conversation, engine: "Engine", params: SamplingParams, progress: bool | None
) -> None:
    """Asks, writes the answer as it comes, and keeps both.

    Raises:
      RequestError: the question is refused; it is not kept.
    """
    token_ids, dropped = conversation.ask(options.checked_text(question, "the line"))
    if dropped:
        _say(f"the conversation no longer fits into the context: its {dropped} oldest messages are dropped")
    text, output = "", None
    try:
        output = _stream(engine, token_ids, params, progress)
        text = output.text
    finally:
        if text:
            conversation.answer(text)
        else:
            conversation.retract()
    options.write_answer("\n")
    if output.finish_reason == "error":
        _say(f"jpaged: error: {output.error}")
    elif output.finish_reason == "length":
        _say("(cut off: --max-tokens or the end of the context)")


def _stream(engine: "Engine", token_ids: list[int], params: SamplingParams, progress: bool | None) -> Output:
    """Runs one request alone and writes its text as it comes; Ctrl-C ends it early."""
    request_id = engine.add(token_ids, params, stream=True)
    shown, output = 0, None
    try:
        with StopOnInterrupt() as interrupt, waiting("reading the question", progress) as done:
            while engine.has_work:
                outputs = engine.step()
                if interrupt.came and engine.has_work:
                    aborted = engine.abort(request_id)
                    outputs = outputs if aborted is None else [aborted]
                for output in outputs:
                    done()
                    options.write_answer(output.text[shown:])
                    shown = len(output.text)
    finally:
        engine.abort(request_id)
    assert output is not None  # every request gives a last output
    return output


class StopOnInterrupt:
    """Notes a Ctrl-C instead of raising it, so that no step is torn apart; a second one raises.

    Attributes:
      came: Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)
