// What the tests ask of the artifacts, in Node and in a browser: train on batches[first..end], evaluate the first batch, save.
const kinds = { float32: Float32Array, int64: BigInt64Array };

export async function drive(ort, Trainer, source, { batches, first, end, from }) {
  const tensor = ({ type, dims, data }) => new ort.Tensor(type, kinds[type].from(data, type === "int64" ? BigInt : Number), dims);
  const fed = batches.map((batch) => Object.fromEntries(Object.entries(batch).map(([name, value]) => [name, tensor(value)])));
  const model = await Trainer.load(ort, source, { intraOpNumThreads: 1 });
  if (from) await model.restore(from);
  const losses = [];
  for (const batch of fed.slice(first, end)) losses.push(await model.step(batch));
  const [output] = Object.values(await model.evaluate(fed[0]));
  return { losses, output: [...output.data], dims: output.dims, saved: model.save() };
}
