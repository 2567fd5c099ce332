// Graphs and their layers: which is drawn, at which stage; the slider through the stages, with what each changed.

const MOST_LINES = 3000;
const view = { content: null, nodes: null, drawn: null };

function showGraphs() {
  if (!data.graphs.length) return section("layer").append(element("p", {}, "No graph was compiled."));
  const names = data.graphs.map((graph, number) => [String(number), `${number + 1}. ${graph.name}${graph.count > 1 ? ` (and ${graph.count - 1} alike)` : ""}: ${graph.summary}`]);
  view.controls = element("div", { className: "controls" });
  view.alike = element("p", { className: "quiet" });
  view.canvas = element("div", { id: "canvas" });
  view.details = element("div", { id: "details" });
  view.text = element("div");
  section("layer").append(
    element("div", { className: "controls" }, dropDown("graph", names, state.graph || "0", (graph) => { choose({ graph, layer: "", stage: "", op: "", kernel: "" }); showGraph(); })),
    view.controls, view.alike, legend(data.kernels === null ? COLORS : [...COLORS, ["var(--kernel)", "the chosen kernel (dashed: a part of the box)"]]),
    element("div", { className: "drawing" }, view.canvas, view.details), view.text,
  );
  return showGraph();
}

const graphNumber = () => (data.graphs[state.graph] ? Number(state.graph) : 0);

async function showGraph() {
  const graph = data.graphs[graphNumber()];
  view.content = await loaded(graphNumber());
  const last = graph.stages.length - 1;
  const asked = graph.stages.indexOf(state.stage);
  const slider = element("input", { type: "range", min: 0, max: last, step: 1, value: asked < 0 ? last : asked, "aria-label": "stage" });
  view.layers = layersOf(view.content, last);
  const layer = layerFor(state.layer);
  view.controls.replaceChildren(
    dropDown("layer", view.layers, layer, (value) => { choose({ layer: value || "*", op: "", kernel: "" }); showStage(); }),
    stageControls(graph, slider),
    checkBox("every op", state.ops === "1", (on) => { choose({ ops: on ? "1" : "", op: "" }); showStage(); }),
    dropDown("size", [["", "fit"], ["0.75", "75 %"], ["1", "100 %"], ["1.5", "150 %"]], state.size || "", (size) => { choose({ size }); showStage(); }),
  );
  showAlike(graph);
  showStage();
}

function stageControls(graph, slider) {
  const label = element("strong", {});
  const step = (by) => element("button", { title: by < 0 ? "one pass back" : "one pass on", onclick: () => { slider.value = Number(slider.value) + by; moved(); } }, by < 0 ? "◀" : "▶");
  const moved = () => { choose({ stage: Number(slider.value) === graph.stages.length - 1 ? "" : graph.stages[slider.value], op: "" }); showStage(); };
  slider.addEventListener("input", moved);
  view.stage = () => Number(slider.value);
  view.stageLabel = label;
  return element("label", {}, "stage", step(-1), slider, step(1), label);
}

/** The layers that can be drawn: modules with more than a few ops; others that are alike are named beside them. */
function layersOf(content, stage) {
  const counts = modulesOf(nodesOf(content, stage));
  const options = [...counts].map(([module, ops]) => {
    const others = content.alike[module]?.length || 0;
    return [module, `${module} (${ops} ops${others ? `, as ${others} more` : ""})`];
  });
  return [["", "the whole graph"], ...options];
}

/** The layer that an address names: a module, one with * for numbers, or one that reads as another; else the first. */
function layerFor(name) {
  const modules = view.layers.map(([module]) => module);
  if (name === "*") return "";
  if (name) {
    const like = Object.entries(view.content.alike).find(([, others]) => others.some((other) => isIn(name, other)));
    const asked = like ? like[0] + name.slice(like[1].find((other) => isIn(name, other)).length) : name;
    const found = modules.find((module) => module && module === asked) || modules.find((module) => module && anyLayer(module) === asked);
    if (found) return found;
  }
  const repeated = Object.keys(view.content.alike)[0] || modules.find((module) => /(^|\.)\d+$/.test(module));
  return modules.includes(repeated) ? repeated : "";
}

function showAlike(graph) {
  const texts = Object.entries(view.content.alike).map(([layer, others]) => `${others.length} ${others.length > 1 ? "layers read" : "layer reads"} as ${layer}, left out here (${others[0]}${others.length > 1 ? ` … ${others.at(-1)}` : ""}).`);
  if (graph.count > 1) texts.push(`${graph.count} graphs have this text; the other layers are ${graph.others.slice(0, 8).join(", ")}${graph.others.length > 8 ? ", …" : ""}.`);
  view.alike.textContent = texts.join(" ");
}

