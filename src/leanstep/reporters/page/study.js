// Peak, step time and throughput against the batch, untouched and planned.

function startStudy(data) {
  const {study} = data;
  const gain = study.largest_before ? `, ${(study.largest_after / study.largest_before).toFixed(2)} × as large` : "";
  byId("batches-caption").textContent =
    `Under ${formatBytes(study.budget_bytes)} the largest batch tried is ${study.largest_before || "none"} untouched and ${study.largest_after || "none"} planned${gain}. Open marks are predicted, filled ones measured.`;
  const rule = study.points.some((point) => point.textbook) ? [["√n segments, as textbooks estimate", "var(--rule)", "dash"]] : [];
  fillLegend("batches-legend", [["untouched", "var(--before)"], ["planned", "var(--after)"], ["budget", "var(--ink)", "dash"], ...rule]);
  plot("batches-peak-plot", "Peak memory against the batch", () => peakFigure(study));
  plot("batches-time-plot", "Step time against the batch", () => {
    const [unit, seconds] = timeScale(Math.max(...readings(study).map((reading) => reading.seconds)));
    return studyFigure(study, `step time, ${unit}`, (_, reading) => reading.seconds / seconds);
  });
  plot("batches-rate-plot", "Samples a second against the batch",
    () => studyFigure(study, "samples a second", (batch, reading) => batch / reading.seconds));
}

function readings(study) {
  return study.points.flatMap((point) => [point.before, point.after]).filter(Boolean);
}

const LINES = {
  before: {name: "untouched", shade: "before", mode: "lines+markers+text", dash: "solid"},
  after: {name: "planned", shade: "after", mode: "lines+markers+text", dash: "solid"},
  textbook: {name: "√n segments", shade: "rule", mode: "lines", dash: "dash"},
};

function studyFigure(study, title, value) {
  const traces = Object.entries(LINES).map(([which, {name, shade, mode, dash}]) => {
    const points = study.points.filter((point) => point[which]);
    const isLargest = (point) => point.batch === study[`largest_${which}`];
    // Where both are the same batch, one number says it.
    const isNamed = (point) => isLargest(point) && !(which === "before" && point.batch === study.largest_after);
    return {
      type: "scatter", mode, name, x: points.map((point) => point.batch), y: points.map((point) => value(point.batch, point[which])),
      text: points.map((point) => (isNamed(point) ? String(point.batch) : "")), textposition: "bottom center",
      textfont: {size: 11.5, color: colour(shade)}, cliponaxis: false,
      line: {color: colour(shade), width: which === "textbook" ? 1.5 : 2, dash},
      marker: {opacity: 1, size: points.map((point) => (isLargest(point) ? 13 : 8)),
               color: points.map((point) => (point[which].measured ? colour(shade) : colour("paper"))),
               symbol: points.map((point) => (isLargest(point) ? "diamond" : "circle")),
               line: {width: 2, color: colour(shade)}},
      hovertemplate: `batch %{x}: %{y:.3~g}<extra>${name}</extra>`,
    };
  });
  return {traces, layout: {
    height: 300, hovermode: "closest", dragmode: false, margin: {l: 8, r: 12, t: 34, b: 8},
    title: {text: title, font: {size: 13, color: colour("ink")}, x: 0, xref: "paper", xanchor: "left", y: 0.97},
    xaxis: axis("batch", {rangemode: "tozero", fixedrange: true}), yaxis: axis("", {rangemode: "tozero", fixedrange: true}),
  }};
}

function peakFigure(study) {
  const most = Math.max(study.budget_bytes, ...readings(study).map((reading) => reading.peak_bytes));
  const [unit, bytes] = byteScale(most);
  const figure = studyFigure(study, `peak, ${unit}`, (_, reading) => reading.peak_bytes / bytes);
  const line = budgetLine(study.budget_bytes, bytes, "y");
  figure.layout.shapes = line.shapes;
  figure.layout.annotations = line.annotations.map((note) => ({...note, x: 0, xanchor: "left"}));
  return figure;
}
