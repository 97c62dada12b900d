// Curves by step, drawn by uPlot: smoothing, and one step cursor for all charts.

const CHART_HEIGHT = 150;
const FEWEST_SMOOTHED = 10; // points of a curve: fewer are drawn as they are
const WHOLE_STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();
const stepCharts = [];

const steps = {
  value: null,
  listeners: [],
  set(step) {
    if (step === this.value) return;
    this.value = step;
    for (const listener of this.listeners) listener(step);
  },
};

const smoothing = { weight: 0 };

/** Exponential moving average without bias towards the first value; missing values stay missing. */
function smoothed(values, weight) {
  if (!weight || values.filter((value) => value !== null).length < FEWEST_SMOOTHED) return values;
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function stepRange() {
  const all = RUNS.flatMap((run) => run.axes.map((axis) => [axis[0], axis[axis.length - 1]])).filter((ends) => ends.length && ends[0] !== undefined);
  if (!all.length) return [0, 1];
  const low = Math.min(...all.map((ends) => ends[0])), high = Math.max(...all.map((ends) => ends[1]));
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function axisOptions(extra) {
  return { stroke: cssColor("--dim"), grid: { stroke: cssColor("--grid"), width: 1 }, ticks: { show: false },
    font: "11px system-ui, sans-serif", ...extra };
}

/** Options that all charts share; `cursorKey` connects the cursors of charts. */
function chartOptions(width, height, cursorKey, xRange, series, onCursor) {
  return {
    width, height, series, legend: { show: false }, padding: [6, 8, 0, 0],
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low ?? xRange[0], high ?? xRange[1]]) } },
    axes: [
      axisOptions({ size: 24, space: 45, incrs: cursorKey === "step" ? WHOLE_STEPS : undefined, values: (_, ticks) => ticks.map(tick) }),
      axisOptions({ size: 52, space: 28, values: (_, ticks) => ticks.map(tick) }),
    ],
    cursor: { sync: { key: cursorKey, scales: ["x", null] }, y: false, points: { show: false } },
    hooks: { setCursor: [onCursor] },
  };
}

/** Join the curves of several runs into one table with sorted x values; null where a run has no value. */
function joined(curves) {
  const xs = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const rowOf = new Map(xs.map((x, row) => [x, row]));
  const columns = curves.map((curve) => {
    const column = new Array(xs.length).fill(null);
    curve.x.forEach((x, index) => { column[rowOf.get(x)] = curve.y[index]; });
    return column;
  });
  return [xs, columns];
}

/** A chart of curves [{label, color, x, y}] that follows theme, width and smoothing; `axis` is "step" or "time". */
class Chart {
  constructor(title, curves, axis, xRange) {
    this.curves = curves;
    this.axis = axis;
    this.xRange = xRange;
    this.values = el("span", { class: "values" });
    this.body = el("div", {});
    this.node = el("div", { class: "chart", role: "figure", "aria-label": title },
      el("header", {}, el("span", { class: "name" }, title), this.values), this.body);
    [this.xs, this.columns] = joined(curves);
    this.width = 0;
    new ResizeObserver(() => this.resize()).observe(this.body);
    themeListeners.push(() => this.draw());
    this.show(null);
  }

  data() {
    const [low, high] = this.xRange;
    const columns = this.columns.flatMap((column) => [column, this.axis === "step" ? smoothed(column, smoothing.weight) : column]);
    // Empty rows at both ends give all charts the same x axis, so that their cursors stand below each other.
    const before = this.xs[0] > low, after = this.xs[this.xs.length - 1] < high;
    const padded = (column, first, last) => [...(before ? [first] : []), ...column, ...(after ? [last] : [])];
    return [padded(this.xs, low, high), ...columns.map((column) => padded(column, null, null))];
  }

  resize() {
    const width = Math.floor(this.body.clientWidth);
    if (width === this.width || width < 50) return;
    this.width = width;
    if (this.plot) this.plot.setSize({ width, height: CHART_HEIGHT });
    else this.draw();
  }

  draw() {
    if (!this.width) return;
    if (this.plot) this.plot.destroy();
    const faded = smoothing.weight > 0 && this.axis === "step";
    const series = [{}, ...this.curves.flatMap((curve) => {
      const color = cssColor(curve.color);
      const line = { spanGaps: true, points: { show: this.xs.length < 30, size: 5, stroke: color, fill: color } };
      return [{ ...line, stroke: `${color}55`, width: 1, show: faded, points: { show: false } }, { ...line, stroke: color, width: 1.5 }];
    })];
    const options = chartOptions(this.width, CHART_HEIGHT, this.axis, this.xRange, series, (plot) => this.onCursor(plot));
    if (this.axis === "time") options.scales.y = { range: (_, low, high) => [0, (high || 1) * 1.05] };
    this.plot = new uPlot(options, this.data(), clear(this.body));
    if (this.axis === "step") this.place(steps.value);
  }

