// What TypeScript knows of pythonop.mjs: lay this file beside it.

/** What of a tensor the trainer looks at; an `ort.Tensor` is one. */
export interface TensorLike {
  readonly type: string;
  readonly dims: readonly number[];
  readonly data: unknown;
}

/** What of onnxruntime-web or onnxruntime-node the trainer calls. */
export interface Runtime<Tensor extends TensorLike> {
  readonly InferenceSession: { create(...given: never[]): Promise<unknown> };
  readonly Tensor: { new (...given: any[]): Tensor };
}

/** An input or an output in manifest.json; an open size is its name, or null. */
export interface Described {
  name: string;
  dtype: string;
  shape: (number | string | null)[] | null;
}

/** manifest.json of a folder of artifacts. */
export interface Manifest {
  format: 1;
  files: { training: string; eval: string; initial: string; eval_loss?: string; eval_plain?: string; unread?: string };
  inputs: Described[];
  targets: Described[];
  loss: string;
  eval: { inputs: Described[]; state: string[]; outputs: Described[] };
  state: { name: string; next: string; dtype: string; shape: number[]; kind: "parameter" | "buffer" | "optimizer" | "seed" }[];
  hyperparameters: { name: string; dtype: string; shape: number[]; default: number }[];
  optimizer: string;
  python: string[];
}

/** Trains from a folder of artifacts; made by `Trainer.load` alone. */
export class Trainer<Tensor extends TensorLike = TensorLike> {
  private constructor();

  /** Opens the artifacts in a folder (Node; a file: URL, too) or below a URL; `options` are onnxruntime's for a session. */
  static load<Tensor extends TensorLike>(ort: Runtime<Tensor>, source: string | URL, options?: object): Promise<Trainer<Tensor>>;

  readonly manifest: Manifest;

  /** Parameters, buffers, the optimizer's state and the learning rates, by name; empty after `dispose`. */
  state: Record<string, Tensor>;

  /** One training step; gives the loss. A batch may also hold a learning_rate (learning_rate_1, ...) or a seed, as a number. */
  step(batch: Readonly<Record<string, Tensor | number>>): Promise<number>;

  /** The model's outputs by name, in eval mode; with targets in the batch the loss, too. */
  evaluate(batch: Readonly<Record<string, Tensor | number>>): Promise<Record<string, Tensor>>;

  /** The whole state as bytes. */
  save(): ReturnType<Uint8Array["slice"]>; // Uint8Array<ArrayBuffer> where TypeScript has that

  /** Goes on from what `save` gave, to the same bits. */
  restore(saved: ArrayBufferLike | ArrayBufferView): Promise<void>;

  /** Waits for what was called before, then releases onnxruntime's sessions and the state. */
  dispose(): Promise<void>;
}
