// The chat: one lane, or two with settings of their own that answer the same messages. What is
// written stays in this page's memory.

const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
];

async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

class Lane {
  constructor(name) {
    this.messages = [];
    this.running = null;
    this.inputs = SAMPLING.map(([field, label, rules]) => {
      const input = make("input", { type: "number", placeholder: "default", "data-field": field, ...rules });
      return [field, input, make("label", {}, label, input)];
    });
    this.log = make("div", { class: "log", "aria-live": "polite", "aria-busy": "false" });
    const shown = make("details", {}, make("summary", { text: `Settings ${name}`.trim() }),
      make("div", { class: "sampling" }, ...this.inputs.map((each) => each[2])));
    this.box = make("div", { class: "lane" }, shown, this.log);
  }

  sampling() {
    return Object.fromEntries(this.inputs.filter(([, input]) => input.value !== "")
      .map(([field, input]) => [field, Number(input.value)]));
  }

  say(kind, text) {
    const turn = make("div", { class: `turn ${kind}` });
    if (text) turn.textContent = text;
    this.log.append(turn);
    turn.scrollIntoView({ block: "nearest" });
    return turn;
  }

  async answer(words, system) {
    this.say("user", words);
    const earlier = [...this.messages, { role: "user", content: words }];
    const turn = this.say("assistant", "");
    const times = { began: performance.now(), first: null, last: null, tokens: null, chunks: 0 };
    const abort = new AbortController();
    this.running = abort;
    this.log.setAttribute("aria-busy", "true");
    let text = "", failure = null;
    try {
      for await (const event of await this.stream(earlier, system, abort.signal)) {
        if (event.error) throw new AskError(event.error.status || 0, event.error.message);
        if (event.usage) times.tokens = event.usage.completion_tokens;
        const piece = event.choices && event.choices[0] && event.choices[0].delta.content;
        if (!piece) continue;
        times.last = performance.now();
        times.first = times.first === null ? times.last : times.first;
        times.chunks += 1;
        text += piece;
        turn.replaceChildren(...markdown(text));
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
    }
    this.running = null;
    this.log.setAttribute("aria-busy", "false");
    if (text) this.messages = [...earlier, { role: "assistant", content: text }];
    turn.append(make("p", { class: "times", text: this.timesOf(times, abort.signal.aborted) }));
    if (failure) {
      this.say("failed", failure.message);
      if (failure.status === 401) askForKey(failure.message);
    }
  }

  async stream(earlier, system, signal) {
    const messages = system ? [{ role: "system", content: system }, ...earlier] : earlier;
    const body = { messages, stream: true, stream_options: { include_usage: true }, ...this.sampling() };
    const reply = await fetch("v1/chat/completions", {
      method: "POST", signal, headers: { "content-type": "application/json", ...keys.headers(false) },
      body: JSON.stringify({ model: await chat.model(), ...body }),
    });
    if (!reply.ok) throw await errorOf(reply);
    return eventsOf(reply);
  }

  timesOf(times, isStopped) {
    if (times.first === null) return isStopped ? "stopped" : "no text";
    const parts = [`first token after ${seconds((times.first - times.began) / 1000)}`];
    const tokens = times.tokens === null ? times.chunks : times.tokens;
    const took = (times.last - times.first) / 1000;
    if (tokens > 1 && took > 0) parts.push(`${number((tokens - 1) / took)} tokens/s`);
    parts.push(times.tokens === null ? `about ${tokens} tokens` : `${tokens} tokens`);
    if (isStopped) parts.push("stopped");
    return parts.join(", ");
  }
}

const chat = {
  lanes: [], name: null,

  async model() {
    if (this.name === null) {
      const reply = await fetch("v1/models", { headers: keys.headers(false) });
      if (!reply.ok) throw await errorOf(reply);
      this.name = (await reply.json()).data[0].id;
    }
    return this.name;
  },

  start() {
    this.reset();
    byId("compare").addEventListener("change", () => this.reset());
    byId("clear").addEventListener("click", () => this.reset());
    byId("stop").addEventListener("click", () => this.stop());
    byId("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  },

  reset() {
    this.stop();
    const names = byId("compare").checked ? ["A", "B"] : [""];
    this.lanes = names.map((name) => new Lane(name));
    byId("lanes").replaceChildren(...this.lanes.map((lane) => lane.box));
  },

  stop() {
    for (const lane of this.lanes) if (lane.running) lane.running.abort();
  },

  async send() {
    const field = byId("message"), words = field.value.trim();
    if (!words || byId("send").disabled) return;
    field.value = "";
    byId("send").disabled = true;
    byId("stop").disabled = false;
    const system = byId("system").value.trim();
    await Promise.all(this.lanes.map((lane) => lane.answer(words, system)));
    byId("send").disabled = false;
    byId("stop").disabled = true;
    field.focus();
  },
};
