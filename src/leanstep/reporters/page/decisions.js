// The decisions as a tree: modules open to block calls, block calls to ops; search shows what matches.

const ACTIONS = {keep: "kept", recompute: "recomputed", offload: "offloaded"};

class DecisionTable {
  constructor(data) {
    this.rows = data.decisions;
    this.parents = this.findParents();
    // Modules are open, block calls are closed.
    this.open = this.rows.map((row) => row.kind === "module");
    this.hasChildren = this.rows.map((row, place) => place + 1 < this.rows.length && this.rows[place + 1].depth > row.depth);
    this.query = "";
  }

  findParents() {
    const path = [];
    return this.rows.map((row, place) => {
      path.length = row.depth;
      const parent = row.depth ? path[row.depth - 1] : -1;
      path[row.depth] = place;
      return parent;
    });
  }

  start() {
    this.lines = this.rows.map((row, place) => this.line(row, place));
    document.querySelector("#decisions-table tbody").append(...this.lines);
    byId("decisions-search").addEventListener("input", (event) => {
      this.query = event.target.value.trim().toLowerCase();
      this.show();
    });
    this.show();
  }

  line(row, place) {
    const bytes = (nbytes) => element("td", {class: "number"}, nbytes ? formatBytes(nbytes) : "–");
    const name = element("td", {class: "name"});
    name.style.setProperty("--depth", row.depth);
    if (this.hasChildren[place]) {
      const toggle = element("button", {class: "toggle", type: "button", "aria-label": `Show what is in ${row.path}`});
      toggle.addEventListener("click", () => { this.open[place] = !this.open[place]; this.show(); });
      name.append(toggle);
    } else {
      name.append(element("span", {class: "leaf"}));
    }
    name.append(element("span", {class: "text"}, row.kind === "op" ? shortOp(row.name).replace("::aten.", " · ") : row.name));
    return element("tr", {class: row.kind, title: row.why || row.path}, name,
      element("td", {class: "quiet"}, ...row.actions.map((action) => element("span", {}, element("i", {swatch: `var(--${ACTIONS[action]})`}), `${action} `))),
      bytes(row.kept_bytes), bytes(row.dropped_bytes), bytes(row.moved_bytes),
      element("td", {class: "number"}, row.seconds ? formatSeconds(row.seconds) : "–"),
      bytes(row.freed_bytes), element("td", {class: "source"}, row.source));
  }

  matches(row) {
    return [row.path, row.name, row.source, row.why, row.actions.join(" ")].some((text) => text.toLowerCase().includes(this.query));
  }

  // What a search finds, and the lines above it; without one, what is below open lines.
  visible() {
    if (!this.query) {
      const shown = [];
      this.rows.forEach((_, place) => {
        const parent = this.parents[place];
        shown.push(parent < 0 || (shown[parent] && this.open[parent]));
      });
      return {shown, count: 0};
    }
    const found = this.rows.map((row) => this.matches(row));
    const shown = [...found];
    found.forEach((is, place) => {
      for (let above = this.parents[place]; is && above >= 0; above = this.parents[above]) shown[above] = true;
    });
    return {shown, count: found.filter(Boolean).length};
  }

  show() {
    const {shown, count} = this.visible();
    this.lines.forEach((line, place) => {
      line.hidden = !shown[place];
      const toggle = line.querySelector(".toggle");
      if (!toggle) return;
      const isOpen = this.query ? Boolean(shown[place + 1]) : this.open[place];
      toggle.textContent = isOpen ? "▾" : "▸";
      toggle.setAttribute("aria-expanded", isOpen);
    });
    byId("decisions-count").textContent = this.query ? `${count} of ${this.rows.length} lines` : `${this.rows.length} lines`;
  }
}
