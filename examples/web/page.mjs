// Trains the model in ./model on the digits in ./digits.bin, and shows how. ?steps=200 runs so many steps at once.
import { Trainer } from "./pythonop.mjs";
import { curve, image, raster, weights } from "./draw.mjs";

const RUNTIMES = { wasm: "./ort/ort.wasm.bundle.min.mjs", webgpu: "./ort/ort.webgpu.bundle.min.mjs" };
const SHOWN = 32; // test images in the table
const EVERY = 10; // steps between two looks at the test images, at full speed

const id = (name) => document.getElementById(name);
const say = (text, wrong = false) => Object.assign(id("status"), { textContent: text, className: wrong ? "wrong" : "" });
const frame = () => new Promise(requestAnimationFrame);

let ort, model, about, digits; // the runtime, what pythonop.mjs opened, about.json, the data
let start; // the state of a model that has learned nothing yet, to start over from
let losses = [], running = false, milliseconds = 0, looked, own = null; // own: what was drawn by hand
let results = null; // the last look at the test images: probabilities and spikes

async function fetched(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
  return answer;
}

/** The labels of all images, then their pixels, a byte each. */
async function readDigits({ training, test, size }) {
  const bytes = new Uint8Array(await (await fetched("digits.bin")).arrayBuffer());
  const count = training + test;
  return { labels: bytes.subarray(0, count), pixels: Float32Array.from(bytes.subarray(count), (value) => value / 255), area: size * size };
}

const pixelsOf = (first, count) => digits.pixels.subarray(first * digits.area, (first + count) * digits.area);
const images = (pixels) => new ort.Tensor("float32", pixels, [pixels.length / digits.area, digits.area]);

/** The batch of a step: the training images in order, from the front again at the end. */
function batchAt(step) {
  const { batch, training } = about, first = (step * batch) % training;
  const labels = Int32Array.from(digits.labels.subarray(first, first + batch)); // files for WebGPU take no int64
  return { image: images(pixelsOf(first, batch)), target: new ort.Tensor("int32", labels, [batch]) };
}

/** Opens runtime and model. WebAssembly takes one thread: more need headers that a plain server does not send. */
async function open(backend) {
  const runtime = await import(RUNTIMES[backend]);
  runtime.env.wasm.numThreads = 1;
  const options = { executionProviders: [backend], logSeverityLevel: 3 };
  const opened = await Trainer.load(runtime, new URL("model", import.meta.url).href, options);
  [ort, model, start] = [runtime, opened, opened.save()];
}

const stepsMade = () => Number(model.state["state.step"].data[0]);

async function step() {
  const start = performance.now();
  losses.push(await model.step(batchAt(stepsMade())));
  const took = performance.now() - start;
  milliseconds = milliseconds ? 0.95 * milliseconds + 0.05 * took : took;
}

/** Classes' probabilities and the spikes of each image. */
async function look(pixels) {
  const outputs = await model.evaluate({ image: images(pixels) });
  const [logits, spikes] = model.manifest.eval.outputs.map(({ name }) => outputs[name].data);
  const { classes, times, neurons } = about;
  return Array.from({ length: pixels.length / digits.area }, (_, at) => {
    const powers = Array.from(logits.subarray(at * classes, (at + 1) * classes), Math.exp);
    const sum = powers.reduce((a, b) => a + b);
    const shares = powers.map((power) => power / sum);
    return { shares, best: shares.indexOf(Math.max(...shares)), spikes: spikes.subarray(at * times * neurons, (at + 1) * times * neurons) };
  });
}

/** FNV-1a of the whole state. */
const fingerprint = (bytes) => bytes.reduce((hash, byte) => Math.imul(hash ^ byte, 16777619), 2166136261);

// ------------------------------------------------------------------------------------------------------------ pictures

function drawTable() {
  const { training } = about;
  results.slice(0, SHOWN).forEach(({ best }, at) => {
    const label = digits.labels[training + at], right = best === label, button = id("digits").children[at];
    const text = button.lastElementChild;
    text.textContent = right ? `✓ ${best}` : `✗ ${best}`;
    text.className = right ? "right" : "wrong";
    button.setAttribute("aria-label", `a ${label}, taken for ${best}`);
    button.setAttribute("aria-pressed", String(own === null && at === looked));
  });
}

