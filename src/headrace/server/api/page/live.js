// The live view: polls /history once a second, keeps the samples of the chosen window, draws them.

const SPANS_S = { "5m": 300, "1h": 3600, "24h": 86400 };
const ratio = (part, whole) => (isKnown(part) && whole > 0 ? part / whole : null);
const percentiles = (name) => [50, 95, 99].map((p) => ({ name: `p${p}`, of: `${name}_p${p}` }));

const CHARTS = [
  { title: "Throughput", hint: "tokens per second", series: [
    { name: "generated", of: "generated_tokens" }, { name: "prompt, computed", of: "computed_prompt_tokens" },
    { name: "prompt, cached", of: "cached_prompt_tokens" }] },
  { title: "Requests", hint: "now", series: [
    { name: "running", of: "running" }, { name: "waiting", of: "waiting" }] },
  { title: "Time to first token", unit: "seconds", series: percentiles("ttft") },
  { title: "Time per output token", hint: "mean of each request", unit: "seconds", series: percentiles("tpot") },
  { title: "Gap between tokens", hint: "each gap", unit: "seconds", series: percentiles("itl") },
  { title: "Time in the queue", unit: "seconds", series: percentiles("queue") },
  { title: "Where the time goes", hint: "share of the time", unit: "percent", stacked: true, top: 1, series: [
    { name: "compute", of: "step_compute" }, { name: "sample", of: "step_sample" },
    { name: "schedule", of: "step_schedule" }, { name: "commit", of: "step_commit" },
    { name: "publish", of: "step_publish" }] },
  { title: "Tokens per step", hint: "mean", series: [
    { name: "tokens", of: (get) => ratio(get("step_tokens"), get("steps")) }] },
  { title: "Use of the device", hint: "share of its peak", unit: "percent", when: (found) => found.peaks, series: [
    { name: "products (MFU)", of: (get, found) => ratio(get("model_flops"), found.peaks.flops_s) },
    { name: "bandwidth", of: (get, found) => ratio(get("model_bytes"), found.peaks.bytes_s) }] },
  { title: "Products", hint: "FLOP/s", when: (found) => !found.peaks, series: [{ name: "model", of: "model_flops" }] },
  { title: "Memory read", hint: "bytes per second", unit: "bytes", when: (found) => !found.peaks, series: [
    { name: "weights and KV", of: "model_bytes" }] },
  { title: "GPU", hint: "nvidia-smi", unit: "percent", top: 1, when: (found) => found.columns.gpu_busy.some(isKnown), series: [
    { name: "busy", of: "gpu_busy" }] },
  { title: "GPU memory", hint: "nvidia-smi", unit: "bytes", when: (found) => found.columns.gpu_used_bytes.some(isKnown), series: [
    { name: "used", of: "gpu_used_bytes" }] },
  { title: "Prefix cache hits", hint: "share of prompt tokens", unit: "percent", top: 1, series: [
    { name: "found", of: (get) => ratio(get("prefix_hit_tokens"), get("prefix_queried_tokens")) }] },
  { title: "Why prefixes missed", hint: "lookups per second", stacked: true, series: [
    { name: "never seen", of: "prefix_miss_never_seen" }, { name: "evicted", of: "prefix_miss_evicted" },
    { name: "nothing to gain", of: "prefix_miss_too_short" }] },
  { title: "Preemptions", hint: "per second", series: [
    { name: "sequences", of: "preemptions" }, { name: "tokens computed again", of: "preempted_tokens" }] },
  { title: "Refused and failed", hint: "requests per second", series: [
    { name: "refused", of: "refused" }, { name: "failed", of: "failed" }] },
];

