// The samples browser: filters, sorting, tokens colored by log-probability or mismatch, and the group of a sample.

const ROWS_PER_PAGE = 100;
const LOGPROB_LEVELS = [-0.1, -0.5, -1.5, -3, -6];
const MISMATCH_LEVELS = [1e-3, 1e-2, 0.05, 0.2, 1];
const SORTS = {
  "newest first": (a, b) => b.step - a.step || a.kind.localeCompare(b.kind) || a.order - b.order,
  "oldest first": (a, b) => a.step - b.step || a.order - b.order,
  "reward, highest first": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  "reward, lowest first": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  "longest completion first": (a, b) => b.size - a.size,
  "largest mismatch first": (a, b) => (b.mismatch ?? -1) - (a.mismatch ?? -1),
};

const isCompletion = (message) => message.role === "assistant";
const textOf = (messages) => messages.map((message) => message.content).join("\n");

/** The samples of all runs, with what the browser sorts and filters by. */
function allSamples() {
  return RUNS.flatMap((run, runIndex) => run.samples.map((sample, order) => {
    const first = sample.messages.findIndex(isCompletion);
    const at = first < 0 ? sample.messages.length : first;
    const differences = sample.messages.flatMap((message) => (message.training || []).map((value, index) => Math.abs(value - message.generation[index])));
    const completion = textOf(sample.messages.slice(at));
    return { ...sample, run, runIndex, order, prompt: textOf(sample.messages.slice(0, at)), completion, size: completion.length,
      mismatch: differences.length ? Math.max(...differences) : null, searched: null };
  }));
}

function levelOf(value, levels, isAbove) {
  return levels.filter((bound) => (isAbove ? value >= bound : value <= bound)).length;
}

/** The tokens of a completion, each colored and with its numbers as a tooltip. */
function coloredTokens(message, coloring) {
  return message.tokens.map((text, index) => {
    const generation = message.generation[index], training = message.training ? message.training[index] : null;
    const difference = training === null ? null : Math.abs(training - generation);
    let level = 0;
    if (coloring === "log-probability") level = levelOf(generation, LOGPROB_LEVELS, false);
    else if (difference !== null) level = levelOf(difference, MISMATCH_LEVELS, true);
    const numbers = [`log-probability ${number(generation)} (probability ${number(Math.exp(generation))})`];
    if (training !== null) numbers.push(`in training ${number(training)}`, `mismatch ${number(difference)}`);
    const kind = coloring === "log-probability" ? "lp" : "mm";
    return el("span", { class: level ? `tok ${kind}${level}` : "tok", title: numbers.join(", ") }, text);
  });
}

function messageNode(message, coloring) {
  const hasTokens = coloring !== "nothing" && isCompletion(message) && message.tokens;
  return el("pre", { class: "text-of", dir: "auto" }, hasTokens ? coloredTokens(message, coloring) : message.content);
}

class SamplesBrowser {
  constructor() {
    this.all = allSamples();
    this.page = 0;
    this.selected = null;
    this.rows = el("div", { class: "rows", role: "listbox", "aria-label": "samples", keydown: (event) => this.onKey(event) });
    this.detail = el("div", { id: "sample-detail", "aria-live": "polite" });
    this.pages = el("div", { class: "pages" });
    this.count = el("span", { id: "sample-count", class: "dim" });
    this.node = el("div", {}, this.makeControls(), el("div", { class: "browser" }, el("div", {}, this.rows, this.pages), this.detail));
    this.filter();
  }

