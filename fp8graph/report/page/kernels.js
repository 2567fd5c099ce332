// The kernels of the drawn layer: which boxes each computes and which saved values it moves, outlined for the chosen one.

/** The kernels that compute some node of the drawing, in the order of their launches. */
function kernelsOf(content, found) {
  const names = Object.keys(content.origins);
  const drawn = new Set(found.units.flatMap((unit) => unit.nodes.map((node) => node.name)));
  const named = (numbers) => new Set(numbers.map((number) => names[number]));
  return content.kernels
    .map(([place, computes, reads, writes]) => ({ ...data.kernels[place], place: String(place), computes: named(computes), reads: named(reads), writes: named(writes) }))
    .filter((kernel) => [...kernel.computes].some((name) => drawn.has(name)));
}

/** "whole", "partly" if other kernels compute ops of the unit that this one does not, or "". */
function coverOf(kernel, unit, kernels) {
  const [own, all] = [[kernel], kernels].map((these) => unit.nodes.filter((node) => these.some((one) => one.computes.has(node.name))).length);
  return own ? (own === all ? "whole" : "partly") : "";
}

const again = (kernel, unit) => kernel.graph === "backward" && !unit.backward;

/** Whether a kernel writes a saved tensor in forward, or reads it in backward. */
function moves(kernel, tensor) {
  if (kernel.graph === "backward") return kernel.reads.has(tensor.kept);
  return kernel.writes.has(tensor.made.find((name) => view.drawn.kernels.some((one) => one.writes.has(name))));
}

/** The same of what an edge of the drawing stands for, which one box reads. */
function movesEdge(kernel, edge, kernels) {
  if (edge.from.backward === edge.to.backward || (kernel.graph === "backward" && !coverOf(kernel, edge.to, kernels))) return false;
  return [...edge.tensors.values()].some((tensor) => tensor.kept && moves(kernel, tensor));
}

/** Outline what a kernel computes and moves; null: what the chosen one does, if there is one. */
function outline(kernel) {
  const { found, kernels, saved } = view.drawn;
  const shown = kernel || kernels.find((one) => one.place === state.kernel);
  for (const unit of found.units) {
    const cover = shown ? coverOf(shown, unit, kernels) : "";
    unit.group?.classList.toggle("computed", cover !== "");
    unit.group?.classList.toggle("partly", cover === "partly");
  }
  for (const edge of found.edges.values()) edge.path?.classList.toggle("moved", Boolean(shown) && movesEdge(shown, edge, kernels));
  for (const [tensor, line] of saved) line.classList.toggle("moved", Boolean(shown) && moves(shown, tensor));
}

/** A list of kernels: one is outlined while the pointer is on it, and stays so after a click. */
function kernelList(kernels) {
  const place = element("div", { className: "kernels" });
  const redraw = () => place.replaceChildren(...kernels.map((kernel) => {
    const chosen = kernel.place === state.kernel;
    const button = element("button", {
      className: chosen ? "link chosen" : "link", title: "outline what it computes",
      onmouseenter: () => outline(kernel), onmouseleave: () => outline(null), onfocus: () => outline(kernel), onblur: () => outline(null),
      onclick: () => { choose({ kernel: chosen ? "" : kernel.place }); redraw(); outline(null); },
    }, kernel.name.replace(/^extern_kernels\./, ""));
    const more = [kernel.graph, kernel.bytes ? bytesText(kernel.bytes) : kernel.kind === "extern" ? "library" : ""].filter(Boolean).join(", ");
    return element("div", {}, button, element("span", { className: "quiet" }, ` ${more}`), ...(chosen ? aboutKernel(kernel) : []));
  }));
  redraw();
  return place;
}

function aboutKernel(kernel) {
  const { found, kernels, saved } = view.drawn;
  const units = found.units.filter((unit) => coverOf(kernel, unit, kernels));
  const partly = units.filter((unit) => coverOf(kernel, unit, kernels) === "partly").length;
  const repeated = units.filter((unit) => again(kernel, unit)).length;
  const boxes = [`${units.length} box${units.length > 1 ? "es" : ""}`, partly ? `${partly} in part` : "", repeated ? `${repeated} again, for backward` : ""].filter(Boolean).join(", ");
  const values = [...saved.keys()].filter((tensor) => moves(kernel, tensor)).map((tensor) => tensor.name);
  return [
    element("div", {}, `computes ${boxes}`),
    ...(kernel.ops.length ? [element("div", {}, `ops: ${kernel.ops.join(", ")}`)] : []),
    ...(values.length ? [element("div", {}, `${kernel.graph === "backward" ? "reads what was saved" : "writes what is saved"}: ${values.join(", ")}`)] : []),
  ];
}

/** The part of the panel that lists kernels: of a unit, or of all that is drawn. */
function kernelsPart(unit) {
  const { kernels, last } = view.drawn;
  if (data.kernels === null) return [];
  const title = element("h3", {}, "Kernels");
  if (!last) return [title, element("p", { className: "quiet" }, "They are known of the last stage only.")];
  const own = unit ? kernels.filter((kernel) => coverOf(kernel, unit, kernels)) : kernels;
  if (own.length) return [title, kernelList(own)];
  const none = unit ? "None is known to compute this box: it is outside of the layer, or Inductor replaced its ops or needs no kernel for them." : "None is known to compute a box of this drawing.";
  return [title, element("p", { className: "quiet" }, none)];
}

/** A kernel of the table was clicked: the layer that it is a part of, with its boxes outlined. */
async function drawKernel(place) {
  const number = data.kernels[place].drawn;
  const content = await loaded(number);
  const [, computes] = content.kernels.find(([one]) => one === place) || [];
  const origins = Object.values(content.origins);
  const modules = (computes || []).map((one) => content.modules[origins[one][0]]);
  const layer = graphNumber() === number ? layerFor(state.layer) : "*";
  const own = modules.map((module) => module.replace(/((?:^|\.)\d+)(\..*)?$/, "$1")).find((module) => /(^|\.)\d+$/.test(module));
  choose({ graph: number ? String(number) : "", stage: "", op: "", kernel: String(place), layer: modules.some((module) => isIn(module, layer)) ? layer || "*" : own || "*" });
  section("layer").querySelector("select").value = String(number);
  await showGraph();
  section("layer").scrollIntoView({ behavior: "smooth" });
}
