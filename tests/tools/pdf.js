({pages, author, subject}) => {
  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    element.append(...children);
    return element;
  };
  // "chapters/08b_forward#nan" becomes "08b_forward.nan"
  const short = (name) => name.split("/").pop();
  const place = (name, id) => (id ? `${short(name)}.${id}` : short(name));
  const known = new Set(pages.map((page) => page.name));
  const pageOf = (id) => make("span", { class: "page-of", "data-page-of": id }, "000");
  const words = (heading) => {
    const copy = heading.cloneNode(true);
    for (const link of copy.querySelectorAll(".headerlink")) link.remove();
    for (const element of [copy, ...copy.querySelectorAll("[id]")]) element.removeAttribute("id");
    return copy.childNodes;
  };

  function article(page) {
    const source = new DOMParser().parseFromString(page.html, "text/html").querySelector("article");
    for (const useless of source.querySelectorAll("script, .headerlink, form, button")) useless.remove();
    for (const element of source.querySelectorAll("[id]")) element.id = place(page.name, element.id);
    for (const attribute of ["for", "aria-labelledby", "aria-describedby", "headers", "data-figure"])
      for (const element of source.querySelectorAll(`[${attribute}]`))
        element.setAttribute(attribute, element.getAttribute(attribute).split(" ")
          .map((id) => place(page.name, id)).join(" "));
    const address = new URL(page.name, "file:///");
    for (const link of source.querySelectorAll("a[href]")) {
      const target = new URL(link.getAttribute("href"), address);
      if (target.protocol !== "file:") continue;
      const name = target.pathname.slice(1).replace(/\.html$/, "");
      if (known.has(name)) link.href = `#${place(name, decodeURIComponent(target.hash.slice(1)))}`;
      else link.replaceWith(...link.childNodes);
    }
    for (const image of source.querySelectorAll("img")) image.loading = "eager";
    // The drawings in it say what they show; around them, a figure would be one without words.
    for (const frames of source.querySelectorAll(".frames")) frames.closest("figure")?.setAttribute("role", "group");
    // Read aloud, MathML on paper is a row of letters; its LaTeX is not.
    for (const formula of source.querySelectorAll(".math:has(annotation)")) {
      const box = formula.querySelector(".formula") ?? formula;
      box.setAttribute("role", "img");
      box.ariaLabel = `formula: ${formula.querySelector("annotation").textContent.trim()}`;
    }
    for (const heading of source.querySelectorAll("h1, h2, h3, h4, h5, h6"))
      heading.ariaLevel = Math.min(6, Number(heading.tagName[1]) + page.depth - 1);
    // Chromium breaks a line between a formula and the comma after it.
    for (const formula of source.querySelectorAll("span.math")) {
      const rest = formula.nextSibling;
      const mark = rest?.nodeType === Node.TEXT_NODE && rest.data.match(/^[.,;:?!)’”]+/)?.[0];
      if (!mark) continue;
      rest.data = rest.data.slice(mark.length);
      const together = make("span", { style: "white-space: nowrap" });
      formula.replaceWith(together);
      together.append(formula, mark);
    }
    // A link to a section has to lead to its heading, which can stand a page after the section's
    // own beginning: a heading goes with what follows it.
    for (const inner of source.querySelectorAll("section[id]")) {
      const heading = inner.querySelector(":scope > :is(h1, h2, h3, h4, h5, h6)");
      if (!heading) continue;
      for (const label of inner.querySelectorAll(":scope > span[id]:empty"))
        if (label.compareDocumentPosition(heading) & Node.DOCUMENT_POSITION_FOLLOWING)
          heading.prepend(label);
      heading.id = inner.id;
      inner.removeAttribute("id");
    }
    const section = make("section", { id: short(page.name), class: "page" });
    section.append(...source.childNodes);
    return section;
  }

  // Hints and solutions, away from the exercise they belong to.
  const answers = make("section", { id: "answers", class: "page answers" },
    make("h1", { "aria-level": 1 }, "Hints and answers"),
    make("p", {}, "What the pages fold away until you open it, in the order of the chapters."));
  let count = 0;
  function moveAnswers(section, page) {
    const kept = [];
    let exercise = null, heading = null;
    for (const element of section.querySelectorAll("h2, h3, .admonition.exercise, details")) {
      if (/^H\d$/.test(element.tagName)) { heading = element; exercise = null; continue; }
      if (element.tagName !== "DETAILS") { exercise = element.querySelector(".admonition-title"); continue; }
      if (element.parentElement.closest("details")) continue;
      const hint = element.matches(".sd-dropdown");
      if (!hint && !element.closest(".tag_hide-cell")) continue;
      const summary = element.querySelector(".sd-summary-text, .collapsed") ?? element.firstElementChild;
      const text = summary.textContent.trim().replace(/^Show /, "");
      const label = text[0].toUpperCase() + text.slice(1);
      const id = `answer-${++count}`, back = `question-${count}`;
      element.replaceWith(make("p", { class: "moved", id: back },
        make("a", { href: `#${id}` }, `${label}: page `, pageOf(id))));
      for (const useless of element.querySelectorAll(":scope > summary")) useless.remove();
      const box = make("div", { class: "answer", id },
        make("p", { class: "answer-title" },
          make("a", { href: `#${back}` }, label, " (page ", pageOf(back), ")")));
      box.append(...element.childNodes);
      const about = exercise ?? heading ?? section.querySelector("h1");
      if (kept.about !== about)
        kept.push(make("h3", { "aria-level": 3, class: "answer-about" }, ...words(about)));
      kept.about = about;
      kept.push(box);
    }
    if (kept.length)
      answers.append(make("section", { id: `answers.${short(page.name)}` },
        make("h2", { "aria-level": 2 }, ...words(section.querySelector("h1"))), ...kept));
    for (const details of section.querySelectorAll("details")) {
      details.querySelector(":scope > summary")?.remove();
      details.replaceWith(make("div", { class: "folded" }, ...details.childNodes));
    }
  }

  // A tag for each name, dot and blank of the code would be most of the file: those that look like
  // the text around them go.
  function flatten() {
    const plain = new Map();
    for (const span of document.querySelectorAll("pre span, code span")) {
      if (!plain.has(span.className)) {
        const [own, around] = [span, span.closest("pre, code")].map((e) => getComputedStyle(e));
        plain.set(span.className, ["color", "fontWeight", "fontStyle", "backgroundColor"].every(
          (name) => own[name] === around[name]));
      }
      if (plain.get(span.className)) span.replaceWith(...span.childNodes);
    }
    for (const code of document.querySelectorAll("pre, code")) code.normalize();
  }

  const book = make("article", { class: "bd-article" });
  const list = make("nav", { class: "book-contents", "aria-label": "Contents" });
  const entry = (id, depth, children) => list.append(make("p", { class: `depth-${depth}` },
    make("a", { href: `#${id}` }, make("span", {}, ...children), pageOf(id))));
  const names = [];
  for (const page of pages) {
    const section = article(page);
    moveAnswers(section, page);
    const title = section.querySelector("h1");
    if (page.depth === 1) {
      const cover = make("header", { class: "title-page" });
      title.before(cover);
      cover.append(title, make("p", { class: "subtitle" }, subject), make("p", { class: "author" }, author));
      // The site's map: the contents follow, with page numbers.
      for (const map of section.querySelectorAll(".toctree-wrapper, .tableofcontents-wrapper")) {
        const around = map.parentElement;
        map.remove();
        if ([...around.children].every((child) => /^(H\d|SPAN)$/.test(child.tagName))) around.remove();
      }
      book.append(section, make("section", { id: "contents", class: "page" },
        make("h1", { "aria-level": 1 }, "Contents"), list));
      continue;
    }
    if (page.part) {
      const id = `part-${page.part.split(":")[0].replaceAll(" ", "-").toLowerCase()}`;
      section.prepend(make("h1", { id, class: "part", "aria-level": 1 }, page.part));
      entry(id, 1, [page.part]);
    }
    entry(short(page.name), page.depth, words(title));
    for (const heading of section.querySelectorAll("h2"))
      entry(heading.id, page.depth + 1, words(heading));
    book.append(section);
    // A running head for each chapter: a page of its own name.
    const name = `p${names.length}`;
    section.style.page = name;
    names.push([name, title.textContent.trim()]);
  }
  entry("answers", 1, ["Hints and answers"]);
  book.append(answers);
  document.body.replaceChildren(make("main", { class: "bd-main" },
    make("div", { class: "bd-content" }, make("div", { class: "bd-article-container" }, book))));
  document.body.className = "book-print";
  for (const dead of document.querySelectorAll("script, link[rel=next], link[rel=prev]")) dead.remove();
  flatten();
  document.title = book.querySelector("h1").textContent.trim();
  document.head.append(make("style", {}, names.map(([name, text]) =>
    `@page ${name} { @top-left { content: ${JSON.stringify(text)}; } }`).join("\n")));
  return Promise.all([...document.images].map((image) => image.decode())).then(() => null);
}
