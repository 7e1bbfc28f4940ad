// Walks a recorded graph: <div class="step-through"> holds the data that the notebook printed.
// Without this script the page shows the static figure; with it, the walk takes the figure's place.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLUMN = 172, ROW = 98;

  const svg = (name, attributes, parent, text) => {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const { html, controls, mount } = window.walk;

  // An arrow with its number; "down" carries a value on the left, "up" a gradient on the right.
  function arrow(parent, from, to, shift, way, text, where) {
    const length = Math.hypot(to.x - from.x, to.y - from.y);
    const along = { x: (to.x - from.x) / length, y: (to.y - from.y) / length };
    const left = { x: -along.y, y: along.x };
    if (left.x > 0) { left.x = -left.x; left.y = -left.y; }
    const sign = way === "down" ? 1 : -1;
    const point = (distance, aside) => ({
      x: from.x + along.x * distance + left.x * aside + shift,
      y: from.y + along.y * distance + left.y * aside,
    });
    const ends = [point(25, sign * 5), point(length - 25, sign * 5)];
    if (way === "up") ends.reverse();
    const group = svg("g", { class: `st-${way}` }, parent);
    svg("line", { x1: ends[0].x, y1: ends[0].y, x2: ends[1].x, y2: ends[1].y,
      "marker-end": `url(#st-head-${way})` }, group);
    const place = point(length * where, sign * 13);
    svg("text", { x: place.x, y: place.y + 5, "text-anchor": way === "down" ? "end" : "start" },
      group, text);
    return group;
  }

  function draw(data, parent) {
    const picture = svg("svg", { role: "img" }, parent);
    const heads = svg("defs", {}, picture);
    for (const way of ["down", "up"]) {
      const head = svg("marker", { id: `st-head-${way}`, viewBox: "0 0 8 8", refX: 7, refY: 4,
        markerWidth: 7, markerHeight: 7, orient: "auto" }, heads);
      svg("path", { d: "M0 0 8 4 0 8z" }, head);
    }
    const at = (n) => ({ x: n.at[0] * COLUMN, y: n.at[1] * ROW });
    const named = (n) => (n.kind === "operation" && !n.name.startsWith("#") ? `${n.name} = ${n.value}` : n.value);
    const uses = (k) => data.edges.filter((e) => e.from === k).length;

    const edges = data.edges.map((edge, k) => {
      const twins = data.edges.filter((e) => e.from === edge.from && e.to === edge.to);
      const shift = (twins.indexOf(edge) - (twins.length - 1) / 2) * 50;
      const source = data.nodes[edge.from];
      const fork = uses(edge.from) > twins.length, join = data.edges.filter((e) => e.to === edge.to).length > twins.length;
      const where = fork ? (join ? 0.54 : 0.62) : join ? 0.32 : 0.5;
      const [from, to] = [at(source), at(data.nodes[edge.to])];
      return {
        down: arrow(picture, from, to, shift, "down", source.kind === "constant" ? "" : twins.length > 1 || data.edges.findIndex((e) => e.from === edge.from) < k ? source.value : named(source), where),
        up: edge.gradient ? arrow(picture, from, to, shift, "up", edge.gradient, where + 0.16 * fork) : null,
      };
    });
    const last = data.nodes[data.output], end = { x: at(last).x, y: at(last).y + ROW };
    const exit = { down: arrow(picture, at(last), end, 0, "down", last.value, 0.5),
      up: arrow(picture, at(last), end, 0, "up", last.gradient, 0.5) };
    svg("text", { x: end.x, y: end.y - 4, "text-anchor": "middle", class: "st-name" }, picture, last.name);

    const nodes = data.nodes.map((node) => {
      const { x, y } = at(node), half = Math.max(20, 5 * node.symbol.length + 9);
      const group = svg("g", { class: `st-node st-${node.kind}` }, picture);
      if (node.kind === "leaf") svg("ellipse", { cx: x, cy: y, rx: half + 2, ry: 20 }, group);
      else if (node.kind !== "constant") svg("rect", { x: x - half, y: y - 19, width: 2 * half, height: 38, rx: node.kind === "operation" ? 12 : 0 }, group);
      svg("text", { x, y: y + 5, "text-anchor": "middle" }, group, node.symbol);
      const crowded = data.nodes.some((n) => n.at[1] === node.at[1] && n.at[0] > node.at[0] && n.at[0] - node.at[0] < 1.3);
      const leaf = node.kind === "leaf" || node.kind === "parameter";
      const longest = leaf ? `.grad = ${node.gradient}` : node.keeps ? `keeps ${node.keeps}` : "";
      const note = svg("text", { x: crowded ? x - half - 8 : x + half + 8, y: y + 4, "text-anchor": crowded ? "end" : "start", class: leaf ? "st-note st-gradient" : "st-note" }, picture, longest);
      const sum = node.sums && !leaf ? svg("text", { x: note.getAttribute("x"), y: y - 13, "text-anchor": note.getAttribute("text-anchor"), class: "st-note st-gradient" }, picture, `Σ = ${node.gradient}`) : null;
      return { group, note, sum };
    });
    // All texts stand there now, at their longest, so this is the room that the walk needs.
    const box = picture.getBBox();
    picture.setAttribute("viewBox", `${box.x - 4} ${box.y - 6} ${box.width + 8} ${box.height + 10}`);
    picture.style.maxWidth = `${box.width * 1.1}px`;
    picture.style.minWidth = `${box.width * 0.6}px`;  // smaller, and its numbers can't be read
    return { picture, nodes, edges, exit };
  }

  function build(root, number) {
    const data = JSON.parse(root.querySelector("script").textContent);
    const figure = document.getElementById(root.dataset.figure);
    const image = figure && figure.querySelector("img");
    const host = document.createElement("div");
    host.className = "st-walk";
    if (image) (image.closest("a.reference") || image).replaceWith(host); else root.prepend(host);

    const drawing = draw(data, host);
    const id = `step-through-${number}`;
    const { slider, now, start } = controls(host, { id, label: "Step", last: data.steps.length }, update);
    const sentence = html("p", { className: "st-sentence", id: `${id}-sentence` }, host);
    sentence.setAttribute("aria-live", "polite");
    drawing.picture.setAttribute("aria-labelledby", sentence.id);

    const show = (element, visible) => element && element.classList.toggle("st-off", !visible);
    function update() {
      const at = now(), done = data.steps.slice(0, at), current = done[at - 1];
      const forward = new Set(), backward = new Set(), sent = new Set(), freed = new Set();
      for (const step of done) {
        (step.phase === "forward" ? forward : backward).add(step.node);
        step.edges.forEach((k) => sent.add(k));
        if (step.frees) freed.add(step.node);
      }
      data.nodes.forEach((node, k) => {
        const { group, note, sum } = drawing.nodes[k];
        const ready = node.kind === "constant" ? data.edges.some((e) => e.from === k && forward.has(e.to)) : forward.has(k);
        group.classList.toggle("st-waiting", !ready);
        group.classList.toggle("st-current", Boolean(current) && current.node === k);
        show(sum, backward.has(k));
        const leaf = note.classList.contains("st-gradient");
        note.textContent = leaf && backward.has(k) ? `.grad = ${node.gradient}`
          : node.keeps && forward.has(k) ? (freed.has(k) ? "freed" : `keeps ${node.keeps}`) : "";
      });
      data.edges.forEach((edge, k) => {
        show(drawing.edges[k].down, data.nodes[edge.from].kind === "constant" ? forward.has(edge.to) : forward.has(edge.from));
        show(drawing.edges[k].up, sent.has(k));
      });
      show(drawing.exit.down, forward.has(data.output));
      show(drawing.exit.up, backward.has(data.output));
      const place = at ? `Step ${at} of ${data.steps.length}, ${current.phase}. ` : "";
      sentence.textContent = place + (current ? current.sentence
        : "Nothing has run yet. Press Next.");
      slider.setAttribute("aria-valuetext", at ? `${at} of ${data.steps.length}` : "start");
    }
    start();
    drawing.nodes.forEach(({ group }) => group.classList.remove("st-current"));
    sentence.textContent = "Everything at once. Press Start, then Next, to see it happen step by step.";
  }

  mount("step-through", build);
})();
