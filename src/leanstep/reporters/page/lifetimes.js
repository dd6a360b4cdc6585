// When each activation is made, last used in forward, and first and last used in backward.

const FATES = ["kept", "recomputed", "offloaded"];

function startLifetimes(data) {
  const {lives, num_left_out: more, left_out_bytes: moreBytes} = data.lifetimes;
  const rest = more ? ` ${more} smaller ones (${formatBytes(moreBytes)} in all) are left out.` : "";
  byId("lifetimes-caption").textContent =
    `Each line is one activation, from the op that makes it to its last use in backward. Between its last use in forward and its first in backward it only waits.${rest}`;
  const used = FATES.filter((fate) => lives.some((life) => life[6] === fate));
  fillLegend("lifetimes-legend", [["in use", "var(--ink)"], ...used.map((fate) => [`waits, ${fate}`, `var(--${fate})`])]);
  plot("lifetimes-plot", `Lifetimes of ${lives.length} activations`, () => lifetimeFigure(data, lives));
}

function lifetimeFigure(data, lives) {
  const {steps} = data, {starts} = steps.before;
  const [unit, seconds] = timeScale(starts.at(-1));
  const begin = (op) => starts[op] / seconds, end = (op) => starts[op + 1] / seconds;
  const text = lives.map(([storage, nbytes, , , , , fate]) => {
    const {name, module, source} = nameOfStorage(steps, storage);
    return `<b>${name}</b> ${formatBytes(nbytes)}, ${fate}<br>${[module, source].filter(Boolean).join(" · ")}`;
  });
  const bars = (chosen, from, to, shade) => ({
    type: "bar", orientation: "h", y: chosen, base: chosen.map((row) => from(lives[row])),
    x: chosen.map((row) => to(lives[row]) - from(lives[row])), text: chosen.map((row) => text[row]),
    textposition: "none", hovertemplate: "%{text}<extra></extra>", marker: {color: shade, line: {width: 1, color: shade}},
  });
  const all = lives.map((_, row) => row);
  const waits = FATES.map((fate) => bars(all.filter((row) => lives[row][6] === fate),
    (life) => end(life[3]), (life) => begin(life[4]), colour(fate))).filter((trace) => trace.y.length);
  const uses = [
    bars(all, (life) => begin(life[2]), (life) => end(life[3]), colour("ink")),
    bars(all, (life) => begin(life[4]), (life) => end(life[5]), colour("ink")),
  ];
  const ticks = blockTicks(steps, lives);
  const bands = phaseBands(steps, "before", "y", seconds);
  return {traces: [...waits, ...uses], layout: {
    height: Math.min(isNarrow() ? 480 : 680, 120 + lives.length * 5), barmode: "overlay", bargap: lives.length > 100 ? 0.05 : 0.25, hovermode: "closest",
    shapes: bands.shapes, annotations: bands.annotations.map((note) => ({...note, yanchor: "bottom"})),
    xaxis: axis(`time in the untouched step, ${unit}`, {showgrid: false, range: [0, starts.at(-1) / seconds]}),
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
