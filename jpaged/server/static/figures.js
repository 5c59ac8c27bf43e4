// The figures beside the pool, each with a sparkline of the last minutes.

import { FIGURES } from "./history.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 100;
const HEIGHT = 24;

export class Figures {
  #parts;

  // `list` is a <dl>.
  constructor(list) {
    this.#parts = FIGURES.map(([title]) => {
      const group = document.createElement("div");
      const [name, value, text] = ["dt", "dd", "span"].map((tag) => document.createElement(tag));
      const lines = document.createElementNS(SVG, "svg");
      lines.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
      lines.setAttribute("preserveAspectRatio", "none");
      lines.setAttribute("aria-hidden", "true");
      const [area, line] = ["area", "line"].map((kind) => {
        const path = document.createElementNS(SVG, "path");
        path.setAttribute("class", kind);
        return path;
      });
      lines.append(area, line);
      name.textContent = title;
      text.textContent = "–";
      value.append(text, lines);
      group.append(name, value);
      list.append(group);
      return { text, area, line };
    });
  }

  // `values` are a History's, `now` what its `add` returned.
  show(values, now) {
    this.#parts.forEach(({ text, area, line }, index) => {
      const [, , write, top] = FIGURES[index];
      const last = values[index].at(-1);
      text.textContent = last === undefined ? "–" : write(last) + (top && top(now) > 1 ? ` of ${write(top(now))}` : "");
      const [outline, filled] = curve(values[index], top?.(now));
      line.setAttribute("d", outline);
      area.setAttribute("d", filled);
    });
  }
}

// Two SVG paths, the line and what lies under it, of at most the whole width; the newest value is at the right.
function curve(values, top) {
  const highest = top ?? Math.max(1e-9, ...values.filter((value) => value !== undefined));
  const step = WIDTH / Math.max(values.length - 1, 59);
  const first = WIDTH - step * (values.length - 1);
  const points = values.flatMap((value, index) =>
    value === undefined ? [] : [`${(first + index * step).toFixed(1)} ${(HEIGHT - 1 - (HEIGHT - 2) * (value / highest)).toFixed(1)}`],
  );
  if (points.length < 2) return ["", ""];
  const [from, to] = [points[0], points.at(-1)].map((point) => point.split(" ")[0]);
  return [`M${points.join("L")}`, `M${from} ${HEIGHT}L${points.join("L")}L${to} ${HEIGHT}Z`];
}
