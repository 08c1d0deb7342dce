// One training step in Node, with nothing but its standard file calls.
//
//     step.js MODEL WAY
//
// Reads w (float32) from MODEL/weights and contributes 2 w + 1 to MODEL/gradients, so that with the reducer `sum`
// the next version is 3 w + 1. WAY: sync, whole, stream.
'use strict';
const fs = require('fs');

const [model, way] = process.argv.slice(2);
const weights = `${model}/weights`;
const gradients = `${model}/gradients`;

function gradientOf(bytes) {
  const values = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  return Buffer.from(values.map((w) => 2 * w + 1).buffer);
}

function sync() {
  const from = fs.openSync(weights, 'r');
  const bytes = Buffer.alloc(fs.fstatSync(from).size);
  for (let done = 0, n = 1; n > 0; done += n) {
    n = fs.readSync(from, bytes, done, bytes.length - done, null);
  }
  fs.closeSync(from);
  const gradient = gradientOf(bytes);
  const to = fs.openSync(gradients, 'w');
  for (let done = 0; done < gradient.length;) {
    done += fs.writeSync(to, gradient, done, Math.min(70000, gradient.length - done));
  }
  fs.closeSync(to); // The end of the contribution: this is where a refusal is told.
}

function whole() {
  fs.writeFileSync(gradients, gradientOf(fs.readFileSync(weights)));
}

function stream() {
  const chunks = [];
  fs.createReadStream(weights).on('data', (chunk) => chunks.push(chunk)).on('end', () => {
    fs.createWriteStream(gradients).end(gradientOf(Buffer.concat(chunks)));
  });
}

({ sync, whole, stream })[way]();
