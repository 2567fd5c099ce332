// One stage of a graph, from its text to what is drawn: nodes, then units (a node, or a run of small ops of one module).

const VIEWS = /^(aten\.(view|_unsafe_view|reshape|permute|transpose|t|expand|slice|select|squeeze|unsqueeze|alias|as_strided|detach|split|unbind)\b|getitem$)/;
const HIGH = /^(aten\.(mm|bmm|addmm|baddbmm|_grouped_mm)|fp8graph\.grouped_mm)\b/;
const NATIVE = /^fp8graph\.scaled_(grouped_)?mm\b/;
const ALONE = /attention|_c10d_functional|^higher_order|statistics/;
const SIZES = { f64: 8, i64: 8, f32: 4, i32: 4, bf16: 2, f16: 2, i16: 2, e4m3: 1, e5m2: 1, e4m3fnuz: 1, e5m2fnuz: 1, uint8: 1, int8: 1, bool: 1 };

const contents = new Map();

/** What a graph consists of, unpacked when it is first asked for. */
function loaded(number) {
  if (!contents.has(number)) {
    contents.set(number, unpacked(data.graphs[number].content).then((bytes) => JSON.parse(new TextDecoder().decode(bytes))));
  }
  return contents.get(number);
}

/** The nodes of one stage in order, by name. The bodies of higher-order ops follow after an empty line. */
function nodesOf(content, stage) {
  const found = new Map();
  let body = "";
  for (const number of content.texts[stage]) {
    const line = content.lines[number];
    if (line === "") body = `${body}'`;
    const parts = /^([A-Za-z_]\w*): (.*?)(?: = (.*?))?(?:  # (.*))?$/.exec(line);
    if (!parts) continue;
    const [, name, type, code = "", site = ""] = parts;
    const [module, source, backward] = content.origins[name] || [-1, -1, 0];
    const index = /^(\w+)\[(\d+)\]$/.exec(code);
    const op = index ? "getitem" : code ? code.slice(0, code.indexOf("(")) : "input";
    const inputs = unique((code.slice(index ? 0 : op.length).match(/(?<![\w.])[A-Za-z_]\w*(?![\w=(.])/g) || []).map((input) => input + body));
    found.set(name + body, {
      name: name + body, type, op, code, site, line, inputs: inputs.filter((input) => found.has(input)),
      module: content.modules[module] || "", source: content.sources[source] || "", backward: Boolean(backward),
    });
  }
  return found;
}

/** Bytes of "bf16[32, 64]"; null if a size is dynamic or there are several tensors. */
function bytesOf(type) {
  const parts = /^(\w+)\[([\d, ]*)\]$/.exec(type);
  if (!parts || !(parts[1] in SIZES)) return null;
  return parts[2].split(", ").filter(Boolean).reduce((product, size) => product * Number(size), SIZES[parts[1]]);
}

const isIn = (module, layer) => !layer || module === layer || module.startsWith(`${layer}.`);

/** The modules of a graph that can be drawn, with the number of their ops. */
function modulesOf(nodes) {
  const counts = new Map();
  for (const node of nodes.values()) {
    if (node.op === "input" || !node.module) continue;
    const parts = node.module.split(".");
    for (let end = 1; end <= parts.length; end += 1) {
      const prefix = parts.slice(0, end).join(".");
      counts.set(prefix, (counts.get(prefix) || 0) + 1);
    }
  }
  return counts;
}

function kindOf(node, nodes) {
  if (NATIVE.test(node.op)) return "gemm-native";
  if (HIGH.test(node.op)) return readsDecoded(node, nodes) ? "gemm-emulated" : "gemm-high";
  return node.op.startsWith("fp8graph.") && !/statistics/.test(node.op) ? "quantize" : "other";
}

function readsDecoded(node, nodes) {
  return node.inputs.some((name) => {
    let input = nodes.get(name);
    while (VIEWS.test(input.op) && input.inputs.length) input = nodes.get(input.inputs[0]);
    return input.op === "fp8graph.dequantize";
  });
}

/** What is drawn of a layer: units, edges between them, and what comes from outside or goes there. */
function unitsOf(nodes, layer, saved, everyOp) {
  const unitOf = new Map(); // of each node: views belong to what they look at
  const units = [];
  const open = { true: null, false: null }; // by direction: the run that more small ops may join
  for (const node of nodes.values()) {
    if (node.op === "input" || !isIn(node.module, layer)) continue;
    if (VIEWS.test(node.op) && node.inputs.length) {
      const looked = unitOf.get(node.inputs[0]);
      if (looked) { looked.views.push(node); unitOf.set(node.name, looked); }
      continue;
    }
    const kind = kindOf(node, nodes);
    const alone = everyOp || kind !== "other" || ALONE.test(node.op);
    const run = open[node.backward];
    if (!alone && run && run.module === node.module) {
      run.nodes.push(node);
      unitOf.set(node.name, run);
      continue;
    }
    const unit = { id: `u${units.length}`, kind, nodes: [node], views: [], module: node.module, backward: node.backward, operand: operandOf(node) };
    units.push(unit);
    unitOf.set(node.name, unit);
    open[node.backward] = alone ? null : unit;
  }
  const found = { units, outside: [], edges: new Map(), partitioned: saved.size > 0 };
  const inside = new Set(units);
  for (const unit of units) for (const node of [...unit.nodes, ...unit.views]) connect(found, unit, node, nodes, unitOf, saved, layer);
  for (const node of nodes.values()) if (!unitOf.has(node.name) && node.op !== "input" && !VIEWS.test(node.op)) leave(found, node, nodes, unitOf, inside);
  return found;
}

const operandOf = (node) => /^quantize_(input|weight|grad_output)/.exec(node.name)?.[1] || "";

/** The edges into one node, through views. */
function connect(found, unit, node, nodes, unitOf, saved, layer) {
  for (const name of node.inputs) {
    const chain = [nodes.get(name)];
    while (!unitOf.has(chain.at(-1).name) && VIEWS.test(chain.at(-1).op) && chain.at(-1).inputs.length) chain.push(nodes.get(chain.at(-1).inputs[0]));
    const source = chain.at(-1);
    const from = unitOf.get(source.name) || (source.op === "input" ? null : stub(found, source, "from"));
    if (source.op === "input" && unit.backward && !source.backward) keepInput(unit, source);
    if (!from || from === unit) continue;
    const tensor = chain.find((one) => !one.backward) || source;
    const crosses = !from.backward && unit.backward;
    const kept = [...chain.map((one) => one.name), ...viewsOf(tensor, nodes)].find((one) => saved.has(one)) || "";
    const result = chain.at(-2)?.op === "getitem" ? [chain.at(-2).name] : [];
    addEdge(found, from, unit, { tensor: crosses ? tensor : source === chain[0] ? source : chain[0], crosses, kept, made: [...result, source.name] });
  }
}

/** The names of the views of a tensor that it is a view of: any of them may be what is saved. */
function viewsOf(node, nodes) {
  const names = [];
  for (let one = node; VIEWS.test(one.op) && one.op !== "getitem" && one.inputs.length; one = nodes.get(one.inputs[0])) names.push(one.inputs[0]);
  return names;
}

function keepInput(unit, input) {
  unit.keptInputs = unit.keptInputs || new Map();
  unit.keptInputs.set(input.name, input);
}

function stub(found, node, direction) {
  const module = node.module || "outside of modules";
  const known = found.outside.find((one) => one.module === module && one.backward === node.backward && one.direction === direction);
  if (known) return known;
  const made = { id: `o${found.outside.length}`, kind: "outside", nodes: [], views: [], module, backward: node.backward, direction };
  found.outside.push(made);
  return made;
}

/** The edges from a layer to a node outside of it. */
function leave(found, node, nodes, unitOf, inside) {
  for (const name of node.inputs) {
    let source = nodes.get(name);
    while (!unitOf.has(source.name) && VIEWS.test(source.op) && source.inputs.length) source = nodes.get(source.inputs[0]);
    const from = unitOf.get(source.name);
    if (from && inside.has(from) && from.backward === node.backward) addEdge(found, from, stub(found, node, "to"), { tensor: nodes.get(name), crosses: false, kept: "", made: [] });
  }
}

/** `kept`: the node that is saved, a view of the tensor or itself; `made`: the nodes that a kernel may name that writes it. */
function addEdge(found, from, to, { tensor, crosses, kept, made }) {
  const key = `${from.id} ${to.id}`;
  if (!found.edges.has(key)) found.edges.set(key, { from, to, crosses, tensors: new Map() });
  found.edges.get(key).tensors.set(tensor.name, { name: tensor.name, type: tensor.type, bytes: bytesOf(tensor.type), kept, made });
}
