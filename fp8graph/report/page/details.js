// What a layer saves for backward, which kernels compute it, and what is known of one unit of its drawing.

function showSaved(panel, found, partitioned) {
  const saved = new Map();
  for (const edge of found.edges.values()) {
    if (edge.from.backward === edge.to.backward) continue;
    for (const tensor of edge.tensors.values()) if (tensor.kept) saved.set(tensor.name, tensor);
  }
  const tensors = [...saved.values()].sort((a, b) => (b.bytes || 0) - (a.bytes || 0));
  const total = tensors.reduce((sum, tensor) => sum + (tensor.bytes || 0), 0);
  const dynamic = tensors.some((tensor) => tensor.bytes === null) ? ", and tensors of dynamic sizes" : "";
  panel.replaceChildren(element("h3", {}, "Saved for backward"));
  if (!partitioned) panel.append(element("p", { className: "quiet" }, "Nothing is known to be saved: this is an inference graph, or not the last stage."));
  else panel.append(element("p", {}, `${bytesText(total)} in ${tensors.length} tensors${dynamic}, beside inputs of the graph (weights and their FP8 copies).`));
  for (const tensor of tensors) view.drawn.saved.set(tensor, element("dd", { className: "mono" }, `${tensor.name}: ${tensor.type}`));
  panel.append(element("dl", {}, ...tensors.flatMap((tensor) => [
    element("dt", {}, tensor.bytes === null ? "dynamic" : bytesText(tensor.bytes)),
    view.drawn.saved.get(tensor),
  ])), element("p", { className: "quiet" }, "Choose a box to see its ops."), ...kernelsPart(null));
}

function showUnit(panel, unit, found) {
  const edges = [...found.edges.values()];
  const list = (title, own, other) => (own.length ? [element("h3", {}, title), element("dl", {}, ...own.flatMap((edge) => [...edge.tensors.values()].flatMap((tensor) => [
    element("dt", {}, other(edge).labels[0]), element("dd", { className: "mono" }, `${tensor.name}: ${tensor.type}`),
  ])))] : []);
  panel.replaceChildren(
    element("h3", {}, unit.labels[0]),
    element("p", { className: "quiet" }, unit.module || "outside of modules"),
    ...scalesOf(unit),
    ...kernelsPart(unit),
    ...sourcesOf(unit),
    ...(unit.nodes.length ? [element("h3", {}, "Ops"), ...[...unit.nodes, ...unit.views].map((node) => element("div", { className: "mono" }, node.line))] : []),
    ...list("Reads", edges.filter((edge) => edge.to === unit), (edge) => edge.from),
    ...list("Read by", edges.filter((edge) => edge.from === unit), (edge) => edge.to),
  );
}

function sourcesOf(unit) {
  const lines = unique(unit.nodes.map((node) => node.source).filter(Boolean));
  return lines.length ? [element("h3", {}, "In the model"), ...lines.map((line) => element("div", { className: "mono" }, line))] : [];
}

function scalesOf(unit) {
  const observed = unit.operand ? observedScales(unit) : "";
  return observed ? [element("p", {}, `scale_inv at the last observed step: ${observed}`)] : [];
}

/** Fade what does not touch the chosen unit. */
function highlight(unit, svg, edges) {
  for (const group of svg.querySelectorAll(".chosen")) group.classList.remove("chosen");
  unit.group.classList.add("chosen");
  for (const edge of edges) edge.path.classList.toggle("faded", edge.from !== unit && edge.to !== unit);
}
