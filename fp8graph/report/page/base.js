// Elements, numbers, packed data, and the state of the page, which is in its address: #layer=model.layers.*&stage=match.

const data = JSON.parse(document.getElementById("data").textContent);

/** A new element: attributes by name, `on...` as listeners, children as nodes or text. Text is never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const section = (name) => document.getElementById(name);

/** 12345678 -> "12.3 M": for FLOPs and seconds. */
function amountText(amount, unit) {
  if (!amount) return `0 ${unit}`;
  if (unit === "B") return bytesText(amount);
  const names = ["p", "n", "µ", "m", "", "K", "M", "G", "T", "P", "E"];
  const power = Math.max(-4, Math.min(6, Math.floor(Math.log10(amount) / 3)));
  return `${(amount / 1000 ** power).toPrecision(3)} ${names[power + 4]}${unit}`;
}

function bytesText(amount) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = amount < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(amount) / 10));
  return power ? `${(amount / 1024 ** power).toFixed(1)} ${names[power]}` : `${amount} B`;
}

/** Rounded down: 100 % is everything. */
const percentText = (share) => (share > 0 && share < 0.01 ? "less than 1 %" : `${Math.floor(100 * share)} %`);

/** A name with * in place of each number, as in the tables. */
const anyLayer = (name) => name.replace(/(^|(?<=\.))\d+(?=\.|$)/g, "*");

const unique = (values) => [...new Set(values)];

/** Deflated bytes in base64 -> bytes. */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

/** Change what is chosen, and the address with it; "" means the default. */
function choose(changes) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([, value]) => value !== "" && value !== undefined);
  history.replaceState(null, "", kept.length ? `#${new URLSearchParams(kept)}` : "#");
}

function dropDown(label, options, chosen, changed) {
  const select = element("select", { onchange: () => changed(select.value) });
  for (const [value, text] of options) select.append(element("option", { value, selected: value === chosen }, text));
  return element("label", {}, label, select);
}

function checkBox(label, checked, changed) {
  const box = element("input", { type: "checkbox", checked, onchange: () => changed(box.checked) });
  return element("label", {}, box, label);
}

function legend(entries) {
  const items = entries.map(([color, text]) => element("span", {}, element("i", { style: `background:${color}` }), text));
  return element("div", { className: "legend" }, ...items);
}

/** Rows of text as a table; the first row is its header. */
function plainTable(rows) {
  const [titles, ...others] = rows;
  const head = element("tr", {}, ...titles.map((title) => element("th", {}, title)));
  const body = others.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell instanceof Node ? cell : String(cell)))));
  return element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}
