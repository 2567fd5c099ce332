// Show everything, and say when that is done: data-ready on the body has the milliseconds since the page was asked for.

function showContents() {
  const names = { overview: "Overview", statistics: "Statistics", gemms: "GEMMs", others: "Other products", layer: "Graphs", collectives: "Collectives", refusals: "Left as it was", kernels: "Kernels" };
  const links = Object.entries(names).filter(([name]) => !section(name).hidden);
  section("contents").append(...links.map(([name, text]) => element("a", { href: "#", onclick: (event) => { event.preventDefault(); section(name).scrollIntoView({ behavior: "smooth" }); } }, text)));
}

async function showPage() {
  showOverview();
  showGemms();
  showPlainTables();
  await showStatistics();
  await showGraphs();
  showContents();
  document.body.dataset.ready = performance.now().toFixed(0);
}

showPage().catch((error) => {
  document.body.dataset.error = String(error);
  section("overview").prepend(element("p", {}, `This page could not be drawn: ${error}`));
  throw error;
});
