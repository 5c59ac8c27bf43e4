"""Small engines over a tiny model, and a loop that serves requests and checks the page accounting."""

import pytest

from jpaged.batch import BatchPacker
from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, StepShape
from jpaged.engine import Engine
from jpaged.request import SamplingParams

PAGE = 8
PROMPTS = [[1, 2, 3], [9] * 17, list(range(20, 36)), [40], [5, 4, 3, 2, 1, 0, 7, 7, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_engine(model, **options) -> Engine:
    """`options`: as for `make_engine_config`."""
    return Engine(model, make_engine_config(**options))


def make_engine_config(
    *, num_pages=64, seqs=4, budget=32, length=128, cache=None, scheduler=None, **options
) -> EngineConfig:
    """`cache` and `scheduler`: further fields of their configs."""
    return EngineConfig(
        cache=CacheConfig(page_size=PAGE, num_pages=num_pages, **(cache or {})),
        scheduler=SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=length, **(scheduler or {})
        ),
        check_invariants=True,
        compilation_cache=False,
        **{"token_buckets": (seqs, budget), **options},
    )


def give_gpu_shapes(monkeypatch: pytest.MonkeyPatch, *few_rows: int) -> None:
    """Engines that are made on a CPU then have the step shapes of a GPU: with prompt steps of few rows too."""
    monkeypatch.setattr("jpaged.token_buckets._FEW_ROWS", few_rows)
    of_platform = EngineConfig.step_shapes
    monkeypatch.setattr(EngineConfig, "step_shapes", lambda self, *sizes: of_platform(self, *sizes[:2], "gpu"))


def shapes_taken(monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """A list that gets the shape of each step from now on."""
    shapes, pack = [], BatchPacker.pack

    def pack_and_tell(packer, plan):
        packed, shape = pack(packer, plan)
        shapes.append(shape)
        return packed, shape

    monkeypatch.setattr(BatchPacker, "pack", pack_and_tell)
    return shapes


def serve(engine: Engine, requests, *, at_once: bool = True, cold: bool = False) -> list:
    """Outputs in order of the requests; checks the page accounting after each step. `cold`: nothing is cached."""
    if cold:
        engine.reset_prefix_cache()
    done = {}
    for index, (prompt, params) in enumerate(requests):
        engine.add(prompt, params, request_id=f"r{index}")
        while not at_once and engine.has_work:
            done.update((output.request_id, output) for output in engine.step())
    while engine.has_work:
        done.update((output.request_id, output) for output in engine.step())
        check_pages(engine)
    stats = engine.stats()
    assert stats.now.pages_used == stats.pages_pinned
    return [done[f"r{index}"] for index in range(len(requests))]


def check_pages(engine: Engine) -> None:
    """Each page of the pool is free, cached, used or the null page."""
    stats = engine.stats()
    assert stats.pages_free + stats.pages_cached + stats.now.pages_used + 1 == stats.num_pages


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]
