// Anthropic's JavaScript SDK, which Claude Code is made with, on /v1/messages.
import Anthropic from "@anthropic-ai/sdk";
import * as shared from "./checks.mjs";
const { assert, check, key, keyedUrl, model, rejects, run, tooLong, url } = shared;

const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const greedy = { model, messages, temperature: 0, max_tokens: 40 };
const tools = [{ name: "get_weather", input_schema: shared.weatherSchema }];
const tool_choice = { type: "tool", name: "get_weather" };

check("plain and streamed are the same", async () => {
  const whole = await client.messages.create(greedy);
  const streamed = await client.messages.stream(greedy).finalMessage();
  assert.ok(whole.content[0].text);
  assert.deepEqual(streamed.content, whole.content);
  assert.equal(streamed.stop_reason, whole.stop_reason);
  assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
});

check("a named tool is used once, whole and streamed", async () => {
  const asked = { ...greedy, max_tokens: 400, tools, tool_choice };
  const whole = await client.messages.create(asked);
  const streamed = await client.messages.stream(asked).finalMessage();
  for (const answer of [whole, streamed]) {
    const uses = answer.content.filter((block) => block.type === "tool_use");
    assert.equal(uses.length, 1);
    assert.deepEqual(Object.keys(uses[0].input).sort(), ["city", "unit"]);
    assert.equal(answer.stop_reason, "tool_use");
  }
});

check("tokens are counted as they are used", async () => {
  const counted = await client.messages.countTokens({ model, messages, tools });
  const { usage } = await client.messages.create({ ...greedy, max_tokens: 1, tools });
  assert.equal(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens ?? 0));
});

check("keys and errors", async () => {
  const wrong = new Anthropic({ baseURL: keyedUrl, apiKey: "wrong", maxRetries: 0 });
  await rejects("AuthenticationError", () => wrong.messages.create(greedy));
  const right = new Anthropic({ baseURL: keyedUrl, apiKey: key, maxRetries: 0 });
  assert.ok((await right.messages.create(greedy)).content.length);
  const long = { ...greedy, messages: [{ role: "user", content: tooLong }] };
  const error = await rejects("BadRequestError", () => client.messages.create(long));
  assert.equal(error.error.error.type, "invalid_request_error");
});

await run();
