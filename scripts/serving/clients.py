"""Other people's clients against `jpaged serve`: OpenAI's own, and EleutherAI's lm-eval.

    python -m scripts.serving.clients [--model smollm2-135m-instruct] [--lm-eval PATH/bin/lm_eval]

OpenAI's client does what its documents show, one check after the other. lm-eval, where its program is named, scores a
local task of multiple choice through `/v1/completions`; the same log-likelihoods are then computed by the engine
offline, and must be equal but for rounding. The exit status is 1 if a check fails or they differ. The last line is
JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from scripts.report import print_json, print_table
from scripts.serving.server_process import free_port, spawned

KEY: Final = "a-key-of-mine"
SIZES: Final[dict[str, Any]] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
BUCKETS: Final = (8, 256)
_START_S: Final = 1800.0  # compiling a real model on a small machine
_MAX_DIFFERENCE: Final = 1e-3  # of a log-likelihood, float32
_TASK: Final = """task: local_qa
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
"""
# A question, its answer, and three others that are as long.
_FACTS: Final = (
    ("The capital of France is", " Paris", " Rome", " Madrid", " Berlin"),
    ("The capital of Japan is", " Tokyo", " Seoul", " Beijing", " Delhi"),
    ("The capital of Italy is", " Rome", " Paris", " London", " Athens"),
    ("The capital of Spain is", " Madrid", " Lisbon", " Rome", " Vienna"),
    ("The opposite of hot is", " cold", " red", " fast", " green"),
    ("The opposite of up is", " down", " blue", " big", " sweet"),
    ("The opposite of day is", " night", " tree", " water", " money"),
    ("Grass is", " green", " loud", " salty", " square"),
    ("The sky on a clear day is", " blue", " wooden", " sweet", " angry"),
    ("Snow is", " white", " hot", " loud", " spicy"),
    ("Water freezes into", " ice", " gold", " sand", " wood"),
    ("Bees make", " honey", " paper", " steel", " glass"),
    ("A week has seven", " days", " years", " stones", " birds"),
    ("A triangle has three", " sides", " cities", " hours", " songs"),
    ("The sun rises in the", " east", " kitchen", " book", " night"),
    ("Fish live in", " water", " clocks", " books", " fire"),
    ("Two plus two equals", " four", " seven", " nine", " zero"),
    ("The first month of the year is", " January", " March", " August", " October"),
    ("The last month of the year is", " December", " May", " June", " February"),
    ("Romeo and Juliet was written by William", " Shakespeare", " Newton", " Columbus", " Mozart"),
)


def check_openai(url: str, model: str) -> dict[str, str]:
    """What each check found: "ok", or what went wrong."""
    import openai

    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    say: list[Any] = [{"role": "user", "content": "Name three rivers."}]
    asked: dict[str, Any] = {"model": model, "messages": say, "temperature": 0, "max_completion_tokens": 24}

    def whole_and_streamed() -> bool:
        whole = client.chat.completions.create(**asked)
        text, usage = "", whole.usage
        for event in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            text += (event.choices[0].delta.content or "") if event.choices else ""
            usage = event.usage or usage
        counted = usage.completion_tokens == whole.usage.completion_tokens > 0
        return counted and text == whole.choices[0].message.content

    def logprobs() -> bool:
        done = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0].logprobs
        return all(len(entry.top_logprobs) == 3 for entry in done.content) and len(done.content) > 0

    def several() -> bool:
        done = client.completions.create(model=model, prompt=["One", "Two"], n=2, seed=7, max_tokens=8)
        again = client.completions.create(model=model, prompt=["One", "Two"], n=2, seed=7, max_tokens=8)
        texts = [choice.text for choice in done.choices]
        return len(texts) == 4 and texts == [choice.text for choice in again.choices]

    def scored() -> bool:
        done = client.completions.create(model=model, prompt="The sky is blue", max_tokens=0, echo=True, logprobs=1)
        values = done.choices[0].logprobs.token_logprobs
        return (
            values[0] is None and all(value < 0 for value in values[1:]) and done.choices[0].text == "The sky is blue"
        )

    def stopped() -> bool:
        done = client.completions.create(model=model, prompt="1, 2, 3, 4,", temperature=0, stop=" 8", max_tokens=40)
        return done.choices[0].finish_reason == "stop" and " 8" not in done.choices[0].text

    def formed() -> bool:
        schema = {"type": "object", "properties": {"river": {"enum": ["Nile", "Rhine"]}}, "required": ["river"]}
        form: Any = {"type": "json_schema", "json_schema": {"name": "river", "schema": schema}}
        done = client.chat.completions.create(**asked | {"max_completion_tokens": 60}, response_format=form)
        return json.loads(done.choices[0].message.content or "")["river"] in ("Nile", "Rhine")

    def chosen() -> bool:
        body = {"structured_outputs": {"choice": ["yes", "no"]}}
        return client.chat.completions.create(**asked, extra_body=body).choices[0].message.content in ("yes", "no")

    def refused() -> bool:
        try:
            client.completions.create(model=model, prompt="a", top_p=7)
        except openai.BadRequestError as error:
            return error.param == "top_p"
        return False

    def unknown_model() -> bool:
        try:
            client.completions.create(model="gpt", prompt="a")
        except openai.NotFoundError:
            return True
        return False

    def no_key() -> bool:
        try:
            openai.OpenAI(base_url=f"{url}/v1", api_key="a-wrong-key", max_retries=0).models.list()
        except openai.AuthenticationError:
            return True
        return False

    def left() -> bool:
        for _ in range(8):
            with client.completions.create(model=model, prompt="Once", max_tokens=300, stream=True) as stream:
                next(iter(stream))
        return bool(client.completions.create(model=model, prompt="Once", max_tokens=1).choices)

    checks: dict[str, Callable[[], bool]] = {
        "models": lambda: model in [one.id for one in client.models.list()],
        "a chat, whole and streamed": whole_and_streamed,
        "log-probabilities": logprobs,
        "several prompts and answers, by seed": several,
        "echo and score": scored,
        "a stop string": stopped,
        "a JSON schema": formed,
        "a choice": chosen,
        "a wrong parameter": refused,
        "a wrong model": unknown_model,
        "a wrong key": no_key,
        "streams that are left": left,
    }
    found = {}
    for name, check in checks.items():
        try:
            found[name] = "ok" if check() else "not as expected"
        except Exception as error:  # whatever it is, it is what the check found
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def write_task(folder: Path) -> Path:
    """The task: its questions, the answer at another place each time."""
    lines = []
    for number, (question, *choices) in enumerate(_FACTS):
        at = number % len(choices)
        turned = choices[-at:] + choices[:-at] if at else choices
        lines.append(json.dumps({"question": question, "choices": turned, "answer": turned.index(choices[0])}))
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "local_qa.yaml").write_text(_TASK % questions, encoding="utf-8")
    return questions


def write_tokenizer(model: str, folder: Path) -> None:
    """The model's tokenizer as a folder of Hugging Face, which is what lm-eval reads; a .gguf has none."""
    from jpaged.fetch import fetch
    from jpaged.tokenizer import Tokenizer

    folder.mkdir()
    Tokenizer.load(fetch(model))._hf.save(f"{folder / 'tokenizer.json'}")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def run_lm_eval(program: Path, url: str, model: str, folder: Path) -> dict[str, Any]:
    """lm-eval's own results, and (context, continuation, log-likelihood) of each of its requests."""
    write_task(folder)
    write_tokenizer(model, folder / "tokenizer")
    arguments = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer": folder / "tokenizer",
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 4,
        "max_length": SIZES["max_model_len"],
    }
    command = [f"{program}", "--model", "local-completions", "--tasks", "local_qa", "--include_path", f"{folder}"]
    command += ["--batch_size", "4", "--log_samples", "--output_path", f"{folder / 'out'}", "--model_args"]
    command += [",".join(f"{name}={value}" for name, value in arguments.items())]
    environment = os.environ | {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": f"{folder / 'data'}"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"lm_eval ended with status {done.returncode}: {done.stderr[-1500:]}")
    [results] = (folder / "out").rglob("results_*.json")
    [samples] = (folder / "out").rglob("samples_*.jsonl")
    scores = json.loads(results.read_text("utf-8"))
    asked = []
    for sample in map(json.loads, samples.read_text("utf-8").splitlines()):
        for request, [[value, _]] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            asked.append((request["arg_0"], request["arg_1"], float(value)))
    return {"accuracy": scores["results"]["local_qa"]["acc,none"], "version": scores["lm_eval_version"], "asked": asked}


def largest_difference(model: str, asked: list[tuple[str, str, float]]) -> float:
    """Between the log-likelihoods that lm-eval was given and those of the engine offline."""
    from jpaged import LLM, EngineConfig, SamplingParams, SchedulerConfig

    llm = LLM(model, config=EngineConfig(scheduler=SchedulerConfig(**SIZES), token_buckets=BUCKETS), progress=False)
    assert llm.tokenizer is not None
    begins = [llm.tokenizer.encode(context) for context, _, _ in asked]
    wholes = [llm.tokenizer.encode(context + continuation) for context, continuation, _ in asked]
    outputs = llm.generate(wholes, SamplingParams(max_tokens=0, prompt_logprobs=0), progress=False)
    differences = []
    for begin, output, (_, _, value) in zip(begins, outputs, asked, strict=True):
        entries = (output.prompt_logprobs or ())[len(begin) :]
        differences.append(abs(value - sum(entry.logprob for entry in entries if entry is not None)))
    return max(differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--lm-eval", type=Path, help="lm-eval's program; left out: OpenAI's client alone")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    scored = None
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), f"http://127.0.0.1:{(port := free_port())}"
        sizes = SIZES | {"token_buckets": ",".join(map(str, BUCKETS))}
        words = [f"--{name.replace('_', '-')} {value}" for name, value in sizes.items()]
        command = f"python -m jpaged.cli serve {options.model} --port {port} {' '.join(words)} --api-key {KEY}"
        with spawned(f"{command} --no-progress", url, folder / "log", start_s=_START_S) as server:
            checks = check_openai(server.url, options.model)
            if options.lm_eval is not None:
                scored = run_lm_eval(options.lm_eval, server.url, options.model, folder)
            log = server.faults()
    if scored is not None:
        asked = scored.pop("asked")
        scored |= {"questions": len(_FACTS), "requests": len(asked)}
        scored["largest_difference"] = largest_difference(options.model, asked)
    print_table("OpenAI's client", ["check", "found"], [[name, found] for name, found in checks.items()])
    results = {"model": options.model, "openai": {"version": version("openai"), "checks": checks}, "lm_eval": scored}
    print_json("serving/clients", results | {"log_faults": log})
    differs = scored is not None and scored["largest_difference"] > _MAX_DIFFERENCE
    return int(differs or bool(log) or any(found != "ok" for found in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
