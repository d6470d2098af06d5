// OpenAI's JavaScript SDK: chats, tools, structured output, responses, embeddings, errors.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as shared from "./checks.mjs";
const { assert, check, context, keyedUrl, model, rejects, run, tooLong, url } = shared;

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const greedy = { model, messages, temperature: 0, max_tokens: 24 };
const roomy = { ...greedy, max_tokens: 400 };
const weather = {
  type: "function",
  function: { name: "get_weather", parameters: shared.weatherSchema },
};
const named = { type: "function", function: { name: "get_weather" } };
const River = z.object({ name: z.string(), length_km: z.number().int() });

check("plain and streamed are the same", async () => {
  const whole = await client.chat.completions.create(greedy);
  const stream_options = { include_usage: true };
  const stream = await client.chat.completions.create({ ...greedy, stream: true, stream_options });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.ok(text);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

check("a named tool is called once", async () => {
  const answer = await client.chat.completions.create({
    ...roomy,
    tools: [weather],
    tool_choice: named,
  });
  const calls = answer.choices[0].message.tool_calls;
  assert.deepEqual(calls.map((call) => call.function.name), ["get_weather"]);
  assert.deepEqual(Object.keys(JSON.parse(calls[0].function.arguments)).sort(), ["city", "unit"]);
});

check("a required call ends", async () => {
  const answer = await client.chat.completions.create({
    ...greedy,
    max_tokens: 1000,
    tools: [weather],
    tool_choice: "required",
  });
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
});

check("the stream helper puts a call together", async () => {
  const runner = client.chat.completions.stream({ ...roomy, tools: [weather], tool_choice: named });
  const calls = (await runner.finalChatCompletion()).choices[0].message.tool_calls;
  assert.equal(calls.length, 1);
  JSON.parse(calls[0].function.arguments);
});

check("runTools ends", async () => {
  let called = 0;
  const tool = {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city.",
      parameters: shared.weatherSchema,
      parse: JSON.parse,
      function: () => ((called += 1), "Rain, 9 C."),
    },
  };
  const asked = { ...roomy, tools: [tool], tool_choice: named };
  const runner = client.chat.completions.runTools(asked, { maxChatCompletions: 3 });
  await runner.done();
  assert.equal(called, 1); // a named choice is asked once by this helper
});

check("zod schemas", async () => {
  const answer = await client.chat.completions.parse({
    ...roomy,
    messages: [{ role: "user", content: "The Rhine is 1230 km long." }],
    response_format: zodResponseFormat(River, "river"),
  });
  River.parse(answer.choices[0].message.parsed);
});

check("responses, streamed and by previous id", async () => {
  const asked = { model, temperature: 0, max_output_tokens: 24 };
  const first = await client.responses.create({ ...asked, input: "My name is Ada." });
  const second = await client.responses.create({
    ...asked,
    input: "What is my name?",
    previous_response_id: first.id,
    stream: true,
  });
  let text = "";
  let last;
  for await (const event of second) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.equal(text, last.response.output_text ?? text);
  assert.ok(last.response.usage.input_tokens > first.usage.input_tokens);
});

check("completions, embeddings and models", async () => {
  const prompt = "The capital of France is";
  const plain = await client.completions.create({ model, prompt, temperature: 0, max_tokens: 4 });
  assert.ok(plain.choices[0].text.startsWith(" Paris"));
  const vectors = await client.embeddings.create({ model, input: ["A river.", "A lake."] });
  assert.equal(vectors.data.length, 2);
  const norm = vectors.data[0].embedding.reduce((sum, value) => sum + value * value, 0);
  assert.ok(Math.abs(norm - 1) < 1e-3);
  const ids = (await client.models.list()).data.map((card) => card.id);
  assert.ok(ids.includes(model));
});

check("errors", async () => {
  const long = { ...greedy, messages: [{ role: "user", content: tooLong }] };
  const overflow = await rejects("BadRequestError", () => client.chat.completions.create(long));
  assert.equal(overflow.code, "context_length_exceeded");
  assert.match(overflow.message, new RegExp(`maximum context length is ${context}`));
  const wrong = new OpenAI({ baseURL: `${keyedUrl}/v1`, apiKey: "wrong", maxRetries: 0 });
  await rejects("AuthenticationError", () => wrong.chat.completions.create(greedy));
  const unknown = { ...greedy, model: "gpt-4o" };
  await rejects("NotFoundError", () => client.chat.completions.create(unknown));
});

check("a timeout and a stream that is left", async () => {
  const endless = { ...greedy, max_tokens: 4000, ignore_eos: true };
  await rejects("APIConnectionTimeoutError", () =>
    client.chat.completions.create(endless, { timeout: 50 }),
  );
  const stream = await client.chat.completions.create({ ...endless, stream: true });
  for await (const _ of stream) break;
  assert.ok((await client.chat.completions.create(greedy)).choices[0].message.content);
});

await run();
