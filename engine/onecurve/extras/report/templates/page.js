"use strict";
// Charts name their colors as CSS variables, so page and charts have one palette, in light and in dark.
const scheme = matchMedia("(prefers-color-scheme: dark)");
const isTouch = matchMedia("(pointer: coarse)").matches;

function resolve(node, styles) {
  if (typeof node === "string") return node.startsWith("var(--") ? styles.getPropertyValue(node.slice(4, -1)).trim() : node;
  if (Array.isArray(node)) return node.map((child) => resolve(child, styles));
  if (node === null || typeof node !== "object") return node;
  return Object.fromEntries(Object.entries(node).map(([key, child]) => [key, resolve(child, styles)]));
}

const axis = {
  gridcolor: "var(--grid)", linecolor: "var(--line)", zeroline: false, automargin: true, ticklabelstandoff: 5,
  title: { standoff: 8, font: { size: 12 } },
};
const template = { layout: {
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "var(--sans)", size: 12, color: "var(--muted)" },
  colorway: Array.from({ length: 10 }, (_, index) => `var(--s${index + 1})`),
  xaxis: axis, yaxis: axis, margin: { l: 8, r: 14, t: 8, b: 8 },
  hovermode: "x unified", hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--line)", font: { color: "var(--ink)" } },
} };

function draw(chart) {
  const { data, layout } = JSON.parse(chart.querySelector("script").textContent);
  const figure = resolve({ data, layout: { ...layout, template } }, getComputedStyle(document.documentElement));
  if (isTouch) figure.layout.dragmode = false; // a finger on a chart scrolls the page
  return Plotly.react(chart.querySelector(".plot"), figure.data, figure.layout, { responsive: true, displayModeBar: false });
}

async function drawAll() {
  const charts = document.querySelectorAll("figure.chart");
  for (const chart of charts) {
    await draw(chart);
    await new Promise((resume) => setTimeout(resume)); // the page stays usable meanwhile
  }
  document.documentElement.dataset.charts = charts.length;
}

function toggle(button) {
  const plot = button.closest("figure").querySelector(".plot"), hidden = button.getAttribute("aria-pressed") !== "true";
  const traces = plot.data.flatMap((trace, index) => (trace.name === button.dataset.trace ? [index] : []));
  button.setAttribute("aria-pressed", hidden);
  Plotly.restyle(plot, { visible: !hidden }, traces);
}

function sortBy(header) {
  const table = header.closest("table"), column = header.cellIndex;
  const falls = header.getAttribute("aria-sort") === "ascending";
  table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", falls ? "descending" : "ascending");
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const compare = (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
  const byNumber = (a, b) => value(a) - value(b);
  const body = table.tBodies[0], rows = [...body.rows];
  const order = header.classList.contains("number") ? byNumber : compare;
  const isEmpty = (row) => value(row) === "";
  rows.sort((a, b) => isEmpty(a) - isEmpty(b) || (falls ? order(b, a) : order(a, b)));
  body.append(...rows);
}

document.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => toggle(button)));
document.querySelectorAll("table.sortable th").forEach((header) => header.addEventListener("click", () => sortBy(header)));
if (window.Plotly) {
  scheme.addEventListener("change", drawAll);
  drawAll();
} else {
  document.querySelector("#no-plotly").hidden = false;
  document.documentElement.dataset.charts = 0;
}
