"use strict";
(() => {
  const GUTTER = 46, STRIP = 8, AXIS = 20; // CSS pixels around a map
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("trace").textContent);
  const { layers: L, kv_heads: H, cached_tokens: T } = data;
  const C = data.compactions.length;
  const at = [...data.compactions.map((each) => each.tokens), T]; // tokens with cells, by moment
  const removed = unpack(data.removed_by); // [L * H * T]
  const tokens = [...document.querySelectorAll(".t")];
  const state = { moment: C, layer: null, head: null, token: null };
  let chosen, counts; // rows of the chosen heads; how many hold a token, by moment

  function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return data.wide ? new Uint16Array(bytes.buffer) : bytes;
  }

  function choose() {
    chosen = [];
    for (let l = 0; l < L; l++)
      for (let h = 0; h < H; h++)
        if ((state.layer ?? l) === l && (state.head ?? h) === h) chosen.push(l * H + h);
    const left = Array.from({ length: C + 1 }, () => new Uint16Array(T)); // heads it left, by when
    for (const row of chosen) for (let p = 0, i = row * T; p < T; p++, i++) left[removed[i]][p]++;
    counts = [...left.slice(1), left[C]];
    for (let m = C - 2; m >= 0; m--) counts[m] = counts[m].map((n, p) => n + counts[m + 1][p]);
  }

  // Words

  const momentName = (m) =>
    m === C ? `at the end, ${T} tokens` : `after compaction ${m + 1} of ${C}, ${at[m]} tokens`;

  function partOf(token) {
    if (token < data.prompt_tokens) return "prompt";
    return `thought ${1 + data.thoughts.findIndex(([start, end]) => start <= token && token < end)}`;
  }

  const named = (token) => `Token ${token} ${JSON.stringify(data.texts[token])}, ${partOf(token)}`;

  function holders(token, moment) {
    if (token >= T) return "sampled last, so it has no cell";
    if (token >= at[moment]) return "not there yet";
    const of = chosen.length === 1 ? "the chosen head" : `${chosen.length} heads`;
    if (chosen.length === 1) return counts[moment][token] ? `held by ${of}` : `removed from ${of}`;
    return `held by ${counts[moment][token]} of ${of}`;
  }

  function fate(row, token) {
    const by = removed[row * T + token];
    return by === C ? "held to the end" : `removed by compaction ${by + 1}, at ${at[by]} tokens`;
  }

  // The text

  function shadeText() {
    tokens.forEach((span, p) => {
      const there = p < at[state.moment];
      const share = there ? counts[state.moment][p] / chosen.length : 0;
      span.style.background = share ? `rgb(var(--shade) / ${(0.06 + 0.54 * share).toFixed(3)})` : "";
      span.classList.toggle("none", !share);
      span.classList.toggle("at", p === state.token);
    });
  }

  // Maps: a column for each token

  function sheet(width, height) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [width, height];
    return canvas.getContext("2d");
  }

  function colour(name) {
    const pen = sheet(1, 1);
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    return [1, 3, 5].map((i) => parseInt(pen.fillStyle.slice(i, i + 2), 16));
  }

  function drawMap(canvas, rows, rowHeight, paint, labels, marked) {
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = rows * rowHeight;
    canvas.width = Math.round(width * scale);
    canvas.style.height = `${height + STRIP + AXIS}px`;
    canvas.height = Math.round((height + STRIP + AXIS) * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const plot = width - GUTTER;
    canvas.map = { rows, rowHeight, plot };
    const image = new ImageData(T, rows);
    paint(image.data);
    const small = sheet(T, rows), tall = sheet(T, Math.max(Math.round(height * scale), rows));
    small.putImageData(image, 0, 0);
    tall.imageSmoothingEnabled = false; // rows keep their edges
    tall.drawImage(small.canvas, 0, 0, T, tall.canvas.height);
    pen.imageSmoothingEnabled = T > plot * scale; // columns that are too many blend
    pen.imageSmoothingQuality = "high";
    pen.drawImage(tall.canvas, GUTTER, STRIP, plot, height);
    drawStrip(pen, plot);
    drawLabels(pen, plot, height, rowHeight, labels);
    pen.strokeStyle = `rgb(${colour("--mark")})`;
    pen.lineWidth = 1.5;
    for (const row of marked)
      pen.strokeRect(GUTTER + 0.75, STRIP + row * rowHeight, plot - 1.5, rowHeight);
    if (state.token !== null && state.token < T) {
      pen.strokeRect(GUTTER + (state.token * plot) / T, STRIP, Math.max(plot / T, 1), height);
    }
  }

  function drawStrip(pen, plot) {
    const strip = colour("--strip");
    [[0, data.prompt_tokens], ...data.thoughts].forEach(([start, end], i) => {
      pen.fillStyle = `rgba(${strip}, ${i === 0 ? 1 : i % 2 ? 0.25 : 0.55})`;
      const until = Math.min(end, T);
      pen.fillRect(GUTTER + (start * plot) / T, 0, ((until - start) * plot) / T, STRIP - 2);
    });
  }

  function drawLabels(pen, plot, height, rowHeight, labels) {
    pen.fillStyle = `rgb(${colour("--soft")})`;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const used = [];
    for (const [row, text] of labels) {
      const y = STRIP + (row + 0.5) * rowHeight;
      if (used.some((other) => Math.abs(y - other) < 11)) continue;
      pen.fillText(text, GUTTER - 6, y);
      used.push(y);
    }
    for (const p of ticks(T, plot / 80)) {
      pen.textAlign = p === 0 ? "left" : p > 0.98 * T ? "right" : "center";
      pen.fillText(p, GUTTER + (p * plot) / T, STRIP + height + AXIS / 2 + 2);
    }
  }

  function ticks(most, about) {
    const rough = most / Math.max(about, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max([1, 2, 5, 10].find((f) => f * power >= rough) * power, 1);
    return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
  }

  function put(pixels, index, [r, g, b], alpha) {
    pixels.set([r, g, b, Math.round(255 * alpha)], 4 * index);
  }

  function drawTime() {
    const held = colour("--held");
    const rowHeight = Math.min(22, Math.max(3, 360 / (C + 1)));
    const labels = [[C, "end"], ...at.slice(0, C).map((_, m) => [m, String(m + 1)])];
    drawMap(byId("time"), C + 1, rowHeight, (pixels) => {
      for (let m = 0; m <= C; m++)
        for (let p = 0; p < at[m]; p++)
          put(pixels, m * T + p, held, counts[m][p] ? 0.08 + (0.92 * counts[m][p]) / chosen.length : 0);
    }, labels, [state.moment]);
  }

  function drawHeads() {
    const held = colour("--held"), gone = colour("--gone");
    const rowHeight = Math.min(14, Math.max(2, 420 / (L * H)));
    const labels = Array.from({ length: L }, (_, l) => [l * H + (H - 1) / 2, `L${l}`]);
    drawMap(byId("heads"), L * H, rowHeight, (pixels) => {
      for (let row = 0; row < L * H; row++)
        for (let p = 0, i = row * T; p < at[state.moment]; p++, i++) {
          const by = removed[i];
          if (by > state.moment || by === C) put(pixels, i, held, 1);
          else put(pixels, i, gone, 0.06 + (0.5 * (by + 1)) / (state.moment + 1));
        }
    }, labels, chosen.length < L * H ? chosen : []);
  }

  // Cells by layer and head

  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    made.textContent = text;
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  }

  function fillCells() {
    const held = state.moment === C ? data.held_at_end : data.compactions[state.moment].held;
    const most = Math.max(...held.flat());
    const top = document.createElement("tr");
    top.append(element("th", "layer", { scope: "col" }));
    for (let h = 0; h < H; h++) top.append(element("th", `head ${h}`, { scope: "col" }));
    top.append(element("th", "mean", { scope: "col" }));
    if (data.layer_budgets) top.append(element("th", "budget", { scope: "col" }));
    const rows = held.map((heads, l) => {
      const row = document.createElement("tr");
      row.append(element("th", l, { scope: "row" }));
      heads.forEach((cells, h) => {
        const cell = element("td", cells, { class: "head" });
        cell.style.background = `rgb(var(--shade) / ${((0.6 * cells) / most).toFixed(3)})`;
        cell.classList.toggle("chosen", chosen.length < L * H && chosen.includes(l * H + h));
        cell.onclick = () => pick(l, h);
        row.append(cell);
      });
      row.append(element("td", (heads.reduce((a, b) => a + b) / H).toFixed(1)));
      if (data.layer_budgets) row.append(element("td", data.layer_budgets[l]));
      return row;
    });
    byId("cells").replaceChildren(top, ...rows);
  }

  // Bytes

  const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["bytes", 1]];
  function bytes(count) {
    const [unit, scale] = UNITS.find(([, size]) => count >= size) ?? UNITS[3];
    return `${+(count / scale).toFixed(1)} ${unit}`;
  }

  function shape(name, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    made.textContent = text;
    return made;
  }

  function drawBytes() {
    const width = Math.max(byId("bytes").clientWidth, 300), height = 240, left = 76, foot = 24;
    const full = (t) => L * H * Math.ceil(t / data.page_cells) * data.page_bytes;
    const most = full(T);
    const x = (t) => left + ((width - left - 8) * t) / T;
    const y = (b) => 8 + (height - foot - 8) * (1 - b / most);
    const points = (list) => list.map(([t, b]) => `${x(t).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
    const line = [], before = new Map(data.compactions.map((each) => [each.tokens, each.bytes_before]));
    for (let t = 0; t <= T; t++) {
      if (before.has(t)) line.push([t, before.get(t)]);
      line.push([t, data.cell_bytes[t]]);
    }
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Bytes of KV over tokens: ${bytes(data.cell_bytes[T])} at the end, ${bytes(most)} for the full cache` });
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(shape("line", { x1: left, x2: width - 8, y1: y(part * most), y2: y(part * most), stroke: "var(--line)" }));
      svg.append(shape("text", { x: left - 8, y: y(part * most) + 4, "text-anchor": "end" }, bytes(part * most)));
    }
    for (const t of ticks(T, width / 100))
      svg.append(shape("text", { x: x(t), y: height - 4, "text-anchor": !t ? "start" : t > 0.98 * T ? "end" : "middle" }, t));
    for (const [, end] of [[0, data.prompt_tokens], ...data.thoughts])
      svg.append(shape("line", { x1: x(end), x2: x(end), y1: height - foot, y2: height - foot + 6, stroke: "var(--strip)" }));
    const stretch = { fill: "none", "stroke-linejoin": "round", "stroke-width": 2 };
    svg.append(shape("polyline", { ...stretch, stroke: "var(--strip)", "stroke-width": 1.5, "stroke-dasharray": "5 4",
      points: points(Array.from({ length: T + 1 }, (_, t) => [t, full(t)])) }));
    svg.append(shape("polyline", { ...stretch, stroke: "var(--held)", points: points(line) }));
    for (const t of at.slice(0, C))
      svg.append(shape("circle", { cx: x(t), cy: y(data.cell_bytes[t]), r: 3, fill: "var(--gone)" }));
    const now = at[state.moment];
    svg.append(shape("line", { x1: x(now), x2: x(now), y1: 8, y2: height - foot, stroke: "var(--mark)", "stroke-dasharray": "2 3" }));
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect();
      const t = Math.round(((((event.clientX - box.left) * width) / box.width - left) / (width - left - 8)) * T);
      if (t < 0 || t > T) return hideTip();
      showTip(event, `${t} tokens: ${bytes(data.cell_bytes[t])}${before.has(t) ? `, from ${bytes(before.get(t))}` : ""}\nfull cache: ${bytes(full(t))}`);
    };
    svg.onpointerleave = hideTip;
    byId("bytes").replaceChildren(svg);
  }

  // What the reader does

  function showTip(event, text) {
    const tip = byId("tip");
    tip.textContent = text;
    tip.style.display = "block";
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    const below = event.clientY + 18;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
  }
  function hideTip() {
    byId("tip").style.display = "none";
  }

  function spot(canvas, event) {
    const box = canvas.getBoundingClientRect(), map = canvas.map;
    const token = Math.floor(((event.clientX - box.left - GUTTER) * T) / map.plot);
    const row = Math.floor((event.clientY - box.top - STRIP) / map.rowHeight);
    return token >= 0 && token < T && row < map.rows ? { token, row: Math.max(row, 0) } : null;
  }

  function onMap(id, describe, click) {
    const canvas = byId(id);
    canvas.onpointermove = (event) => {
      const found = spot(canvas, event);
      if (!found) return hideTip();
      showTip(event, `${named(found.token)}\n${describe(found)}`);
    };
    canvas.onpointerleave = hideTip;
    canvas.onclick = (event) => {
      const found = spot(canvas, event);
      if (found) click(found);
    };
  }

  function pick(layer, head) {
    const same = state.layer === layer && state.head === head;
    [state.layer, state.head] = same ? [null, null] : [layer, head];
    byId("layer").value = state.layer ?? "";
    byId("head").value = state.head ?? "";
    choose();
    draw();
  }

  function mark(token) {
    state.token = token;
    const span = tokens[token];
    span.scrollIntoView({ block: "nearest" });
    draw();
  }

  function draw() {
    byId("when").value = momentName(state.moment);
    byId("moment").setAttribute("aria-valuetext", momentName(state.moment));
    byId("status").textContent =
      state.token === null ? "" : `${named(state.token)}: ${holders(state.token, state.moment)}`;
    shadeText();
    drawTime();
    drawHeads();
    fillCells();
    drawBytes();
  }

  byId("moment").oninput = (event) => {
    state.moment = Number(event.target.value);
    draw();
  };
  for (const name of ["layer", "head"])
    byId(name).onchange = (event) => {
      state[name] = event.target.value === "" ? null : Number(event.target.value);
      choose();
      draw();
    };
  const text = byId("text");
  text.onkeydown = (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const token = (state.token ?? -1) + (steps[event.key] ?? NaN);
    if (event.key === "Escape") state.token = null, draw();
    if (Number.isNaN(token)) return;
    event.preventDefault();
    mark(Math.min(Math.max(token, 0), tokens.length - 1));
  };
  text.onpointermove = (event) => {
    const token = tokens.indexOf(event.target);
    if (token < 0) hideTip();
    else showTip(event, `${named(token)}\n${holders(token, state.moment)}`);
  };
  text.onpointerleave = hideTip;
  text.onclick = (event) => {
    const token = tokens.indexOf(event.target);
    if (token >= 0) mark(token);
  };
  onMap("time", ({ token, row }) => `${momentName(row)}: ${holders(token, row)}`, ({ row }) => {
    state.moment = row;
    byId("moment").value = row;
    draw();
  });
  onMap("heads", ({ token, row }) => `layer ${Math.floor(row / H)}, head ${row % H}: ${fate(row, token)}`,
    ({ row }) => pick(Math.floor(row / H), row % H));
  byId("moment").form.onsubmit = () => false;
  window.onresize = draw;
  matchMedia("(prefers-color-scheme: dark)").onchange = draw;
  choose();
  draw();
})();
