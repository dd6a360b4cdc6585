// Memory over the step: stacked by category, the untouched step above the planned one.

// For each stretch of time in view the point with the highest level: no peak is lost, and a step of
// ten thousand ops draws as fast as one of a hundred.
function thinned(curve, from, to, columns) {
  const {starts} = curve, last = curve.ops.length;
  const width = (to - from) / columns;
  const begins = [], points = [];
  let column = -1, highest = -1;
  for (let point = 0; point < last; point += 1) {
    if (starts[point + 1] < from || starts[point] > to) continue;
    const own = Math.max(0, Math.floor((starts[point] - from) / width));
    const level = levelAt(curve, point);
    if (own !== column) {
      column = own;
      highest = level;
      begins.push(starts[point]);
      points.push(point);
    } else if (level > highest) {
      highest = level;
      points[points.length - 1] = point;
    }
  }
  begins.push(Math.min(to, starts[last]));
  return {begins, points};
}

function stackTraces(steps, which, thin, bytes, seconds, axisName) {
  const curve = steps[which];
  // The last level is held to the end.
  const held = [...thin.points, thin.points[thin.points.length - 1]];
  const x = thin.begins.map((start) => start / seconds);
  const layers = curve.layers.map((layer, group) => ({
    x, y: held.map((point) => Math.max(0, layer[point]) / bytes),
    type: "scatter", mode: "lines", stackgroup: which, yaxis: axisName, hoverinfo: "skip",
    line: {shape: "hv", width: 0, color: colour(`group-${group}`)}, fillcolor: colour(`group-${group}`),
  })).filter((_, group) => curve.layers[group].some((level) => level > 0));
  const total = {
    x, y: held.map((point) => levelAt(curve, point) / bytes), customdata: held,
    type: "scatter", mode: "lines", yaxis: axisName, hoverinfo: "none", name: which,
    line: {shape: "hv", width: 1, color: faded(colour("ink"), 0.45)},
  };
  return [...layers, total];
}

function phaseBands(steps, which, axisName, seconds) {
  const curve = steps[which], shapes = [], annotations = [];
  const phases = curve.positions.map((position) => steps.ops.phases[Math.min(position, steps.ops.phases.length - 1)]);
  const end = curve.starts[curve.starts.length - 1];
  for (let phase = 0; phase < steps.phases.length; phase += 1) {
    const first = phases.indexOf(phase);
    if (first < 0) continue;
    const from = curve.starts[first], to = curve.starts[phases.lastIndexOf(phase) + 1];
    shapes.push({
      type: "rect", xref: "x", x0: from / seconds, x1: to / seconds, yref: `${axisName} domain`, y0: 0, y1: 1,
      layer: "below", line: {width: 0}, fillcolor: faded(colour("quiet"), phase % 2 ? 0.11 : 0.04),
    });
    // A short phase at the end has its name before it.
    const isShort = to - from < 0.06 * end;
    annotations.push({
      xref: "x", x: from / seconds, yref: `${axisName} domain`, y: 1, text: ` ${steps.phases[phase]} `,
      showarrow: false, xanchor: isShort ? "right" : "left", yanchor: "top", font: {size: 11, color: colour("quiet")},
    });
  }
  return {shapes, annotations};
}

function budgetLine(budget, bytes, axisName) {
  if (budget === null) return {shapes: [], annotations: []};
  return {
    shapes: [{type: "line", xref: "paper", x0: 0, x1: 1, yref: axisName, y0: budget / bytes, y1: budget / bytes,
              line: {color: colour("ink"), width: 1.5, dash: "dash"}}],
    annotations: [{xref: "paper", x: 1, yref: axisName, y: budget / bytes, text: `budget ${formatBytes(budget)}`,
                   showarrow: false, xanchor: "right", yanchor: "bottom", font: {size: 11, color: colour("ink")}}],
  };
}

class MemoryPlot {
  constructor(data) {
    this.steps = data.steps;
    this.budget = data.budget_bytes;
    this.curves = this.steps.after ? ["before", "after"] : ["before"];
    this.end = Math.max(...this.curves.map((which) => this.steps[which].starts.at(-1)));
    const highest = Math.max(...this.curves.map((which) => levelAt(this.steps[which], this.steps[which].peak)));
    this.top = 1.12 * Math.max(highest, this.budget || 0);
    [this.byteUnit, this.bytes] = byteScale(highest);
    [this.timeUnit, this.seconds] = timeScale(this.end);
    this.range = [0, this.end];
    this.chosen = null;
  }

  start() {
    const used = this.steps.groups.map((name, group) => [name, `var(--group-${group})`])
      .filter((_, group) => this.steps.before.layers[group].some((level) => level > 0));
    const outline = this.steps.after ? [["untouched level", "var(--before)", "dash"]] : [];
    fillLegend("memory-legend", [...used, ...outline]);
    this.place = plot("memory-plot", this.label(), () => this.figure());
    this.place.on("plotly_relayout", (change) => this.zoomed(change));
    this.place.on("plotly_hover", (event) => this.hovered(event));
    this.place.on("plotly_unhover", hideTip);
    this.place.on("plotly_click", (event) => this.choose(...this.at(event)));
    this.tools();
  }

  label() {
    const peaks = this.curves.map((which) => formatBytes(levelAt(this.steps[which], this.steps[which].peak)));
    return `Memory over the step, peak ${peaks.join(", planned ")}`;
  }

