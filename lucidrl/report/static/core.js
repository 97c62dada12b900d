// Data, elements and number formats that all parts of the page use. Text from a run reaches the page as text nodes only.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;

/** Make an element; attributes that are functions become listeners, children that are strings become text. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function clear(node) {
  while (node.firstChild) node.removeChild(node.firstChild);
  return node;
}

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const NUM_COLORS = 8;
const colorOfRun = (index) => cssColor(`--c${index % NUM_COLORS}`);

function swatch(variable) {
  const node = el("span", { class: "swatch", "aria-hidden": "true" });
  node.style.background = `var(${variable})`;
  return node;
}

/** A number with about four significant digits. */
function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-US");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return value.toPrecision(4);
}

/** A number on an axis: without the zeros that a table needs. */
function tick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return size >= 1000 ? value.toLocaleString("en-US") : String(Number(value.toPrecision(5)));
}

function seconds(value) {
  if (value === 0) return "0 s";
  if (value >= 120) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(1)} ms`;
  return `${(value * 1e6).toFixed(0)} µs`;
}

const whenText = (unixSeconds) => (unixSeconds ? new Date(unixSeconds * 1000).toLocaleString() : "–");

/** Index of the last entry of a sorted list that is at most `value`; -1 if there is none. */
function lastAtMost(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** [x values, y values] of a metric of a run, or null. */
function seriesOf(run, name) {
  const found = run.series[name];
  return found ? [run.axes[found[0]], found[1]] : null;
}

function runName(run, index) {
  return [swatch(`--c${index % NUM_COLORS}`), run.name];
}

/** A select of the runs; hidden if there is one run. */
function runSelect(label, onChange, runs = RUNS) {
  const select = el("select", { change: () => onChange(runs[Number(select.value)]) },
    runs.map((run, index) => el("option", { value: index }, run.name)));
  return runs.length > 1 ? el("label", {}, label, select) : null;
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}

const themeListeners = [];

/** Use the theme of the system until the reader chooses one; the choice is kept where the browser allows it. */
function themeButton() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("lucidrl-theme"); } catch { /* a page from disk may have no storage */ }
  const button = el("button", { type: "button", id: "theme", click: () => {
    chosen = current() === "dark" ? "light" : "dark";
    try { localStorage.setItem("lucidrl-theme", chosen); } catch { /* as above */ }
    apply();
  } });
  const current = () => (chosen === "dark" || chosen === "light" ? chosen : system.matches ? "dark" : "light");
  function apply() {
    document.documentElement.dataset.theme = current();
    button.textContent = current() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `switch to the ${current() === "dark" ? "light" : "dark"} theme`);
    for (const listener of themeListeners) listener();
  }
  system.addEventListener("change", apply);
  apply();
  return button;
}
