// Views, theme and keys; then everything begins.

const VIEWS = ["live", "chat", "doctor", "memory", "settings"];

function show(name) {
  for (const view of VIEWS) {
    const tab = byId(`tab-${view}`);
    byId(view).hidden = view !== name;
    tab.setAttribute("aria-selected", String(view === name));
    tab.tabIndex = view === name ? 0 : -1;
  }
  // With a slash: the bare name is an element's, and the browser would scroll there.
  if (location.hash !== `#/${name}`) history.replaceState(null, "", `#/${name}`);
  panels.open(name);
}

function startViews() {
  for (const view of VIEWS) {
    byId(`tab-${view}`).addEventListener("click", () => show(view));
    byId(`tab-${view}`).addEventListener("keydown", (event) => {
      const at = VIEWS.indexOf(view), last = VIEWS.length - 1;
      const to = { ArrowLeft: at ? at - 1 : last, ArrowRight: at < last ? at + 1 : 0, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = VIEWS[to];
      show(next);
      byId(`tab-${next}`).focus();
    });
  }
  const asked = () => VIEWS.find((view) => location.hash === `#/${view}`);
  addEventListener("hashchange", () => { if (asked()) show(asked()); });
  show(asked() || "live");
}

function startTheme() {
  const root = document.documentElement;
  let chosen = null;
  try { chosen = localStorage.getItem("headrace-theme"); } catch { /* not allowed here */ }
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  byId("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    try { localStorage.setItem("headrace-theme", root.dataset.theme); } catch { /* for this page only */ }
    if (live.columns) live.blocks();
  });
}

function startKeys() {
  byId("keys-button").addEventListener("click", () => askForKey("Sent with every request of this page."));
  byId("keys-cancel").addEventListener("click", () => byId("keys").close());
  byId("keys-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keys.write("api", byId("key-api").value.trim());
    keys.write("operator", byId("key-operator").value.trim());
    byId("keys").close();
    chat.name = null;
    live.delay = 1000;
    live.poll();
    panels.open(VIEWS.find((view) => !byId(view).hidden));
  });
}

startTheme();
startKeys();
chat.start();
panels.start();
calculator.start();
live.start();
startViews();
