"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const layers = JSON.parse(byId("data").textContent).layers;
  const body = byId("table").tBodies[0];
  const rows = Array.from(body.rows);
  const headers = Array.from(byId("table").tHead.rows[0].cells);
  const canvas = document.querySelector(".canvas");
  const boxes = Array.from(document.querySelectorAll(".box[data-index]"));
  const width = 640, height = 280, left = 74, right = 626, top = 34, bottom = 224;

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

  // Round steps of a scale: 1, 2 or 5 times a power of ten.
  function ticks(low, high, about) {
    const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) {
      found.push(Math.abs(value) < step / 1e6 ? 0 : value);
    }
    return found;
  }

  function drawAxes(svg, horizontal, vertical, across) {
    for (const [value, label] of vertical.marks) {
      const y = vertical.place(value);
      draw(svg, "line", { class: "grid", x1: left, x2: right, y1: y, y2: y });
      draw(svg, "text", { x: left - 6, y: y + 5, "text-anchor": "end" }, label);
    }
    for (const value of across) {
      const x = horizontal.place(value);
      draw(svg, "line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 6 });
      draw(svg, "text", { x, y: bottom + 22, "text-anchor": "middle" }, short(value));
    }
    draw(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    draw(svg, "text", { class: "title", x: (left + right) / 2, y: height - 8, "text-anchor": "middle" }, horizontal.title);
    const middle = (top + bottom) / 2;
    draw(svg, "text", { class: "title", x: 15, y: middle, "text-anchor": "middle", transform: `rotate(-90 15 ${middle})` }, vertical.title);
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
    const powers = Array.from({ length: Math.floor(Math.max(...bars.counts.map((count) => Math.log10(1 + count)))) + 1 }, (_, power) => 10 ** power);
    const values = logarithmic ? powers : ticks(0, most, 4);
    drawAxes(
      svg,
      { title: "value of the input", place: (value) => between(value, bars.low, bars.high, left, right) },
      { title: logarithmic ? "number of values (log)" : "number of values",
        marks: values.map((count) => [count, count >= 1e4 ? count.toExponential(0).replace("e+", "e") : String(count)]),
        place: (count) => bottom - (size(count) / most) * (bottom - top) },
      ticks(bars.low, bars.high, 6),
    );
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
    drawClip(svg, clipLow, bars.low, bars.high);
    drawClip(svg, clipHigh, bars.low, bars.high);
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
    const channels = weights.min.length * weights.each;
    drawAxes(
      svg,
      { title: "output channel", place: (channel) => left + ((channel / weights.each) + 0.5) * step },
      { title: "weight", marks: ticks(low, high, 5).map((value) => [value, short(value)]), place: level },
      ticks(0, channels - 1 || 1, 6).filter((channel) => Number.isInteger(channel) && channel < channels),
    );
    weights.min.forEach((minimum, place) => {
      const x = left + (place + 0.5) * step, maximum = weights.max[place];
      const first = place * weights.each;
      const line = draw(svg, "line", {
        class: "range", "stroke-width": thick, x1: x, x2: x,
        y1: level(maximum), y2: Math.max(level(minimum), level(maximum) + 1),
      });
      const which = weights.each > 1 ? `channels ${first} …` : `channel ${first}`;
      draw(line, "title", {}, `${which}: ${short(minimum)} … ${short(maximum)}`);
    });
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
    for (const box of boxes) box.classList.toggle("chosen", Number(box.dataset.index) === index);
    byId("chosen").value = String(index);
    byId("facts").replaceChildren();
    for (let column = 2; column < headers.length; column += 1) {
      fact(headers[column].textContent.trim(), row.cells[column].innerText.trim().replaceAll("\n", ", "));
    }
    if (byId("picked")) byId("picked").replaceChildren(...picked(row));
    offerInputs(layers[index].inputs);
    drawChosen();
    drawWeights(layers[index]);
  }

  // The line under the network: name, type, SQNR, and the way to the charts.
  function picked(row) {
    const name = document.createElement("strong"), link = document.createElement("a");
    name.textContent = row.cells[1].textContent.trim();
    link.href = "#detail";
    link.textContent = "charts of this layer";
    const facts = [2, 3, 4, 5].map((column) => `${headers[column].textContent.trim()} ${row.cells[column].textContent.trim()}`);
    return [name, ` · ${facts.join(" · ")} · `, link];
  }

  function offerInputs(inputs) {
    const list = byId("input");
    list.replaceChildren(...inputs.map((_, place) => new Option(`input ${place + 1} of ${inputs.length}`, place)));
    list.hidden = inputs.length < 2;
  }

  function drawChosen() {
    drawActivation(layers[Number(byId("chosen").value)].inputs[Number(byId("input").value)]);
  }

  // -- the network ---------------------------------------------------------------------------------------------------

  let scale = 1;

  function resize(wanted) {
    const svg = canvas.querySelector("svg"), area = svg.viewBox.baseVal;
    scale = wanted;
    svg.style.width = `${area.width * scale}px`;
    svg.style.height = `${area.height * scale}px`;
  }

  // Draw the network in another size and keep its middle, or show a box.
  function zoom(wanted) {
    const area = canvas.querySelector("svg").viewBox.baseVal;
    const chosen = boxes.find((box) => box.classList.contains("chosen"));
    const middleX = (canvas.scrollLeft + canvas.clientWidth / 2) / scale, middleY = (canvas.scrollTop + canvas.clientHeight / 2) / scale;
    const whole = Math.min(canvas.clientWidth / area.width, canvas.clientHeight / area.height);
    if (wanted === "fit") resize(Math.min(1, whole));
    else if (wanted === "chosen") resize(Math.max(scale, 1));
    else resize(Math.min(4, Math.max(Math.min(1, whole), scale * Number(wanted))));
    canvas.scrollTo(middleX * scale - canvas.clientWidth / 2, middleY * scale - canvas.clientHeight / 2);
    if (wanted === "chosen" && chosen) show(chosen);
  }

  function show(box) {
    const inside = box.getBoundingClientRect(), around = canvas.getBoundingClientRect();
    canvas.scrollBy((inside.left + inside.right - around.left - around.right) / 2, (inside.top + inside.bottom - around.top - around.bottom) / 2);
  }

  if (canvas) {
    resize(Math.min(1, canvas.clientWidth / canvas.querySelector("svg").viewBox.baseVal.width));  // no branch begins hidden
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;  // the wheel alone scrolls
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (event.key === "+" || event.key === "-") return zoom(event.key === "+" ? 1.4 : 1 / 1.4);
      const box = event.target.closest(".box[data-index]");
      if (!box || (event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      choose(Number(box.dataset.index));
    });
  }

  document.addEventListener("click", (event) => {
    const zooming = event.target.closest("[data-zoom]");
    if (zooming) return zoom(zooming.dataset.zoom);
    const sorting = event.target.closest("#table thead button");
    if (sorting) return sort(sorting);
    const choosing = event.target.closest(".choose, #table tbody tr, .box[data-index]");
    if (!choosing) return;
    choose(Number(choosing.dataset.index));
    if (!choosing.classList.contains("box")) byId("detail").scrollIntoView({ block: "nearest" });
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
