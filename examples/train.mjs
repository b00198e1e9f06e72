// A training loop without Python: npm install onnxruntime-node, then
//
//     node examples/train.mjs step.onnx batches.json
//
// batches.json is a list of {"input": {"type": "float32", "dims": [5, 4], "data": [...]}, "target": {...}}.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const ort = createRequire(process.cwd() + "/")("onnxruntime-node");
const [path, data] = process.argv.slice(2);
const kinds = { float32: Float32Array, float64: Float64Array, int64: BigInt64Array };
const tensor = ({ type, dims, data }) => new ort.Tensor(type, kinds[type].from(data, type === "int64" ? BigInt : Number), dims);

const initial = await ort.InferenceSession.create(path.replace(/\.onnx$/, ".init.onnx"));
const step = await ort.InferenceSession.create(path);
const state = await initial.run({});
for (const batch of JSON.parse(readFileSync(data))) {
  const feeds = { ...state };
  for (const name in batch) feeds[name] = tensor(batch[name]);
  const results = await step.run(feeds);
  for (const name in results) if (name.endsWith(".next")) state[name.slice(0, -".next".length)] = results[name];
  console.log(results.loss.data[0]);
}
