// Asking the server: keys, errors, and small ways to make elements. No text is ever put in as HTML.

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// For a screen reader only.
function say(words) {
  byId("said").textContent = words;
}

class AskError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Keys live as long as the tab; a browser that forbids storage keeps them until the page is left.
const keys = {
  values: {},
  read(name) {
    try { return sessionStorage.getItem(`headrace-${name}`) || this.values[name] || ""; }
    catch { return this.values[name] || ""; }
  },
  write(name, value) {
    this.values[name] = value;
    try {
      if (value) sessionStorage.setItem(`headrace-${name}`, value);
      else sessionStorage.removeItem(`headrace-${name}`);
    } catch { /* only this page then */ }
  },
  headers(isOperators) {
    const key = (isOperators && this.read("operator")) || this.read("api") || this.read("operator");
    return key ? { authorization: `Bearer ${key}` } : {};
  },
};

async function errorOf(reply) {
  let message = `The server answered ${reply.status}.`;
  try {
    const found = (await reply.json()).error;
    message = found.message;
    if (found.remedy && !message.includes(found.remedy)) message += ` ${found.remedy}`;
  } catch { /* not JSON: the status has to do */ }
  return new AskError(reply.status, message);
}

async function ask(path) {
  let reply;
  try {
    reply = await fetch(path, { headers: keys.headers(true), cache: "no-store" });
  } catch {
    throw new AskError(0, "The server can't be reached.");
  }
  if (!reply.ok) throw await errorOf(reply);
  return reply.json();
}

function askForKey(why) {
  const dialog = byId("keys");
  byId("keys-why").textContent = why;
  byId("key-api").value = keys.read("api");
  byId("key-operator").value = keys.read("operator");
  if (!dialog.open) dialog.showModal();
}

// -- numbers as people read them ------------------------------------------------------------------

const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);

function number(value, digits = 3) {
  if (!isKnown(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(digits)}G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(digits)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(digits)}k`;
  if (size >= 100) return Math.round(value).toLocaleString("en");
  if (size === 0) return "0";
  return String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (!isKnown(value)) return "–";
  if (value < 1) return `${number(value * 1000)} ms`;
  return value < 120 ? `${number(value)} s` : `${number(value / 60)} min`;
}

const percent = (value) => (isKnown(value) ? `${number(value * 100)}%` : "–");

function bytes(value) {
  if (!isKnown(value)) return "–";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(value) >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  }
  return `${value} bytes`;
}

const UNITS = { number, seconds, percent, bytes };
