"use strict";
// Texts of the file reach the page by textContent alone.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const views = new Map([...document.querySelectorAll(".view")].map((view) => [view.dataset.view, view]));
const past = [];
let current = data.first;

function show(view, back = true) {
  if (!views.has(view) || view === current) return;
  if (back) past.push(current);
  views.get(current).hidden = true;
  views.get(view).hidden = false;
  current = view;
  at("back").hidden = past.length === 0;
  at("where").textContent = data.views[view];
  if (view.startsWith("depth ")) at("depth").value = view;
}

function add(parent, tag, text) {
  const element = parent.appendChild(document.createElement(tag));
  element.textContent = text;
  return element;
}

function mark(name) {
  for (const old of document.querySelectorAll(".hit")) old.classList.remove("hit");
  for (const box of views.get(current).querySelectorAll("[data-box]")) {
    if (box.dataset.box !== name) continue;
    box.classList.add("hit");
    box.scrollIntoView({ block: "center", inline: "center" });
  }
}

function tell(name) {
  const box = data.boxes[name];
  const facts = at("facts");
  facts.replaceChildren();
  if (!box) return;
  add(facts, "h2", box.title);
  if (box.opens && box.opens !== current) add(facts, "button", "Open this module").onclick = () => show(box.opens);
  const list = add(facts, "dl", "");
  for (const [what, text] of box.facts) {
    add(list, "dt", what);
    add(list, "dd", text);
  }
}

function boxOf(event) {
  const box = event.target.closest("[data-box]");
  return box && box.dataset.box;
}

const main = document.querySelector("main");
main.addEventListener("click", (event) => {
  const name = boxOf(event);
  if (!name) return;
  mark(name);
  tell(name);
});
function open(event) {
  const name = boxOf(event);
  if (name && data.boxes[name]?.opens) show(data.boxes[name].opens);
}
main.addEventListener("dblclick", open);
main.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  const name = boxOf(event);
  if (name) tell(name);
  open(event);
});
at("depth").addEventListener("change", (event) => show(event.target.value));
at("back").addEventListener("click", () => {
  const view = past.pop();
  if (view) show(view, false);
  at("back").hidden = past.length === 0;
});
let zoom = 1;
function scale(factor) {
  zoom = Math.min(4, Math.max(0.05, factor));
  for (const view of views.values()) {
    const picture = view.querySelector("svg");
    picture.style.width = `${picture.viewBox.baseVal.width * zoom}px`;
    picture.style.height = "auto";
  }
}
let chosen = false; // a size that somebody asked for stays when the window changes
const choose = (factor) => ((chosen = true), scale(factor));
at("larger").onclick = () => choose(zoom * 1.25);
at("smaller").onclick = () => choose(zoom / 1.25);
const fitting = () => (main.clientWidth - 24) / views.get(current).querySelector("svg").viewBox.baseVal.width;
at("fit").onclick = () => choose(fitting());
function fit() {
  const small = main.clientWidth < 768; // a telephone: fingers make it larger
  if (!chosen) scale(small || fitting() > 0.4 ? Math.min(1, fitting()) : 1); // all of it at once, where it can still be read
}
fit();
addEventListener("resize", fit);
at("search").addEventListener("input", (event) => {
  const wanted = event.target.value.trim().toLowerCase();
  const list = at("found");
  list.replaceChildren();
  list.hidden = !wanted;
  if (!wanted) return;
  const hits = data.nodes.filter(([, text]) => text.toLowerCase().includes(wanted));
  for (const [name, text, view] of hits.slice(0, 50)) {
    add(add(list, "li", ""), "button", text).onclick = () => {
      show(view);
      mark(name);
      tell(name);
    };
  }
  add(list, "li", hits.length > 50 ? `and ${hits.length - 50} more` : `${hits.length} found`).className = "note";
});
