// The timeline as a zoomable picture: one track per process and thread, one rectangle per span.

const TRACK_LABEL_PX = 150, SPAN_ROW_PX = 18, AXIS_PX = 22;
const MOST_CANVAS_PX = 1200;

class Timeline {
  constructor() {
    this.canvas = el("canvas", { tabindex: "0", role: "img",
      "aria-label": "timeline; plus and minus zoom, the arrow keys move, 0 shows everything" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.note = el("p", { class: "dim" });
    const buttons = [["Zoom in", () => this.zoom(0.5)], ["Zoom out", () => this.zoom(2)], ["Show all", () => this.showAll()]];
    this.controls = el("div", { class: "controls" }, buttons.map(([text, click]) => el("button", { type: "button", click }, text)));
    this.node = el("div", {}, this.note, this.controls, el("div", { class: "timeline" }, this.canvas, this.tip));
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerup", () => { this.dragged = null; });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.node);
    themeListeners.push(() => this.draw());
  }

  use(run) {
    this.data = run.timeline;
    this.note.textContent = this.data.note;
    let row = 0;
    this.tracks = this.data.tracks.map((track) => {
      const placed = { ...track, top: AXIS_PX + row * SPAN_ROW_PX + 4 };
      row += track.rows + 0.5;
      return placed;
    });
    this.height = Math.min(MOST_CANVAS_PX, AXIS_PX + row * SPAN_ROW_PX + 4);
    this.showAll();
  }

  showAll() {
    [this.low, this.high] = [0, this.data.end || 1];
    this.draw();
  }

  labelWidth() { return this.canvas.clientWidth < 500 ? 80 : TRACK_LABEL_PX; }

  timeAt(x) {
    const left = this.labelWidth();
    return this.low + ((x - left) / (this.canvas.clientWidth - left)) * (this.high - this.low);
  }

  zoom(factor, center = (this.low + this.high) / 2) {
    const whole = this.data.end || 1;
    const width = Math.min(whole, Math.max(whole / 1e6, (this.high - this.low) * factor));
    const share = (center - this.low) / (this.high - this.low);
    this.low = Math.min(Math.max(0, center - share * width), whole - width);
    this.high = this.low + width;
    this.draw();
  }

  pan(delta) {
    const width = this.high - this.low;
    this.low = Math.min(Math.max(0, this.low + delta), (this.data.end || 1) - width);
    this.high = this.low + width;
    this.draw();
  }

  onWheel(event) {
    if (!event.ctrlKey && !event.shiftKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY) && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX / this.canvas.clientWidth) * (this.high - this.low));
    else this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.timeAt(event.offsetX));
  }

  onDown(event) {
    this.dragged = event.offsetX;
    this.canvas.setPointerCapture(event.pointerId);
  }

  onMove(event) {
    if (this.dragged !== null && this.dragged !== undefined) {
      const delta = this.timeAt(this.dragged) - this.timeAt(event.offsetX);
      this.dragged = event.offsetX;
      this.pan(delta);
      return;
    }
    const span = this.spanAt(event.offsetX, event.offsetY);
    this.tip.hidden = !span;
    if (!span) return;
    this.tip.textContent = span.text;
    this.tip.style.left = `${Math.min(event.offsetX + 12, this.canvas.clientWidth - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${event.offsetY + 16}px`;
  }

  onKey(event) {
    const width = this.high - this.low;
    const actions = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.showAll(),
      ArrowLeft: () => this.pan(-width / 5), ArrowRight: () => this.pan(width / 5) };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  spanAt(x, y) {
    if (x < this.labelWidth()) return null;
    const moment = this.timeAt(x), slack = ((this.high - this.low) / this.canvas.clientWidth) * 2;
    for (const track of this.tracks) {
      const depth = Math.floor((y - track.top) / SPAN_ROW_PX);
      if (depth < 0 || depth >= track.rows) continue;
      for (let at = 0; at < track.spans.length; at += 4) {
        const [start, duration, name, row] = track.spans.slice(at, at + 4);
        if (row === depth && start - slack <= moment && moment <= start + duration + slack) {
          return { text: `${this.data.names[name]}: ${seconds(duration)}, at ${seconds(start)}` };
        }
      }
    }
    return null;
  }

  draw() {
    if (!this.data || !this.canvas.clientWidth) return;
    const scale = window.devicePixelRatio || 1, width = this.canvas.clientWidth, left = this.labelWidth();
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const toX = (moment) => left + ((moment - this.low) / (this.high - this.low)) * (width - left);
    const colors = Array.from({ length: NUM_COLORS }, (_, index) => cssColor(`--c${index}`));
    this.drawAxis(pen, toX, left, width);
    for (const track of this.tracks) {
      for (let at = 0; at < track.spans.length; at += 4) {
        const start = track.spans[at], duration = track.spans[at + 1];
        if (start + duration < this.low || start > this.high) continue;
        this.drawSpan(pen, toX, left, width, track.top, track.spans, at, colors);
      }
    }
    pen.fillStyle = cssColor("--bg");
    pen.fillRect(0, AXIS_PX, left - 2, this.height);
    pen.fillStyle = cssColor("--text");
    for (const track of this.tracks) pen.fillText(fitted(pen, track.name, left - 12), 6, track.top + SPAN_ROW_PX / 2);
  }

  drawAxis(pen, toX, left, width) {
    const rough = (this.high - this.low) / Math.max(2, (width - left) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
    pen.strokeStyle = cssColor("--grid");
    pen.fillStyle = cssColor("--dim");
    for (let tick = Math.ceil(this.low / unit) * unit; tick <= this.high; tick += unit) {
      pen.beginPath();
      pen.moveTo(toX(tick), AXIS_PX);
      pen.lineTo(toX(tick), this.height);
      pen.stroke();
      pen.fillText(tick === 0 ? "0" : unit >= 1 ? `${Math.round(tick)} s` : seconds(tick), Math.min(toX(tick) + 3, width - 48), AXIS_PX / 2);
    }
  }

  drawSpan(pen, toX, left, width, top, spans, at, colors) {
    const x = Math.max(left, toX(spans[at])), end = Math.min(width, toX(spans[at] + spans[at + 1]));
    const name = spans[at + 2], y = top + spans[at + 3] * SPAN_ROW_PX, wide = Math.max(1, end - x);
    if (end < left) return;
    pen.fillStyle = colors[this.data.colors[name] % NUM_COLORS];
    pen.fillRect(x, y + 1, wide > 3 ? wide - 1 : wide, SPAN_ROW_PX - 3);
    if (wide > 30) {
      pen.fillStyle = cssColor("--bg");
      pen.fillText(fitted(pen, this.data.names[name], wide - 8), x + 4, y + SPAN_ROW_PX / 2);
    }
  }
}

/** The text, cut so that it is at most `width` wide. */
function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let size = text.length;
  while (size && pen.measureText(`${text.slice(0, size)}…`).width > width) size -= 1;
  return size ? `${text.slice(0, size)}…` : "";
}

function timelineSection() {
  const drawn = RUNS.filter((run) => run.timeline);
  if (!drawn.length) return section("timeline", "Timeline", el("p", { class: "dim" }, "No step is timed yet."));
  const timeline = new Timeline();
  timeline.use(drawn[0]);
  const select = runSelect("Run", (run) => timeline.use(run), drawn);
  if (select) timeline.controls.prepend(select);
  timeline.controls.append(el("span", { class: "dim" }, "drag to move; click, then use the wheel or + − ← → to zoom and move"));
  return section("timeline", "Timeline", timeline.node);
}
