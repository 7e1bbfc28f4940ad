// Shows one frame of a drawing at a time. <div class="frames"> holds the drawing and, as a list,
// what is to be said of each frame. In the drawing, data-from=3 is there from frame 3 on,
// data-only=3 in frame 3 alone, data-on="3 5" is emphasised in these. Without this script the page
// shows drawing and list as they are.
(() => {
  const html = (name, attributes, parent, text = "") => {
    const element = Object.assign(document.createElement(name), attributes);
    element.append(text);
    parent.append(element);
    return element;
  };

  function mount(root, number) {
    const items = [...root.querySelectorAll("li")], last = items.length;
    const walk = !root.dataset.chosen, id = `frames-${number}`;
    const marked = (name) => [...root.querySelectorAll(`svg [data-${name}]`)];
    const from = marked("from"), only = marked("only"), on = marked("on");

    const host = html("div", { className: "st-walk" }, root);
    root.prepend(host);
    host.append(root.querySelector(".fr-picture"));
    const controls = html("div", { className: "st-controls" }, host);
    const button = (text, step) => walk && html("button", { type: "button", onclick: () => go(step()) }, controls, text);
    const first = button("Start", () => 0), previous = button("← Previous", () => now() - 1);
    html("label", { htmlFor: id, className: "st-label" }, controls, root.dataset.control);
    const slider = html("input", { type: "range", id, min: walk ? 0 : 1, max: last,
      value: root.dataset.chosen || last }, controls);
    const next = button("Next →", () => now() + 1);
    const shown = walk ? null : html("output", { className: "fr-shown" }, controls);
    if (shown) {
      shown.setAttribute("for", id);
      shown.setAttribute("aria-live", "off");  // the slider itself says it
      const ticks = html("datalist", { id: `${id}-ticks` }, controls);
      root.dataset.ticks.split(" ").forEach((value) => html("option", { value }, ticks));
      slider.setAttribute("list", ticks.id);
    }
    // Whatever is shown in turn lies in one place of a grid, as large as the largest of them needs,
    // so that nothing on the page jumps.
    const said = html("div", { className: "fr-stage st-sentence" }, host);
    const sentence = html("p", {}, said);
    sentence.setAttribute("aria-live", "polite");
    items.forEach((item) => {
      const room = html("p", { className: "fr-hidden" }, said, `Step 00 of 00. ${item.querySelector("p").textContent}`);
      room.setAttribute("aria-hidden", "true");
    });
    const stage = html("div", { className: "fr-stage" }, host);
    const details = items.map((item) => item.querySelector(".fr-detail"));
    stage.append(...details.filter(Boolean));
    if (!stage.children.length) stage.remove();

    const now = () => Number(slider.value);
    let waiting;
    function update(pause) {
      const at = now(), item = items[at - 1];
      const show = (part, visible) => part.setAttribute("display", visible ? "inline" : "none");
      from.forEach((part) => show(part, Number(part.dataset.from) <= at));
      only.forEach((part) => show(part, Number(part.dataset.only) === at));
      on.forEach((part) => part.classList.toggle("fr-current", part.dataset.on.split(" ").includes(String(at))));
      details.forEach((detail, k) => detail && detail.classList.toggle("fr-hidden", k !== at - 1));
      const label = item ? item.dataset.label : "start";
      slider.setAttribute("aria-valuetext", label);
      if (shown) shown.textContent = label;
      const text = item ? item.querySelector("p").textContent : "Nothing has been looked at yet. Press Next.";
      const place = walk && item ? `${label[0].toUpperCase()}${label.slice(1)}. ` : "";
      if (walk) {
        first.disabled = previous.disabled = at === 0;
        next.disabled = at === last;
      }
      clearTimeout(waiting);
      if (pause) waiting = setTimeout(() => { sentence.textContent = place + text; }, pause);
      else sentence.textContent = place + text;
    }
    const go = (step) => { slider.value = step; update(0); };
    // A slider that is dragged passes many frames: the sentence is that of the one it stops at.
    slider.addEventListener("input", () => update(200));
    update(0);
    if (walk) {
      on.forEach((part) => part.classList.remove("fr-current"));
      sentence.textContent = "Everything at once"
        + (details.some(Boolean) ? ", with the numbers of the last step" : "")
        + ". Press Start, then Next, to see it happen step by step.";
    }
  }

  const start = () => document.querySelectorAll(".frames").forEach(mount);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
