// Calls to the server that this page came from. Failures become sentences for people.

export class ApiError extends Error {
  // `status` is 0 if no answer came at all.
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Api {
  key = ""; // in memory only

  async get(path) {
    return (await this.#call(path, { cache: "no-store", signal: AbortSignal.timeout(30_000) })).json();
  }

  // The Response, whose body may be a stream.
  post(path, body, signal) {
    const headers = { "content-type": "application/json" };
    return this.#call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  async #call(path, options) {
    const headers = { ...options.headers, ...(this.key && { authorization: `Bearer ${this.key}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      const late = error.name === "TimeoutError";
      throw new ApiError(late ? "The server does not answer." : "The server cannot be reached.", 0);
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

async function refusal(response) {
  if (response.status === 401) {
    return new ApiError("The server asks for a valid API key; enter one in the settings of the chat.", 401);
  }
  const answer = await response.json().catch(() => null);
  const seconds = response.headers.get("retry-after");
  const again = seconds ? ` Another try may help in ${seconds} s.` : "";
  return new ApiError(sentence(answer?.error?.message ?? `The server answers ${response.status}.`) + again, response.status);
}

// A message of the API as a sentence.
export function sentence(message) {
  return message.charAt(0).toUpperCase() + message.slice(1) + (/[.!?]$/.test(message) ? "" : ".");
}
