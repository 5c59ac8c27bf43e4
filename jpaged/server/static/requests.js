// The table of live requests: how far each is and what it holds; never what it says.

const MAX_ROWS = 50;
const GOLDEN_ANGLE = 137.5; // neighbours in the table get hues far apart

export class Requests {
  #body;
  #more;
  #lit;
  #rows = new Map(); // key -> its parts
  #hues = new Map(); // key -> hue
  #numSeen = 0;
  #pinned = null;

  // `lit` gets the key of the request whose pages are to be lit, or null.
  constructor(body, more, lit) {
    this.#body = body;
    this.#more = more;
    this.#lit = lit;
  }

  // The server's requests with `key`, `name` and `hue`; `own` is the id of the chat's. Other keys' requests have no
  // id: they go by their place.
  named(requests, own) {
    const named = requests.map((one, index) => {
      const key = one.request_id ?? `${index}`;
      if (!this.#hues.has(key)) this.#hues.set(key, (this.#numSeen++ * GOLDEN_ANGLE) % 360);
      const name = one.request_id === own ? "this chat" : one.request_id;
      return { ...one, key, name: name ?? "of another key", hue: this.#hues.get(key) };
    });
    const live = new Set(named.map(({ key }) => key));
    for (const key of this.#hues.keys()) if (!live.has(key)) this.#hues.delete(key);
    return named;
  }

  show(requests) {
    const shown = requests.slice(0, MAX_ROWS);
    const live = new Set(shown.map(({ key }) => key));
    for (const [key, { row }] of this.#rows) {
      if (live.has(key)) continue;
      row.remove();
      this.#rows.delete(key);
      if (this.#pinned === key) this.#pin(null);
    }
    for (const request of shown) {
      if (!this.#rows.has(request.key)) this.#rows.set(request.key, this.#makeRow(request));
      const { cells, button } = this.#rows.get(request.key);
      if (button.textContent !== request.name) button.textContent = request.name;
      const preempted = request.num_preemptions ? `, preempted ${request.num_preemptions}×` : "";
      const values = [request.status + preempted, request.num_prompt_tokens, request.num_output_tokens, request.num_pages, `${request.age_s.toFixed(1)} s`];
      values.forEach((value, index) => (cells[index].textContent = value));
    }
    const hidden = requests.length - shown.length;
    this.#more.textContent = hidden ? `and ${hidden} more` : requests.length ? "" : "None.";
  }

  // Marks the requests of these keys, which hold what is pointed at.
  mark(keys) {
    for (const [key, { row }] of this.#rows) row.classList.toggle("held", keys?.has(key) ?? false);
  }

  #makeRow({ key, hue }) {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    const button = document.createElement("button");
    head.scope = "row";
    button.type = "button";
    button.title = "Show its pages";
    button.setAttribute("aria-pressed", "false");
    button.style.setProperty("--hue", hue);
    button.addEventListener("click", () => this.#pin(this.#pinned === key ? null : key));
    row.addEventListener("pointerenter", () => this.#lit(key));
    row.addEventListener("pointerleave", () => this.#lit(this.#pinned));
    head.append(button);
    const cells = Array.from({ length: 5 }, () => document.createElement("td"));
    row.append(head, ...cells);
    this.#body.append(row);
    return { row, button, cells };
  }

  #pin(key) {
    this.#pinned = key;
    for (const [other, { button }] of this.#rows) button.setAttribute("aria-pressed", `${other === key}`);
    this.#lit(key);
  }
}
