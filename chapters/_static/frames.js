// Shows one frame of a drawing at a time. <div class="frames"> holds the drawing and, as a list,
// what is to be said of each frame. In the drawing, data-from=3 is there from frame 3 on,
// data-only=3 in frame 3 alone, data-on="3 5" is emphasised in these. Without this script the page
// shows drawing and list as they are.
(() => {
  const { html, controls, mount } = window.walk;

  function build(root, number) {
    const items = [...root.querySelectorAll("li")], last = items.length;
    const chosen = Number(root.dataset.chosen), id = `frames-${number}`;
    const marked = (name) => [...root.querySelectorAll(`svg [data-${name}]`)];
    const from = marked("from"), only = marked("only"), on = marked("on");

    const host = html("div", { className: "st-walk" }, root);
    root.prepend(host);
    host.append(root.querySelector(".fr-picture"));
    const { box, slider, now, start } = controls(host, { id, label: root.dataset.control, last, chosen },
      (dragged) => update(dragged ? 200 : 0));
    const shown = chosen ? html("output", { className: "fr-shown" }, box) : null;
    if (shown) {
      shown.setAttribute("for", id);
      shown.setAttribute("aria-live", "off");  // the slider itself says it
      const ticks = html("datalist", { id: `${id}-ticks` }, box);
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
      const place = !chosen && item ? `${label[0].toUpperCase()}${label.slice(1)}. ` : "";
      clearTimeout(waiting);  // a slider that is dragged passes many frames: only the last is said
      if (pause) waiting = setTimeout(() => { sentence.textContent = place + text; }, pause);
      else sentence.textContent = place + text;
    }
    start();
    if (!chosen) {
      on.forEach((part) => part.classList.remove("fr-current"));
      sentence.textContent = "Everything at once"
        + (details.some(Boolean) ? ", with the numbers of the last step" : "")
        + ". Press Start, then Next, to see it happen step by step.";
    }
  }

  mount("frames", build);
})();
