// The fit calculator: of the loaded model from its own ledger, here; of any other by the server's `fit`.

const calculator = {
  facts: null, choices: null, timer: null, turn: 0,

  start() {
    for (const id of ["fit-sequences", "fit-tokens", "fit-memory", "fit-model", "fit-gpu", "fit-gpus", "fit-quant", "fit-kv"]) {
      byId(id).addEventListener("input", () => this.update(300));
    }
    byId("fit").addEventListener("submit", (event) => event.preventDefault());
  },

  // `whole` is what the loaded model takes.
  async open(facts, whole) {
    this.facts = facts;
    if (!byId("fit-memory").value) {
      byId("fit-sequences").value = facts.max_sequences || 16;
      byId("fit-tokens").value = Math.min(facts.context_tokens || 4096, 4096);
      byId("fit-memory").value = (Math.ceil((whole / 2 ** 30) * 10) / 10).toFixed(1);
    }
    this.update(0);
    if (this.choices) return;
    try {
      this.choices = await ask("fit");
    } catch (error) {
      this.say(error.message, "");
      return;
    }
    const option = (value, text) => make("option", { value, text: text || value });
    byId("fit-model").append(...this.choices.models.map((each) => option(each.id, `${each.id} (${each.precision})`)));
    byId("fit-gpu").append(...this.choices.gpus.map((each) => option(each.name, `${each.name} (${bytes(each.memory_bytes)})`)));
    byId("fit-quant").append(...this.choices.quants.map((each) => option(each)));
    byId("fit-kv").append(...this.choices.kv_dtypes.map((each) => option(each)));
  },

  update(pause_ms) {
    const isLoaded = !byId("fit-model").value;
    for (const each of document.querySelectorAll("#fit [data-for]")) {
      each.hidden = (each.dataset.for === "loaded") !== isLoaded;
    }
    clearTimeout(this.timer);
    this.turn += 1; // what is on its way is not shown any more
    const read = (id) => Number(byId(id).value);
    if (!(read("fit-sequences") > 0 && read("fit-tokens") > 0)) {
      this.say("Give numbers above 0.", "");
    } else if (isLoaded) {
      this.loaded(read("fit-sequences"), read("fit-tokens"), read("fit-memory") * 2 ** 30);
    } else {
      this.timer = setTimeout(() => this.other(this.turn), pause_ms);
    }
  },

  // The KV cache is blocks of whole tokens; what else is loaded does not depend on sequences.
  loaded(sequences, wanted, memory) {
    const found = this.facts && this.facts.ledger_bytes;
    if (!found || !this.facts.kv_tokens) return;
    const perToken = found.predicted.kv_pool / this.facts.kv_tokens;
    const fixed = Object.entries(found.predicted).filter(([part]) => part !== "kv_pool").reduce((sum, [, size]) => sum + size, 0);
    const block = this.facts.block_tokens || 1;
    const tokens = Math.ceil(wanted / block) * block;
    if (!(memory > 0)) {
      this.say("Give numbers above 0.", "");
      return;
    }
    const needed = fixed + sequences * tokens * perToken;
    const most = Math.max(0, Math.floor((memory - fixed) / (tokens * perToken)));
    this.say(needed <= memory ? `It fits: ${bytes(memory - needed)} are left.`
      : `It does not fit: ${bytes(needed - memory)} are missing. ${number(most)} sequences of ${number(tokens)} tokens would fit.`,
    needed <= memory ? "good" : "bad");
    this.rows([["weights, activations and runtime", bytes(fixed)],
      [`${number(sequences)} sequences × ${number(tokens)} tokens × ${bytes(perToken)}`, bytes(sequences * tokens * perToken)],
      ["together", bytes(needed)], ["most sequences of that length", number(most)]]);
  },

  async other(turn) {
    const values = { model: "fit-model", gpu: "fit-gpu", gpus: "fit-gpus", quant: "fit-quant", kv_dtype: "fit-kv",
      context: "fit-tokens", concurrency: "fit-sequences" };
    const query = new URLSearchParams(Object.entries(values).map(([name, id]) => [name, byId(id).value]).filter(([, value]) => value));
    let found;
    try {
      found = await ask(`fit?${query}`);
    } catch (error) {
      if (turn !== this.turn) return;
      if (error.status === 503) this.timer = setTimeout(() => this.other(turn), 1000); // another question is being answered
      else this.say(error.message, "bad");
      return;
    }
    if (turn !== this.turn) return;
    const where = `${found.gpus > 1 ? `${found.gpus} × ` : ""}${found.gpu}`;
    this.say(found.fits ? `It fits on ${where}: ${bytes(found.spare_bytes)} are left.`
      : `It does not fit on ${where}: ${bytes(-found.spare_bytes)} are missing.`, found.fits ? "good" : "bad");
    const ledger = found.ledger;
    const rows = [[`weights, ${found.precision}`, bytes(ledger.weights_bytes)],
      [`KV pool, ${found.kv_dtype}: ${number(found.concurrency)} × ${number(found.context_tokens)} tokens`, bytes(ledger.kv_pool_bytes)],
      ["activations, graphs and runtime", bytes(ledger.activations_bytes + ledger.graphs_bytes + ledger.runtime_bytes)],
      [found.gpus > 1 ? "together, on each GPU" : "together", bytes(found.total_bytes)], ["may be used", bytes(found.budget_bytes)],
      ["most sequences of that length", number(found.most_sequences)],
      ["longest context for so many sequences", `${number(found.longest_context_tokens)} tokens`]];
    if (found.floors) {
      rows.push([`TTFT of ${number(found.floors.prompt_tokens)} tokens, at least`, seconds(found.floors.ttft_s)],
        ["TPOT, at least", `${seconds(found.floors.tpot_s)} (bound by ${found.floors.tpot_bound})`]);
    }
    this.rows(rows, found.changes.map((each) => [each.flags, each.words]), found.notes);
  },

  say(text, kind) {
    byId("fit-answer").textContent = text;
    byId("fit-answer").className = `answer ${kind}`;
    this.rows([]);
  },

  rows(rows, changes = [], notes = []) {
    byId("fit-table").replaceChildren(...rows.map(([name, value]) => make("tr", {}, make("td", { text: name }), make("td", { class: "n", text: value }))));
    byId("fit-changes").replaceChildren(...(changes.length ? [make("h3", { text: "What would fit" }),
      make("ul", {}, ...changes.map(([flags, words]) => make("li", {}, make("code", { text: flags }), ` ${words}`)))] : []),
    ...notes.map((each) => make("p", { class: "hint", text: `${each[0].toUpperCase()}${each.slice(1)}.` })));
  },
};
