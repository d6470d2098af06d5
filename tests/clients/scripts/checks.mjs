// What the JavaScript scripts here share: where the server is, and how their checks are run.
// A script calls check(name, function) for each, then run(), which prints a line of JSON for each
// check; test_scripts.py reads them. One check that fails does not stop the others.
import assert from "node:assert/strict";

export { assert };
export const url = process.env.CLIENTS_URL; // no key is asked for
export const keyedUrl = process.env.CLIENTS_KEYED_URL;
export const key = process.env.CLIENTS_KEY; // what keyedUrl asks for
export const model = process.env.CLIENTS_MODEL;
export const context = Number(process.env.CLIENTS_CONTEXT); // tokens
export const tooLong = "many words ".repeat(context);
export const weatherSchema = {
  type: "object",
  properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};

const checks = [];

export function check(name, body) {
  checks.push([name, body]);
}

// The error, whose constructor must have this name.
export async function rejects(name, call) {
  let found;
  try {
    found = await call();
  } catch (error) {
    assert.equal(error.constructor.name, name, error.stack);
    return error;
  }
  assert.fail(`${name} was expected; the answer was ${JSON.stringify(found)}`);
}

export async function run() {
  for (const [name, body] of checks) {
    console.log(JSON.stringify({ begun: name }));
    let error = null;
    try {
      await body();
    } catch (thrown) {
      error = String(thrown?.stack ?? thrown);
    }
    console.log(JSON.stringify({ done: name, error }));
  }
}
