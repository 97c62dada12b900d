// Builds the page from its parts.

const RELOAD_MS = 10000;

/** A checkbox that loads the page again while its runs are going. */
function reloadToggle() {
  if (!RUNS.some((run) => run.state === "running")) return null;
  let isOn = false;
  try { isOn = sessionStorage.getItem("lucidrl-reload") === "on"; } catch { /* a page from disk may have no storage */ }
  let timer = null;
  const box = el("input", { type: "checkbox", id: "reload", change: () => {
    try { sessionStorage.setItem("lucidrl-reload", box.checked ? "on" : "off"); } catch { /* as above */ }
    clearInterval(timer);
    if (box.checked) timer = setInterval(() => location.reload(), RELOAD_MS);
  } });
  box.checked = isOn;
  if (isOn) timer = setInterval(() => location.reload(), RELOAD_MS);
  return el("label", { title: "needs `lucidrl report RUN --watch`, which writes the page again" }, box, " Reload every 10 s");
}

function build() {
  const sections = [curvesSection, timeSection, timelineSection, machineSection, samplesSection, configSection, environmentSection, eventsSection]
    .map((make) => make());
  const links = sections.map((node) => el("a", { href: `#${node.id}` }, node.querySelector("h2").textContent));
  document.body.prepend(el("a", { class: "skip", href: "#main" }, "Skip to the content"),
    el("div", { class: "topbar" }, el("strong", {}, "Lucid RL"), el("nav", { "aria-label": "sections" }, links), reloadToggle(), themeButton()));
  document.getElementById("main").append(headerCards(), comparisonNode() || "", notesNode() || "", ...sections,
    el("footer", {}, `Written ${whenText(DATA.written)} by lucidrl ${DATA.version}. `, DATA.thinning.join(" ")));
  document.documentElement.dataset.ready = "true";
}

build();
