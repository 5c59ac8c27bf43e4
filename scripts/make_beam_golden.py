"""Make tests/golden/beam.json: beam searches by Hugging Face transformers in float32, evidence from outside jpaged.

    pip install torch transformers gguf tokenizers safetensors numpy
    python scripts/make_beam_golden.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf         some 20 minutes on one core

Every search is one call of `generate(do_sample=False, num_beams=width, num_return_sequences=width, ...)` with eager
attention, on the default model (its weights as `make_golden.py` reads them) and on small random models of
tests/golden/tiny_models.py. The log-probabilities of every step are then handed to tests/golden/beam_reference.py,
which must find the same tokens and scores: that shows what the reference is worth, and gives each search its margin,
the smallest difference of log-probabilities that any of its decisions hung on.
"""

# pyright: reportMissingImports=false
import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_golden  # it also makes `tests` importable
import numpy as np
import torch
from gguf import GGUFReader

from tests.golden import beam_reference, tiny_models

FORMAT = [
    "A prompt is searched once for each combination of width, length penalty and early stopping.",
    "prompts[i].model: 'smollm2', or the name of a model in tests/golden/tiny_models.py.",
    "prompts[i].name: unique. For smollm2 it is the name of a prompt in smollm2.json.",
    "prompts[i].token_ids: the prompt. stop_token_ids: tokens that end an output (no other token does).",
    "prompts[i].max_tokens, min_tokens: output tokens at the most, and before a stop token at the least.",
    "searches[j].width, length_penalty, early_stopping: num_beams and the like of transformers' generate.",
    "searches[j].token_ids: the `width` hypotheses, best first; a stop token that ended one is its last token.",
    "searches[j].scores: cumulative log-probability / (number of tokens, stop token included) ** length_penalty.",
    "searches[j].num_steps: steps until the search was over, the one that the prompt's logits start included.",
    "searches[j].margin: smallest difference of log-probabilities that a decision hung on; below some 1e-3 other",
    "    float32 arithmetic may rightly find other tokens.",
]
WIDTHS = (2, 4, 6)
LENGTH_PENALTIES = (0.0, 1.0, 2.0)
EARLY_STOPPING = (False, True, "never")


@dataclass(frozen=True)
class Task:
    """A prompt to search from; `stops` are texts of one token each for smollm2, ids for the small models."""

    model: str
    name: str
    stops: tuple[Any, ...]
    max_tokens: int
    min_tokens: int = 0


# Stop tokens that come often: otherwise nothing but the length would end an output.
TASKS = (
    Task("smollm2", "capital", ("<|im_end|>", "."), 24),
    Task("smollm2", "sum", ("<|im_end|>", "\n"), 24),
    Task("smollm2", "chat_python", ("<|im_end|>",), 24),
    Task("smollm2", "chat_garden", ("<|im_end|>",), 20),
    Task("smollm2", "boiling", ("<|im_end|>", "\n", "."), 16),
    Task("smollm2", "fibonacci", (), 16),
    Task("smollm2", "list", ("\n", "."), 16, min_tokens=5),
    Task("gqa", "gqa_one_token", (37, 42), 16),
    Task("gqa", "gqa_17_tokens", (9, 66, 68), 16, min_tokens=7),
    Task("mistral", "mistral_one_token", (35, 66), 16),
    Task("mistral", "mistral_17_tokens", (25, 53), 24),
)


def prompts(path: Path) -> Iterator[tuple[Any, Task, list[int], list[int]]]:
    """(model of transformers, task, prompt, stop ids) of every task."""
    reader = GGUFReader(path)
    models: dict[str, Any] = {"smollm2": make_golden.load_gguf(reader)}
    tokenizer = make_golden.load_tokenizer(reader)
    smollm2 = json.loads((make_golden.GOLDEN / "smollm2.json").read_text())
    known = {entry["name"]: entry["token_ids"] for entry in smollm2["prompts"]}
    for task in TASKS:
        if task.model == "smollm2":
            stops = [tokenizer.encode(text).ids for text in task.stops]
            if any(len(ids) != 1 for ids in stops):
                raise SystemExit(f"{task.name}: a stop of several tokens, {stops}")
            yield models["smollm2"], task, known[task.name], [ids[0] for ids in stops]
        else:
            if task.model not in models:
                _, models[task.model] = make_golden.build_tiny(task.model)
            config = tiny_models.VARIANTS[task.model]
            seed = list(tiny_models.VARIANTS).index(task.model)
            one, several, _ = tiny_models.prompts(seed, config["vocab_size"])
            yield models[task.model], task, one if task.name.endswith("one_token") else several, list(task.stops)


@torch.inference_mode()
def search(model: Any, task: Task, prompt: list[int], stops: list[int], **settings: Any) -> dict[str, Any]:
    """One search by transformers, and the check of it."""
    width, length_penalty, early_stopping = (settings[k] for k in ("width", "length_penalty", "early_stopping"))
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=task.max_tokens,
        min_new_tokens=task.min_tokens or None,
        eos_token_id=stops or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    outputs = [row[len(prompt) :][:n] for row, n in zip(out.sequences.tolist(), lengths, strict=True)]
    scores = out.sequences_scores.tolist()

    steps = iter(out.scores)
    found = beam_reference.beam_search(
        lambda beams: next(steps).numpy()[: len(beams)],  # before the first step all beams are the prompt
        width=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=stops,
        max_tokens=task.max_tokens,
        min_tokens=task.min_tokens,
    )
    same = [list(ids) for ids in found.token_ids] == outputs and found.num_steps == len(out.scores)
    if not same or not np.allclose(found.scores, scores, rtol=1e-5, atol=1e-6):
        raise SystemExit(f"{task.name}, {settings}: the reference finds {found}, transformers {outputs}, {scores}")
    return {
        **settings,
        "num_steps": found.num_steps,
        "margin": round(found.margin, 6),
        "scores": make_golden.numbers(scores),
        "token_ids": outputs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden beam searches with Hugging Face transformers.")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than free cores is far slower")
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, default=make_golden.GOLDEN / "beam.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    entries = []
    for model, task, prompt, stops in prompts(args.gguf):
        searches = []
        for width, length_penalty, early in itertools.product(WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING):
            settings = {"width": width, "length_penalty": length_penalty, "early_stopping": early}
            searches.append(search(model, task, prompt, stops, **settings))
        entries.append(
            {
                "model": task.model,
                "name": task.name,
                "token_ids": prompt,
                "stop_token_ids": stops,
                "max_tokens": task.max_tokens,
                "min_tokens": task.min_tokens,
                "searches": searches,
            }
        )
        steps = [entry["num_steps"] for entry in searches]
        margins = [entry["margin"] for entry in searches]
        found = {json.dumps(entry["token_ids"]) for entry in searches}
        print(
            f"{task.name}: {min(steps)} to {max(steps)} steps, {len(found)} results, margin {min(margins)}", flush=True
        )
    data = {
        "format": FORMAT,
        "provenance": make_golden.provenance(
            "",
            made_by=f"scripts/make_beam_golden.py --gguf {args.gguf.name}",
            gguf={"file": args.gguf.name, "sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest()},
            license="the weights are SmolLM2-135M-Instruct, Apache-2.0",
        ),
        "prompts": entries,
    }
    args.out.write_text(make_golden.to_json(data, depth=4) + "\n")
    print(json.dumps({"file": args.out.name, "searches": sum(len(entry["searches"]) for entry in entries)}))


if __name__ == "__main__":
    main()
