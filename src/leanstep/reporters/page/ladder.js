// The budget slider: one plan for each rung of the ladder, all of them in the page.

class BudgetSlider {
  constructor(data) {
    this.ladder = data.ladder;
    this.frontier = data.frontier;
    this.planned = data.planned;
    this.planBudget = data.decisions ? data.budget_bytes : null;
    // From left to right the budget grows.
    this.rungs = [...this.ladder.rungs].reverse();
    this.most = Math.max(...this.rungs.flatMap((rung) => rung.shares.map((share) => share[1] + share[2] + share[3])), 1);
    [this.byteUnit, this.bytes] = byteScale(this.ladder.unplanned_peak_bytes);
    this.usesHost = this.rungs.some((rung) => rung.host_bytes > 0);
    this.index = this.first();
  }

  // The rung of the plan, or the least budget that costs at most a tenth of the step.
  first() {
    if (this.planBudget !== null) {
      const found = this.rungs.findIndex((rung) => rung.budget_bytes >= this.planBudget);
      return found < 0 ? this.rungs.length - 1 : found;
    }
    return Math.max(0, this.rungs.findIndex((rung) => rung.extra_seconds <= 0.1 * this.ladder.step_seconds));
  }

  start() {
    const slider = byId("budget-slider");
    slider.max = this.rungs.length - 1;
    slider.value = this.index;
    byId("budget-low").textContent = `${formatBytes(this.rungs[0].budget_bytes)}, the least by recomputing`;
    byId("budget-high").textContent = `${formatBytes(this.rungs.at(-1).budget_bytes)}, untouched`;
    const host = this.usesHost ? [["offloaded to the host", "var(--offloaded)"]] : [];
    fillLegend("budget-legend", [["kept", "var(--kept)"], ["recomputed", "var(--recomputed)"], ...host]);
    slider.addEventListener("input", () => this.move(Number(slider.value)));
    plot("budget-plot", "Extra time against peak memory, for every budget", () => this.figure());
    byId("budget-plot").on("plotly_click", (event) => {
      const found = event.points.find((point) => point.data.name === this.ladder.solver);
      if (!found) return;
      slider.value = found.pointIndex;
      this.move(found.pointIndex);
    });
    this.show();
  }

  move(index) {
    this.index = index;
    this.show();
    const mark = this.mark();
    Plotly.restyle("budget-plot", {x: [mark.x], y: [mark.y]}, [byId("budget-plot").data.length - 1]);
  }

  show() {
    const rung = this.rungs[this.index];
    const share = rung.extra_seconds / this.ladder.step_seconds;
    byId("budget-value").textContent = formatBytes(rung.budget_bytes);
    byId("budget-slider").setAttribute("aria-valuetext",
      `${formatBytes(rung.budget_bytes)}, peak ${formatBytes(rung.peak_bytes)}, ${formatChange(share)} step time`);
    byId("budget-figures").replaceChildren(...this.figures(rung, share).flatMap(([id, name, value, note]) => [
      element("div", {}, element("dt", {}, name), element("dd", {id: `budget-${id}`}, value, element("span", {class: "note"}, note)))]));
    byId("budget-shares").replaceChildren(...rung.shares.map((own) => this.row(own)));
  }

  figures(rung, share) {
    const {ladder} = this;
    const planned = ladder.step_seconds + rung.extra_seconds;
    const lower = rung.peak_bytes / ladder.unplanned_peak_bytes - 1;
    const sum = (place) => rung.shares.reduce((total, own) => total + own[place], 0);
    return [
      ["peak", "Predicted peak", formatBytes(rung.peak_bytes), `${formatChange(lower)} of ${formatBytes(ladder.unplanned_peak_bytes)}`],
      ["time", "Step time", formatSeconds(planned), `${formatChange(share)}, at least ${formatChange(rung.bound_seconds / ladder.step_seconds)} by proof`],
      ["batch", "Largest batch here", this.batch(rung.batch_growth), `without a plan ${this.batch(rung.untouched_growth)}`],
      ["recomputed", "Recomputed", formatBytes(sum(2)), `${formatBytes(sum(1))} kept`],
      ...(this.usesHost ? [["offloaded", "In host memory", formatBytes(sum(3)), "between forward and backward"]] : []),
    ];
  }

