"""`plan_text`: a `ServingPlan` in words: the sum of a device's bytes, what was decided, and how to change it."""

from collections.abc import Mapping, Sequence
from typing import Final

from jpaged.accelerators import ACCELERATORS
from jpaged.division import LENGTHS, Division
from jpaged.launch_settings import Setting
from jpaged.serving_plan import ServingPlan, Wishes, smallest_topology

SEVERAL_CHIPS: Final = "several chips come later: this version runs a model on one device, and only plans for more"
_ESTIMATES: Final = ("temporaries", "programs")


def plan_text(plan: ServingPlan, settings: Sequence[Setting] = ()) -> str:
    """The whole plan.

    Args:
      plan: of a model on a topology.
      settings: environment variables of the launcher.
    """
    one, topology = plan.chosen, plan.topology
    chip = topology.accelerator
    count = f"{topology.num_chips} x {chip.kind}" if chip.platform != "cpu" else "this machine's cores and memory"
    if chip.devices_per_chip > 1:
        count += f", {topology.num_devices} devices: jax takes a core and its half of the memory for one"
    if topology.num_hosts > 1:
        count += f", {topology.num_hosts} hosts"
    lines = [f"{plan.model} on {topology}: {count}", "", *_sum_lines(plan, one)]
    if one.objection is None:
        lines += ["", *(f"  {name:<16}{value}" for name, value in _decisions(plan, one).items())]
    if len(plan.divisions) > 1:
        lines += ["", *_division_lines(plan)]
    if settings:
        lines += ["", "  environment, set before jax is imported (what you set stays)", *_setting_lines(settings)]
    elif chip.platform == "cpu":
        lines += ["", "  environment     nothing is set for a CPU"]
    return "\n".join(lines)


def _setting_lines(settings: Sequence[Setting]) -> list[str]:
    """Those of one reason on one line."""
    by_reason: dict[str, list[str]] = {}
    for one in settings:
        by_reason.setdefault(one.reason, []).append(f"{one.name}={one.value}{' (yours)' if one.is_users else ''}")
    return [f"    {' '.join(names)}\n      {reason}" for reason, names in by_reason.items()]


def refusal(plan: ServingPlan, wishes: Wishes) -> str:
    """What does not fit, and what would."""
    one, chip = plan.chosen, plan.topology.accelerator
    where = f"{plan.topology}" if one.degree > 1 or plan.topology.num_devices == 1 else f"one device of {plan.topology}"
    what = f"{plan.model} ({_weights(plan)}) does not fit on {where}: {one.objection}"
    kinds = [chip] if chip.name in ACCELERATORS else []
    kinds += [other for other in ACCELERATORS.values() if other.platform != "cpu" and other.name != chip.name]
    found = [topology for kind in kinds if (topology := smallest_topology(plan, kind, wishes)) is not None]
    if not found:
        return f"{what}; none of the topologies that are known would hold it"
    later = f" ({SEVERAL_CHIPS})" if any(topology.num_devices > 1 for topology in found) else ""
    return f"{what}; it would fit on {', '.join(map(str, found))}{later}"


def _weights(plan: ServingPlan) -> str:
    return f"{plan.dtype}, the layers' in {plan.weights}" if plan.weights else plan.dtype


def _sum_lines(plan: ServingPlan, one: Division) -> list[str]:
    chip = plan.topology.accelerator
    device = "a device (half a chip)" if chip.devices_per_chip > 1 else "a device"
    rows, of = [], f" / {one.degree}" if one.degree > 1 else ""
    option = "--weights" if plan.weights else "--dtype"
    notes: Mapping[str, str] = {
        "weights": f"{plan.config.num_parameters:,} in {_weights(plan)}{of} ({option})",
        "sampler's state": f"{one.max_num_seqs} sequences (--max-num-seqs)",
        "step's outputs": "logits and the like, kept from step to step",
        "step's inputs": f"{one.max_step_tokens:,} tokens, page table of {one.page_buckets[-1]:,} pages a row",
        "temporaries": "of the largest step; an estimate",
        "programs": f"{len(one.step_shapes)} compiled steps; an estimate",
        "reserve": "not used",
    }
    for name, size in one.parts.items():
        rows.append((name, size, notes[name]))
    if one.num_pages:
        bytes_of = f"{one.num_pages:,} of {one.page_size} tokens, {one.bytes_per_page / 1024:,.0f} KiB each"
        rows.append(("pages", one.pool_bytes, f"{bytes_of}, in {plan.kv_dtype} (--kv-dtype)"))
    else:
        rows.append(("two pages", 2 * one.bytes_per_page, f"the least there can be, of {one.page_size} tokens"))
    total = sum(size for _, size, _ in rows)
    width = max(len(name) for name, _, _ in rows) + 2
    lines = [f"  bytes of {device}"]
    lines += [f"    {name:<{width}}{size / 1e9:>10.3f} GB   {note}" for name, size, note in rows]
    lines.append(f"    {'in all':<{width}}{total / 1e9:>10.3f} GB   of {one.device_bytes / 1e9:.3f} GB")
    if total > one.device_bytes:
        lines.append(f"    {'lacking':<{width}}{(total - one.device_bytes) / 1e9:>10.3f} GB")
    return lines


