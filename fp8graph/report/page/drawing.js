// A layer as a drawing: forward goes down on the left, backward goes up on the right, what is saved goes across.

const MOST_UNITS = 1200; // more take seconds to place, and nobody can read them
const GAP = 150; // between forward and backward
const COLORS = [
  ["var(--native)", "GEMM in FP8"], ["var(--emulated)", "GEMM, emulated"], ["var(--high)", "GEMM in high precision"],
  ["var(--quantize)", "quantization and scales"], ["var(--other)", "other ops"], ["var(--saved)", "saved for backward (dotted: computed again)"],
];

/** The two lines of text on a unit. */
function labelsOf(unit) {
  if (unit.kind === "outside") return [`${unit.direction} ${unit.module}`, ""];
  const [first] = unit.nodes;
  const module = unit.module.split(".").at(-1) || "(root)";
  if (unit.kind.startsWith("gemm")) return [`${gemmName(first)} ${(first.site || unit.module).split(".").at(-1)}`, first.type];
  if (unit.kind === "quantize") return [`${first.op.slice(9)} ${unit.operand}`.trim(), quantizeLabel(unit)];
  if (unit.nodes.length === 1) return [`${first.op.replace(/^(aten|prims)\./, "").slice(0, 36)}`, first.type.slice(0, 44)];
  return [`${module}: ${unit.nodes.length} ops`, unit.nodes.at(-1).type.slice(0, 44)];
}

/** fprop, dgrad or wgrad: the dialect's nodes are called so; of others it is known what forward is. */
const gemmName = (node) => /^(fprop|dgrad|wgrad)/.exec(node.name)?.[1] || (node.backward ? "backward GEMM" : "fprop");

function quantizeLabel(unit) {
  const [first] = unit.nodes;
  const dtype = /dtype=(\w+)/.exec(first.code)?.[1] || "";
  if (first.op !== "fp8graph.quantize") return first.type.slice(0, 44);
  const layouts = ["rowwise", "columnwise"].filter((layout) => new RegExp(`${layout}=\\[\\d`).test(first.code));
  const observed = observedScales(unit);
  return [dtype, layouts.join(" + "), observed ? `scale_inv ${observed}` : ""].filter(Boolean).join(", ");
}

/** Places units with dagre; the positions of each are its centre. */
function placed(units, edges, upwards) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: upwards ? "BT" : "TB", nodesep: 22, ranksep: 26, marginx: 12, marginy: 12 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const unit of units) {
    unit.labels = labelsOf(unit);
    unit.width = Math.max(70, 20 + Math.max(7.1 * unit.labels[0].length, 6.2 * unit.labels[1].length));
    unit.height = unit.labels[1] ? 40 : 26;
    graph.setNode(unit.id, { width: unit.width, height: unit.height });
  }
  for (const edge of edges) graph.setEdge(edge.from.id, edge.to.id);
  if (units.length) dagre.layout(graph);
  for (const unit of units) Object.assign(unit, { x: graph.node(unit.id).x, y: graph.node(unit.id).y });
  for (const edge of edges) edge.points = graph.edge(edge.from.id, edge.to.id).points;
  return trimmed(units, edges);
}

/** Moved to the origin: dagre leaves edges out of its own bounds. */
function trimmed(units, edges) {
  const points = edges.flatMap((edge) => edge.points);
  const [xs, ys] = ["x", "y"].map((axis) => {
    const half = axis === "x" ? "width" : "height";
    return [...units.flatMap((unit) => [unit[axis] - unit[half] / 2, unit[axis] + unit[half] / 2]), ...points.map((point) => point[axis])];
  });
  if (!units.length) return { width: 0, height: 0 };
  move(units, edges, 12 - Math.min(...xs), 12 - Math.min(...ys));
  return { width: Math.max(...xs) - Math.min(...xs) + 24, height: Math.max(...ys) - Math.min(...ys) + 24 };
}

function move(units, edges, x, y) {
  for (const unit of units) { unit.x += x; unit.y += y; }
  for (const edge of edges) edge.points = edge.points.map((point) => ({ x: point.x + x, y: point.y + y }));
}