  onCursor(plot) {
    const x = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null;
    if (this.axis !== "step") this.show(x);
    else if (x === null) queueMicrotask(() => this.place(steps.value)); // the cursor stays when the pointer leaves
    else if (!this.isPlacing) steps.set(Math.round(x));
  }

  /** Move the cursor of this chart to a step, without a pointer. */
  place(step) {
    this.show(step);
    if (!this.plot || step === null) return;
    this.isPlacing = true;
    const top = this.plot.over.clientHeight / 2;
    this.plot.setCursor({ left: this.plot.valToPos(step, "x"), top }, true, false);
    this.isPlacing = false;
  }

  /** Write the value of each curve at `x` (by default, its last value) beside the title. */
  show(x) {
    clear(this.values);
    for (const curve of this.curves) {
      const index = x === null ? curve.x.length - 1 : lastAtMost(curve.x, x);
      const value = index >= 0 ? curve.y[index] : null;
      this.values.append(el("span", { title: index >= 0 ? `${curve.label}, ${this.axis} ${number(curve.x[index])}` : curve.label },
        this.curves.length > 1 ? swatch(curve.color) : null, number(value)));
    }
  }
}

function metricChart(name, xRange) {
  const curves = RUNS.flatMap((run, index) => {
    const found = seriesOf(run, name);
    return found ? [{ label: run.name, color: `--c${index % NUM_COLORS}`, x: found[0], y: found[1] }] : [];
  });
  const chart = new Chart(name, curves, "step", xRange);
  chart.node.dataset.metric = name;
  stepCharts.push(chart);
  steps.listeners.push((step) => chart.place(step));
  return chart;
}

/** Show the charts whose metrics contain the text of the filter. */
function filterMetrics() {
  const wanted = document.getElementById("metric-filter").value.trim().toLowerCase();
  for (const chart of document.querySelectorAll("#curves [data-metric]")) {
    chart.hidden = !chart.dataset.metric.toLowerCase().includes(wanted);
  }
}

function chartControls(xRange) {
  const longest = Math.max(0, ...RUNS.flatMap((run) => run.axes.map((axis) => axis.length)));
  smoothing.weight = longest > 20 ? 0.6 : 0;
  const smoothOutput = el("output", {}, smoothing.weight.toFixed(2));
  const smooth = el("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: smoothing.weight, input: () => {
    smoothing.weight = Number(smooth.value);
    smoothOutput.textContent = smoothing.weight.toFixed(2);
    for (const chart of stepCharts) chart.draw();
  } });
  const [low, high] = [Math.ceil(xRange[0]), Math.floor(xRange[1])];
  const stepOutput = el("output", { id: "step-value" }, "last");
  const step = el("input", { type: "range", id: "step", min: low, max: Math.max(low, high), value: Math.max(low, high),
    input: () => steps.set(Number(step.value)) });
  steps.listeners.push((value) => { step.value = value; stepOutput.textContent = value; });
  const filter = el("input", { type: "search", id: "metric-filter", placeholder: "reward", input: () => {
    const rest = document.getElementById("rest");
    if (filter.value.trim() && rest) rest.open = true;
    filterMetrics();
  } });
  return el("div", { class: "controls sticky" },
    el("label", { title: "the left and right arrow keys move the cursor" }, "Step", step, stepOutput),
    el("label", {}, "Smoothing", smooth, smoothOutput),
    el("label", {}, "Metrics with", filter),
    RUNS.length > 1 ? el("span", { class: "legend" }, RUNS.map((run, index) => el("span", {}, runName(run, index)))) : null);
}

function curvesSection() {
  if (!DATA.charts.length && !DATA.constant.length) {
    return section("curves", "Curves", el("p", { class: "dim" }, "No step is recorded yet."));
  }
  const xRange = stepRange();
  const controls = chartControls(xRange);
  const groups = DATA.charts.map((group) => {
    const make = () => el("div", { class: "grid" }, group.names.map((name) => metricChart(name, xRange).node));
    if (!group.is_folded) return el("div", {}, el("h3", {}, group.title), make());
    const body = el("div", {});
    // Drawn when it is first opened: a run may have hundreds of metrics.
    const fold = el("details", { id: "rest", toggle: () => {
      if (!fold.open || body.firstChild) return;
      body.append(make());
      filterMetrics();
    } },
      el("summary", {}, `${group.title} (${group.names.length})`), body);
    return fold;
  });
  const constant = DATA.constant.length ? el("details", { id: "constant" },
    el("summary", {}, `Metrics that did not change (${DATA.constant.length})`),
    el("div", { class: "scroll" }, el("table", { class: "narrow" },
      el("tr", {}, el("th", {}, "metric"), RUNS.map((run, index) => el("th", { class: "num" }, runName(run, index)))),
      DATA.constant.map(([name, values]) => el("tr", {}, el("td", {}, name), values.map((value) => el("td", { class: "num" }, number(value)))))))) : null;
  return section("curves", "Curves", controls, ...groups, constant);
}