def _decisions(plan: ServingPlan, one: Division) -> dict[str, str]:
    holds = ", ".join(f"{one.sequences(length):,} of {length:,} tokens" for length in one.lengths())
    prefill = one.max_num_prefill_tokens
    of_prompts = "" if prefill is None else f", {prefill:,} of prompts alone (--max-num-prefill-tokens)"
    rows = {
        "page size": f"{one.page_size} tokens (--page-size)",
        "attention": one.attention,
        "context": f"{one.max_model_len:,} tokens of prompt and answer (--max-model-len)",
        "tokens in pages": f"{one.num_replicas * one.token_capacity:,} (--num-pages, --memory-fraction, which is "
        f"{one.memory_fraction:g})",
        "at once": f"{one.max_num_seqs} sequences (--max-num-seqs), {one.max_num_batched_tokens:,} tokens a step "
        f"(--max-num-batched-tokens){of_prompts}",
        "pages hold": f"{holds}, if no prefix is shared",
        "compiled steps": f"{len(one.step_shapes)}: {_steps(one)}",
    }
    if plan.topology.accelerator.platform != "cpu" and one.token_capacity < LENGTHS[0] * one.max_num_seqs:
        rows["tight"] = "sequences will wait for pages, or lose them; 8-bit pages (--kv-dtype int8) hold nearly twice"
    if one.degree > 1:
        config, n = plan.config, one.degree
        kv_heads = max(config.num_key_value_heads // n, 1)
        rows["tensor parallel"] = (
            f"{n} devices: {config.num_attention_heads // n} of {config.num_attention_heads} query heads each, "
            f"{kv_heads} of {config.num_key_value_heads} KV heads, {config.intermediate_size // n:,} of "
            f"{config.intermediate_size:,} MLP columns, {-(-config.vocab_size // n):,} of {config.vocab_size:,} rows "
            "of the vocabulary (--tensor-parallel)"
        )
        rows["whole on each"] = ", ".join(one.repeated)
    if one.num_replicas > 1:
        rows["models"] = f"{one.num_replicas} side by side, a server each"
    if one.degree > 1:
        rows["this version"] = SEVERAL_CHIPS
    elif plan.topology.num_devices > 1:
        rows["this version"] = "one device a server: start one for each chip, with --chip 0, --chip 1, ..."
    return rows


def _steps(one: Division) -> str:
    """The shapes; as many as all that is named before the widths of the page table, times these."""
    tokens, pages = (" ".join(map(str, sizes)) for sizes in (one.token_buckets, one.page_buckets))
    single = [shape for shape in one.step_shapes if shape.num_steps == 1]
    of_size = {size: {shape.num_rows for shape in single if shape.num_tokens == size} for size in one.token_buckets}
    several = {shape.num_rows for shape in one.step_shapes if shape.num_steps > 1}
    words = [f"tokens {tokens}"]
    for size, rows in of_size.items():
        if fewer := sorted(rows)[:-1]:
            words.append(f"that of {size} for {' '.join(map(str, fewer))} rows too")
    if several:
        words.append(f"{one.decode_steps} decode steps at once for {' '.join(map(str, sorted(several)))} rows")
    return "; ".join([*words, f"pages a row {pages}"])


def _division_lines(plan: ServingPlan) -> list[str]:
    lines = [f"  ways to share {plan.topology.num_devices} devices (--tensor-parallel)"]
    for one in plan.divisions:
        models = "1 model" if one.num_replicas == 1 else f"{one.num_replicas} models"
        of = f"{models} on {one.degree} {'device' if one.degree == 1 else 'devices'} each"
        if one.objection is not None:
            what = f"does not fit: {one.objection.rpartition(': ')[2]}"
        else:
            what = (
                f"{one.num_replicas * one.token_capacity:,} tokens in pages of {one.page_size}, sequences up to "
                f"{one.max_model_len:,}"
            )
        mark = "*" if one is plan.chosen else " "
        lines.append(f"   {mark}{of:<26}{one.parts['weights'] / 1e9:>8.2f} GB of weights a device; {what}")
    return lines