async function drawOne() {
  const { training, size, times, neurons } = about;
  const pixels = own ?? pixelsOf(training + looked, 1);
  const { shares, spikes, best } = own ? (await look(own))[0] : results[looked];
  image(id("look"), pixels, size);
  raster(id("spikes"), spikes, times, neurons);
  id("spikes").setAttribute("aria-label", `${spikes.reduce((a, b) => a + b)} spikes of ${neurons} neurons in ${times} time steps`);
  [...id("classes").children].forEach((row, digit) => {
    row.firstElementChild.style.setProperty("--share", shares[digit].toFixed(3));
    row.lastElementChild.textContent = `${Math.round(100 * shares[digit])} %`;
    row.style.fontWeight = digit === best ? "600" : "";
  });
}

function drawNumbers() {
  const recent = losses.slice(-20);
  id("step").textContent = String(stepsMade());
  id("loss").textContent = recent.length ? (recent.reduce((a, b) => a + b) / recent.length).toFixed(3) : "–";
  id("time").textContent = milliseconds ? `${milliseconds.toFixed(1)} ms` : "–";
  id("curve").setAttribute("aria-label", `The loss of ${losses.length} steps; now ${id("loss").textContent}`);
  curve(id("curve"), losses);
}

async function draw() {
  const { training, test, size } = about;
  results = await look(pixelsOf(training, test));
  const right = results.filter(({ best }, at) => best === digits.labels[training + at]).length;
  id("accuracy").textContent = `${((100 * right) / test).toFixed(1)} %`;
  drawNumbers();
  drawTable();
  await drawOne();
  weights(id("weights"), model.state["param.inner.weight"].data, size, 8);
  id("print").textContent = (fingerprint(model.save()) >>> 0).toString(16).padStart(8, "0");
}

// ------------------------------------------------------------------------------------------------------------ training

/** Steps until somebody pauses, or until the step `end`; pictures are drawn between steps. */
async function train(end = Infinity, speed = () => Number(id("speed").value)) {
  running = true;
  id("run").textContent = "Pause";
  say("Training …");
  let due = performance.now();
  while (running && stepsMade() < end) {
    const wanted = speed();
    const made = stepsMade();
    if (wanted) {
      if (performance.now() >= due) await step(), (due = Math.max(due + 1000 / wanted, performance.now() - 100));
    } else {
      for (let count = 0; count < EVERY && running && stepsMade() < end; count++) await step();
    }
    if (stepsMade() > made) await (stepsMade() % (wanted === 60 ? 4 : 1) ? drawNumbers() : draw());
    await frame();
  }
  running = false;
  id("run").textContent = "Start";
  await draw();
  say(`Paused at step ${stepsMade()}.`);
}

/** One thing at a time: what is asked for while the model trains pauses it first. */
let last = Promise.resolve();
function next(work) {
  running = false;
  last = last.then(work).catch((error) => {
    running = false;
    console.error(error);
    say(String(error.message ?? error), true);
  });
  return last;
}

// --------------------------------------------------------------------------------------------------------------- saved

const KEY = `pythonop ${location.pathname}`;
const encoded = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
const decoded = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

function save() {
  localStorage.setItem(KEY, JSON.stringify({ losses, state: encoded(model.save()) }));
  id("resume").disabled = false;
  say(`Saved step ${stepsMade()} in this browser: ${(model.save().length / 1024).toFixed(0)} KiB of parameters and optimizer state.`);
}

async function resume() {
  const saved = JSON.parse(localStorage.getItem(KEY));
  await model.restore(decoded(saved.state));
  losses = saved.losses;
  showRate();
  await draw();
  say(`Back at step ${stepsMade()}, to the bit.`);
}

async function once() {
  await step();
  await draw();
  say(`Step ${stepsMade()}.`);
}

async function startOver() {
  const { learning_rate } = model.state; // stays what somebody chose
  await model.restore(start);
  model.state.learning_rate = learning_rate;
  losses = [];
  own = null;
  await draw();
  say("At the start again.");
}

function setRate() {
  const rate = 10 ** Number(id("rate").value);
  model.state.learning_rate = new ort.Tensor("float32", [rate], []);
  showRate();
}

function showRate() {
  const rate = model.state.learning_rate.data[0];
  id("rate").value = String(Math.log10(rate));
  id("rate-value").textContent = rate.toPrecision(2);
}