/** Seconds per step, stacked by phase, of one run. */
class PhaseStack {
  constructor() {
    this.legend = el("div", { class: "legend" });
    this.body = el("div", {});
    this.node = el("div", { class: "chart wide", id: "phases", role: "figure", "aria-label": "seconds per step by phase" }, this.legend, this.body);
    new ResizeObserver(() => this.draw()).observe(this.body);
    themeListeners.push(() => this.draw(true));
    steps.listeners.push((step) => this.place(step));
  }

  use(run) {
    this.phases = run.phases;
    this.draw(true);
  }

  draw(isForced) {
    const width = Math.floor(this.body.clientWidth);
    if (!this.phases || width < 50 || (width === this.width && !isForced)) return;
    this.width = width;
    if (this.plot) this.plot.destroy();
    const { names, seconds: columns, steps: x } = this.phases;
    let sum = new Array(x.length).fill(0);
    const tops = columns.map((column) => (sum = sum.map((value, row) => value + (column[row] || 0))));
    // From the highest to the lowest: each area covers the lower part of the one before it.
    const order = names.map((_, index) => index).reverse();
    const series = [{}, ...order.map((index) => {
      const color = cssColor(`--c${index % NUM_COLORS}`);
      return { stroke: color, fill: color, width: 1, points: { show: x.length < 2, fill: color } };
    })];
    const range = [x[0], x[x.length - 1]];
    const options = chartOptions(width, 200, "step", range, series, (plot) => {
      if (plot.cursor.left < 0) queueMicrotask(() => this.place(steps.value));
      else if (!this.isPlacing) steps.set(Math.round(plot.posToVal(plot.cursor.left, "x")));
    });
    options.scales.y = { range: (_, low, high) => [0, high || 1] };
    this.plot = new uPlot(options, [x, ...order.map((index) => tops[index])], clear(this.body));
    this.show(steps.value);
  }

  place(step) {
    this.show(step);
    if (!this.plot || step === null) return;
    this.isPlacing = true;
    this.plot.setCursor({ left: this.plot.valToPos(step, "x"), top: 10 }, true, false);
    this.isPlacing = false;
  }

  /** Show the seconds of a step; before a step is chosen, the mean of all steps. */
  show(step) {
    if (!this.phases) return;
    const { names, seconds: columns, steps: x } = this.phases;
    const row = step === null ? -1 : lastAtMost(x, step);
    const mean = (column) => column.reduce((sum, value) => sum + (value || 0), 0) / column.length;
    const values = columns.map((column) => (row >= 0 ? column[row] || 0 : mean(column)));
    const total = values.reduce((sum, value) => sum + value, 0);
    clear(this.legend).append(el("span", { class: "dim" }, row >= 0 ? `step ${x[row]}: ${seconds(total)}` : `mean step: ${seconds(total)}`),
      ...names.map((name, index) => el("span", {}, swatch(`--c${index % NUM_COLORS}`),
        `${name} ${seconds(values[index])} (${total ? Math.round((100 * values[index]) / total) : 0} %)`)));
  }
}

function timeSection() {
  const timed = RUNS.filter((run) => run.phases);
  const advice = RUNS.flatMap((run) => (run.opportunities.length ? [el("div", {},
    RUNS.length > 1 ? el("h3", {}, run.name) : null,
    el("ol", { class: "opportunities" }, run.opportunities.map((text) => el("li", {}, text))))] : []));
  if (!timed.length) return section("time", "Time per step", el("p", { class: "dim" }, "No step is timed yet."));
  const stack = new PhaseStack();
  stack.use(timed[0]);
  return section("time", "Time per step", el("div", { class: "controls" }, runSelect("Run", (run) => stack.use(run), timed)), stack.node,
    advice.length ? el("div", {}, el("h3", {}, "Largest opportunities"), ...advice) : null);
}

function machineSection() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.machine)))].sort();
  if (!names.length) return section("machine", "Memory and utilization", el("p", { class: "dim" }, "Nothing is recorded: the run was shorter than tracking.monitor_interval_s, or tracking.monitor is off."));
  const ends = RUNS.flatMap((run) => Object.values(run.machine).map(([x]) => [x[0], x[x.length - 1]]));
  const range = [Math.min(...ends.map(([first]) => first)), Math.max(...ends.map(([, last]) => last))];
  if (range[0] === range[1]) range[1] = range[0] + 1;
  const charts = names.map((name) => new Chart(name, RUNS.flatMap((run, index) => (run.machine[name]
    ? [{ label: run.name, color: `--c${index % NUM_COLORS}`, x: run.machine[name][0], y: run.machine[name][1] }] : [])), "time", range).node);
  return section("machine", "Memory and utilization",
    el("p", { class: "dim" }, "By seconds since the run began to log. CPU and GPU use in percent, memory in GB (1024³ bytes)."), el("div", { class: "grid" }, charts));
}
