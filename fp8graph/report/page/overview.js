// How much is in FP8: of FLOPs, bytes and predicted time; and what else there is to know.

function showOverview() {
  const bars = data.shares.map((share) => (share.missing ? missingShare(share) : shareBar(share)));
  section("overview").append(
    element("p", {}, element("strong", {}, data.summary)),
    ...bars,
    legend([
      ["var(--native)", "FP8"],
      ["var(--emulated)", "FP8, emulated: its numerics without its speed"],
      ["var(--elsewhere)", "low precision of the program's own"],
      ["var(--high)", "high precision"],
    ]),
    element("ul", { className: "notes" }, ...data.notes.map((note) => element("li", {}, note))),
  );
}

function missingShare(share) {
  return element("div", { className: "share" }, element("span", {}, share.what), element("span", { className: "quiet" }, share.missing));
}

function shareBar({ what, unit, parts, before }) {
  const total = Object.values(parts).reduce((sum, part) => sum + part, 0);
  const width = (amount) => `width:${total ? (100 * amount) / total : 0}%`;
  const share = total ? (parts.native + parts.emulated) / total : 0;
  const faster = before ? `; ${amountText(before, unit)} if all were in high precision` : "";
  return element(
    "div",
    { className: "share" },
    element("span", {}, `of ${what}`),
    element(
      "div",
      { className: "bar" },
      element("span", { className: "native", style: width(parts.native) }),
      element("span", { className: "emulated", style: width(parts.emulated) }),
      element("span", { className: "elsewhere", style: width(parts["low precision"]) }),
      element("span", { className: "high", style: width(parts["high precision"]) }),
    ),
    element("span", {}, element("strong", {}, total ? `${percentText(share)} in FP8` : "none"), ` of ${amountText(total, unit)}${faster}`),
  );
}

function showPlainTables() {
  section("others").hidden = !data.others.length;
  section("others").append(...data.others.map(plainTable));
  for (const name of ["collectives", "refusals"]) {
    section(name).hidden = !data[name].length;
    if (data[name].length) section(name).append(plainTable(data[name]));
  }
  if (data.kernels !== null) {
    const named = (kernel, place) => (kernel.drawn === null ? kernel.name : element("button", { className: "link", title: "draw its layer", onclick: () => drawKernel(place) }, kernel.name));
    const rows = data.kernels.map((kernel, place) => [kernel.graph, kernel.kind, named(kernel, place), kernel.ops.join(", "), kernel.bytes ? bytesText(kernel.bytes) : ""]);
    section("kernels").append(plainTable([["graph", "kind", "kernel", "ops that it fuses", "bytes"], ...rows]));
    section("kernels").hidden = false;
  } else if (data.has_target) {
    section("kernels").append(element("p", { className: "quiet" }, "The kernels were not generated: read report.kernels before report.to_html."));
    section("kernels").hidden = false;
  }
}