  batch(growth) {
    const {batch} = this.ladder;
    return batch ? `about ${Math.floor(batch * growth)}` : `about ${growth.toFixed(2)} × this one`;
  }

  row([name, kept, dropped, moved, seconds]) {
    const part = (nbytes, swatch) => {
      const made = element("span", {swatch});
      made.style.width = `${100 * nbytes / this.most}%`;
      return made;
    };
    const says = `${name}: ${formatBytes(kept)} kept, ${formatBytes(dropped)} recomputed, ${formatBytes(moved)} offloaded, ${formatSeconds(seconds)} paid`;
    return element("div", {class: "share", title: says},
      element("span", {class: "name"}, element("bdi", {}, name)),
      element("span", {class: "bar", role: "img", "aria-label": says},
        part(kept, "var(--kept)"), part(dropped, "var(--recomputed)"), part(moved, "var(--offloaded)")),
      element("span", {class: "paid"}, seconds ? `+${formatSeconds(seconds)}` : "–"));
  }

  percent(seconds) {
    return 100 * seconds / this.ladder.step_seconds;
  }

  mark() {
    const rung = this.rungs[this.index];
    return {x: [rung.peak_bytes / this.bytes], y: [this.percent(rung.extra_seconds)]};
  }

  figure() {
    const line = (name, points, style) => ({
      type: "scatter", name, x: points.map((point) => point.peak_bytes / this.bytes), y: points.map((point) => this.percent(point.extra_seconds)),
      customdata: points.map((point) => formatBytes(point.budget_bytes)), hovertemplate: `${name}, budget %{customdata}<br>peak %{x:.2f} ${this.byteUnit}, %{y:.1f} % extra<extra></extra>`, ...style,
    });
    // A frontier is planned without host memory: where the ladder uses it, both are worth a line.
    const solvers = this.frontier ? [...new Set(this.frontier.points.map((point) => point.solver))] : [];
    const others = solvers.filter((name) => this.usesHost || name !== this.ladder.solver);
    const without = this.usesHost ? ", no host memory" : "";
    const dashes = ["dot", "dash", "dashdot", "longdash", "longdashdot"];
    // Steps, not slopes: between two budgets the plan of the smaller one fits, and the bound of the larger one holds.
    const traces = [
      line("proved bound", this.rungs.map((rung) => ({...rung, peak_bytes: rung.budget_bytes, extra_seconds: rung.bound_seconds})), {mode: "lines", line: {shape: "vh", color: colour("quiet"), width: 1, dash: "dot"}}),
      ...others.map((name, place) => line(`${name}${without}`, this.frontier.points.filter((point) => point.solver === name).sort((a, b) => a.budget_bytes - b.budget_bytes), {mode: "lines", line: {shape: "hv", color: colour(`group-${[5, 3, 4, 1, 2][place % 5]}`), width: 1.5, dash: dashes[place % 5]}})),
      line(this.ladder.solver, this.rungs, {mode: "lines+markers", line: {shape: "hv", color: colour("after"), width: 2}, marker: {size: 5, color: colour("after")}}),
      ...(this.planned ? [line("this plan", [{budget_bytes: this.planBudget, peak_bytes: this.planned[0], extra_seconds: this.planned[1]}],
        {mode: "markers", marker: {symbol: "diamond", size: 10, color: colour("bad")}})] : []),
      {type: "scatter", mode: "markers", name: "slider", ...this.mark(), hoverinfo: "skip", showlegend: false, marker: {size: 14, color: "rgba(0,0,0,0)", line: {width: 2.5, color: colour("ink")}}},
    ];
    return {traces, layout: {
      height: 400, hovermode: "closest", dragmode: false, showlegend: true, legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0},
      xaxis: axis(`peak, ${this.byteUnit}`, {fixedrange: true}), yaxis: axis("extra time, % of the step", {rangemode: "tozero", fixedrange: true}),
    }};
  }
}
