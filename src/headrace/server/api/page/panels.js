// The doctor's findings, the memory ledger and the settings.

const panels = {
  facts: null, looking: null,

  start() {
    byId("examine").addEventListener("click", () => this.doctor());
    byId("only-set").addEventListener("change", () => this.settings());
  },

  async open(name) {
    clearInterval(this.looking);
    if (name === "doctor") {
      this.looking = setInterval(() => { if (!document.hidden) this.doctor(); }, 5000);
      await this.doctor();
    }
    if (name === "memory" || name === "settings") {
      try {
        this.facts = await ask("version");
      } catch (error) {
        byId(name === "memory" ? "ledger" : "config").replaceChildren(make("p", { class: "note", text: error.message }));
        if (error.status === 401) askForKey(error.message);
        return;
      }
      this.ledger();
      this.settings();
    }
  },

  async doctor() {
    const box = byId("findings");
    try {
      const found = await ask("diagnosis");
      const period = found.period_s > 0 ? `over the last ${seconds(found.period_s)}` : "";
      byId("doctor-note").replaceChildren(`What the rules find in this server's own metrics ${period}`.trim(), ". ",
        make("code", { text: "headrace doctor URL" }), " sends probes as well.");
      const isRead = found.period_s > 0; // rates need two readings
      const shown = JSON.stringify([isRead, found.findings]);
      if (!isRead) setTimeout(() => { if (!byId("doctor").hidden) this.doctor(); }, 1500);
      if (shown === this.shown) return; // a reader is not interrupted by the same again
      this.shown = shown;
      box.replaceChildren(...found.findings.map((each) => this.finding(each)));
      if (!found.findings.length) {
        box.append(isRead ? make("p", { class: "healthy", text: "Nothing found: no rule matches these numbers." })
          : make("p", { class: "note", text: "The metrics are being read for a few seconds." }));
      }
    } catch (error) {
      this.shown = null;
      box.replaceChildren(make("p", { class: "note", text: error.message }));
      if (error.status === 401) askForKey(error.message);
    }
  },

  finding(each) {
    const gain = isKnown(each.gain.low)
      ? `${each.gain.of} × ${number(each.gain.low, 2)} to ${number(each.gain.high, 2)} (${each.gain.basis})`
      : `not predicted: ${each.gain.basis}`;
    const rows = [["Evidence", each.evidence], ["Cause", [each.cause]], ["Fix", each.fix], ["Gain", [gain]],
      ["Confidence", [each.confidence]], ["Unless", [each.unless]]];
    return make("article", { class: `finding ${each.kind}` },
      make("h3", { text: `${each.symptom} (${each.kind}, rule ${each.rule})` }),
      make("dl", {}, ...rows.flatMap(([name, lines]) => [make("dt", { text: name }),
        make("dd", {}, ...lines.map((line) => make("div", { text: line })))])));
  },

  ledger() {
    const found = this.facts.ledger_bytes;
    if (!found) {
      byId("ledger").replaceChildren(make("p", { class: "note",
        text: this.facts.config ? "The engine is starting." : "The ledger is for operators: give the operator's key." }));
      return;
    }
    const predicted = found.predicted, allocated = found.allocated || {};
    const whole = Object.values(predicted).reduce((sum, each) => sum + each, 0);
    const rows = Object.entries(predicted).map(([part, size]) => make("tr", {},
      make("td", { text: part.replace("kv_", "KV ").replace("_", " ") }), make("td", { class: "n", text: bytes(size) }),
      make("td", { class: "n", text: bytes(allocated[part]) }),
      make("td", {}, make("meter", { min: 0, max: whole, value: size, "aria-label": `${part}: ${percent(size / whole)}` }))));
    rows.push(make("tr", { class: "set" }, make("td", { text: "together" }), make("td", { class: "n", text: bytes(whole) }),
      make("td"), make("td", { text: `${number(this.facts.kv_tokens)} tokens of KV cache` })));
    byId("ledger").replaceChildren(make("table", {}, make("tr", {}, make("th", { text: "part" }),
      make("th", { class: "n", text: "predicted" }), make("th", { class: "n", text: "allocated" }), make("th", { text: "share" })), ...rows));
    calculator.open(this.facts, whole);
  },

  settings() {
    const config = this.facts && this.facts.config;
    if (!config) {
      byId("config").replaceChildren(make("p", { class: "note", text: "Settings are for operators: give the operator's key." }));
      return;
    }
    const origins = this.facts.origins || {}, only = byId("only-set").checked;
    const tables = Object.entries(config).map(([table, values]) => {
      const rows = Object.entries(values)
        .filter(([name]) => !only || (origins[name] && origins[name] !== "default"))
        .map(([name, value]) => make("tr", { class: origins[name] && origins[name] !== "default" ? "set" : "" },
          make("td", {}, make("code", { text: name })),
          make("td", { text: this.settingText(name, value) }),
          make("td", { text: origins[name] || "" })));
      const head = make("tr", {}, make("th", { text: table }), make("th", { text: "value" }), make("th", { text: "from" }));
      return rows.length ? make("table", { class: "settings" }, head, ...rows) : null;
    }).filter((table) => table !== null);
    const nothing = make("p", { class: "hint", text: "Nothing was set: everything is as it comes." });
    byId("config").replaceChildren(...(tables.length ? tables : [nothing]));
  },

  // What was left to the engine is shown as it chose.
  settingText(name, value) {
    const isLeft = value === null || (Array.isArray(value) && !value.length);
    const chosen = this.facts[name] ?? (this.facts.identity && this.facts.identity[name]);
    if (isLeft && isKnown(chosen)) return `${chosen.toLocaleString("en")} (chosen)`;
    return isLeft ? "–" : String(value);
  },
};
