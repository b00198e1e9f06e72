// Pictures on canvases: the curve of the loss, images, spikes, weights. Colours are those of style.css, light or dark.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A context in CSS pixels, as sharp as the screen. */
function context(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = globalThis.devicePixelRatio || 1;
  const [wide, high] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/** The mean of each value and those before it, of 20 at most. */
function smooth(values) {
  let sum = 0;
  return values.map((value, at) => (sum += value - (at >= 20 ? values[at - 20] : 0)) / Math.min(at + 1, 20));
}

function line(pen, values, place, style, width) {
  pen.beginPath();
  values.forEach((value, at) => pen.lineTo(...place(at, value)));
  Object.assign(pen, { strokeStyle: style, lineWidth: width, lineJoin: "round" });
  pen.stroke();
}

/** The loss of each step, and its mean over 20 steps. */
export function curve(canvas, losses) {
  const { pen, width, height } = context(canvas);
  const [left, bottom, top, right] = [30, height - 22, 8, width - 6];
  const steps = Math.max(100, losses.length), highest = Math.max(2.5, ...losses.slice(0, 50));
  const place = (at, value) => [left + (right - left) * (at / (steps - 1)), bottom - (bottom - top) * Math.min(1, value / highest)];
  Object.assign(pen, { font: "12px system-ui, sans-serif", fillStyle: colour("soft"), strokeStyle: colour("line"), lineWidth: 1 });
  for (let value = 0; value <= highest; value += highest > 5 ? 2 : 0.5) {
    const [, y] = place(0, value);
    pen.beginPath(), pen.moveTo(left, y), pen.lineTo(right, y), pen.stroke();
    Object.assign(pen, { textAlign: "right", textBaseline: "middle" });
    pen.fillText(value.toFixed(1), left - 6, y);
  }
  Object.assign(pen, { textBaseline: "top" });
  for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
    pen.textAlign = align;
    pen.fillText(share ? Math.round(steps * share) : "step 0", left + (right - left) * share, bottom + 6);
  }
  if (losses.length < 2) return;
  pen.globalAlpha = 0.35;
  line(pen, losses, place, colour("accent"), 1);
  pen.globalAlpha = 1;
  line(pen, smooth(losses), place, colour("accent"), 2.5);
}

/** Gray pixels from 0 to 1, a pixel of the canvas each: white on black. */
export function image(canvas, pixels, size) {
  Object.assign(canvas, { width: size, height: size });
  const shown = new ImageData(size, size);
  pixels.forEach((value, at) => shown.data.set([255, 255, 255, 255 * value], 4 * at));
  canvas.getContext("2d").putImageData(shown, 0, 0);
}

/** Spikes (times, neurons) as marks: neurons down, time to the right. */
export function raster(canvas, spikes, times, neurons) {
  const { pen, width, height } = context(canvas);
  const [wide, high] = [width / times, height / neurons];
  pen.fillStyle = colour("line");
  for (let time = 0; time <= times; time++) pen.fillRect(Math.min(width - 1, time * wide), 0, 1, height);
  pen.fillStyle = colour("accent");
  spikes.forEach((spike, at) => {
    if (spike) pen.fillRect((Math.floor(at / neurons) + 0.18) * wide, ((at % neurons) + 0.12) * high, wide * 0.64, high * 0.76);
  });
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** Rows of weights as images of size x size: one colour for negative, one for positive, nothing for zero. */
export function weights(canvas, values, size, columns) {
  const count = values.length / size ** 2, rows = Math.ceil(count / columns), gap = 3, cell = size + gap;
  const [wide, high] = [columns * cell - gap, rows * cell - gap];
  Object.assign(canvas, { width: wide, height: high });
  canvas.style.aspectRatio = `${wide} / ${high}`;
  canvas.style.imageRendering = "pixelated";
  const [positive, negative] = [rgb(colour("positive")), rgb(colour("negative"))];
  const largest = Math.max(0.08, [...values].map(Math.abs).sort((a, b) => a - b)[Math.floor(values.length * 0.995)]);
  const shown = new ImageData(wide, high);
  values.forEach((value, at) => {
    const [neuron, pixel] = [Math.floor(at / size ** 2), at % size ** 2];
    const x = (neuron % columns) * cell + (pixel % size), y = Math.floor(neuron / columns) * cell + Math.floor(pixel / size);
    shown.data.set([...(value > 0 ? positive : negative), 255 * (0.06 + 0.94 * Math.min(1, Math.abs(value) / largest))], 4 * (y * wide + x));
  });
  canvas.getContext("2d").putImageData(shown, 0, 0);
}
