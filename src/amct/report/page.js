"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const layers = JSON.parse(byId("data").textContent).layers;
  const body = byId("table").tBodies[0];
  const rows = Array.from(body.rows);
  const headers = Array.from(byId("table").tHead.rows[0].cells);
  const width = 640, height = 260, left = 14, right = 626, top = 30, bottom = 222;

  // -- table ---------------------------------------------------------------------------------------------------------

  const words = new Intl.Collator(undefined, { numeric: true });

  function compare(column, numeric, direction) {
    return (one, other) => {
      const a = one.cells[column], b = other.cells[column];
      if (!numeric) return direction * words.compare(a.textContent.trim(), b.textContent.trim());
      const x = a.dataset.value, y = b.dataset.value;
      if (x === "" || y === "") return (x === "") - (y === "");  // unmeasured values are always last
      const difference = Number(x) - Number(y);
      return Number.isNaN(difference) ? 0 : direction * difference;
    };
  }

  function sort(button) {
    const header = button.closest("th");
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    rows.sort(compare(Number(button.dataset.column), "numeric" in button.dataset, direction));
    body.append(...rows);
  }

  function search(text) {
    const wanted = text.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const fits = (row.cells[1].textContent + "\n" + row.cells[2].textContent).toLowerCase().includes(wanted);
      row.hidden = !fits;
      shown += fits;
    }
    byId("found").textContent = wanted ? `${shown} of ${rows.length} layers` : "";
  }

  // -- charts --------------------------------------------------------------------------------------------------------

  function draw(svg, tag, attributes, text) {
    const element = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    svg.append(element);
    return element;
  }

  const short = (value) => Number(value.toPrecision(3)).toString();
  const between = (value, low, high, from, to) => from + ((value - low) / (high - low)) * (to - from);

  function clear(svg, tall) {
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
  }

  function drawNothing(svg, text) {
    clear(svg, 60);
    draw(svg, "text", { x: left, y: 40 }, text);
  }

  function drawClip(svg, value, low, high) {
    const x = between(value, low, high, left, right);
    draw(svg, "line", { class: "clip", x1: x, x2: x, y1: top - 8, y2: bottom });
    const anchor = x < 80 ? "start" : x > width - 80 ? "end" : "middle";
    draw(svg, "text", { class: "clip", x, y: top - 13, "text-anchor": anchor }, short(value));
  }

  function drawActivation(input) {
    const svg = byId("activation"), bars = input.bars;
    clear(svg, height);
    byId("activation-note").textContent = "";
    if (!bars) return drawNothing(svg, "not measured");
    const logarithmic = byId("logarithmic").checked;
    const size = (count) => (logarithmic ? Math.log10(1 + count) : count);
    const most = Math.max(...bars.counts.map(size), 1e-9);
    const step = (bars.high - bars.low) / bars.counts.length;
    const [clipLow, clipHigh] = input.clip;
    bars.counts.forEach((count, place) => {
      const from = bars.low + place * step, middle = from + step / 2;
      const outside = middle < clipLow || middle > clipHigh;
      const tall = count ? Math.max((size(count) / most) * (bottom - top), 1) : 0;
      const bar = draw(svg, "rect", {
        class: outside ? "bar outside" : "bar",
        x: between(from, bars.low, bars.high, left, right), y: bottom - tall,
        width: Math.max((right - left) / bars.counts.length - 1, 1), height: tall,
      });
      draw(bar, "title", {}, `${short(from)} … ${short(from + step)}: ${count} values`);
    });
    draw(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    drawClip(svg, clipLow, bars.low, bars.high);
    drawClip(svg, clipHigh, bars.low, bars.high);
    draw(svg, "text", { x: left, y: height - 14 }, short(bars.low));
    draw(svg, "text", { x: right, y: height - 14, "text-anchor": "end" }, short(bars.high));
    if (bars.low < 0 && bars.high > 0) {
      const zero = between(0, bars.low, bars.high, left, right);
      draw(svg, "line", { class: "axis", x1: zero, x2: zero, y1: bottom, y2: bottom + 7 });
      if (zero > 90 && zero < width - 90) draw(svg, "text", { x: zero, y: height - 14, "text-anchor": "middle" }, "0");
    }
    const far = bars.below + bars.above;
    byId("activation-note").textContent =
      `Values from ${short(input.seen[0])} to ${short(input.seen[1])}; the dashed lines are the clip range.` +
      (far ? ` ${far} values lie beyond the picture.` : "");
  }

  function drawWeights(layer) {
    const svg = byId("weights"), weights = layer.weights;
    clear(svg, height);
    byId("weights-note").textContent = "";
    if (!weights || !weights.min.length) return drawNothing(svg, "no weights");
    let low = Math.min(0, ...weights.min), high = Math.max(0, ...weights.max);
    if (low === high) [low, high] = [-1, 1];
    const step = (right - left) / weights.min.length, thick = Math.max(Math.min(step * 0.75, 14), 0.8);
    const level = (value) => between(value, low, high, bottom, top);
    draw(svg, "line", { class: "axis", x1: left, x2: right, y1: level(0), y2: level(0) });
    weights.min.forEach((minimum, place) => {
      const x = left + (place + 0.5) * step, maximum = weights.max[place];
      const first = place * weights.each;
      const line = draw(svg, "line", {
        class: "range", "stroke-width": thick, x1: x, x2: x,
        y1: level(maximum), y2: Math.max(level(minimum), level(maximum) + 1),
      });
      const channels = weights.each > 1 ? `channels ${first} …` : `channel ${first}`;
      draw(line, "title", {}, `${channels}: ${short(minimum)} … ${short(maximum)}`);
    });
    draw(svg, "text", { x: left, y: top - 13 }, short(high));
    draw(svg, "text", { x: left, y: height - 14 }, short(low));
    byId("weights-note").textContent =
      weights.each > 1 ? `Each line stands for ${weights.each} neighbouring channels.` : `${weights.min.length} channels.`;
  }

  // -- the selected layer --------------------------------------------------------------------------------------------

  function fact(name, value) {
    const box = document.createElement("div"), term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.textContent = value;
    box.append(term, text);
    byId("facts").append(box);
  }

  const rowOf = new Map(rows.map((row) => [Number(row.dataset.index), row]));

  function choose(index) {
    const row = rowOf.get(index);
    if (!row) return;
    for (const other of rows) other.classList.toggle("chosen", other === row);
    byId("chosen").value = String(index);
    byId("facts").replaceChildren();
    for (let column = 2; column < headers.length; column += 1) {
      fact(headers[column].textContent.trim(), row.cells[column].innerText.trim().replaceAll("\n", ", "));
    }
    offerInputs(layers[index].inputs);
    drawChosen();
    drawWeights(layers[index]);
  }

  function offerInputs(inputs) {
    const list = byId("input");
    list.replaceChildren(...inputs.map((_, place) => new Option(`input ${place + 1} of ${inputs.length}`, place)));
    list.hidden = inputs.length < 2;
  }

  function drawChosen() {
    drawActivation(layers[Number(byId("chosen").value)].inputs[Number(byId("input").value)]);
  }

  document.addEventListener("click", (event) => {
    const sorting = event.target.closest("#table thead button");
    if (sorting) return sort(sorting);
    const choosing = event.target.closest(".choose, #table tbody tr");
    if (!choosing) return;
    choose(Number(choosing.dataset.index));
    byId("detail").scrollIntoView({ block: "nearest" });
  });
  byId("search").addEventListener("input", (event) => search(event.target.value));
  byId("chosen").addEventListener("change", (event) => choose(Number(event.target.value)));
  byId("logarithmic").addEventListener("change", drawChosen);
  byId("input").addEventListener("change", drawChosen);

  const worst = document.querySelector(".bars .choose");
  if (layers.length) choose(worst ? Number(worst.dataset.index) : 0);
  else byId("detail").hidden = true;
  search(byId("search").value);  // a browser may keep the search text on reload
})();
