// A formula wider than the page scrolls in its own box; give that box, and only that, a tab stop.
// (The theme does the same for code, output and tables.)
(() => {
  const mark = () => document.querySelectorAll("div.math > .formula").forEach((box) => {
    const wide = box.scrollWidth > box.clientWidth;
    for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Wide formula"]]) {
      if (wide) box.setAttribute(name, value); else box.removeAttribute(name);
    }
  });
  addEventListener("load", mark);
  addEventListener("resize", mark);
  document.fonts.addEventListener("loadingdone", mark);
})();
