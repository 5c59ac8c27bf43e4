// One turn of the conversation in the log: what was said, the answers, and what they cost.

const REASONS = { length: "cut at the token limit", abort: "ended by the server" };

export class Turn {
  #element = document.createElement("article");
  #answers = document.createElement("div");
  #facts = document.createElement("p");
  #began = performance.now();
  #firstAt = null;
  #usage = null;
  #endings = new Set();
  #texts = []; // of each answer
  #nodes = []; // which show them, since the last `paint`

  constructor(log, said) {
    const message = document.createElement("p");
    message.className = "said";
    message.textContent = said;
    this.#answers.className = "answers";
    this.#facts.className = "facts";
    this.#facts.textContent = "…";
    this.#element.append(message, this.#answers, this.#facts);
    log.append(this.#element);
  }

  get hasText() {
    return this.#texts.length > 0;
  }

  // Of the first answer.
  get text() {
    return this.#texts[0] ?? "";
  }

  // Takes an event of a streamed chat completion; it is to be seen after the next `paint`.
  add({ choices, usage }) {
    this.#usage = usage ?? this.#usage;
    for (const { index, delta, finish_reason } of choices) {
      if (delta.content) {
        this.#firstAt ??= performance.now();
        while (this.#texts.length <= index) this.#texts.push("");
        this.#texts[index] += delta.content;
      }
      if (finish_reason in REASONS) this.#endings.add(REASONS[finish_reason]);
    }
  }

  paint() {
    this.#texts.forEach((text, index) => {
      const node = this.#nodeOf(index);
      if (node.length < text.length) node.appendData(text.slice(node.length));
    });
  }

  // `how`: in a word, unless it came to its own end.
  end(how) {
    this.paint();
    const seconds = (performance.now() - this.#began) / 1000;
    const facts = [...this.#endings, ...(how ? [how] : [])];
    if (this.#firstAt !== null) facts.push(`first text after ${((this.#firstAt - this.#began) / 1000).toFixed(2)} s`);
    if (this.#usage) {
      const { completion_tokens: made, prompt_tokens: asked, prompt_tokens_details: details } = this.#usage;
      facts.push(`${made} tokens in ${seconds.toFixed(1)} s, ${(made / seconds).toFixed(1)} a second`);
      facts.push(`${details?.cached_tokens ?? 0} of ${asked} prompt tokens cached`);
    }
    this.#facts.textContent = facts.join(" · ");
  }

  remove() {
    this.#element.remove();
  }

  #nodeOf(index) {
    while (this.#nodes.length <= index) {
      const answer = document.createElement("p");
      const text = document.createTextNode(""); // text alone: nothing that a model writes is ever markup
      answer.append(text);
      this.#answers.append(answer);
      this.#nodes.push(text);
    }
    return this.#nodes[index];
  }
}