  makeControls() {
    const again = () => this.filter();
    const option = (value, text) => el("option", { value }, text);
    const files = [...new Map(this.all.map((sample) => [`${sample.kind} ${sample.step}`, sample])).values()]
      .sort((a, b) => a.step - b.step || a.kind.localeCompare(b.kind));
    this.file = el("select", { id: "sample-step", change: again }, option("", "all"),
      files.map((sample) => option(`${sample.kind} ${sample.step}`, `${sample.kind} ${sample.step}`)));
    this.least = el("input", { type: "number", id: "sample-least", step: "any", input: again, size: 6 });
    this.most = el("input", { type: "number", id: "sample-most", step: "any", input: again, size: 6 });
    this.least.style.width = this.most.style.width = "5.5rem";
    this.text = el("input", { type: "search", id: "sample-text", input: again });
    const hasMismatch = this.all.some((sample) => sample.mismatch !== null);
    this.sort = el("select", { id: "sample-sort", change: again },
      Object.keys(SORTS).filter((name) => hasMismatch || !name.includes("mismatch")).map((name) => option(name, name)));
    const hasTokens = this.all.some((sample) => sample.messages.some((message) => message.tokens));
    const colorings = ["nothing", ...(hasTokens ? ["log-probability"] : []), ...(hasMismatch ? ["mismatch"] : [])];
    this.coloring = el("select", { id: "sample-coloring", change: () => this.showDetail() }, colorings.map((name) => option(name, name)));
    this.coloring.value = hasTokens ? "log-probability" : "nothing";
    this.run = RUNS.length > 1 ? el("select", { id: "sample-run", change: again }, option("", "all"), RUNS.map((run, index) => option(index, run.name))) : null;
    return el("div", { class: "controls" },
      this.run ? el("label", {}, "Run", this.run) : null,
      el("label", {}, "Step", this.file), el("label", {}, "Reward from", this.least), el("label", {}, "to", this.most),
      el("label", {}, "Text", this.text), el("label", {}, "Sort by", this.sort), el("label", {}, "Color tokens by", this.coloring), this.count);
  }

  filter() {
    const least = this.least.value === "" ? -Infinity : Number(this.least.value);
    const most = this.most.value === "" ? Infinity : Number(this.most.value);
    const words = this.text.value.toLowerCase();
    this.shown = this.all.filter((sample) => {
      if (this.run && this.run.value !== "" && Number(this.run.value) !== sample.runIndex) return false;
      if (this.file.value && this.file.value !== `${sample.kind} ${sample.step}`) return false;
      if ((least > -Infinity || most < Infinity) && !(sample.reward >= least && sample.reward <= most)) return false;
      if (!words) return true;
      sample.searched ??= `${sample.name}\n${sample.prompt}\n${sample.completion}`.toLowerCase();
      return sample.searched.includes(words);
    });
    this.shown.sort(SORTS[this.sort.value]);
    this.page = 0;
    this.count.textContent = `${this.shown.length} of ${this.all.length} samples`;
    this.selected = this.shown[0] || null;
    this.showRows();
    this.showDetail();
  }

  showRows() {
    const first = this.page * ROWS_PER_PAGE, rows = this.shown.slice(first, first + ROWS_PER_PAGE);
    clear(this.rows).append(el("div", { class: "row head", "aria-hidden": "true" },
      el("span", {}, "step"), el("span", { class: "num" }, "reward"), el("span", {}, "prompt"), el("span", {}, "completion")));
    for (const sample of rows) {
      const isSelected = sample === this.selected;
      const row = el("button", { type: "button", class: "row", role: "option", "aria-selected": String(isSelected), tabindex: isSelected ? "0" : "-1",
        click: () => this.select(sample) },
        el("span", {}, RUNS.length > 1 ? swatch(`--c${sample.runIndex % NUM_COLORS}`) : null, sample.kind === "validation" ? `val ${sample.step}` : sample.step),
        el("span", { class: "num" }, number(sample.reward)),
        el("span", { class: "cut", dir: "auto" }, sample.prompt.slice(0, 200)), el("span", { class: "cut", dir: "auto" }, sample.completion.slice(0, 200)));
      this.rows.append(row);
    }
    const last = Math.ceil(this.shown.length / ROWS_PER_PAGE) - 1;
    const turn = (page) => { this.page = page; this.selected = this.shown[page * ROWS_PER_PAGE]; this.showRows(); this.showDetail(); };
    clear(this.pages);
    if (last > 0) {
      this.pages.append(el("button", { type: "button", disabled: this.page === 0, click: () => turn(this.page - 1) }, "Previous"),
        el("span", { class: "dim" }, `${first + 1} to ${first + rows.length}`),
        el("button", { type: "button", disabled: this.page === last, click: () => turn(this.page + 1) }, "Next"));
    }
  }

