// What every picture with a slider shares: how its elements are made, its buttons, and when it starts.
// window.walk is used by step-through.js and frames.js, which load after it.
window.walk = (() => {
  const html = (name, attributes, parent, text = "") => {
    const element = Object.assign(document.createElement(name), attributes);
    element.append(text);
    parent.append(element);
    return element;
  };

  // Start, Previous, a slider from 0 to `last`, Next. Where each place is a picture of its own (a
  // choice) and `chosen` the first, there is the slider alone, from 1 on.
  // `update(dragged)` is called whenever the place has changed.
  function controls(host, { id, label, last, chosen = 0 }, update) {
    const box = html("div", { className: "st-controls" }, host);
    const button = (text, place) => chosen ? null : html("button", { type: "button", onclick: () => {
      slider.value = place();
      moved(false);
    } }, box, text);
    const now = () => Number(slider.value);
    const first = button("Start", () => 0), previous = button("← Previous", () => now() - 1);
    html("label", { htmlFor: id, className: "st-label" }, box, label);
    const slider = html("input", { type: "range", id, min: chosen ? 1 : 0, max: last, value: chosen || last }, box);
    const next = button("Next →", () => now() + 1);
    const moved = (dragged) => {
      if (!chosen) {
        first.disabled = previous.disabled = now() === 0;
        next.disabled = now() === last;
      }
      update(dragged);
    };
    slider.addEventListener("input", () => moved(true));
    return { box, slider, now, start: () => moved(false) };
  }

  // Calls mount(element, number) for every element of a class, once all of the page is there.
  function mount(name, each) {
    const start = () => document.querySelectorAll(`.${name}`).forEach(each);
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
    else start();
  }

  return { html, controls, mount };
})();
