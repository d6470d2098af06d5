// Vercel's AI SDK by its openai-compatible provider, and by its openai provider (/v1/responses).
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import { assert, check, keyedUrl, model, run, tooLong, url } from "./checks.mjs";

const compatible = createOpenAICompatible({
  name: "headrace",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = { compatible: compatible(model), chat: openai.chat(model), responses: openai(model) };
const greedy = { temperature: 0, maxOutputTokens: 40, maxRetries: 0, prompt: "Name a river." };
const roomy = { ...greedy, maxOutputTokens: 400, prompt: "What is the weather in Paris?" };
const River = z.object({ name: z.string(), length_km: z.number().int() });
const tools = {
  get_weather: ai.tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) }),
    execute: async () => "Rain, 9 C.",
  }),
};
const toolChoice = { type: "tool", toolName: "get_weather" };

async function eachModel(body) {
  for (const [name, asked] of Object.entries(models)) {
    try {
      await body(asked);
    } catch (error) {
      error.stack = `${name}: ${error.stack}\n${JSON.stringify(error.requestBodyValues ?? null)}`;
      throw error;
    }
  }
}

check("generateText", () =>
  eachModel(async (asked) => {
    const answer = await ai.generateText({ ...greedy, model: asked });
    assert.ok(answer.text);
    assert.ok(["stop", "length"].includes(answer.finishReason));
    assert.ok(answer.usage.outputTokens > 0);
    assert.ok(answer.usage.inputTokens > 0);
  }),
);

check("streamText", () =>
  eachModel(async (asked) => {
    const whole = await ai.generateText({ ...greedy, model: asked });
    const stream = ai.streamText({ ...greedy, model: asked });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  }),
);

check("a named tool is called once", () =>
  eachModel(async (asked) => {
    const answer = await ai.generateText({ ...roomy, model: asked, tools, toolChoice });
    assert.deepEqual(answer.toolCalls.map((call) => call.toolName), ["get_weather"]);
    assert.equal(answer.toolResults.length, 1);
    assert.ok(["tool-calls", "stop"].includes(answer.finishReason));
  }),
);

check("required and auto end, streamed", () =>
  eachModel(async (asked) => {
    const asking = { ...roomy, maxOutputTokens: 1000, model: asked, tools };
    const required = ai.streamText({ ...asking, toolChoice: "required" });
    assert.ok((await required.toolCalls).length > 0);
    assert.equal(await required.finishReason, "tool-calls");
    const auto = ai.streamText({ ...asking, maxOutputTokens: 200, toolChoice: "auto" });
    assert.ok(["stop", "length", "tool-calls"].includes(await auto.finishReason));
  }),
);

check("several steps end", () =>
  eachModel(async (asked) => {
    // The first step must call, and its result goes back to the model.
    const answer = await ai.generateText({
      ...roomy,
      model: asked,
      tools,
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? toolChoice : "none" }),
      stopWhen: ai.isStepCount(3),
    });
    assert.equal(answer.steps.length, 2);
    assert.ok(answer.text);
  }),
);

check("objects by schema", () =>
  eachModel(async (asked) => {
    const prompt = "The Rhine is 1230 km long.";
    const { object } = await ai.generateObject({ ...roomy, prompt, model: asked, schema: River });
    River.parse(object);
    const output = ai.Output.object({ schema: River });
    River.parse((await ai.generateText({ ...roomy, prompt, model: asked, output })).output);
  }),
);

check("objects by schema, streamed", () =>
  eachModel(async (asked) => {
    const output = ai.Output.object({ schema: River });
    const stream = ai.streamText({ ...roomy, model: asked, output });
    let pieces = 0;
    for await (const _ of stream.partialOutputStream) pieces += 1;
    assert.ok(pieces > 1);
    River.parse(await stream.output);
  }),
);

check("a choice of words", () =>
  eachModel(async (asked) => {
    const output = ai.Output.choice({ options: ["rain", "sun"] });
    const answer = await ai.generateText({ ...roomy, model: asked, output });
    assert.ok(["rain", "sun"].includes(answer.output));
  }),
);

check("embeddings", async () => {
  const values = ["A river.", "A lake.", "Tax law."];
  for (const provider of [compatible, openai]) {
    const found = await ai.embedMany({ model: provider.embeddingModel(model), values });
    assert.equal(found.embeddings.length, 3);
    assert.ok(found.usage.tokens > 0);
    const { embedding } = await ai.embed({ model: provider.embeddingModel(model), value: "A." });
    assert.equal(embedding.length, found.embeddings[0].length);
  }
});

check("errors", async () => {
  await eachModel(async (asked) => {
    const asking = { ...greedy, prompt: tooLong, model: asked };
    const error = await ai.generateText(asking).catch((thrown) => thrown);
    assert.ok(ai.APICallError.isInstance(error), String(error?.stack));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /maximum context length/);
  });
  const wrong = createOpenAI({ baseURL: `${keyedUrl}/v1`, apiKey: "wrong" });
  const denied = await ai.generateText({ ...greedy, model: wrong(model) }).catch((error) => error);
  assert.equal(denied.statusCode, 401);
  assert.equal(denied.isRetryable, false);
});

check("an answer that is aborted", async () => {
  const controller = new AbortController();
  const asking = { ...greedy, maxOutputTokens: 4000, abortSignal: controller.signal };
  const stream = ai.streamText({ ...asking, model: models.compatible });
  for await (const _ of stream.textStream) controller.abort();
  assert.ok((await ai.generateText({ ...greedy, model: models.compatible })).text);
});

await run();
