// Server-sent events, out of the pieces that a connection brings, wherever it cuts them.

const END_OF_LINE = /\r\n|\n|\r(?!$)/; // a CR at the very end may be half of a CR LF

// Yields the data of each event of `stream`, a ReadableStream of bytes. Leaving early closes the connection.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? "\n" : value;
      const lines = rest.split(END_OF_LINE);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}
