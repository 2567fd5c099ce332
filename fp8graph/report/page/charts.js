// Statistics: a heat map, layers x steps or layers x tensors, with the loss above it, and the curves of one layer.

const STEPPED = "steps";
const matrices = new Map();
const scales = new Map(); // "operand": { min, max } of all layers at the last step

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const numberText = (value) => (Number.isFinite(value) ? Number(value.toPrecision(4)).toString() : "-");
const copyOf = (plane) => [plane.layout, plane.recipe, plane.what_if ? "what if" : ""].filter(Boolean).join(", ") || "the tensor itself";

/** [layers, steps] of one plane, row by row. */
async function matrixOf(plane) {
  if (!matrices.has(plane)) matrices.set(plane, new Float32Array(await unpacked(plane.values)));
  return matrices.get(plane);
}

async function showStatistics() {
  const statistics = data.statistics;
  if (statistics === null) return;
  section("statistics").hidden = false;
  if (!statistics.planes.length) {
    section("statistics").append(element("p", {}, "No step was observed yet."));
    return;
  }
  await readScales();
  const places = { controls: element("div", { className: "controls" }), chart: element("div", { className: "chart" }), curves: element("div", { className: "chart" }) };
  section("statistics").append(places.controls, places.chart, places.curves);
  await drawStatistics(places);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawStatistics(places));
  addEventListener("resize", () => [places.chart, places.curves].forEach((place) => echarts.getInstanceByDom(place)?.resize()));
}

async function readScales() {
  const { planes, sites, steps } = data.statistics;
  for (const plane of planes.filter((one) => /^scale_inv_(min|max)$/.test(one.stat) && !one.what_if)) {
    const matrix = await matrixOf(plane);
    sites.forEach((site, row) => {
      const value = matrix[(row + 1) * steps.length - 1];
      if (Number.isNaN(value)) return;
      const key = `${site} ${plane.operand}`;
      scales.set(key, { ...scales.get(key), [plane.stat.slice(-3)]: value });
    });
  }
}

/** The observed scale_inv of a quantize node: a module's name in the graph ends the layer's name. */
function observedScales(unit) {
  if (!scales.size) return "";
  const sites = data.statistics.sites.filter((site) => site === unit.module || site.endsWith(`.${unit.module}`));
  const found = sites.map((site) => scales.get(`${site} ${unit.operand}`)).find(Boolean);
  if (!found) return "";
  return found.min === found.max ? numberText(found.min) : `${numberText(found.min)} … ${numberText(found.max)}`;
}

const firstOf = (asked, values) => (values.includes(asked) ? asked : values[0]);

/** What is chosen, each choice among those that fit the ones before it. */
function chosenPlane() {
  const { planes } = data.statistics;
  const stats = unique(planes.map((plane) => plane.stat));
  const stat = firstOf(state.stat || "underflows%", stats);
  const ofStat = planes.filter((plane) => plane.stat === stat);
  const operands = unique(ofStat.map((plane) => plane.operand));
  const operand = firstOf(state.tensor, operands);
  const copies = unique(ofStat.filter((plane) => plane.operand === operand).map(copyOf));
  const copy = firstOf(state.copy, copies);
  return { stats, stat, operands, operand, copies, copy, ofStat, plane: ofStat.find((one) => one.operand === operand && copyOf(one) === copy) };
}

async function drawStatistics(places) {
  const { sites, steps } = data.statistics;
  const asked = chosenPlane();
  const kinds = unique(sites.map((site) => anyLayer(site)));
  const kind = kinds.includes(state.kind) ? state.kind : sites.length > 60 && kinds.length < sites.length ? kinds[0] : "";
  const columns = state.columns === "tensors" ? "tensors" : STEPPED;
  const step = steps.includes(Number(state.step)) ? Number(state.step) : steps.at(-1);
  const change = (name) => (value) => { choose({ [name]: value }); drawStatistics(places); };
  const same = (values) => values.map((value) => [String(value), String(value)]);
  places.controls.replaceChildren(
    dropDown("statistic", same(asked.stats), asked.stat, change("stat")),
    ...(columns === STEPPED ? [dropDown("tensor", same(asked.operands), asked.operand, change("tensor")), dropDown("copy", same(asked.copies), asked.copy, change("copy"))] : []),
    dropDown("columns", [[STEPPED, "steps"], ["tensors", "tensors at one step"]], columns, change("columns")),
    ...(columns === STEPPED ? [] : [dropDown("step", same(steps), String(step), change("step"))]),
    dropDown("layers", [["", "all"], ...same(kinds)], kind, (value) => change("kind")(value || "all")),
    checkBox("logarithmic", state.log === "1", (on) => change("log")(on ? "1" : "")),
  );
  const rows = sites.map((site, row) => ({ site, row })).filter(({ site }) => !kind || anyLayer(site) === kind);
  const table = columns === STEPPED ? await stepTable(asked.plane, rows) : await tensorTable(asked.ofStat, rows, steps.indexOf(step));
  drawHeatMap(places, rows, table, asked, columns === STEPPED);
  if (state.site) await drawCurves(places, state.site, asked);
}

async function stepTable(plane, rows) {
  const { steps } = data.statistics;
  const matrix = await matrixOf(plane);
  return { columns: steps.map(String), values: rows.map(({ row }) => [...matrix.subarray(row * steps.length, (row + 1) * steps.length)]) };
}

