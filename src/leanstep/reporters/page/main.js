// Say the verdict, then draw each section, the first ones first.

function startVerdict(data) {
  const {summary} = data;
  byId("title").textContent = data.title;
  byId("subtitle").textContent = data.subtitle.join(" · ");
  byId("verdict").classList.add(summary.tone);
  byId("word").textContent = `${summary.word}.`;
  byId("sentence").textContent = summary.sentence;
  byId("facts").append(...summary.facts.map((fact) => element("div", {}, element("dt", {}, fact.label),
    element("dd", {}, element("div", {class: `value ${fact.tone}`}, fact.value), element("div", {class: "note"}, fact.note)))));
  byId("notes").hidden = !summary.notes.length;
  byId("notes").querySelector("ul").append(...summary.notes.map((note) => element("li", {}, note)));
}

// A section without data is one line: what to type to get it.
function sayMissing(section, command) {
  byId(section).querySelector(".body").remove();
  byId(section).querySelector(".caption").remove();
  const parts = command.split(", then ").flatMap((part, place) => [place ? ", then " : "", element("code", {}, part)]);
  byId(section).append(element("p", {class: "missing"}, "Not in this report. To get it: ", ...parts));
}

// What can be read without a plot.
function startReport(data) {
  startTheme();
  startVerdict(data);
}

function drawSections(data) {
  const missing = new Map(data.missing);
  const sections = [
    ["steps", "memory", () => new MemoryPlot(data).start()],
    ["peaks", "peak", () => startPeak(data)],
    ["lifetimes", "lifetimes", () => startLifetimes(data)],
    ["ladder", "budget", () => new BudgetSlider(data).start()],
    ["decisions", "decisions", () => new DecisionTable(data).start()],
    ["study", "batches", () => startStudy(data)],
  ];
  for (const [part, section] of sections) {
    if (missing.has(part)) sayMissing(section, missing.get(part));
  }
  const waiting = sections.filter(([part]) => !missing.has(part));
  // One section a turn, so that the first can be read while the others are drawn.
  const next = () => {
    const section = waiting.shift();
    if (!section) {
      document.documentElement.dataset.ready = Math.round(performance.now());
      return;
    }
    section[2]();
    setTimeout(next, 0);
  };
  next();
}
