"use strict";
// Texts of the file reach the page by textContent and title alone.
const data = JSON.parse(document.getElementById("data").textContent);
const flame = document.getElementById("flame");
const facts = document.getElementById("facts");
const LINE = 24;
const READABLE = 34; // pixels of a bar that has room for a word
const time = (seconds) => (seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toFixed(0)} µs`);
const PARTS = new Set(["forward", "gradient", "tangent", "update"]);

function link(branch, parent, part) {
  branch.parent = parent;
  branch.part = branch.kind === "part" ? (PARTS.has(branch.name) ? branch.name : "own") : part;
  for (const inner of branch.inside) link(inner, branch, branch.part);
}
link(data.tree, null, "run");

function bar(branch, left, width, level) {
  const share = branch.seconds / (data.tree.seconds || 1);
  const element = flame.appendChild(document.createElement("button"));
  const kind = branch.kind === "python" ? "python" : `${branch.kind} ${branch.part}`;
  const narrow = (flame.clientWidth * width) / 100 < READABLE;
  element.className = `bar ${kind}${narrow ? " narrow" : ""}`;
  element.style.left = `${left}%`;
  element.style.width = `${width}%`;
  element.style.top = `${level * LINE}px`;
  const text = `${branch.name} · ${time(branch.seconds)} · ${(share * 100).toFixed(1)} %`;
  element.title = text;
  if (!narrow) element.textContent = text;
  element.onclick = () => {
    show(branch);
    facts.replaceChildren();
    for (const [what, said] of [["time in a run", `${time(branch.seconds)}, ${(share * 100).toFixed(1)} %`], ...(branch.facts ?? [])]) {
      const line = facts.appendChild(document.createElement("div"));
      line.textContent = `${what}: ${said}`;
    }
  };
}

let current = data.tree;
function show(chosen) {
  current = chosen;
  flame.replaceChildren();
  let deepest = 0;
  const above = [];
  for (let branch = chosen.parent; branch; branch = branch.parent) above.unshift(branch);
  above.forEach((branch, level) => bar(branch, 0, 100, level));
  function draw(branch, left, width, level) {
    if (width < 0.05) return;
    deepest = Math.max(deepest, level);
    bar(branch, left, width, level);
    for (const inner of branch.inside) {
      const share = branch.seconds ? (inner.seconds / branch.seconds) * width : 0;
      draw(inner, left, share, level + 1);
      left += share;
    }
  }
  draw(chosen, 0, 100, above.length);
  flame.style.height = `${(deepest + 1) * LINE}px`;
}
show(data.tree);
addEventListener("resize", () => show(current));