function drawLayer(found, zoom, chosen) {
  const all = [...found.units, ...found.outside];
  if (all.length > MOST_UNITS) return element("p", { className: "quiet" }, `${all.length} boxes are too many to draw: choose one of its modules.`);
  const edges = [...found.edges.values()];
  const sides = [false, true].map((backward) => {
    const units = all.filter((unit) => unit.backward === backward);
    const own = edges.filter((edge) => edge.from.backward === backward && edge.to.backward === backward);
    return { units, own, ...placed(units, own, backward) };
  });
  const [forward, backward] = sides;
  const height = Math.max(forward.height, backward.height) + 28;
  const start = forward.width ? forward.width + (backward.width ? GAP : 0) : 0;
  move(forward.units, forward.own, 0, 28);
  move(backward.units, backward.own, start, height - backward.height);
  const width = start + backward.width;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width: width * zoom, height: height * zoom, role: "img", "aria-label": "the layer as a graph" });
  svg.append(arrowHead());
  if (forward.width) svg.append(drawn("text", { x: 12, y: 18, class: "title" }, "forward ↓"));
  if (backward.width) svg.append(drawn("text", { x: start + 12, y: 18, class: "title" }, "backward ↑"));
  for (const edge of edges) svg.append(...drawnEdge(edge, found.partitioned));
  for (const unit of all) svg.append(drawnUnit(unit, () => chosen(unit, svg, edges)));
  return svg;
}

function arrowHead() {
  const head = drawn("path", { d: "M0,0 L7,3.5 L0,7 z", style: "fill:var(--quiet);stroke:none" });
  return drawn("defs", {}, drawn("marker", { id: "arrow", markerWidth: 7, markerHeight: 7, refX: 6.5, refY: 3.5, orient: "auto" }, head));
}

function drawnEdge(edge, partitioned) {
  const tensors = [...edge.tensors.values()];
  const crosses = edge.from.backward !== edge.to.backward;
  const kept = tensors.filter((tensor) => tensor.kept);
  const text = tensors.map((tensor) => `${tensor.name}: ${tensor.type}${tensor.bytes === null ? "" : `, ${bytesText(tensor.bytes)}`}`).join("\n");
  const path = drawn("path", { d: crosses ? across(edge) : along(edge.points), "marker-end": "url(#arrow)", class: crosses && partitioned ? (kept.length ? "saved" : "recomputed") : "" });
  path.append(drawn("title", {}, crosses && partitioned ? `${kept.length ? "saved for backward" : "computed again in backward"}\n${text}` : text));
  edge.path = path;
  if (!kept.length || !crosses || kept.some((tensor) => tensor.bytes === null)) return [path];
  const bytes = kept.reduce((sum, tensor) => sum + tensor.bytes, 0);
  const label = drawn("text", { x: edge.from.x + edge.from.width / 2 + 8, y: edge.from.y - 4, class: "edge" }, bytesText(bytes));
  const first = !edge.from.labelled; // one label where several readers share what is saved
  edge.from.labelled = true;
  return first ? [path, label] : [path];
}

const along = (points) => points.map((point, index) => `${index ? "L" : "M"}${point.x.toFixed(1)},${point.y.toFixed(1)}`).join(" ");

function across({ from, to }) {
  const [x1, x2] = [from.x + from.width / 2, to.x - to.width / 2];
  const bend = Math.max(60, (x2 - x1) / 2);
  return `M${x1},${from.y} C${x1 + bend},${from.y} ${x2 - bend},${to.y} ${x2},${to.y}`;
}

function drawnUnit(unit, clicked) {
  const [title, more] = unit.labels;
  const group = drawn("g", { class: `node ${unit.kind}`, tabindex: 0, role: "button", "data-unit": unit.nodes[0]?.name || unit.id });
  group.append(
    drawn("rect", { x: unit.x - unit.width / 2, y: unit.y - unit.height / 2, width: unit.width, height: unit.height, rx: 5 }),
    drawn("text", { x: unit.x, y: unit.y + (more ? -3 : 4), "text-anchor": "middle" }, title),
    drawn("text", { x: unit.x, y: unit.y + 12, "text-anchor": "middle", class: "small" }, more),
    drawn("title", {}, [...unit.nodes, ...unit.views].map((node) => node.line).join("\n").slice(0, 1500) || title),
  );
  group.addEventListener("click", clicked);
  group.addEventListener("keydown", (event) => { if (event.key === "Enter") clicked(); });
  unit.group = group;
  return group;
}
