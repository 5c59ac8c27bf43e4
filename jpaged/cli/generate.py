"""`jpaged generate`."""

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from jpaged.cli import options
from jpaged.errors import RequestError
from jpaged.request import Output, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from jpaged.llm import LLM
    from jpaged.tokenizer import Tokenizer

_SAMPLING_DEFAULTS: Final = options.SamplingOptions(max_tokens=128)


@options.flattened
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Texts to continue; - stands for the lines of the standard input."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt through the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, in order.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it grows; one prompt only.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probability of each token and of the n likeliest, in nats.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt; they share its pages.")] = 1,
    best_of: Annotated[
        int | None, typer.Option(help="Answers to sample, of which the --n likeliest are given; or beams.")
    ] = None,
    beam_search: Annotated[
        bool, typer.Option("--beam-search", help="Search for the likeliest answers; needs --temperature 0.")
    ] = False,
    length_penalty: Annotated[
        float, typer.Option(help="Beam search divides log-probabilities by length to this power.")
    ] = 1.0,
    show_stats: Annotated[bool, typer.Option("--stats", help="Print a table of the run to standard error.")] = False,
    progress: options.Bars = None,
    model: options.Model = options.DEFAULT_MODEL,
    sampling: options.SamplingOptions = _SAMPLING_DEFAULTS,
    max_num_seqs: options.MaxNumSeqs = 32,
    engine: options.EngineOptions = options.ENGINE_DEFAULTS,
) -> None:
    """Continue prompts, all at once.

    Without a PROMPT, each line of a piped standard input is one; blank lines are passed over. One answer is printed as
    it is; several have a header each.
    """
    params = sampling.params(
        logprobs=logprobs, n=n, best_of=best_of, use_beam_search=beam_search, length_penalty=length_penalty
    )
    if 0 < max_num_seqs < params.num_sequences:
        raise RequestError(
            f"--n or --best-of is {params.num_sequences}, expected at most --max-num-seqs ({max_num_seqs})"
        )
    texts = _prompts(prompts or [])
    if stream and (len(texts) > 1 or as_json or logprobs is not None or params.num_sequences > 1):
        raise RequestError(
            "--stream prints one answer to one prompt; it goes with neither several of them, --json nor --logprobs"
        )
    llm = engine.load(model, max_num_seqs=max_num_seqs, progress=progress)
    inputs = [_as_question(text, llm) if chat else text for text in texts]
    start = time.perf_counter()
    if stream:
        outputs = [_stream(llm, inputs[0], params, progress)]
    else:
        outputs = llm.generate(inputs, params)
        for index, (text, output) in enumerate(zip(texts, outputs, strict=True)):
            if as_json:
                print(json.dumps(_record(index, text, output), ensure_ascii=False))
            else:
                _print_output(text, output, llm.tokenizer, header=len(texts) > 1, last=index == len(texts) - 1)
    sys.stdout.flush()
    if show_stats:
        from jpaged.cli.stats_table import print_stats

        print_stats(llm.engine, outputs, time.perf_counter() - start)
    failed = [output for output in outputs if output.finish_reason == "error"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outputs)} requests failed; the first: {failed[0].error}")


def _prompts(given: list[str]) -> list[str]:
    """The prompts, with `-` replaced by the lines of the standard input."""
    if not given:
        if sys.stdin.isatty():
            raise RequestError("no prompt: give a PROMPT, or - and lines on standard input")
        given = ["-"]
    texts: list[str] = []
    for text in given:
        if text != "-":
            texts.append(options.checked_text(text, "a prompt"))
            continue
        try:
            lines = [line.rstrip("\r\n") for line in sys.stdin]
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not valid UTF-8: {error.reason}") from None
        texts += [options.checked_text(line, "a line of standard input") for line in lines if line.strip()]
    if not texts:
        raise RequestError("no prompt: standard input is empty")
    return texts


def _as_question(text: str, llm: "LLM") -> list[int]:
    assert llm.tokenizer is not None  # an LLM that was loaded has one
    return llm.tokenizer.encode_chat([{"role": "user", "content": text}])


def _stream(llm: "LLM", prompt: Any, params: SamplingParams, progress: bool | None) -> Output:
    from jpaged.cli.waiting import waiting

    shown, output = 0, None
    with waiting("reading the prompt", progress) as done:
        for output in llm.generate([prompt], params, stream=True, progress=False):
            done()
            options.write_answer(output.text[shown:])
            shown = len(output.text)
    assert output is not None  # every request gives a last output
    options.write_answer("\n")
    return output


def _print_output(text: str, output: Output, tokenizer: "Tokenizer | None", *, header: bool, last: bool) -> None:
    if header:
        shortened = " ".join(text.split())
        print(f"==> {shortened if len(shortened) <= 72 else shortened[:71] + '…'} <==")
    count = len(output.completions)
    for completion in output.completions:
        if count > 1:
            score = "" if completion.score is None else f", score {completion.score:.4f}"
            print(f"--- answer {completion.index + 1} of {count}{score}")
        options.write_answer(completion.text + "\n")
        for entry in completion.logprobs or ():
            print(_logprob_line(entry, tokenizer))
    if header and not last:
        print()


def _logprob_line(entry: TokenLogprobs, tokenizer: "Tokenizer | None") -> str:
    def name(token: int) -> str:
        return repr(tokenizer.decode([token], skip_special_tokens=False)) if tokenizer else f"{token}"

    top = "  ".join(f"{name(token)} {logprob:.3f}" for token, logprob in entry.top)
    return f"{entry.logprob:8.3f}  {name(entry.token_id)}" + (f"  | {top}" if top else "")


def _record(index: int, text: str, output: Output) -> dict[str, Any]:
    """What `--json` prints: the prompt as it was given, and the fields of `Output`."""
    record: dict[str, Any] = {
        "index": index,
        "prompt": text,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "token_ids": list(output.token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_preemptions": output.num_preemptions,
    }
    if output.logprobs is not None:
        record["logprobs"] = _logprobs(output.logprobs)
    if len(output.completions) > 1:
        record["completions"] = [
            {**asdict(completion), "logprobs": completion.logprobs and _logprobs(completion.logprobs)}
            for completion in output.completions
        ]
    if output.error is not None:
        record["error"] = output.error
    return record


def _logprobs(entries: tuple[TokenLogprobs, ...]) -> list[dict[str, Any]]:
    return [{"token_id": e.token_id, "logprob": e.logprob, "top": [list(pair) for pair in e.top]} for e in entries]