  figure() {
    const isBoth = this.curves.length > 1;
    const traces = [], shapes = [], annotations = [];
    const columns = isNarrow() ? 300 : 700;
    for (const [place, which] of this.curves.entries()) {
      const name = place ? "y2" : "y";
      traces.push(...stackTraces(this.steps, which, thinned(this.steps[which], ...this.range, columns), this.bytes, this.seconds, name));
      for (const part of [phaseBands(this.steps, which, name, this.seconds), budgetLine(this.budget, this.bytes, name)]) {
        shapes.push(...part.shapes);
        annotations.push(...part.annotations);
      }
      if (isBoth) {
        annotations.push({xref: "paper", x: 0, yref: `${name} domain`, y: 1, yanchor: "bottom", xanchor: "left", showarrow: false,
                          text: `<b>${place ? "planned" : "untouched"}</b>`, font: {size: 12}});
      }
    }
    if (isBoth) traces.push(this.outline(columns));
    const vertical = {range: [0, this.top / this.bytes], fixedrange: true, rangemode: "tozero"};
    const layout = {
      height: isBoth ? (isNarrow() ? 460 : 560) : 380, hovermode: "x", shapes: [...shapes, ...this.chosenLine()], annotations,
      xaxis: axis(`time by the ops of the step, ${this.timeUnit}`, {
        range: this.range.map((time) => time / this.seconds), anchor: isBoth ? "y2" : "y", showgrid: false,
        showspikes: true, spikemode: "across", spikesnap: "cursor", spikethickness: 1, spikedash: "solid", spikecolor: colour("ink"),
      }),
      yaxis: axis(this.byteUnit, {...vertical, domain: isBoth ? [0.545, 1] : [0, 1]}),
    };
    if (isBoth) layout.yaxis2 = axis(this.byteUnit, {...vertical, domain: [0, 0.455]});
    return {traces, layout};
  }

  // The untouched level behind the planned one, on the same axis.
  outline(columns) {
    const thin = thinned(this.steps.before, ...this.range, columns);
    const held = [...thin.points, thin.points.at(-1)];
    return {
      x: thin.begins.map((start) => start / this.seconds), y: held.map((point) => levelAt(this.steps.before, point) / this.bytes),
      type: "scatter", mode: "lines", yaxis: "y2", hoverinfo: "skip", line: {shape: "hv", width: 1.2, dash: "dot", color: colour("before")},
    };
  }

  zoomed(change) {
    const ends = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const isReset = change["xaxis.autorange"] || (ends[0] === undefined && change["xaxis.range"] === undefined);
    if (isReset && !change["xaxis.autorange"]) return;
    const range = isReset ? [0, this.end] : (change["xaxis.range"] || ends).map((time) => time * this.seconds);
    const kept = [Math.max(0, range[0]), Math.min(this.end, range[1])];
    if (kept[0] === this.range[0] && kept[1] === this.range[1]) return;
    this.range = kept;
    drawn.get("memory-plot")();
  }

  // The step and the point under the pointer.
  at(event) {
    const which = event.points[0].data.name === "after" ? "after" : "before";
    const place = event.points.find((point) => point.data.name === which) || event.points[0];
    const begins = place.data.x, time = event.xvals ? event.xvals[0] : place.x;
    let column = place.pointIndex;
    if (column > 0 && time < begins[column]) column -= 1;
    return [which, place.data.customdata[column]];
  }

  hovered(event) {
    const [which, point] = this.at(event);
    const rows = aliveAt(this.steps, which, point);
    const more = rows.length > 6 ? element("div", {class: "where"}, `and ${rows.length - 6} more; click to list them`) : "";
    showTip(event.event,
      element("div", {}, element("b", {}, opName(this.steps, this.steps[which].ops[point])), ` · ${formatBytes(levelAt(this.steps[which], point))}`),
      element("div", {class: "where"}, placeOf(this.steps, which, point)),
      element("table", {}, ...rows.slice(0, 6).map((row) => element("tr", {},
        element("td", {}, element("i", {swatch: `var(--group-${row.group})`}), formatBytes(row.bytes)),
        element("td", {}, row.name), element("td", {class: "where"}, [row.module, row.source].filter(Boolean).join(" · "))))),
      more);
  }

  // List what is alive at an op, and mark the op.
  choose(which, point) {
    this.chosen = {which, point};
    showAlive(this.steps, which, point);
    drawn.get("memory-plot")();
  }

  step(by) {
    const {which, point} = this.chosen;
    this.choose(which, Math.min(this.steps[which].ops.length - 1, Math.max(0, point + by)));
  }

  chosenLine() {
    if (!this.chosen) return [];
    const {which, point} = this.chosen;
    const time = this.steps[which].starts[point] / this.seconds;
    const name = which === "after" ? "y2" : "y";
    return [{type: "line", xref: "x", x0: time, x1: time, yref: `${name} domain`, y0: 0, y1: 1, line: {color: colour("ink"), width: 1.5}}];
  }

  tools() {
    const button = (text, act) => {
      const made = element("button", {type: "button"}, text);
      made.addEventListener("click", act);
      return made;
    };
    const peaks = this.curves.map((which) => button(
      this.curves.length > 1 ? `List the ${which === "after" ? "planned" : "untouched"} peak` : "List the peak",
      () => this.choose(which, this.steps[which].peak)));
    byId("memory-tools").append(...peaks);
    byId("alive-previous").addEventListener("click", () => this.step(-1));
    byId("alive-next").addEventListener("click", () => this.step(1));
  }
}
