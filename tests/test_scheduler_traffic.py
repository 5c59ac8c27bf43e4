"""The scheduler under whole loads: every answer must be that of the request alone, whatever else there is.

Random traffic is in `test_memory_machine`.
"""

import pytest

from tests.scheduler_driver import VOCAB, Driver, make_group, make_scheduler

BEAMS = {"use_beam_search": True, "temperature": 0.0, "n": 2, "best_of": 3}


def mixed_groups(count: int) -> list:
    """Requests of all kinds, half of which begin with the same tokens."""
    shared, groups = [(5 * i + 1) % VOCAB for i in range(9)], []
    for i in range(count):
        prompt = [*(shared if i % 2 else []), *((i + j * j) % VOCAB for j in range(1 + i % 7))]
        options = {0: {"n": 3}, 1: BEAMS, 2: {"best_of": 2}, 3: {"max_tokens": 0, "prompt_logprobs": 0}}.get(i % 6, {})
        options = {"max_tokens": 1 + i % 6, "ignore_eos": i % 4 < 2, **options}
        groups.append(make_group(f"r{i}", prompt, seed=i, priority=i % 3, arrival_time_s=float(i), **options))
    return groups


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_pages", [7, 12, 65])
def test_answers_do_not_depend_on_pool_size_and_run_ahead(num_pages, depth):
    scheduler = make_scheduler(num_pages, 4, max_num_seqs=5, budget=9, max_model_len=24, prefix_cache=False)
    driver = Driver(scheduler)
    options = [{"max_tokens": 1 + i % 17, "ignore_eos": i % 2 == 0} for i in range(25)]
    groups = [make_group(f"r{i}", 1 + i % 7, seed=i, **each) for i, each in enumerate(options)]
    driver.add(*groups)
    driver.drain(depth)
    assert (scheduler.num_preemptions > 0) == (num_pages < 65)
    assert scheduler.num_preemptions == sum(group.num_preemptions for group in groups)
    for group in groups:
        driver.check_answers(group)
    assert driver.memory.allocator.num_free == num_pages - 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False, "max_chunk_tokens": 3},
        {"host_pages": 40, "preemption": "swap"},
        {"host_pages": 6, "preemption": "swap", "policy": "priority", "max_chunk_tokens": 4},
        {"sliding_window": 6, "max_chunk_tokens": 4, "num_pages": 14},
        {"sliding_window": 5, "max_chunk_tokens": 3, "page_size": 2, "num_pages": 17},
        {"page_size": 1, "num_pages": 41, "headroom_pages": 2, "max_passes": 0},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("depth", [0, 2])
def test_answers_do_not_depend_on_what_becomes_of_the_pages(options, depth):
    options = {"num_pages": 12, "page_size": 4, "max_num_seqs": 6, "budget": 14, "max_model_len": 28, **options}
    driver, groups = Driver(make_scheduler(**options)), mixed_groups(30)
    driver.add(*groups)
    driver.drain(depth)
    for group in groups:
        driver.check_answers(group)
    scheduler, memory = driver.scheduler, driver.memory
    has_room = "headroom_pages" in options or "sliding_window" in options
    assert (scheduler.num_preemptions > 0) == (not has_room)
    assert (scheduler.num_swaps > 0) == (options.get("preemption") == "swap")
    assert memory.num_copied_pages > 0 or options["page_size"] == 1
    assert (memory.num_hit_tokens > 0) == options.get("prefix_cache", True)
    assert memory.allocator.num_used == 0
    most = sum(len(group.request.prompt_token_ids) + 6 * len(group.seqs) for group in groups)
    assert driver.device.num_computed < 3 * most  # bounded thrash


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("host_pages", [0, 5, 30])
@pytest.mark.parametrize("kind", [{}, {"n": 2}, {"n": 3}, BEAMS])
def test_groups_that_need_the_whole_pool_follow_each_other(kind, host_pages, prefix_cache):
    """Each grows to exactly the pages that there are, so all others must give way, and partial hits no room."""
    options = {"prefix_cache": prefix_cache, "host_pages": host_pages, "preemption": "swap", "budget": 7}
    driver = Driver(make_scheduler(8, 4, max_num_seqs=7, max_model_len=28, **options))
    count = kind.get("best_of", kind.get("n", 1))
    groups = []
    for i in range(6):
        prompt_len = 5 + 2 * i % 5
        limit = (prompt_len // 4 + (7 - prompt_len // 4) // count) * 4
        prompt = [*range(4), *((i + j) % VOCAB for j in range(prompt_len - 4))]
        groups.append(make_group(f"r{i}", prompt, seed=5 * i, max_tokens=limit - prompt_len, **kind))
    driver.add(*groups)
    driver.drain(depth=1)
    for group in groups:
        driver.check_answers(group)
    assert driver.memory.allocator.num_used == 0


def test_a_partial_hit_that_needs_the_last_page_is_computed_again():
    driver = Driver(make_scheduler(num_pages=5, page_size=4, max_model_len=16))
    first, second = make_group("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=5), make_group("b", [1, 2, 9, *range(11)])
    driver.add(first)
    driver.drain()
    allocator = driver.memory.allocator
    assert (allocator.num_free, allocator.num_cached) == (1, 3)
    second = make_group("b", [1, 2, 9, *range(11)], max_tokens=2)
    driver.add(second)
    driver.drain()
    driver.check_answers(second)
    assert (second.num_preemptions, second.seqs[0].num_cached_tokens) == (0, 0)