/** The losses of two steps, the second of which knows what the first one learned. */
const trial = async () => [await model.step(batchAt(0)), await model.step(batchAt(1))];

/** Goes on elsewhere, where that opens the model and computes the same. */
async function change(backend) {
  const before = [ort, model], saved = model.save(), name = id("backend").selectedOptions[0].textContent;
  say(`Loading onnxruntime-web for ${name} …`);
  try {
    const expected = await trial();
    await open(backend);
    await model.restore(saved);
    const losses = await trial();
    if (losses.some((loss, at) => !(Math.abs(loss - expected[at]) < 1e-3))) throw new Error(`its losses are ${losses}, not ${expected}`);
    say(`Runs on ${name}, from step ${stepsMade() - 2}.`);
  } catch (error) {
    if (model !== before[1]) await model.dispose();
    [ort, model] = before;
    id("backend").value = "wasm";
    say(`${name} does not train this model here, so WebAssembly goes on: ${error.message ?? error}`, true);
  }
  await model.restore(saved);
  if (model !== before[1]) await before[1].dispose();
  milliseconds = 0;
  await draw();
}

// --------------------------------------------------------------------------------------------------------------- start

function makeTable() {
  for (let at = 0; at < SHOWN; at++) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(document.createElement("canvas"), document.createElement("span"));
    image(button.firstElementChild, pixelsOf(about.training + at, 1), about.size);
    button.addEventListener("click", () => ((own = null), (looked = at), drawTable(), drawOne()));
    id("digits").append(button);
  }
  for (let digit = 0; digit < about.classes; digit++) {
    const row = document.createElement("li");
    row.append(document.createElement("i"), document.createElement("span"));
    id("classes").append(row);
  }
  looked = 0;
}

/** Draws a soft dot of ink where the pointer is. */
function ink(event) {
  if (!event.buttons) return;
  const { size } = about, box = id("look").getBoundingClientRect();
  const [x, y] = [((event.clientX - box.left) / box.width) * size, ((event.clientY - box.top) / box.height) * size];
  own ??= new Float32Array(digits.area);
  own.forEach((value, at) => {
    const distance = Math.hypot((at % size) + 0.5 - x, Math.floor(at / size) + 0.5 - y);
    own[at] = Math.max(value, Math.min(1, Math.max(0, 1.7 - distance)));
  });
  showOwn();
}

function clear() {
  own = new Float32Array(digits.area);
  showOwn();
}

/** What was drawn by hand; a training that runs shows what it makes of it by itself. */
function showOwn() {
  image(id("look"), own, about.size);
  drawTable();
  if (!running) next(drawOne);
}

function connect() {
  id("run").addEventListener("click", () => (running ? (running = false) : next(() => train())));
  id("once").addEventListener("click", () => next(once));
  id("reset").addEventListener("click", () => next(startOver));
  id("save").addEventListener("click", () => next(save));
  id("resume").addEventListener("click", () => next(resume));
  id("rate").addEventListener("input", setRate);
  id("backend").addEventListener("change", () => next(() => change(id("backend").value)));
  id("clear").addEventListener("click", clear);
  for (const kind of ["pointerdown", "pointermove"]) id("look").addEventListener(kind, ink);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => running || next(draw));
  addEventListener("resize", () => running || next(draw));
  for (const name of ["run", "once", "reset", "save", "clear"]) id(name).disabled = false;
  id("resume").disabled = localStorage.getItem(KEY) === null;
}

/** WebGPU where the browser has an adapter for it. */
async function offerWebGPU() {
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  const option = id("backend").options[1];
  if (adapter) option.disabled = false;
  else option.textContent = "WebGPU (not here)";
}

async function main() {
  about = await (await fetched("about.json")).json();
  [digits] = await Promise.all([readDigits(about), open("wasm"), offerWebGPU()]);
  const { versions, exporter } = about;
  id("about").textContent =
    `Exported with pythonop ${versions.pythonop} by ${exporter} of PyTorch ${versions.torch}; runs on onnxruntime-web ${versions["onnxruntime-web"]}. ` +
    `${about.training} digits to learn from and ${about.test} to be tested on, drawn by a script.`;
  makeTable();
  showRate();
  connect();
  await draw();
  say("Ready. Nothing is sent anywhere.");
  const steps = Number(new URLSearchParams(location.search).get("steps"));
  if (steps) next(() => train(steps, () => 0));
}

next(main);
