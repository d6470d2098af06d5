// Charts over time as SVG: lines or stacked areas. A gap in the data is a gap in the line.

const LATEST = 15; // samples in which a value is still of now
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 168, LEFT = 60, RIGHT = 8, TOP = 12, BOTTOM = 22; // pixels, as .chart svg has them

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The end of a scale. Bytes are counted in powers of 1024.
function niceTop(value, unit) {
  if (!(value > 0)) return 1;
  if (unit === "bytes") {
    const size = 1024 ** Math.max(0, Math.floor(Math.log(value) / Math.log(1024)));
    return niceTop(value / size) * size;
  }
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (value <= step * power * 1.0001) return step * power;
  return 10 * power;
}

class Chart {
  // given: { title, hint, unit, series: [{ name, of }], stacked, top, when }; `of` is a column's name
  // or a function from a row of columns to a value, `when` says whether there is something to show.
  constructor(parent, given) {
    this.given = given;
    this.at = null; // the place under the pointer
    this.hint = make("span", { text: given.hint || "" });
    this.picture = svg("svg", { role: "img", tabindex: "0", "aria-label": given.title });
    this.legend = make("ul", { class: "legend" });
    const caption = make("figcaption", {}, make("b", { text: given.title }), this.hint);
    this.box = make("figure", { class: "chart" }, caption, this.picture, this.legend);
    parent.append(this.box);
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.choose(null));
    this.picture.addEventListener("keydown", (event) => this.step(event));
    this.picture.addEventListener("blur", () => this.choose(null));
    this.times = [];
    this.values = given.series.map(() => []);
    this.width = 480;
    // One unit of the picture is one pixel, so that its text is as large as the page's.
    new ResizeObserver(() => {
      const width = this.picture.clientWidth;
      if (!width || width === this.width) return;
      this.width = width;
      if (this.times.length) this.draw();
    }).observe(this.picture);
  }

  show(found, span) {
    const columns = found.columns;
    this.box.hidden = Boolean(this.given.when) && !this.given.when(found);
    if (this.box.hidden) return;
    this.times = columns.at_s;
    // Short of data, what there is takes the whole width.
    const known = this.times.length ? this.times[this.times.length - 1] - this.times[0] : 0;
    this.period = known / Math.max(1, this.times.length - 1);
    this.span = Math.min(span, Math.max(60, known));
    this.values = this.given.series.map(({ of }) => (typeof of === "string"
      ? columns[of] : this.times.map((_, at) => of((name) => columns[name][at], found))));
    this.draw();
  }

  x(time) {
    const last = this.times[this.times.length - 1];
    return this.width - RIGHT - ((last - time) / this.span) * (this.width - LEFT - RIGHT);
  }

  draw() {
    const { given, times } = this;
    const stacked = given.stacked;
    const heights = stacked ? this.sums() : this.values;
    const highest = Math.max(0, ...heights.flat().filter(isKnown));
    // A share may pass 100% for a second, when long steps end in it; the scale stays.
    const top = given.top || niceTop(highest, given.unit);
    const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(top * share), y2: y(top * share) }));
      const label = svg("text", { class: "axis", x: LEFT - 6, y: y(top * share) + 4, "text-anchor": "end" });
      label.textContent = UNITS[given.unit || "number"](top * share);
      parts.push(label);
    }
    if (times.length > 1) {
      parts.push(...this.timeLabels());
      for (let place = heights.length - 1; place >= 0; place -= 1) {
        const path = stacked ? this.area(heights, place, y) : this.line(heights[place], y);
        const kind = stacked ? `area a${place + 1}` : `line l${place + 1}`;
        if (path) parts.push(svg("path", { class: kind, d: path }));
      }
    } else {
      const empty = svg("text", { class: "empty", x: (LEFT + this.width) / 2, y: HEIGHT / 2, "text-anchor": "middle" });
      empty.textContent = "collecting";
      parts.push(empty);
    }
    if (this.at !== null && this.at < times.length) {
      const x = this.x(times[this.at]);
      parts.push(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.picture.replaceChildren(...parts);
    this.name();
  }

  sums() {
    const under = this.times.map(() => 0);
    return this.values.map((list) => list.map((value, at) => {
      if (!isKnown(value)) return null;
      under[at] += value;
      return under[at];
    }));
  }

  // Whether two samples are too far apart to be joined: there was no engine, or for a while nothing
  // to take a percentile of.
  apart(from, at) {
    return this.times[at] - this.times[from] > Math.max(8, this.period * 4);
  }

  line(list, y) {
    let path = "", before = null;
    list.forEach((value, at) => {
      const x = this.x(this.times[at]);
      if (!isKnown(value) || x < LEFT - 0.1) return;
      const joined = before !== null && !this.apart(before, at);
      path += `${joined ? "L" : "M"}${x.toFixed(1)} ${y(value).toFixed(1)}`;
      if (!joined) path += "h.1"; // a single value shows as a point
      before = at;
    });
    return path;
  }

  area(heights, place, y) {
    let path = "", run = [];
    const close = () => {
      if (run.length > 1) {
        const up = run.map((at) => `${this.x(this.times[at]).toFixed(1)} ${y(heights[place][at]).toFixed(1)}`);
        const ends = [run[run.length - 1], run[0]].map((at) => `${this.x(this.times[at]).toFixed(1)} ${y(0)}`);
        path += `M${[...up, ...ends].join("L")}Z`;
      }
      run = [];
    };
    heights[place].forEach((value, at) => {
      if (!isKnown(value) || (run.length && this.apart(run[run.length - 1], at))) close();
      if (isKnown(value) && this.x(this.times[at]) >= LEFT - 0.1) run.push(at);
    });
    close();
    return path;
  }

  timeLabels() {
    const last = this.times[this.times.length - 1];
    return [0, 0.5, 1].map((share) => {
      const time = last - this.span * (1 - share);
      const place = { x: this.x(time), y: HEIGHT - 5, class: "axis" };
      const anchor = ["start", "middle", "end"][share * 2];
      const label = svg("text", { ...place, "text-anchor": anchor });
      label.textContent = new Date(time * 1000).toLocaleTimeString("en-GB");
      return label;
    });
  }

  name() {
    const unit = UNITS[this.given.unit || "number"];
    const at = this.at !== null ? this.at : this.times.length - 1;
    // Now: the latest that is known. In some seconds there is nothing to take a percentile of.
    const shown = this.values.map((list) => (this.at !== null ? list[at]
      : list.slice(-LATEST).findLast(isKnown)));
    const items = this.given.series.map((series, place) => {
      const value = unit(shown[place]);
      const colour = make("i", { class: `s${place + 1}` });
      return make("li", {}, colour, `${series.name} `, make("b", { text: value }));
    });
    this.legend.replaceChildren(...items);
    const words = this.given.series.map((series, place) => `${series.name} ${unit(shown[place])}`);
    const when = this.at === null || !this.times.length ? "now"
      : `at ${new Date(this.times[at] * 1000).toLocaleTimeString("en-GB")}`;
    this.hint.textContent = this.at === null ? this.given.hint || "" : when;
    this.words = `${when}: ${words.join(", ")}`;
    this.picture.setAttribute("aria-label", `${this.given.title}, ${this.words}${this.extent(unit)}`);
  }

  // What the picture shows at a glance, in words.
  extent(unit) {
    const parts = this.given.series.map((series, place) => {
      const known = this.values[place].filter(isKnown);
      if (known.length < 2) return null;
      const low = known.reduce((least, each) => Math.min(least, each), Infinity);
      const high = known.reduce((most, each) => Math.max(most, each), -Infinity);
      return low === high ? null : `${series.name} from ${unit(low)} to ${unit(high)}`;
    }).filter((part) => part !== null);
    return parts.length ? `. In the last ${seconds(this.span)}: ${parts.join(", ")}` : "";
  }

  point(event) {
    if (!this.times.length) return;
    const box = this.picture.getBoundingClientRect();
    const x = event.clientX - box.left;
    let best = 0;
    this.times.forEach((time, at) => {
      if (Math.abs(this.x(time) - x) < Math.abs(this.x(this.times[best]) - x)) best = at;
    });
    this.choose(best);
  }

  step(event) {
    const far = this.times.length;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -far, End: far }[event.key];
    if (by === undefined || !far) return;
    event.preventDefault();
    const from = this.at === null ? this.times.length - 1 : this.at;
    this.choose(Math.min(this.times.length - 1, Math.max(0, from + by)));
    say(this.words); // a reader hears what the keys move to; nobody is told of every second
  }

  choose(at) {
    if (this.at === at) return;
    this.at = at;
    this.draw();
  }
}
