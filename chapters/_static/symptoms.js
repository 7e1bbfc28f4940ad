// Which faults can be behind a pasted message?  The same patterns and the same order as
// bpkit.diagnosis.faults.for_error: the longest match first, then the order of the catalogue.
(() => {
  "use strict";
  // A message given on the title page travels behind the #, which no browser sends to a server.
  const KEY = "#message=";
  const ask = document.querySelector("form.ask");
  ask?.addEventListener("submit", (event) => {
    event.preventDefault();
    const message = ask.querySelector("textarea").value;
    location.assign(ask.action + (message.trim() ? KEY + encodeURIComponent(message) : ""));
  });

  const form = document.querySelector(".message-box");
  const source = document.getElementById("message-patterns");
  if (!form || !source) return;
  const { patterns, decides } = JSON.parse(source.textContent);
  const compiled = patterns.map(([pattern, ...fault]) => [new RegExp(pattern), ...fault]);

  function lookUp(text) {
    const message = text.trim().split(/\s+/).join(" ");
    const found = new Map();
    for (const [pattern, slug, title, link] of compiled) {
      const length = message.match(pattern)?.[0].length ?? 0;
      if (length > (found.get(slug)?.length ?? 0)) found.set(slug, { slug, title, link, length });
    }
    return [...found.values()].sort((a, b) => b.length - a.length);
  }

  // Text in which `code` is set as code; made of text nodes, so nothing pasted is read as HTML.
  function withCode(text) {
    return text.split("`").map((piece, place) => {
      if (place % 2 === 0) return document.createTextNode(piece);
      const code = document.createElement("code");
      code.textContent = piece;
      return code;
    });
  }

  function show(text) {
    const result = form.querySelector(".message-found");
    result.replaceChildren();
    if (!text.trim()) return;
    const found = lookUp(text);
    const head = document.createElement("p");
    result.append(head);
    if (!found.length) {
      const further = document.createElement("a");
      further.href = "#what-you-see";
      further.textContent = "what you see";
      head.append("No fault of the catalogue raises this. Look for ", further, ", further down.");
      return;
    }
    head.textContent = `${found.length === 1 ? "One fault" : `${found.length} faults`} can be behind it:`;
    const list = document.createElement("ol");
    for (const { slug, title, link } of found) {
      const item = document.createElement("li");
      const anchor = document.createElement("a");
      anchor.href = link;
      anchor.dataset.slug = slug;
      anchor.append(...withCode(title));
      item.append(anchor, ": ", ...withCode(decides[slug]));
      list.append(item);
    }
    result.append(list);
  }

  const area = form.querySelector("textarea");
  area.addEventListener("input", () => show(area.value));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  function given() {
    if (!location.hash.startsWith(KEY)) return;
    area.value = decodeURIComponent(location.hash.slice(KEY.length));
    show(area.value);
    form.scrollIntoView();
    area.focus({ preventScroll: true });
  }
  addEventListener("hashchange", given);
  show(area.value); // what a browser keeps over a reload
  given();
})();
