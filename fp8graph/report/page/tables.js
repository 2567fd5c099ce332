// The table of GEMMs: layers that differ only in numbers share a row, which a click unfolds; filters above it.

const MOST_ROWS = 400; // at once
const FILTERS = ["recipe", "gemm", "execution", "reason"];

function showGemms() {
  const count = element("span", { className: "quiet" });
  const place = element("div", { className: "scroll" });
  const redraw = () => drawGemms(place, count);
  const name = element("input", {
    type: "search", placeholder: "name of a layer", value: state.name || "", "aria-label": "filter by name",
    oninput: () => { choose({ name: name.value }); redraw(); },
  });
  const boxes = FILTERS.map((what) => {
    const values = unique(data.gemms.map((row) => filterValue(row, what))).sort();
    const options = [["", "any"], ...values.map((value) => [value, value.length > 90 ? `${value.slice(0, 88)}…` : value])];
    return dropDown(what === "gemm" ? "GEMM" : what, options, state[what] || "", (value) => { choose({ [what]: value }); redraw(); });
  });
  section("gemms").append(element("div", { className: "controls" }, name, ...boxes, count), place);
  redraw();
}

/** Predictions differ from layer to layer: reasons are filtered without their numbers. */
const filterValue = (row, what) => (what === "reason" ? row.reason.replace(/predicted [\d.]+x/, "predicted …") : row[what]);

function isShown(row) {
  const wanted = (state.name || "").toLowerCase();
  const named = !wanted || row.site.toLowerCase().includes(wanted) || row.names.some((name) => name.toLowerCase().includes(wanted));
  return named && FILTERS.every((what) => !state[what] || filterValue(row, what) === state[what]);
}

function drawGemms(place, count) {
  const rows = data.gemms.filter(isShown);
  const gemms = rows.reduce((sum, row) => sum + row.names.length, 0);
  count.textContent = `${gemms} GEMMs in ${rows.length} rows`;
  const total = data.gemms.reduce((sum, row) => sum + row.flops, 0);
  const titles = ["site", "count", "op", "GEMM", "m x n x k", "recipe", "dtypes", "execution", "FLOPs", "reason"];
  const body = element("tbody", {}, ...rows.slice(0, MOST_ROWS).map((row) => gemmRow(row, total)));
  const head = element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", {}, title))));
  place.replaceChildren(element("table", {}, head, body));
  if (rows.length > MOST_ROWS) place.append(moreRows(body, rows, total));
}

function moreRows(body, rows, total) {
  const button = element("button", {
    onclick: () => { body.append(...rows.slice(MOST_ROWS).map((row) => gemmRow(row, total))); button.remove(); },
  }, `show ${rows.length - MOST_ROWS} more rows`);
  return button;
}

function gemmRow(row, total) {
  const tag = { native: "native", emulated: "emulated", "high precision": "high" }[row.execution] || "high";
  const several = row.names.length > 1;
  const unfold = several ? element("button", { className: "link", title: "list these layers", onclick: () => toggleNames(line, row) }, String(row.names.length)) : "1";
  const line = element(
    "tr",
    { className: `is-${row.execution.replace(" ", "-")}` },
    element("td", { className: "name" }, element("button", { className: "link", title: "draw this layer", onclick: () => drawLayerOf(row) }, row.site)),
    element("td", { className: "number" }, unfold),
    element("td", {}, row.op),
    element("td", {}, row.gemm),
    element("td", { className: "tight" }, row.size),
    element("td", {}, row.recipe),
    element("td", { className: "tight" }, row.dtypes),
    element("td", {}, element("span", { className: `tag ${tag}` }, row.execution)),
    element("td", { className: "number" }, total ? percentText(row.flops / total) : ""),
    element("td", {}, row.reason),
  );
  return line;
}

function toggleNames(line, row) {
  if (line.nextSibling?.className === "unfolded") return line.nextSibling.remove();
  const names = row.names.map((name) => element("div", {}, name));
  line.after(element("tr", { className: "unfolded" }, element("td", { colSpan: 10 }, element("div", { className: "names" }, ...names))));
}
