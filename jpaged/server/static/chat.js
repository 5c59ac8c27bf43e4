// The conversation: asks for answers, shows them as they grow, and ends them by closing the connection.

import { ApiError, sentence } from "./api.js";
import { Turn } from "./turn.js";
import { events } from "./sse.js";

const NEAR_END = 40; // CSS pixels

export class Chat {
  #api;
  #page;
  #messages = []; // that were said; of several answers the first
  #running = null; // the AbortController of what is being answered
  #frame = 0; // in which the answer is to be painted, if there is one
  answerId = ""; // of the last answer, as the server knows it

  // `page`: the elements log, error, ask, prompt, send, stop, clear, model, system, temperature, maxTokens, answers.
  constructor(api, page) {
    this.#api = api;
    this.#page = page;
    page.ask.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    page.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    page.stop.addEventListener("click", () => this.#running?.abort());
    page.clear.addEventListener("click", () => this.#clear());
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    this.#page.log.replaceChildren();
    this.#tell("");
    this.#page.prompt.focus();
  }

  async #send() {
    const { prompt } = this.#page;
    const text = prompt.value.trim();
    if (!text || this.#running) return;
    const before = this.#messages;
    const messages = [...before, { role: "user", content: text }];
    const turn = new Turn(this.#page.log, text);
    prompt.value = "";
    this.#tell("");
    const running = new AbortController();
    this.#become(running);
    this.#toEnd(true);
    let error;
    try {
      await this.#answer(messages, turn, running.signal);
    } catch (caught) {
      error = caught;
    }
    if (this.#running === running) this.#become(null);
    const follows = this.#isAtEnd();
    if (this.#messages !== before) return; // another conversation has begun
    if (error && error.name !== "AbortError") {
      const known = error instanceof ApiError;
      this.#tell(known ? error.message : "The connection broke in the middle of the answer.");
    }
    if (turn.hasText) {
      turn.end(running.signal.aborted ? "stopped" : error ? "broken off" : "");
      this.#messages = [...messages, { role: "assistant", content: turn.text }];
    } else if (error) { // as if it had never been said
      turn.remove();
      if (!prompt.value) prompt.value = text;
    } else turn.end("");
    this.#toEnd(follows);
  }

  async #answer(messages, turn, signal) {
    const response = await this.#api.post("v1/chat/completions", this.#request(messages), signal);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(sentence(event.error.message), event.error.code);
      this.answerId = event.id;
      turn.add(event);
      this.#frame ||= requestAnimationFrame(() => this.#paint(turn)); // however many events a frame has
    }
    throw new ApiError("The server closed the connection before the answer was complete.", 0);
  }

  #paint(turn) {
    this.#frame = 0;
    const follows = this.#isAtEnd();
    turn.paint();
    this.#toEnd(follows);
  }

  #request(messages) {
    const { model, system, temperature, maxTokens, answers } = this.#page;
    const instructions = system.value.trim();
    const body = {
      model: model.value || undefined,
      messages: instructions ? [{ role: "system", content: instructions }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
    };
    // An empty field leaves the choice to the server.
    for (const [name, field] of [["temperature", temperature], ["max_completion_tokens", maxTokens], ["n", answers]]) {
      if (field.value !== "") body[name] = Number(field.value);
    }
    return body;
  }

  #become(running) {
    const { send, stop, log } = this.#page;
    this.#running = running;
    send.disabled = running !== null;
    stop.disabled = running === null;
    log.setAttribute("aria-busy", `${running !== null}`); // read out when it is whole
  }

  #isAtEnd() {
    const { log } = this.#page;
    return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  }

  #toEnd(follows) {
    const { log } = this.#page;
    if (follows) log.scrollTop = log.scrollHeight;
  }

  #tell(message) {
    this.#page.error.textContent = message;
    this.#page.error.hidden = !message;
  }
}
