// Light or dark as the reader's system has it, until the button is used; and how all plots look.

const drawn = new Map();

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// The value that a custom property has in the scheme now shown.
function colour(name) {
  const probe = element("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function faded(rgb, share) {
  return rgb.replace("rgb(", "rgba(").replace(")", `, ${share})`);
}

function isNarrow() {
  return innerWidth < 600;
}

function axis(title, more = {}) {
  return {
    title: {text: title, font: {size: 12, color: colour("quiet")}, standoff: 8},
    gridcolor: colour("line"), linecolor: colour("line"), tickfont: {size: 11.5, color: colour("quiet")},
    zeroline: false, automargin: true, ...more,
  };
}

function layoutOf(more) {
  return {
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink")},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: {l: 8, r: 12, t: 24, b: 8}, showlegend: false, bargap: 0.35,
    hoverlabel: {bgcolor: colour("paper"), bordercolor: colour("quiet"), align: "left",
                 font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink")}},
    // A finger on a plot scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...more,
  };
}

const plotConfig = {
  responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset", showTips: false,
};

// Draw a plot now, and again whenever the scheme or the width changes.
function plot(id, label, make) {
  const place = byId(id);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  const draw = () => {
    const {traces, layout} = make();
    return Plotly.react(place, traces, layoutOf(layout), plotConfig);
  };
  drawn.set(id, draw);
  draw();
  return place;
}

function redraw() {
  for (const draw of drawn.values()) draw();
}

function startTheme() {
  const button = byId("theme");
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { label(); redraw(); });
  matchMedia("(max-width: 599px)").addEventListener("change", redraw);
  label();
}
