// Sizes, times and shares as the terminal writes them (leanstep/units.py), and helpers for the DOM.

function formatBytes(bytes) {
  if (Math.abs(bytes) < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let power = 0, hundredths = 0;
  for (; power < units.length; power += 1) {
    hundredths = Math.floor(Math.abs(bytes) * 100 / 1024 ** (power + 1) + 0.5);
    if (hundredths < 102400) break;
  }
  power = Math.min(power, units.length - 1);
  const rest = String(hundredths % 100).padStart(2, "0").replace(/0$/, "");
  return `${bytes < 0 ? "-" : ""}${Math.floor(hundredths / 100)}.${rest} ${units[power]}`;
}

function threeDigits(number) {
  return number.toFixed(number < 9.995 ? 2 : number < 99.95 ? 1 : 0);
}

function formatSeconds(seconds) {
  if (seconds < 0) return `-${formatSeconds(-seconds)}`;
  if (seconds === 0) return "0 s";
  for (const [unit, scale] of [["ns", 1e9], ["us", 1e6], ["ms", 1e3]]) {
    if (seconds * scale < 999.5) return `${threeDigits(seconds * scale)} ${unit}`;
  }
  if (seconds < 59.995) return `${seconds.toFixed(2).replace(/(\.\d)0$/, "$1")} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

function formatChange(share) {
  return `${share < 0 ? "" : "+"}${(share * 100).toFixed(1)}%`;
}

function shortOp(name) {
  return name.replace(/^aten\./, "").replace(/\.default$/, "");
}

// The unit in which an axis counts bytes.
function byteScale(most) {
  return most >= 1024 ** 3 ? ["GiB", 1024 ** 3] : most >= 1024 ** 2 ? ["MiB", 1024 ** 2] : ["KiB", 1024];
}

function timeScale(most) {
  return most >= 1 ? ["s", 1] : most >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6];
}

const byId = (id) => document.getElementById(id);

// An element with its content: text is never read as HTML, names come from other people's code.
function element(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "swatch") made.style.setProperty("--swatch", value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...content);
  return made;
}

function fillLegend(id, entries) {
  byId(id).replaceChildren(...entries.map(([text, swatch, kind]) =>
    element("li", {}, element("i", {swatch, class: kind || ""}), text)));
}

// A box beside the pointer, inside the window.
function showTip(pointer, ...content) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  const left = pointer.clientX + 16 + width > innerWidth ? pointer.clientX - 16 - width : pointer.clientX + 16;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, Math.min(pointer.clientY + 16, innerHeight - height - 8))}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