async function tensorTable(planes, rows, column) {
  const { steps } = data.statistics;
  const all = await Promise.all(planes.map(matrixOf));
  const names = planes.map((plane) => `${plane.operand}${plane.layout ? `\n${copyOf(plane)}` : ""}`);
  return { columns: names, values: rows.map(({ row }) => all.map((matrix) => matrix[row * steps.length + column])) };
}

function chartIn(place, height) {
  echarts.getInstanceByDom(place)?.dispose();
  place.style.height = `${height}px`;
  return echarts.init(place);
}

function drawHeatMap(places, rows, table, asked, stepped) {
  const losses = stepped ? data.statistics.losses : null;
  const height = Math.max(120, Math.min(1400, 15 * rows.length));
  const top = losses ? 150 : 20;
  const label = Math.min(0.42 * places.chart.clientWidth, 20 + 6.6 * Math.max(...rows.map(({ site }) => site.length)));
  const chart = chartIn(places.chart, top + height + 110);
  const log = state.log === "1";
  const shown = (value) => (log ? (value > 0 ? Math.log10(value) : Number.NaN) : value);
  const cells = table.values.flatMap((row, y) => row.map((value, x) => [x, y, shown(value), value])).filter((cell) => Number.isFinite(cell[2]));
  const values = cells.map((cell) => cell[2]);
  const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const text = { color: color("--text") };
  const grids = [{ left: label, right: 24, top, height, containLabel: false }];
  const xAxis = [{ type: "category", data: table.columns, name: stepped ? "step" : "", nameLocation: "middle", nameGap: 28, axisLabel: { color: color("--quiet"), interval: stepped ? "auto" : 0 }, nameTextStyle: text }];
  const yAxis = [{ type: "category", data: rows.map(({ site }) => site), inverse: true, axisLabel: { color: color("--quiet"), width: label - 14, overflow: "truncate", fontSize: 11 } }];
  const series = [{ type: "heatmap", name: asked.stat, data: cells, progressive: 0, emphasis: { itemStyle: { borderColor: color("--text"), borderWidth: 1 } } }];
  if (losses) addLoss(losses, label, { grids, xAxis, yAxis, series, text });
  chart.setOption({
    animation: false, grid: grids, xAxis, yAxis, series,
    tooltip: { confine: true, renderMode: "richText", formatter: (cell) => (cell.seriesType === "heatmap" ? `${rows[cell.value[1]].site}\n${stepped ? "step " : ""}${table.columns[cell.value[0]]}\n${asked.stat} = ${numberText(cell.value[3])}` : `step ${cell.value[0]}\nloss = ${numberText(cell.value[1])}`) },
    visualMap: { seriesIndex: 0, dimension: 2, min: values.length ? least : 0, max: values.length && most > least ? most : (values.length ? least : 0) + 1, calculable: true, orient: "horizontal", left: "center", bottom: 0, itemHeight: 180, textStyle: text, formatter: (value) => numberText(log ? 10 ** value : value), inRange: { color: ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"] } },
  });
  chart.on("click", (event) => { if (event.seriesType === "heatmap") pickSite(places, rows[event.value[1]].site, asked); });
}

function pickSite(places, site, asked) {
  choose({ site });
  drawCurves(places, site, asked);
}

function addLoss(losses, label, { grids, xAxis, yAxis, series, text }) {
  const { steps } = data.statistics;
  grids.push({ left: label, right: 24, top: 24, height: 90 });
  xAxis.push({ type: "value", gridIndex: 1, min: Math.min(steps[0], losses[0]?.[0] ?? 0), max: Math.max(steps.at(-1), losses.at(-1)?.[0] ?? 1), axisLabel: { color: color("--quiet") } });
  yAxis.push({ type: "value", gridIndex: 1, scale: true, name: "loss", nameTextStyle: text, axisLabel: { color: color("--quiet") }, splitLine: { lineStyle: { color: color("--line") } } });
  series.push({ type: "line", name: "loss", xAxisIndex: 1, yAxisIndex: 1, data: losses, showSymbol: losses.length < 40, lineStyle: { color: color("--accent") }, itemStyle: { color: color("--accent") } });
}

/** All copies of the chosen tensor of one layer, over the steps. */
async function drawCurves(places, site, asked) {
  const { sites, steps } = data.statistics;
  const row = sites.indexOf(site);
  if (row < 0) return;
  const planes = asked.ofStat.filter((plane) => plane.operand === asked.operand);
  const lines = await Promise.all(planes.map(matrixOf));
  const chart = chartIn(places.curves, 300);
  const text = { color: color("--text") };
  chart.setOption({
    animation: false,
    title: { text: `${site}: ${asked.stat} of ${asked.operand}`, textStyle: { ...text, fontSize: 13 } },
    legend: { bottom: 0, textStyle: text, type: "scroll" },
    tooltip: { trigger: "axis", confine: true, renderMode: "richText" },
    grid: { left: 70, right: 24, top: 40, bottom: 60 },
    xAxis: { type: "category", data: steps.map(String), name: "step", nameTextStyle: text, axisLabel: { color: color("--quiet") } },
    yAxis: { type: state.log === "1" ? "log" : "value", scale: true, axisLabel: { color: color("--quiet") }, splitLine: { lineStyle: { color: color("--line") } } },
    series: planes.map((plane, index) => ({ type: "line", name: copyOf(plane), data: [...lines[index].subarray(row * steps.length, (row + 1) * steps.length)].map((value) => (Number.isFinite(value) ? value : null)) })),
  });
}