const live = {
  window: "5m", columns: null, charts: null, timer: null, isPaused: false, delay: 1000,

  start() {
    this.charts = CHARTS.map((given) => new Chart(byId("charts"), given));
    byId("window").addEventListener("change", (event) => {
      this.window = event.target.value;
      this.columns = null;
      this.poll();
    });
    byId("pause").addEventListener("click", (event) => {
      this.isPaused = !this.isPaused;
      event.target.setAttribute("aria-pressed", String(this.isPaused));
      event.target.textContent = this.isPaused ? "Go on" : "Pause";
      if (!this.isPaused) this.poll();
    });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.poll(); });
    this.poll();
  },

  async poll() {
    clearTimeout(this.timer);
    if (this.isPaused || document.hidden) return;
    const window_ = this.window;
    const times = this.columns ? this.columns.at_s : [];
    const since = times.length ? times[times.length - 1] : 0;
    try {
      const found = await ask(`history?window=${window_}&since=${since}`);
      if (window_ === this.window) this.take(found);
      this.delay = 1000;
    } catch (error) {
      this.fail(error);
      this.delay = Math.min(this.delay * 2, 15000);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), this.delay);
  },

  take(found) {
    const span = SPANS_S[found.window];
    if (!this.columns) this.columns = found.columns;
    else for (const [name, list] of Object.entries(found.columns)) this.columns[name].push(...list);
    const first = this.columns.at_s.findIndex((time) => time > found.now_s - span - 60);
    if (first > 0) for (const list of Object.values(this.columns)) list.splice(0, first);
    byId("live-note").hidden = true;
    byId("model").textContent = found.model;
    document.title = `${found.model} – Headrace`;
    setState(found.engine_is_up ? "up" : "down", found.engine_is_up ? "serving" : "the engine is starting");
    for (const chart of this.charts) chart.show({ ...found, columns: this.columns }, span);
    this.tiles(found);
    this.blocks();
  },

  last(name) {
    const list = this.columns[name];
    return list.length ? list[list.length - 1] : null;
  },

  // Percentiles are of seconds in which something ended: the latest of the last few samples.
  recent(name) {
    return this.columns[name].slice(-LATEST).findLast(isKnown) ?? null;
  },

  tiles(found) {
    const generated = this.last("generated_tokens");
    const tiles = [
      ["Generated", number(generated), "tokens/s"],
      ["Running", number(this.last("running")), ""],
      ["Waiting", number(this.last("waiting")), "", this.last("waiting") > 0 ? "bad" : ""],
      ["Saturation", percent(this.last("saturation")), ""],
      ["First token, p95", seconds(this.recent("ttft_p95")), ""],
      ["Per token, p95", seconds(this.recent("tpot_p95")), ""],
      ["Finished", number(found.totals.finished), "requests"],
      ["Refused, failed", `${number(found.totals.refused)}, ${number(found.totals.failed)}`, ""],
    ];
    const promised = found.objective;
    if (promised) {
      const missed = Object.values(promised.missed).reduce((sum, each) => sum + each, 0);
      const share = ratio(promised.within, promised.within + missed);
      const kind = share === null ? "" : share >= promised.share ? "good" : "bad";
      tiles.push(["Within the objective", percent(share), `of ${percent(promised.share)}`, kind]);
      tiles.push(["Headroom", percent(promised.headroom), "", promised.headroom < 0 ? "bad" : ""]);
      tiles.push(["Budget burnt", number(promised.burn_rate_5m), "× allowed", promised.burn_rate_5m > 1 ? "bad" : ""]);
    }
    byId("tiles").replaceChildren(...tiles.map(([name, value, unit, kind]) =>
      make("dl", { class: `tile ${kind || ""}` }, make("dt", { text: name }),
        make("dd", {}, value, unit ? make("small", { text: unit }) : null))));
  },

  // Blocks as a picture: each square stands for the same number of blocks.
  blocks() {
    const counts = ["kv_used_blocks", "kv_cached_blocks", "kv_free_blocks"].map((name) => this.last(name));
    const canvas = byId("blocks");
    if (!counts.every(isKnown) || !canvas.clientWidth) return;
    const all = counts.reduce((sum, each) => sum + each, 0);
    const pixels = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * pixels;
    canvas.height = canvas.clientHeight * pixels;
    const rows = 6, size = canvas.height / rows;
    const places = Math.max(1, Math.floor(canvas.width / size)) * rows;
    const squares = Math.min(places, Math.max(all, 1));
    const style = getComputedStyle(document.documentElement);
    const colours = ["--c1", "--c3", "--free"].map((name) => style.getPropertyValue(name));
    const used = Math.ceil((counts[0] / all) * squares);
    const cached = Math.min(squares - used, Math.ceil((counts[1] / all) * squares));
    const context = canvas.getContext("2d");
    for (let at = 0; at < squares; at += 1) {
      context.fillStyle = colours[at < used ? 0 : at < used + cached ? 1 : 2];
      context.fillRect(Math.floor(at / rows) * size + 1, (at % rows) * size + 1, size - 2, size - 2);
    }
    const names = ["used by sequences", "cached prefixes", "free"];
    canvas.setAttribute("aria-label", `KV blocks: ${names.map((name, at) => `${Math.round(counts[at])} ${name}`).join(", ")}`);
    byId("blocks-legend").replaceChildren(...names.map((name, at) => make("li", {},
      make("i", { class: ["s1", "s3", "s0"][at] }), `${name} `, make("b", { text: Math.round(counts[at]).toLocaleString("en") }))));
    byId("blocks-hint").textContent = all > squares ? `a square is ${number(all / squares)} blocks` : "a square is a block";
  },

  fail(error) {
    const note = byId("live-note");
    note.hidden = false;
    note.textContent = error.message;
    if (error.status === 401) {
      setState("down", "a key is needed");
      askForKey(error.message);
    } else if (error.status === 403 || error.status === 404) {
      setState("", "no live numbers");
      note.textContent = `${error.message} The chat works without them.`;
    } else if (error.status === 0) {
      setState("down", "not reachable");
    }
  },
};

function setState(kind, words) {
  byId("state").className = `state ${kind}`;
  // A status that is written again is read out again.
  if (byId("state-text").textContent !== words) byId("state-text").textContent = words;
}
