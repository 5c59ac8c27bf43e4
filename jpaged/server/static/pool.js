// The page pool as a picture: a cell a page, in the order of page ids; several pages a cell if there are very many.

export const KINDS = ["free", "used", "shared", "cached", "null"];
const MAX_CELLS = 4096;
const MAX_HEIGHT = 300; // CSS pixels
const DIM = 0.25; // opacity of what is not looked at
const [SMALLEST, LARGEST] = [4, 22]; // sides of a cell
const MOVES = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

export class Pool {
  #canvas;
  #told;
  #pages = "";
  #requests = [];
  #holders = null; // page id -> indices of requests; made when it is first needed
  #byRequest = false;
  #lit = null; // key of the request whose pages are lit
  #chosen = null; // the cell that is pointed at
  #grid = { each: 1, cells: 0, columns: 1, side: LARGEST };

  // `told` gets a sentence about the cell that is pointed at, and the set of the keys of its requests; two nulls if
  // none is.
  constructor(canvas, told) {
    this.#canvas = canvas;
    this.#told = told;
    canvas.addEventListener("pointermove", (event) => this.#choose(this.#cellAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.#choose(this.#cellAt(event)));
    for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
    new ResizeObserver(() => this.#draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  // `pages`: a digit a page, an index into KINDS. `requests`: objects with `key`, `name`, `hue` and `pages`.
  show(pages, requests) {
    this.#pages = pages;
    this.#requests = requests;
    this.#holders = null;
    this.#draw();
    if (this.#chosen !== null) this.#choose(this.#chosen);
  }

  colour(byRequest) {
    this.#byRequest = byRequest;
    this.#draw();
  }

  // Dims all pages but those of one request; null: none is dimmed.
  light(key) {
    this.#lit = key;
    this.#draw();
  }

  #draw() {
    const canvas = this.#canvas;
    const grid = (this.#grid = layOut(this.#pages.length, canvas.clientWidth));
    const height = Math.max(1, Math.ceil(grid.cells / grid.columns)) * grid.side;
    const scale = window.devicePixelRatio;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(canvas.clientWidth * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const colours = KINDS.map((kind) => style.getPropertyValue(`--${kind}`));
    const lightness = style.getPropertyValue("--request-lightness");
    const lit = this.#litPages();
    const owners = this.#byRequest ? this.#holdersOf() : null;
    const colourOf = (page) => {
      const owner = owners?.get(page)?.[0];
      return owner === undefined ? colours[this.#pages[page]] : `hsl(${this.#requests[owner].hue} 60% ${lightness})`;
    };
    const isDim = (page) => (lit ? !lit.has(page) : owners && KINDS[this.#pages[page]] === "cached");
    for (let cell = 0; cell < grid.cells; cell++) this.#drawCell(context, cell, colourOf, isDim);
    context.globalAlpha = 1;
    if (this.#chosen !== null && this.#chosen < grid.cells) {
      const { x, y } = this.#placeOf(this.#chosen);
      context.strokeStyle = style.color;
      context.lineWidth = 2;
      context.strokeRect(x + 0.5, y + 0.5, grid.side - 2, grid.side - 2);
    }
    canvas.setAttribute("aria-label", `Page pool: ${this.#sum(0, this.#pages.length)}`);
  }

  #drawCell(context, cell, colourOf, isDim) {
    const { each, side } = this.#grid;
    const { x, y } = this.#placeOf(cell);
    const gap = side > 5 ? 2 : 1;
    const first = cell * each;
    const last = Math.min(first + each, this.#pages.length);
    const width = (side - gap) / (last - first);
    for (let page = first; page < last; page++) {
      context.globalAlpha = isDim(page) ? DIM : 1;
      context.fillStyle = colourOf(page);
      context.fillRect(x + (page - first) * width, y, width, side - gap);
    }
    if (this.#byRequest && each === 1 && this.#pages[first] === "2" && side >= 8) {
      context.fillStyle = getComputedStyle(this.#canvas).getPropertyValue("--panel"); // several sequences hold it
      context.beginPath();
      context.arc(x + (side - gap) / 2, y + (side - gap) / 2, side / 6, 0, 7);
      context.fill();
    }
  }

  #placeOf(cell) {
    const { columns, side } = this.#grid;
    return { x: (cell % columns) * side, y: Math.floor(cell / columns) * side };
  }

  #litPages() {
    const request = this.#requests.find(({ key }) => key === this.#lit);
    return request ? new Set(request.pages.flat()) : null;
  }

  #holdersOf() {
    if (!this.#holders) {
      this.#holders = new Map();
      this.#requests.forEach(({ pages }, index) => {
        for (const page of new Set(pages.flat())) {
          if (this.#holders.has(page)) this.#holders.get(page).push(index);
          else this.#holders.set(page, [index]);
        }
      });
    }
    return this.#holders;
  }

  #cellAt({ offsetX, offsetY }) {
    const { cells, columns, side } = this.#grid;
    const column = Math.floor(offsetX / side);
    const cell = Math.floor(offsetY / side) * columns + column;
    return column >= 0 && column < columns && cell >= 0 && cell < cells ? cell : null;
  }

  #move(event) {
    const { cells, columns } = this.#grid;
    const by = { ...MOVES, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (by === undefined || !cells) return;
    event.preventDefault();
    this.#choose(this.#chosen === null ? 0 : Math.min(Math.max(this.#chosen + by, 0), cells - 1));
  }

  #choose(cell) {
    this.#chosen = cell;
    this.#draw();
    if (cell === null || cell >= this.#grid.cells) {
      this.#told(null, null);
      return;
    }
    const first = cell * this.#grid.each;
    const last = Math.min(first + this.#grid.each, this.#pages.length) - 1;
    const held = new Set();
    for (let page = first; page <= last; page++) this.#holdersOf().get(page)?.forEach((index) => held.add(index));
    const requests = [...held].map((index) => this.#requests[index]);
    const what = first === last ? `Page ${first}: ${KINDS[this.#pages[first]]}` : `Pages ${first} to ${last}: ${this.#sum(first, last + 1)}`;
    const by = requests.length ? `; held by ${requests.map(({ name }) => name).join(", ")}` : "";
    this.#told(`${what}${by}`, new Set(requests.map(({ key }) => key)));
  }

  // "3 free, 1 used" of the pages in [first, last).
  #sum(first, last) {
    const counts = countKinds(this.#pages.slice(first, last));
    return KINDS.flatMap((kind, index) => (counts[index] ? [`${counts[index]} ${kind}`] : [])).join(", ");
  }
}

// How many pages there are of each of KINDS.
export function countKinds(pages) {
  const counts = KINDS.map(() => 0);
  for (const digit of pages) counts[digit]++;
  return counts;
}

function layOut(numPages, width) {
  const each = Math.max(1, Math.ceil(numPages / MAX_CELLS));
  const cells = Math.ceil(numPages / each);
  const fitting = Math.floor(Math.sqrt((width * MAX_HEIGHT) / Math.max(cells, 1)));
  const side = Math.min(Math.max(fitting, SMALLEST), LARGEST);
  return { each, cells, side, columns: Math.max(1, Math.floor(width / side)) };
}
