// Figures of the last minutes, out of the counters that the engine counts up.

const KEPT = 300; // answers, so five minutes
const SPAN_MS = 3000; // rates are means over so long

// What is shown: title, the figure out of (now, an earlier answer or undefined), how it is written, and the top of its
// sparkline, where there is a natural one.
export const FIGURES = [
  ["Tokens/s", (now, past) => past && (1000 * grown(now, past, "num_generated_tokens")) / (now.at - past.at), decimal],
  ["Batch size", (now, past) => past && ratio(grown(now, past, "num_step_rows"), grown(now, past, "num_steps")), decimal],
  ["Running", ({ stats }) => stats.num_running, whole],
  ["Waiting", ({ stats }) => stats.num_waiting, whole],
  ["Pages in use", ({ stats }) => stats.now.pages_used, whole, ({ stats }) => stats.num_pages - 1],
  ["Wasted slots", ({ stats }) => wasted(stats.now), percent],
  ["Prefix hit rate", ({ stats }) => ratio(stats.num_cached_tokens, stats.num_queried_tokens), percent, () => 1],
  ["Preemptions", ({ stats }) => stats.num_preemptions, whole],
];

export class History {
  #answers = [];
  values = FIGURES.map(() => []); // of each figure, the oldest first; undefined where there is none

  add(state, at) {
    const last = this.#answers.at(-1);
    if (last && last.process !== state.info.process_id) this.#answers = []; // its counters began anew
    const now = { at, process: state.info.process_id, stats: state.stats };
    const past = this.#answers.findLast((one) => at - one.at >= SPAN_MS) ?? this.#answers[0];
    this.#answers.push(now);
    if (this.#answers.length > KEPT) this.#answers.shift();
    FIGURES.forEach(([, of], index) => {
      this.values[index].push(of(now, past));
      if (this.values[index].length > KEPT) this.values[index].shift();
    });
    return now;
  }
}

function grown(now, past, name) {
  return now.stats[name] - past.stats[name];
}

function ratio(part, all) {
  return all ? part / all : undefined;
}

function wasted({ pages_used, tokens_held, page_size }) {
  return pages_used ? 1 - tokens_held / (pages_used * page_size) : 0;
}

function whole(value) {
  return value.toLocaleString("en");
}

function decimal(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
}

function percent(value) {
  return value.toLocaleString("en", { style: "percent", maximumFractionDigits: 1 });
}
