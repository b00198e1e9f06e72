// What tests/providers/sessions.py asks of onnxruntime-web, in Node and in a page: open a model, run it; models and tensors come as base64.
const arrays = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, uint64: BigUint64Array, int32: Int32Array, uint32: Uint32Array,
  int16: Int16Array, uint16: Uint16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
  float16: typeof Float16Array === "undefined" ? Uint16Array : Float16Array,
};
const decoded = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

function encoded({ buffer, byteOffset, byteLength }) {
  const bytes = new Uint8Array(buffer, byteOffset, byteLength);
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(text);
}

/** Answers questions, one after the other; `options` are onnxruntime's for each session. */
export function answering(ort, options) {
  let session;
  const tensors = (given) => {
    const feeds = {};
    for (const [name, { type, dims, data }] of Object.entries(given)) {
      if (!session.inputNames.includes(name)) continue;
      if (!(type in arrays)) throw new Error(`onnxruntime-web takes no tensor of ${type}`);
      feeds[name] = new ort.Tensor(type, new arrays[type](decoded(data).buffer), dims);
    }
    return feeds;
  };
  return async (asked) => {
    const answer = {};
    try {
      if (asked.model !== undefined) {
        await session?.release();
        session = undefined;
        session = await ort.InferenceSession.create(decoded(asked.model), { ...options, ...asked.options });
      } else {
        answer.results = {};
        const start = performance.now(), results = await session.run(tensors(asked.feeds));
        for (const [name, tensor] of Object.entries(results))
          answer.results[name] = { type: tensor.type, dims: tensor.dims, data: encoded(await tensor.getData()) };
        answer.took = performance.now() - start;
      }
    } catch (error) {
      answer.error = String(error?.message ?? error);
    }
    return answer;
  };
}
