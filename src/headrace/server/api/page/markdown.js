// Markdown as elements, never as HTML text: what a model writes can't become a script or an image.

function inline(text) {
  const found = [];
  const pattern = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\(([^)\s]+)\)/g;
  let from = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > from) found.push(text.slice(from, match.index));
    const [whole, code, bold, italic, label, target] = match;
    if (code !== undefined) found.push(make("code", { text: code }));
    else if (bold !== undefined) found.push(make("strong", {}, ...inline(bold)));
    else if (italic !== undefined) found.push(make("em", {}, ...inline(italic)));
    else if (/^https?:\/\//i.test(target)) {
      found.push(make("a", { href: target, rel: "noopener noreferrer", target: "_blank", text: label }));
    } else found.push(whole);
    from = match.index + whole.length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

const BLOCKS = {
  heading: /^(#{1,6})\s+(.*)$/,
  item: /^(\s*)(?:[-*+]|(\d+)[.)])\s+(.*)$/, // its indent, its number, its words
  quote: /^>\s?(.*)$/,
  row: /^\s*\|(.+)\|\s*$/,
  fence: /^\s*(```|~~~)/,
  rule: /^\s*(?:-{3,}|\*{3,}|_{3,})\s*$/,
};
const startsBlock = (line) => Object.values(BLOCKS).some((pattern) => pattern.test(line));

// What is indented further belongs to the item before it.
function listOf(items) {
  const [, indent, start] = items[0];
  const box = make(start === undefined ? "ul" : "ol", { start });
  for (let at = 0; at < items.length;) {
    const item = make("li", {}, ...inline(items[at][3])), from = at + 1;
    for (at = from; at < items.length && items[at][1].length > indent.length + 1;) at += 1;
    if (at > from) item.append(listOf(items.slice(from, at)));
    box.append(item);
  }
  return box;
}

function markdown(text) {
  const lines = text.split("\n"), found = [];
  let at = 0;
  const takeWhile = (pattern) => {
    const taken = [];
    for (; at < lines.length && pattern.test(lines[at]); at += 1) taken.push(lines[at].match(pattern));
    return taken;
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) { at += 1; continue; }
    if (BLOCKS.fence.test(line)) {
      const mark = line.match(BLOCKS.fence)[1], code = [];
      for (at += 1; at < lines.length && !lines[at].trim().startsWith(mark); at += 1) code.push(lines[at]);
      at += 1;
      found.push(make("pre", { tabindex: "0" }, make("code", { text: code.join("\n") })));
    } else if (BLOCKS.heading.test(line)) {
      const [, marks, words] = line.match(BLOCKS.heading);
      found.push(make(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(words)));
      at += 1;
    } else if (BLOCKS.rule.test(line)) {
      found.push(make("hr"));
      at += 1;
    } else if (BLOCKS.item.test(line)) {
      found.push(listOf(takeWhile(BLOCKS.item)));
    } else if (BLOCKS.quote.test(line)) {
      found.push(make("blockquote", {}, ...inline(takeWhile(BLOCKS.quote).map((each) => each[1]).join(" "))));
    } else if (BLOCKS.row.test(line)) {
      const rows = takeWhile(BLOCKS.row).map((each) => each[1].split("|").map((cell) => cell.trim()))
        .filter((cells) => !cells.every((cell) => /^:?-+:?$/.test(cell)));
      found.push(make("table", {}, ...rows.map((cells, place) => make("tr", {},
        ...cells.map((cell) => make(place ? "td" : "th", {}, ...inline(cell)))))));
    } else {
      const words = [];
      do { words.push(lines[at]); at += 1; }
      while (at < lines.length && lines[at].trim() && !startsBlock(lines[at]));
      found.push(make("p", {}, ...inline(words.join("\n"))));
    }
  }
  return found;
}
