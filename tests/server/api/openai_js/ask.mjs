// What a JavaScript client sees of a server: prints one JSON object for test_openai_js.py.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "smollm2";
const messages = [{ role: "user", content: "Name three primary colors." }];
const greedy = { model, messages, temperature: 0, max_tokens: 16 };
const found = {};

const whole = await client.chat.completions.create(greedy);
found.whole = whole.choices[0].message.content;
found.usage = whole.usage;

found.streamed = "";
const stream = await client.chat.completions.create({
  ...greedy,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) found.stream_usage = chunk.usage;
}

const helper = client.chat.completions.stream(greedy);
found.helper = (await helper.finalChatCompletion()).choices[0].message.content;

const plain = await client.completions.create({
  model,
  prompt: ["The capital of France is", "Once upon a time"],
  temperature: 0,
  max_tokens: 4,
});
found.completions = plain.choices.map((choice) => choice.text);
found.models = (await client.models.list()).data.map((card) => card.id);

// A client that leaves in the middle, and then goes on asking.
const left = await client.chat.completions.create({ ...greedy, max_tokens: 4000, stream: true });
for await (const _ of left) break;

try {
  await client.chat.completions.create({ ...greedy, n: 1000 });
} catch (error) {
  found.error = { name: error.constructor.name, status: error.status, param: error.param };
}
console.log(JSON.stringify(found));
