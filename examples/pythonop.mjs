// Training in JavaScript with what `pythonop step TARGET --artifacts DIR --portable` writes; `ort` is onnxruntime-node or onnxruntime-web.
//     const model = await Trainer.load(ort, "https://example.org/artifacts"); // in Node a folder, too
//     const loss = await model.step({ input, target });                       // tensors by the names in manifest.json

const local = (source) => globalThis.process?.versions?.node && !/^(https?|blob|data):/.test(source);

// By a name that bundlers cannot read: in a page they would look for it in vain.
const builtin = (name) => import(/* @vite-ignore */ /* webpackIgnore: true */ `node:${name}`);

// Names come from a file: no character of control, of direction or of no kind reaches a terminal.
const shown = (text) => `${text}`.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
const failed = (text, cause) => new Error(shown(text), cause && { cause });

async function read(path) {
  if (local(path)) return (await builtin("fs/promises")).readFile(path);
  const unreachable = (error) => Promise.reject(failed(`${path} cannot be fetched: ${error.message}`, error));
  const answer = await fetch(path).catch(unreachable);
  if (!answer.ok) throw failed(`${path}: ${answer.status} ${answer.statusText}`);
  const bytes = new Uint8Array(await answer.arrayBuffer().catch(unreachable));
  if (/^\s*<(!doctype|html)/i.test(new TextDecoder().decode(bytes.subarray(0, 100))))
    throw failed(`${path} is a page of HTML: the server has no such file, and answers with a page instead`);
  return bytes;
}

// One thing at a time for all trainers of one onnxruntime: its WebAssembly cannot run two sessions at once.
const turns = new WeakMap();

function inTurn({ InferenceSession }, work) {
  const turn = (turns.get(InferenceSession) ?? Promise.resolve()).then(work);
  turns.set(InferenceSession, turn.catch(() => {}));
  return turn;
}

async function readManifest(path) {
  const text = new TextDecoder().decode(await read(path));
  try {
    return JSON.parse(text);
  } catch (error) {
    throw failed(`${path} is cut off, or damaged: ${error.message}`);
  }
}

const fits = (a, b) => a && b && a.type === b.type && `${a.dims}` === `${b.dims}`;

