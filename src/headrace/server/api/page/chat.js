// The chat: one lane, or two with settings of their own that answer the same messages. What is
// written stays in this page's memory.

const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, step: 0.05 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
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
    this.name = name;
    this.messages = [];
    this.running = null;
    this.inputs = SAMPLING.map(([field, label, rules]) => {
      const input = make("input", { type: "number", placeholder: "default", "data-field": field, ...rules });
      return [field, input, make("label", {}, label, input)];
    });
    this.log = make("div", { class: "log", role: "log", "aria-live": "polite", "aria-busy": "false" });
    this.summary = make("summary");
    const shown = make("details", {}, this.summary, make("div", { class: "sampling" }, ...this.inputs.map((each) => each[2])));
    this.box = make("div", { class: "lane" }, shown, this.log);
  }

  // A letter is only needed beside another.
  call(hasOthers) {
    const letter = hasOthers ? ` ${this.name}` : "";
    this.summary.textContent = `Sampling settings${letter}`;
    this.log.setAttribute("aria-label", `Conversation${letter}`);
  }

  sampling() {
    return Object.fromEntries(this.inputs.filter(([, input]) => input.value !== "")
      .map(([field, input]) => [field, Number(input.value)]));
  }

  say(kind, text) {
    const turn = make("div", { class: `turn ${kind}` });
    const speaker = { user: "You: ", assistant: "Model: " }[kind];
    if (speaker) turn.append(make("span", { class: "hidden-label", text: speaker }));
    const words = make("div", { class: "words" });
    if (text) words.textContent = text;
    turn.append(words);
    this.log.append(turn);
    turn.scrollIntoView({ block: "nearest" });
    return turn;
  }

  // Drawn at most once a frame, and kept in sight for those who look at its end.
  write(turn, text) {
    this.text = text;
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      const page = document.scrollingElement;
      const isAtEnd = page.scrollHeight - page.scrollTop - innerHeight < 80;
      turn.querySelector(".words").replaceChildren(...markdown(this.text));
      if (isAtEnd) page.scrollTop = page.scrollHeight;
    });
  }

  // The conversation so far, as another lane has it.
  continueFrom(other) {
    this.messages = [...other.messages];
    for (const turn of other.log.children) this.log.append(turn.cloneNode(true));
  }

  async answer(words, system) {
    this.say("user", words);
    const earlier = [...this.messages, { role: "user", content: words }];
    const turn = this.say("assistant", "");
    const times = { began: performance.now(), first: null, last: null, usage: null, chunks: 0 };
    const abort = new AbortController();
    this.running = abort;
    this.log.setAttribute("aria-busy", "true");
    let text = "", failure = null;
    try {
      for await (const event of await this.stream(earlier, system, abort.signal)) {
        if (event.error) throw new AskError(event.error.status || 0, event.error.message);
        if (event.usage) times.usage = event.usage;
        const piece = event.choices && event.choices[0] && event.choices[0].delta.content;
        if (!piece) continue;
        times.last = performance.now();
        times.first = times.first === null ? times.last : times.first;
        times.chunks += 1;
        text += piece;
        this.write(turn, text);
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
    }
    this.running = null;
    cancelAnimationFrame(this.frame);
    this.frame = null;
    turn.querySelector(".words").replaceChildren(...markdown(text));
    this.log.setAttribute("aria-busy", "false");
    if (!turn.isConnected) return; // started over meanwhile
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
    const tokens = times.usage === null ? times.chunks : times.usage.completion_tokens;
    const took = (times.last - times.first) / 1000;
    if (tokens > 1 && took > 0) parts.push(`${number((tokens - 1) / took)} tokens/s`);
    parts.push(times.usage === null ? `about ${tokens} tokens` : `${tokens} tokens`);
    if (times.usage) {
      const cached = times.usage.prompt_tokens_details?.cached_tokens || 0;
      parts.push(`prompt of ${times.usage.prompt_tokens}${cached ? `, ${cached} of it cached` : ""}`);
    }
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
    this.lanes = [new Lane("A")];
    this.compare();
    byId("compare").addEventListener("change", () => this.compare());
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

  // The settings stay, the conversation does not.
  reset() {
    this.stop();
    for (const lane of this.lanes) {
      lane.messages = [];
      lane.log.replaceChildren();
    }
    byId("message").focus({ preventScroll: true });
  },

  // The second lane goes on from where the first one is.
  compare() {
    const wanted = byId("compare").checked ? 2 : 1;
    for (const lane of this.lanes.splice(wanted)) if (lane.running) lane.running.abort();
    if (this.lanes.length < wanted) {
      const second = new Lane("B");
      second.continueFrom(this.lanes[0]);
      this.lanes.push(second);
    }
    for (const lane of this.lanes) lane.call(wanted > 1);
    byId("lanes").replaceChildren(...this.lanes.map((lane) => lane.box));
  },

  stop() {
    for (const lane of this.lanes) if (lane.running) lane.running.abort();
  },

  async send() {
    const field = byId("message"), words = field.value.trim();
    if (!words || byId("send").disabled) return;
    field.value = "";
    byId("send").disabled = byId("compare").disabled = true;
    byId("stop").disabled = false;
    const system = byId("system").value.trim();
    await Promise.all(this.lanes.map((lane) => lane.answer(words, system)));
    byId("send").disabled = byId("compare").disabled = false;
    byId("stop").disabled = true;
    field.focus();
  },
};
