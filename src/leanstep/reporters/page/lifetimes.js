// When each activation is made, last used in forward, and first and last used in backward.

const FATES = ["kept", "recomputed", "offloaded"];

function startLifetimes(data) {
  const {lives, num_left_out: more, left_out_bytes: moreBytes} = data.lifetimes;
  const rest = more ? ` Left out: ${more} smaller, ${formatBytes(moreBytes)} in all.` : "";
  byId("lifetimes-caption").textContent =
    `Each line is one activation, from the op that makes it to its last use in backward. Between its last use in forward and its first in backward it only waits.${rest}`;
  const used = FATES.filter((fate) => lives.some((life) => life[6] === fate));
  fillLegend("lifetimes-legend", [["in use", "var(--ink)"], ...used.map((fate) => [`waits, ${fate}`, `var(--${fate})`])]);
  const place = plot("lifetimes-plot", `Lifetimes of ${lives.length} activations`, () => lifetimeFigure(data, lives));
  place.on("plotly_hover", (event) => showLife(data.steps, lives[Math.round(event.yvals[0])], event.event));
  place.on("plotly_unhover", hideTip);
}

function showLife(steps, life, pointer) {
  if (!life) return;
  const [storage, nbytes, made, lastForward, firstBackward, lastBackward, fate] = life;
  const {name, module, source} = nameOfStorage(steps, storage);
  const uses = [["made", made], ["last used in forward", lastForward], ["first used in backward", firstBackward], ["last used in backward", lastBackward]];
  showTip(pointer,
    element("div", {}, element("b", {}, name), ` · ${formatBytes(nbytes)}, ${fate}`),
    element("div", {class: "where"}, [module, source].filter(Boolean).join(" · ")),
    element("table", {}, ...uses.map(([use, op]) => element("tr", {},
      element("td", {}, use), element("td", {}, formatSeconds(steps.before.starts[op])), element("td", {class: "where"}, opName(steps, op))))));
}

function lifetimeFigure(data, lives) {
  const {steps} = data, {starts} = steps.before;
  const [unit, seconds] = timeScale(starts.at(-1));
  const begin = (op) => starts[op] / seconds, end = (op) => starts[op + 1] / seconds;
  const height = Math.min(isNarrow() ? 480 : 680, 120 + lives.length * 5);
  // One path for each kind, not a bar for each activation: a large model has thousands.
  const width = Math.max(1, (lives.length > 100 ? 1.05 : 0.8) * (height - 80) / lives.length);
  const visible = starts.at(-1) / seconds / 700;
  const spans = (rows, ends, shade) => ({
    type: "scatter", mode: "lines", line: {width, color: shade},
    x: rows.flatMap((row) => { const [from, to] = ends(lives[row]); return [from, Math.max(to, from + visible), null]; }),
    y: rows.flatMap((row) => [row, row, null]), hoverinfo: "none",
  });
  const all = lives.map((_, row) => row);
  const waits = FATES.map((fate) => spans(all.filter((row) => lives[row][6] === fate),
    (life) => [end(life[3]), begin(life[4])], colour(fate))).filter((trace) => trace.y.length);
  const uses = [[2, 3], [4, 5]].map(([from, to]) =>
    spans(all, (life) => [begin(life[from]), end(life[to])], colour("ink")));
  const ticks = blockTicks(steps, lives);
  const bands = phaseBands(steps, "before", "y", seconds);
  return {traces: [...waits, ...uses], layout: {
    height, hovermode: "y", hoverdistance: Math.max(1, Math.floor(width / 2)),
    shapes: bands.shapes, annotations: bands.annotations.map((note) => ({...note, yanchor: "bottom"})),
    xaxis: axis(`time by the ops of the untouched step, ${unit}`, {showgrid: false, range: [0, starts.at(-1) / seconds]}),
    yaxis: axis("", {range: [lives.length, -1], fixedrange: true, showgrid: false, tickvals: ticks.map(([row]) => row), ticktext: ticks.map(([, name]) => name)}),
  }};
}

// A label where the activations of another block begin, as many as there is room for.
function blockTicks(steps, lives) {
  const found = [];
  let last = null;
  lives.forEach(([storage], row) => {
    const {module} = nameOfStorage(steps, storage);
    const block = (module.match(/^.*?\.\d+(?=\.|$)/) || [module.split(".")[0]])[0];
    const isNear = found.length && row - found.at(-1)[0] < lives.length / (isNarrow() ? 16 : 40);
    if (block && block !== last && !isNear) found.push([row, block]);
    last = block;
  });
  const shorten = (name) => (isNarrow() && name.length > 12 ? `…${name.slice(-11)}` : name);
  return found.map(([row, name]) => [row, shorten(name)]);
}