// A manifest comes with its files: what it names lies beside it, and every tensor that carries a value from step to step is told of.
function check(source, manifest) {
  const { format, python, files, state, inputs, loss, targets } = manifest ?? {};
  if (typeof format === "number" && format !== 1) throw failed(`${source}: manifest.json has format ${format}, this module reads format 1`);
  if (format !== 1 || !files || ![python, state, inputs, targets].every(Array.isArray) || !state.length || typeof loss !== "string")
    throw failed(`${source}: manifest.json is damaged: it has no format, or names no files, no state, no inputs, no targets or no loss`);
  if (python.length) throw failed(`${source} needs Python for ${python.join(", ")}: export with --portable; --portable-only says what cannot be`);
  for (const file of [files.training, files.eval, files.initial, ...(files.eval_loss ? [files.eval_loss] : [])])
    if (typeof file !== "string" || !/^[^/\\:?#%\p{C}]+$/u.test(file) || /^\.\.?$/.test(file))
      throw failed(`${source}: manifest.json names the file ${JSON.stringify(file)}, which is not beside it`);
}

// What JavaScript holds the values of a tensor in, by their type in the manifest.
const ARRAYS = {
  bool: "Uint8Array", int8: "Int8Array", uint8: "Uint8Array", int16: "Int16Array", uint16: "Uint16Array", int32: "Int32Array", uint32: "Uint32Array",
  int64: "BigInt64Array", uint64: "BigUint64Array", float32: "Float32Array", float64: "Float64Array",
  float16: globalThis.Float16Array ? "Float16Array" : "Uint16Array of bits",
};

const isTensor = (value) => typeof value?.type === "string" && Array.isArray(value.dims);
const kind = (value) => (value == null ? String(value) : `of the type ${typeof value === "object" ? value.constructor?.name : typeof value}`);

function checkTypes(inputs, batch) {
  for (const { name, dtype } of inputs) {
    const { type } = batch[name];
    if (typeof dtype === "string" && type !== dtype)
      throw failed(`${name} has the type ${type}, the file takes ${dtype}: give new ort.Tensor("${dtype}", ${ARRAYS[dtype] ?? "values"}, sizes)`);
  }
}

// Sizes: those that the file has fixed, and those that several tensors share by a name.
function checkSizes(inputs, batch) {
  const known = Object.create(null);
  for (const { name, shape } of inputs.filter(({ shape }) => Array.isArray(shape))) {
    const { dims } = batch[name];
    if (dims?.length !== shape.length) throw failed(`${name} has the shape [${dims}], the file takes [${shape}]`);
    shape.forEach((size, axis) => {
      if (typeof size === "number" && size !== dims[axis]) {
        const open = axis ? "" : ", or export with --dynamic for batches of any size";
        throw failed(`${name} has the shape [${dims}], the file takes [${shape}]: axis ${axis} is fixed, give ${size} there${open}`);
      }
      if (typeof size !== "string" || !/^\w+$/.test(size)) return;
      const [first, number] = (known[size] ??= [name, dims[axis]]);
      if (number !== dims[axis]) throw failed(`${first} has ${number} ${size}, ${name} has ${dims[axis]}: the file has one size ${size} for both`);
    });
  }
}

const pick = (names, values) => Object.fromEntries(names.filter((name) => Object.hasOwn(values, name)).map((name) => [name, values[name]]));
const described = (state) => Object.entries(state).map(([name, { type, dims, data }]) => ({ name, type, dims, bytes: data.byteLength }));

/** The bytes that somebody gives as a saved state, in memory of their own. */
function bytesOf(saved) {
  const give = "give what save() gave, a Uint8Array, or the ArrayBuffer of its bytes";
  if (saved == null) throw failed(`what was saved is ${saved}: nothing was found there; ${give}`);
  const isBuffer = /^\[object (Shared)?ArrayBuffer\]$/.test(Object.prototype.toString.call(saved)); // also one of another frame
  if (!isBuffer && !ArrayBuffer.isView(saved)) {
    const has = (name) => typeof saved[name] === "function";
    throw failed(`what was saved is ${kind(saved)}: ${has("arrayBuffer") ? "give await saved.arrayBuffer()" : has("then") ? "await it" : give}`);
  }
  if (!saved.byteLength) throw failed(`what was saved is empty: ${give}`);
  return (isBuffer ? new Uint8Array(saved) : new Uint8Array(saved.buffer, saved.byteOffset, saved.byteLength)).slice();
}

/** The line in front of a saved state, and where its values begin; it is compared by what it says, not by how it is spelled. */
function headOf(bytes) {
  const at = bytes.indexOf(10) + 1;
  try {
    const head = at && JSON.parse(new TextDecoder().decode(bytes.subarray(0, at)));
    if (Array.isArray(head) && head.every(({ name, type, dims }) => typeof name === "string" && typeof type === "string" && Array.isArray(dims)))
      return [head, at];
  } catch {} // the next line says it
  throw failed("what was saved does not begin with the names of its values, it is cut off or no state: give what save() of a trainer gave");
}

/** Refuses a saved state that has other names, types or sizes than a trainer's. */
function checkHead(head, expected) {
  const found = new Map(head.map((entry) => [entry.name, entry])), known = new Set(expected.map(({ name }) => name));
  const text = ({ type, dims }) => `${type} [${dims}]`;
  const differ = ({ name, ...entry }) => {
    if (!found.has(name)) return `it lacks ${name}`;
    return text(entry) !== text(found.get(name)) && `${name} is ${text(found.get(name))} in it, and ${text(entry)} here`;
  };
  const extra = head.find(({ name }) => !known.has(name));
  const [what] = [...expected.map(differ).filter(Boolean), ...(extra ? [`it has ${extra.name}`] : [])];
  if (what) throw failed(`what was saved is the state of another model or optimizer: ${what}. Load the folder that it was trained with`);
  if (head.length !== known.size) throw failed("what was saved is damaged: it names a value twice");
}

// That the manifest says of every tensor of the state what it becomes.
function checkState(source, manifest, training, state) {
  const [names, outputs] = [new Set(manifest.state.map(({ name }) => name)), new Set(training.outputNames)];
  for (const { name, next } of manifest.state)
    if (!state[name] || !training.inputNames.includes(name) || !outputs.has(next))
      throw failed(`${source}: manifest.json is damaged: no file has the state ${name}, or ${next}`);
  if (!outputs.has(manifest.loss)) throw failed(`${source}: manifest.json is damaged: no file gives the loss ${manifest.loss}`);
  const given = new Set((manifest.hyperparameters ?? []).map(({ name }) => name));
  const left = Object.keys(state).filter((name) => !names.has(name) && !given.has(name));
  if (left.length) throw failed(`${source}: manifest.json is damaged: it does not say what ${left} becomes in a step`);
}

export class Trainer {
  #released = false;

  /** Opens the artifacts in a folder (Node; a file: URL, too) or below a URL; `options` are onnxruntime's for a session. */
  static async load(ort, source, options = {}) {
    if (!ort?.InferenceSession || !ort.Tensor) throw failed(`Trainer.load takes what "import * as ort" of onnxruntime gives first, not ${kind(ort)}`);
    source = String(source);
    if (local(source) && source.startsWith("file:")) source = (await builtin("url")).fileURLToPath(source);
    source = source.replace(/\/$/, "");
    const manifest = await readManifest(`${source}/manifest.json`);
    check(source, manifest);
    const { files } = manifest;
    const sessions = [];
    const open = async (file) => {
      const [path, model] = [`${source}/${file}`, local(source) ? `${source}/${file}` : await read(`${source}/${file}`)]; // others run meanwhile
      try {
        sessions.push(await inTurn(ort, () => ort.InferenceSession.create(model, options)));
      } catch (error) {
        throw failed(`${path} cannot be opened: ${error.message ?? error}`, error);
      }
      return sessions.at(-1);
    };
    try {
      const [training, evaluation, initial] = [await open(files.training), await open(files.eval), await open(files.initial)];
      const withLoss = files.eval_loss && (await open(files.eval_loss));
      const state = { ...(await inTurn(ort, () => initial.run({}))) };
      checkState(source, manifest, training, state);
      await inTurn(ort, () => initial.release());
      return Object.assign(new Trainer(), { ort, manifest, training, evaluation, withLoss, state });
    } catch (error) {
      await inTurn(ort, () => Promise.allSettled(sessions.map((session) => session.release())));
      throw error;
    }
  }

  /**
   * One training step; gives the loss. A batch may also hold a learning_rate (learning_rate_1, ...) for this step, as a number.
   * Steps, evaluations and restores of all trainers run one after the other, as they were called.
   */
  step(batch) {
    return this.#inTurn(() => this.#run(batch));
  }

  #inTurn(work) {
    return inTurn(this.ort, () => (this.#check(), work()));
  }

  #check() {
    if (this.#released) throw failed("this trainer was disposed of: load another one with Trainer.load");
  }

  async #run(batch) {
    const results = await this.training.run(pick(this.training.inputNames, { ...this.state, ...this.#given(batch) }));
    const wrong = this.manifest.state.find(({ name, next }) => !fits(results[next], this.state[name]));
    if (wrong) throw failed(`the step gives ${wrong.next} of another type or shape than ${wrong.name}: the artifacts are damaged`);
    for (const { name, next } of this.manifest.state) this.state[name] = results[next];
    return Number(results[this.manifest.loss].data[0]);
  }

  #given(batch) {
    if (typeof batch !== "object" || !batch) throw failed(`a batch is ${kind(batch)}: give an object with a tensor for each of ${this.#names()}`);
    const unknown = Object.keys(batch).filter((name) => ![...this.training.inputNames, ...this.evaluation.inputNames].includes(name));
    if (unknown.length) throw failed(`the file has no input ${unknown}: it takes ${this.#names()}`);
    const given = Object.fromEntries(Object.entries(batch).map(([name, value]) => [name, this.#tensor(name, value)]));
    const inputs = [...this.manifest.inputs, ...this.manifest.targets].filter(({ name }) => Object.hasOwn(given, name));
    checkTypes([...inputs, ...Object.keys(pick(Object.keys(given), this.state)).map((name) => ({ name, dtype: this.state[name].type }))], given);
    checkSizes(inputs, given);
    return given;
  }

  #names() {
    return [...this.manifest.inputs, ...this.manifest.targets].map(({ name }) => name);
  }

  /** A number as the tensor of the state that it stands for; tensors are themselves. */
  #tensor(name, value) {
    const like = Object.hasOwn(this.state, name) ? this.state[name] : null;
    if (like && typeof value === "number") {
      const whole = /int/.test(like.type), possible = whole ? Number.isInteger(value) : Number.isFinite(value);
      if (!possible) throw failed(`${name} is ${value}: give a ${whole ? "whole" : "finite"} number`);
      return new this.ort.Tensor(like.type, like.data.constructor.of(whole && like.type.endsWith("64") ? BigInt(value) : value), like.dims);
    }
    if (!isTensor(value)) throw failed(`${name} is ${kind(value)}: give ${like ? "a number or " : ""}an ort.Tensor`);
    if (like && /^float(32|64)$/.test(like.type) && value.data.some((one) => !Number.isFinite(one)))
      throw failed(`${name} is ${value.data.find((one) => !Number.isFinite(one))}: give a finite number`);
    return value;
  }

  /** The model's outputs by name, in eval mode and with what was learned so far; with targets in the batch the loss, too. */
  evaluate(batch) {
    return this.#inTurn(() => {
      const given = this.#given(batch);
      const session = this.withLoss && this.manifest.targets.every(({ name }) => Object.hasOwn(given, name)) ? this.withLoss : this.evaluation;
      return session.run(pick(session.inputNames, { ...this.state, ...given }));
    });
  }

  /** The whole state as bytes: a line of JSON with names, types, sizes, then the values. */
  save() {
    this.#check();
    const head = new TextEncoder().encode(JSON.stringify(described(this.state)) + "\n");
    const values = Object.values(this.state).map(({ data }) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    const saved = new Uint8Array([head, ...values].reduce((sum, part) => sum + part.length, 0));
    [head, ...values].reduce((at, part) => (saved.set(part, at), at + part.length), 0);
    return saved;
  }

  /** Goes on from what save() gave (or an ArrayBuffer of it), to the same bits; `await` it, as it waits for a step that runs. */
  async restore(saved) {
    const bytes = bytesOf(saved); // a copy: a Buffer of Node shares its memory
    return this.#inTurn(() => this.#restored(bytes));
  }

  #restored(bytes) {
    let [head, at] = headOf(bytes);
    const expected = described(this.state);
    checkHead(head, expected);
    const sizes = Object.fromEntries(expected.map(({ name, bytes: size }) => [name, size]));
    if (bytes.length - at !== expected.reduce((sum, { bytes: size }) => sum + size, 0)) throw failed("what was saved is cut off, or damaged");
    const values = Object.fromEntries(head.map(({ name }) => [name, bytes.slice(at, (at += sizes[name])).buffer]));
    const tensor = ({ name, type, dims }) => [name, new this.ort.Tensor(type, new this.state[name].data.constructor(values[name]), dims)];
    this.state = Object.fromEntries(expected.map(tensor));
  }

  /** Waits for what was called before, then releases onnxruntime's sessions and the state. Only load() makes another trainer. */
  dispose() {
    return inTurn(this.ort, async () => {
      if (this.#released) return;
      this.#released = true;
      this.state = {};
      for (const session of [this.training, this.evaluation, this.withLoss]) await session?.release();
    });
  }
}
