// The peak by category and by owner, untouched and planned side by side.

const MOST_OWNERS = 120;

function startPeak(data) {
  const {peaks} = data;
  const steps = [["untouched", peaks.before], ["planned", peaks.after]].filter(([, peak]) => peak);
  byId("peak-caption").textContent = peakSentence(steps);
  const most = Math.max(...steps.map(([, peak]) => peak.peak_bytes), data.budget_bytes || 0);
  const [unit, bytes] = byteScale(most);
  fillLegend("peak-legend", peaks.groups.map((name, group) => [name, `var(--group-${group})`])
    .filter((_, group) => steps.some(([, peak]) => peak.groups[group])));
  plot("peak-groups-plot", "The peak by category", () => groupFigure(data, steps, unit, bytes));
  plot("peak-owners-plot", "The peak by module", () => ownerFigure(steps));
}

function peakSentence(steps) {
  const [[, first], second] = steps;
  if (!second) return `${formatBytes(first.peak_bytes)} at ${first.place}.`;
  const [before, after] = [first, second[1]].map((peak) => formatBytes(peak.peak_bytes));
  return first.place === second[1].place
    ? `Both at ${first.place}: ${before} untouched, ${after} planned.`
    : `Untouched ${before} at ${first.place}; planned ${after} at ${second[1].place}.`;
}

function groupFigure(data, steps, unit, bytes) {
  const traces = data.peaks.groups.map((name, group) => ({
    type: "bar", orientation: "h", name,
    y: steps.map(([step]) => step), x: steps.map(([, peak]) => peak.groups[group] / bytes),
    marker: {color: colour(`group-${group}`)},
    customdata: steps.map(([, peak]) => formatBytes(peak.groups[group])),
    // Only where there is room for it.
    text: steps.map(([, peak]) => (peak.groups[group] > (isNarrow() ? 0.6 : 0.13) * steps[0][1].peak_bytes ? `${name} ${formatBytes(peak.groups[group])}` : "")),
    textposition: "inside", insidetextanchor: "start", textangle: 0, constraintext: "none",
    textfont: {size: 11.5, color: [1, 4].includes(group) ? "#111" : "#fff"},
    hovertemplate: `${name}: %{customdata}<extra></extra>`,
  })).filter((_, group) => steps.some(([, peak]) => peak.groups[group]));
  const line = budgetLine(data.budget_bytes, bytes, "y");
  const shapes = line.shapes.map((shape) => ({...shape, xref: "x", yref: "paper", x0: shape.y0, x1: shape.y0, y0: 0, y1: 1}));
  const annotations = line.annotations.map((note) => ({...note, xref: "x", yref: "paper", x: note.y, y: 1, xanchor: note.y > 0.7 * steps[0][1].peak_bytes / bytes ? "right" : "left"}));
  return {traces, layout: {
    height: 80 + 58 * steps.length, barmode: "stack", bargap: 0.25, shapes, annotations, hovermode: "closest", dragmode: false,
    xaxis: axis(unit, {rangemode: "tozero", fixedrange: true}), yaxis: axis("", {autorange: "reversed", fixedrange: true, tickfont: {size: 12, color: colour("ink")}}),
  }};
}

// Owners in the order of the step; those that are too small to see as one.
function ownerRows(steps) {
  const sizes = new Map();
  for (const [step, peak] of steps) {
    for (const [owner, nbytes] of peak.owners) {
      if (!sizes.has(owner)) sizes.set(owner, {untouched: 0, planned: 0});
      sizes.get(owner)[step] = nbytes;
    }
  }
  const size = (row) => Math.max(row.untouched, row.planned);
  const rows = [...sizes].map(([owner, own]) => ({owner, ...own}));
  const least = 0.002 * Math.max(...steps.map(([, peak]) => peak.peak_bytes));
  const large = new Set([...rows].sort((a, b) => size(b) - size(a)).slice(0, MOST_OWNERS).filter((row) => size(row) > least));
  const rest = rows.filter((row) => !large.has(row));
  if (!rest.length) return rows;
  const sum = (step) => rest.reduce((total, row) => total + row[step], 0);
  return [...rows.filter((row) => large.has(row)), {owner: `${rest.length} smaller`, untouched: sum("untouched"), planned: sum("planned")}];
}

function ownerFigure(steps) {
  const rows = ownerRows(steps);
  const [unit, bytes] = byteScale(Math.max(...rows.map((row) => Math.max(row.untouched, row.planned))));
  const shades = {untouched: "before", planned: "after"};
  const traces = steps.map(([step]) => ({
    type: "bar", name: step, x: rows.map((row) => row.owner), y: rows.map((row) => row[step] / bytes),
    customdata: rows.map((row) => formatBytes(row[step])), marker: {color: colour(shades[step])},
    hovertemplate: `%{x}, ${step}: %{customdata}<extra></extra>`,
  }));
  const every = Math.ceil(rows.length / (isNarrow() ? 9 : 48));
  const labelled = rows.filter((_, place) => place % every === 0);
  const shorten = (name) => (name.length > 22 ? `…${name.slice(-21)}` : name);
  return {traces, layout: {
    height: 330, barmode: "group", bargap: 0.25, bargroupgap: 0, hovermode: "closest", dragmode: false,
    showlegend: steps.length > 1, legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal"},
    xaxis: axis("", {fixedrange: true, showgrid: false, tickangle: rows.length > 8 ? -55 : 0, tickvals: labelled.map((row) => row.owner), ticktext: labelled.map((row) => shorten(row.owner))}),
    yaxis: axis(unit, {rangemode: "tozero", fixedrange: true}),
  }};
}
