// Header, settings, environment, warnings and starts.

function headerCards() {
  return el("div", { class: RUNS.length > 1 ? "cards" : "cards single", id: "overview" }, RUNS.map((run, index) => el("div", { class: "card" },
    el("h1", {}, RUNS.length > 1 ? [runName(run, index), " · "] : null, run.title),
    el("p", {}, el("span", { class: `badge ${run.tone}` }, run.state), " ", el("span", { class: "dim mono" }, run.folder)),
    el("p", { class: "conclusion" }, run.conclusion),
    el("dl", { class: "facts" }, run.facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))))));
}

function comparisonNode() {
  return DATA.comparison ? el("p", { class: "conclusion", id: "comparison" }, DATA.comparison) : null;
}

function notesNode() {
  const notes = RUNS.flatMap((run) => run.notes.map((note) => (RUNS.length > 1 ? `${run.name}: ${note}` : note)));
  return notes.length ? el("div", { class: "notes", id: "notes", role: "note" }, notes.map((note) => el("p", {}, note))) : null;
}

/** A table with one row per name and one column per run; rows whose values differ are marked. */
function comparedTable(heading, rows) {
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, heading), RUNS.map((run, index) => el("th", {}, RUNS.length > 1 ? runName(run, index) : "value")))),
    el("tbody", {}, rows.map(([name, values]) => {
      const differs = new Set(values).size > 1;
      return el("tr", { class: differs ? "differs" : null, "data-name": name.toLowerCase() }, el("td", { class: "mono" }, name),
        values.map((value) => el("td", { class: "text mono", dir: "auto" }, value === null ? "–" : value)));
    }))));
}

function configSection() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))].sort();
  if (!names.length) return section("config", "Configuration", el("p", { class: "dim" }, "The run folder has no readable config.yaml."));
  const table = comparedTable("setting", names.map((name) => [name, RUNS.map((run) => run.config[name] ?? null)]));
  const only = RUNS.length > 1 ? el("input", { type: "checkbox", id: "only-differences", change: () => apply() }) : null;
  const filter = el("input", { type: "search", id: "config-filter", input: () => apply() });
  const count = el("span", { class: "dim" });
  function apply() {
    const words = filter.value.trim().toLowerCase();
    let shown = 0;
    for (const row of table.querySelectorAll("tbody tr")) {
      row.hidden = Boolean((only && only.checked && !row.classList.contains("differs")) || (words && !row.dataset.name.includes(words)));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} of ${names.length} settings`;
  }
  if (only) only.checked = true;
  apply();
  const content = [el("div", { class: "controls" }, only ? el("label", {}, only, "only differences") : null, el("label", {}, "Settings with", filter), count), table];
  if (RUNS.length > 1) return section("config", "Configuration", ...content);
  return section("config", "Configuration", el("details", { id: "settings" }, el("summary", {}, `All ${names.length} settings`), ...content));
}

function environmentSection() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.environment)))];
  if (!names.length) return section("environment", "Environment", el("p", { class: "dim" }, "The run folder has no readable environment.json."));
  return section("environment", "Environment", comparedTable("", names.map((name) => [name, RUNS.map((run) => run.environment[name] ?? null)])));
}

function eventsSection() {
  const parts = RUNS.map((run) => {
    const warnings = run.warnings.length ? el("div", { class: "scroll" }, el("table", {},
      el("tr", {}, el("th", { class: "num" }, "step"), el("th", {}, "warning"), el("th", {}, "message")),
      run.warnings.map((warning) => el("tr", {}, el("td", { class: "num" }, warning.step), el("td", {}, warning.name), el("td", { class: "text" }, warning.message)))))
      : el("p", { class: "dim" }, "No warnings.");
    const starts = run.starts.length ? el("div", { class: "scroll" }, el("table", {},
      el("tr", {}, el("th", {}, "started"), el("th", {}, "ended"), el("th", {}, "command")),
      run.starts.map((start) => el("tr", {}, el("td", {}, whenText(start.start)), el("td", { class: "text" }, start.end),
        el("td", { class: "text mono" }, start.command))))) : el("p", { class: "dim" }, "The run folder has no readable logs/driver.log.");
    return el("div", {}, RUNS.length > 1 ? el("h3", {}, run.name) : null, warnings, el("h3", {}, "Starts and restarts"), starts,
      run.restarts.map((text) => el("p", {}, text)));
  });
  return section("events", "Warnings and restarts", ...parts);
}
