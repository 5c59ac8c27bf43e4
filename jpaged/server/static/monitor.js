// Asks the server about once a second how the page pool is, less often if that is slow or fails, and not at all while
// nobody looks.

const PERIOD_MS = 1000;
const LONGEST_MS = 30_000;
const SHARE = 5; // an answer that takes t ms is asked for every SHARE * t ms at the most

export class Monitor {
  #api;
  #seen;
  #failed;
  #timer;
  #round = 0; // of the request whose answer counts
  #failures = 0;

  // `seen` gets each answer; `failed` an ApiError.
  constructor(api, seen, failed) {
    this.#api = api;
    this.#seen = seen;
    this.#failed = failed;
    document.addEventListener("visibilitychange", () => this.look());
  }

  // Asks now, and then again and again.
  async look() {
    clearTimeout(this.#timer);
    const round = ++this.#round;
    if (document.hidden) return;
    const began = performance.now();
    let state, error;
    try {
      state = await this.#api.get("internal/state");
    } catch (caught) {
      error = caught;
    }
    if (round !== this.#round) return;
    const took = performance.now() - began;
    this.#failures = error ? this.#failures + 1 : 0;
    const wait = Math.max(PERIOD_MS * 2 ** this.#failures, SHARE * took) - took;
    this.#timer = setTimeout(() => this.look(), Math.min(wait, LONGEST_MS));
    if (error) this.#failed(error);
    else this.#seen(state);
  }
}
