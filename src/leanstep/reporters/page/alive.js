// What is alive at one op of the untouched or of the planned step.

function nameOfStorage(steps, number) {
  const {ops, storages} = steps;
  const op = storages.ops[number];
  const group = steps.groups[storages.groups[number]];
  const isMade = storages.births[number] >= 0;
  return {
    name: isMade ? shortOp(ops.texts[ops.names[op]]) : group.replace(/s$/, ""),
    module: op < 0 ? "" : ops.texts[ops.modules[op]],
    source: op < 0 ? "" : ops.texts[ops.sources[op]],
    group: storages.groups[number],
  };
}

// What a plan changes at a point; before an op that runs again has brought anything back.
function shiftsAt(steps, position, isAgain) {
  const found = new Map();
  for (const [start, stop, bytes, storage] of steps.shifts) {
    const covers = isAgain && bytes > 0 ? start < position && position < stop
      : isAgain ? start <= position && position <= stop : start <= position && position < stop;
    if (covers) found.set(storage, (found.get(storage) || 0) + bytes);
  }
  return found;
}

// The bytes of every storage at a point, those that are not there left out.
function storagesAt(steps, which, point) {
  const position = steps[which].positions[point];
  const isAgain = steps[which].ops[point] !== position;
  const {births, deaths, nbytes} = steps.storages;
  const found = which === "after" ? shiftsAt(steps, position, isAgain) : new Map();
  for (let number = 0; number < births.length; number += 1) {
    if (births[number] < position && position <= deaths[number]) {
      found.set(number, (found.get(number) || 0) + nbytes[number]);
    }
  }
  return found;
}

// Rows by falling size that add up to the level of the op.
function aliveAt(steps, which, point) {
  const curve = steps[which];
  const found = storagesAt(steps, which, point);
  const rows = [];
  let sum = 0;
  for (const [number, bytes] of found) {
    sum += bytes;
    if (bytes <= 0) continue;
    const named = number < 0
      ? {name: "held by leanstep", module: "", source: "", group: 4}
      : nameOfStorage(steps, number);
    rows.push({bytes, ...named});
  }
  const apart = steps.before.live[0] - [...storagesAt(steps, "before", 0).values()].reduce((a, b) => a + b, 0);
  const op = curve.ops[point];
  const here = {module: steps.ops.texts[steps.ops.modules[op]], source: steps.ops.texts[steps.ops.sources[op]]};
  const rebuilt = curve.live[point] - sum - apart;
  const rise = levelAt(curve, point) - curve.live[point];
  if (apart > 0) rows.push({bytes: apart, name: "outside the step's tensors", module: "", source: "", group: 2});
  if (rebuilt > 0) rows.push({bytes: rebuilt, name: "rebuilt for backward", ...here, group: 4});
  if (rise > 0) rows.push({bytes: rise, name: `while ${opName(steps, op)} runs`, ...here, group: 5});
  return rows.sort((a, b) => b.bytes - a.bytes);
}

function levelAt(curve, point) {
  return curve.layers.reduce((sum, layer) => sum + layer[point], 0);
}

function opName(steps, op) {
  return shortOp(steps.ops.texts[steps.ops.names[op]]);
}

function placeOf(steps, which, point) {
  const {ops} = steps;
  const curve = steps[which], op = curve.ops[point];
  const isAgain = op !== curve.positions[point];
  const phase = isAgain ? "run again in backward" : steps.phases[ops.phases[op]];
  return [phase, ops.texts[ops.modules[op]], ops.texts[ops.sources[op]]].filter(Boolean).join(" · ");
}

function showAlive(steps, which, point) {
  const rows = aliveAt(steps, which, point);
  const version = steps.after ? (which === "after" ? ", planned" : ", untouched") : "";
  byId("alive").hidden = false;
  byId("alive-title").textContent =
    `${opName(steps, steps[which].ops[point])}: ${formatBytes(levelAt(steps[which], point))} in ${rows.length} parts${version}`;
  byId("alive-place").textContent = placeOf(steps, which, point);
  byId("alive-rows").replaceChildren(...rows.map((row) => element("tr", {},
    element("td", {class: "number"}, formatBytes(row.bytes)),
    element("td", {class: "op"}, row.name),
    element("td", {class: "path"}, row.module),
    element("td", {class: "source"}, row.source),
    element("td", {class: "quiet"}, element("i", {swatch: `var(--group-${row.group})`}), steps.groups[row.group]))));
}
