// Training in JavaScript with what `pythonop step TARGET --artifacts DIR --portable` writes; `ort` is onnxruntime-node or onnxruntime-web.
//     const model = await Trainer.load(ort, "https://example.org/artifacts"); // in Node a folder, too
//     const loss = await model.step({ input, target });                       // tensors by the names in manifest.json

const local = (source) => globalThis.process?.versions?.node && !/^(https?|blob|data):/.test(source);

// By a name that bundlers cannot read: in a page they would look for it in vain.
const builtin = (name) => import(/* @vite-ignore */ /* webpackIgnore: true */ `node:${name}`);

// Names come from a file: no character of control, of direction or of no kind reaches a terminal.
const shown = (text) => `${text}`.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
const failed = (text) => new Error(shown(text));

async function read(path) {
  if (local(path)) return (await builtin("fs/promises")).readFile(path);
  const answer = await fetch(path);
  if (!answer.ok) throw failed(`${path}: ${answer.status} ${answer.statusText}`);
  return new Uint8Array(await answer.arrayBuffer());
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

const isTensor = (value) => typeof value?.type === "string" && Array.isArray(value.dims);
const kind = (value) => (value == null ? String(value) : `of the type ${typeof value === "object" ? value.constructor?.name : typeof value}`);

// Sizes: those that the file has fixed, and those that several tensors share by a name.
function checkSizes(inputs, batch) {
  const known = Object.create(null);
  for (const { name, shape } of inputs.filter(({ name }) => Object.hasOwn(batch, name))) {
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

export class Trainer {
  /** Opens the artifacts in a folder (Node; a file: URL, too) or below a URL; `options` are onnxruntime's for a session. */
  static async load(ort, source, options = {}) {
    source = String(source);
    if (local(source) && source.startsWith("file:")) source = (await builtin("url")).fileURLToPath(source);
    source = source.replace(/\/$/, "");
    const manifest = await readManifest(`${source}/manifest.json`);
    check(source, manifest);
    const { files } = manifest;
    const place = (file) => (local(source) ? `${source}/${file}` : read(`${source}/${file}`));
    const open = async (file) => {
      const model = await place(file); // others run meanwhile
      return inTurn(ort, () => ort.InferenceSession.create(model, options));
    };
    const [training, evaluation, initial] = [await open(files.training), await open(files.eval), await open(files.initial)];
    const withLoss = files.eval_loss && (await open(files.eval_loss));
    const state = { ...(await inTurn(ort, () => initial.run({}))) };
    const [names, outputs] = [new Set(manifest.state.map(({ name }) => name)), new Set(training.outputNames)];
    for (const { name, next } of manifest.state)
      if (!state[name] || !training.inputNames.includes(name) || !outputs.has(next))
        throw failed(`${source}: manifest.json is damaged: no file has the state ${name}, or ${next}`);
    const given = new Set((manifest.hyperparameters ?? []).map(({ name }) => name));
    const left = Object.keys(state).filter((name) => !names.has(name) && !given.has(name));
    if (left.length) throw failed(`${source}: manifest.json is damaged: it does not say what ${left} becomes in a step`);
    return Object.assign(new Trainer(), { ort, manifest, training, evaluation, withLoss, state });
  }

  /**
   * One training step; gives the loss. A batch may also hold a learning_rate (learning_rate_1, ...) for this step, as a number.
   * Steps, evaluations and restores of all trainers run one after the other, as they were called.
   */
  step(batch) {
    return inTurn(this.ort, () => this.#run(batch));
  }

  async #run(batch) {
    const results = await this.training.run(pick(this.training.inputNames, { ...this.state, ...this.#given(batch) }));
    const wrong = this.manifest.state.find(({ name, next }) => !fits(results[next], this.state[name]));
    if (wrong) throw failed(`the step gives ${wrong.next} of another type or shape than ${wrong.name}: the artifacts are damaged`);
    for (const { name, next } of this.manifest.state) this.state[name] = results[next];
    return Number(results[this.manifest.loss].data[0]);
  }

  #given(batch) {
    const unknown = Object.keys(batch).filter((name) => ![...this.training.inputNames, ...this.evaluation.inputNames].includes(name));
    if (unknown.length) throw failed(`the file has no input ${unknown}: it takes ${[...this.manifest.inputs, ...this.manifest.targets].map(({ name }) => name)}`);
    const tensor = (name, value) => {
      const like = this.state[name];
      if (typeof value !== "number" || !like) return value;
      return new this.ort.Tensor(like.type, like.data.constructor.of(like.type === "int64" ? BigInt(value) : value), like.dims);
    };
    const given = Object.fromEntries(Object.entries(batch).map(([name, value]) => [name, tensor(name, value)]));
    for (const [name, value] of Object.entries(given))
      if (!isTensor(value)) throw failed(`${name} is ${kind(value)}: give ${this.state[name] ? "a number or " : ""}an ort.Tensor`);
    checkSizes([...this.manifest.inputs, ...this.manifest.targets], batch);
    return given;
  }

  /** The model's outputs by name, in eval mode and with what was learned so far; with targets in the batch the loss, too. */
  evaluate(batch) {
    return inTurn(this.ort, () => {
      const given = this.#given(batch);
      const session = this.withLoss && this.manifest.targets.every(({ name }) => Object.hasOwn(given, name)) ? this.withLoss : this.evaluation;
      return session.run(pick(session.inputNames, { ...this.state, ...given }));
    });
  }

  /** The whole state as bytes: a line of JSON with names, types, sizes, then the values. */
  save() {
    const head = new TextEncoder().encode(JSON.stringify(described(this.state)) + "\n");
    const values = Object.values(this.state).map(({ data }) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    const saved = new Uint8Array([head, ...values].reduce((sum, part) => sum + part.length, 0));
    [head, ...values].reduce((at, part) => (saved.set(part, at), at + part.length), 0);
    return saved;
  }

  /** Goes on from what save() gave, to the same bits; `await` it, as it waits for a step that runs. */
  async restore(saved) {
    const bytes = new Uint8Array(saved); // a copy: a Buffer of Node shares its memory
    return inTurn(this.ort, () => this.#restored(bytes));
  }

  #restored(bytes) {
    let at = bytes.indexOf(10) + 1;
    const head = new TextDecoder().decode(bytes.subarray(0, at)).trim();
    if (head !== JSON.stringify(described(this.state))) throw failed("what was saved is the state of another model or optimizer");
    if (bytes.length - at !== JSON.parse(head).reduce((sum, { bytes: size }) => sum + size, 0)) throw failed("what was saved is cut off, or damaged");
    const tensor = ({ name, type, dims, bytes: size }) =>
      [name, new this.ort.Tensor(type, new this.state[name].data.constructor(bytes.slice(at, (at += size)).buffer), dims)];
    this.state = Object.fromEntries(JSON.parse(head).map(tensor));
  }
}