  select(sample, hasFocus = false) {
    this.selected = sample;
    const index = this.shown.indexOf(sample);
    if (index >= 0) this.page = Math.floor(index / ROWS_PER_PAGE);
    const top = this.rows.scrollTop;
    this.showRows();
    this.rows.scrollTop = top;
    const row = this.rows.querySelector('[aria-selected="true"]');
    if (row && hasFocus) row.focus();
    this.showDetail();
  }

  onKey(event) {
    const move = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    const next = move && this.shown[this.shown.indexOf(this.selected) + move];
    if (!next) return;
    event.preventDefault();
    this.select(next, true);
  }

  showDetail() {
    clear(this.detail);
    const sample = this.selected;
    if (!sample) {
      this.detail.append(el("p", { class: "dim" }, "No sample matches the filters."));
      return;
    }
    const facts = [`reward ${number(sample.reward)}`, `${sample.kind} ${sample.step}`];
    if (sample.policy_version !== null) facts.push(`policy version ${sample.policy_version}`);
    if (sample.truncated) facts.push("truncated");
    if (sample.dropped) facts.push("dropped: the environment could not score it");
    if (sample.mismatch !== null) facts.push(`largest mismatch ${number(sample.mismatch)}`);
    const coloring = this.coloring.value;
    this.detail.append(el("div", { class: "sample" }, el("h4", {}, RUNS.length > 1 ? runName(sample.run, sample.runIndex) : null, RUNS.length > 1 ? " " : null, sample.name),
      el("p", { class: "dim" }, facts.join(", ")), this.scale(sample, coloring),
      sample.messages.map((message) => [el("div", { class: "role" }, message.role), messageNode(message, coloring)])));
    this.showGroup(sample, coloring);
  }

  scale(sample, coloring) {
    if (coloring === "nothing") return null;
    const isCovered = sample.messages.some((message) => (coloring === "mismatch" ? message.training : message.tokens));
    if (!isCovered) return el("p", { class: "dim" }, `no ${coloring} is recorded for this sample`);
    const isLogprob = coloring === "log-probability", levels = isLogprob ? LOGPROB_LEVELS : MISMATCH_LEVELS;
    return el("p", { class: "scale" }, isLogprob ? "log-probability at most " : "mismatch at least ",
      levels.map((bound, index) => el("span", { class: `${isLogprob ? "lp" : "mm"}${index + 1}` }, tick(bound))));
  }

  showGroup(sample, coloring) {
    if (sample.group === null) return;
    const group = this.all.filter((other) => other.run === sample.run && other.kind === sample.kind && other.step === sample.step && other.group === sample.group);
    if (group.length < 2) return;
    const rewards = group.map((other) => other.reward).filter((reward) => reward !== null);
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / (rewards.length || 1);
    this.detail.append(el("h3", {}, `Group: ${group.length} samples of this prompt, mean reward ${number(mean)}`),
      el("div", { class: "group" }, group.map((other) => el("div", { class: "sample", tabindex: "0", role: "button",
        "aria-current": String(other === sample), click: () => this.select(other),
        keydown: (event) => { if (event.key === "Enter") this.select(other); } },
        el("p", {}, el("strong", { class: "num" }, number(other.reward)), el("span", { class: "dim" }, ` ${other.name.slice(-12)}`)),
        other.messages.filter(isCompletion).map((message) => messageNode(message, coloring))))));
  }
}

function samplesSection() {
  if (!RUNS.some((run) => run.samples.length)) {
    return section("samples", "Samples", el("p", { class: "dim" }, DATA.no_samples));
  }
  return section("samples", "Samples", new SamplesBrowser().node);
}