function showStage() {
  const graph = data.graphs[graphNumber()];
  const [stage, last] = [view.stage(), graph.stages.length - 1];
  view.stageLabel.textContent = stage ? `after ${graph.stages[stage]} (${stage} of ${last})` : "before all passes";
  const nodes = nodesOf(view.content, stage);
  const layer = layerFor(state.layer);
  const saved = new Set(stage === last ? view.content.saved : []);
  const found = unitsOf(nodes, layer, saved, state.ops === "1");
  view.drawn = { found, last: stage === last, kernels: stage === last ? kernelsOf(view.content, found) : [], saved: new Map() };
  const choosing = (unit, svg, edges) => {
    choose({ op: unit.nodes[0]?.name || "" });
    highlight(unit, svg, edges);
    showUnit(view.details, unit, found);
  };
  showSaved(view.details, found, saved.size > 0);
  const drawing = drawLayer(found, 1, choosing);
  view.canvas.replaceChildren(drawing);
  resize(drawing);
  const unit = found.units.find((one) => one.nodes.some((node) => node.name === state.op));
  if (unit && unit.group) choosing(unit, drawing, [...found.edges.values()]);
  outline(null);
  const kernel = view.details.querySelector(".kernels .chosen");
  if (kernel) view.details.scrollTop = kernel.offsetTop - view.details.offsetTop - 60;
  showText(graph, stage);
}

function resize(svg) {
  if (svg.tagName !== "svg") return;
  const [width, height] = ["width", "height"].map((side) => Number(svg.getAttribute(side)));
  const zoom = state.size ? Number(state.size) : Math.max(0.55, Math.min(1, (view.canvas.clientWidth - 4) / width));
  svg.setAttribute("width", width * zoom);
  svg.setAttribute("height", height * zoom);
}

/** A row of the table was clicked: its module, or the layer around it. */
async function drawLayerOf(row) {
  const name = row.names[0].replace(/\[\d+\]$/, "");
  choose({ graph: row.graph ? String(row.graph) : "", stage: "", op: "", kernel: "" });
  view.content = await loaded(row.graph);
  view.layers = layersOf(view.content, data.graphs[row.graph].stages.length - 1);
  const modules = view.layers.map(([module]) => module).filter(Boolean);
  const own = name.replace(/((?:^|\.)\d+)(\..*)?$/, "$1");
  const fits = (wanted) => modules.find((module) => module === wanted) || modules.filter((module) => wanted.endsWith(`.${module}`)).sort((a, b) => b.length - a.length)[0];
  choose({ layer: /(^|\.)\d+(\.|$)/.test(name) ? own : fits(name.split(".").slice(0, -1).join(".")) || fits(name) || "*" });
  const chosen = section("layer").querySelector("select");
  chosen.value = String(row.graph);
  await showGraph();
  section("layer").scrollIntoView({ behavior: "smooth" });
}

/** Lines of this stage and of the one before, in one order: [mark, line]. A line that only moved counts as the same. */
function changes(before, after) {
  const [old, now] = [new Set(before), new Set(after)];
  const found = [];
  let at = 0;
  for (const line of after) {
    while (at < before.length && !now.has(before[at])) found.push(["removed", before[at++]]);
    if (!old.has(line)) found.push(["added", line]);
    else { found.push(["", line]); if (before[at] === line) at += 1; else if (!before.slice(at, at + 50).includes(line)) at += 1; }
  }
  const said = new Set(found.filter(([mark]) => mark === "removed").map(([, line]) => line));
  found.push(...before.slice(at).filter((line) => !now.has(line) && !said.has(line)).map((line) => ["removed", line]));
  return found;
}

function showText(graph, stage) {
  const texts = view.content.texts;
  const found = stage ? changes(texts[stage - 1], texts[stage]) : texts[0].map((line) => ["", line]);
  const [added, removed] = ["added", "removed"].map((mark) => found.filter(([own]) => own === mark).length);
  const whole = state.text === "all" || (!added && !removed);
  const summary = !stage ? "The graph before all passes." : added || removed ? `${graph.stages[stage]} made ${added} lines and removed ${removed}.` : `${graph.stages[stage]} changed nothing.`;
  const lines = whole ? found : nearChanges(found);
  const text = element("pre", { className: "text" }, ...lines.slice(0, MOST_LINES).map(textLine));
  if (lines.length > MOST_LINES) text.append(element("span", { className: "gap" }, `${lines.length - MOST_LINES} more lines: report.graphs[i].stages has them all`));
  view.text.replaceChildren(
    element("h3", {}, stage ? `Text after ${graph.stages[stage]}` : "Text before"),
    element("div", { className: "controls" }, element("span", {}, summary), checkBox("all lines", state.text === "all", (on) => { choose({ text: on ? "all" : "" }); showText(graph, stage); })),
    text,
  );
}

function textLine([mark, line]) {
  const signs = { added: "+ ", removed: "- ", gap: "  " };
  return element("span", { className: mark }, (signs[mark] || "  ") + (mark === "gap" ? line : withInputName(view.content.lines[line])));
}

/** An input's line, with what is passed for it. */
function withInputName(line) {
  const name = /^([A-Za-z_]\w*): [^=]*$/.exec(line)?.[1];
  const module = name && view.content.modules[view.content.origins[name]?.[0]];
  return module && module !== name ? `${line}  # ${module}` : line;
}

/** Changed lines with two around them. */
function nearChanges(found) {
  const near = new Set();
  found.forEach(([mark], index) => { if (mark) for (let at = index - 2; at <= index + 2; at += 1) near.add(at); });
  const kept = [];
  let gone = 0;
  found.forEach((one, index) => {
    if (!near.has(index)) { gone += 1; return; }
    if (gone) kept.push(["gap", `⋯ ${gone} lines`]);
    gone = 0;
    kept.push(one);
  });
  if (gone) kept.push(["gap", `⋯ ${gone} lines`]);
  return kept;
}
