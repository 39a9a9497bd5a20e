// Calls of client packages of JavaScript, as those of calls.py: node calls.mjs URLS, in the folder of node_modules.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const required = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = (name) => import(pathToFileURL(required.resolve(name)));
const { default: OpenAI } = await load("openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { embedMany, generateText, jsonSchema, Output, streamText, tool } = await load("ai");

const [VECTORS, GENERATION] = ["feature-extraction", "text-generation"];
const TEXTS = ["i like you", "a text"];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["paris", "berkeley"] } },
  required: ["city"],
  additionalProperties: false,
};
const description = "The weather in a city";
const messages = [{ role: "user", content: TEXTS[0] }];

function client(url) {
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
}

async function chat(url, more = {}) {
  const asked = { model: "emotion", messages, max_tokens: 8, temperature: 0, ...more };
  const found = await client(url).chat.completions.create(asked);
  return found.choices[0].message.content ?? found.choices[0].message.tool_calls.map((one) => one.function.arguments);
}

async function streamed(url, more = {}) {
  const asked = { model: "emotion", messages, max_tokens: 8, temperature: 0, ...more };
  const runner = client(url).chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const { choices, usage } = await runner.finalChatCompletion();
  if (!(usage.completion_tokens > 0)) throw new Error(`usage ${JSON.stringify(usage)}`);
  return choices[0].message.content ?? choices[0].message.tool_calls.map((one) => one.function.arguments);
}

const tools = [{ type: "function", function: { name: "weather", description, parameters } }];
const calling = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
const schema = { type: "json_schema", json_schema: { name: "place", schema: parameters, strict: true } };

function sdk(url) {
  return createOpenAICompatible({
    name: "penstock",
    baseURL: `${url}/v1`,
    apiKey: "any",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
}

function of(url, more = {}) {
  const model = sdk(url).chatModel("emotion");
  return { model, prompt: TEXTS[0], maxOutputTokens: 8, temperature: 0, maxRetries: 0, ...more };
}

const sdkTools = { weather: tool({ description, inputSchema: jsonSchema(parameters) }) };
const sdkCalling = { tools: sdkTools, toolChoice: "required", maxOutputTokens: 200 };

async function sdkStreamed(url, more = {}) {
  const found = streamText(of(url, { ...more, onError: ({ error }) => { throw error; } }));
  const text = await found.text;
  const usage = await found.usage;
  if (!(usage.outputTokens > 0)) throw new Error(`usage ${JSON.stringify(usage)}`);
  return text || (await found.toolCalls).map((one) => one.input);
}

const CALLS = [
  ["openai", "chat.completions.create", GENERATION, chat],
  ["openai", "chat.completions.stream, usage", GENERATION, streamed],
  ["openai", "chat.completions.create, tools", GENERATION, (url) => chat(url, calling)],
  ["openai", "chat.completions.stream, tools", GENERATION, (url) => streamed(url, calling)],
  [
    "openai", "chat.completions.create, json_schema", GENERATION,
    (url) => chat(url, { response_format: schema, max_tokens: 200 }),
  ],
  [
    "openai", "responses.create", GENERATION,
    async (url) => (await client(url).responses.create(
      { model: "emotion", input: TEXTS[0], max_output_tokens: 16, temperature: 0 },
    )).output_text,
  ],
  [
    "openai", "embeddings.create", VECTORS,
    async (url) => (await client(url).embeddings.create({ model: "emotion", input: TEXTS })).data
      .map((one) => one.embedding),
  ],
  ["@ai-sdk/openai-compatible", "generateText", GENERATION, async (url) => (await generateText(of(url))).text],
  ["@ai-sdk/openai-compatible", "streamText, usage", GENERATION, sdkStreamed],
  [
    "@ai-sdk/openai-compatible", "generateText, tools", GENERATION,
    async (url) => (await generateText(of(url, sdkCalling))).toolCalls.map((one) => one.input),
  ],
  ["@ai-sdk/openai-compatible", "streamText, tools", GENERATION, (url) => sdkStreamed(url, sdkCalling)],
  [
    "@ai-sdk/openai-compatible", "generateText, Output.object", GENERATION,
    async (url) => (await generateText(
      of(url, { output: Output.object({ schema: jsonSchema(parameters) }), maxOutputTokens: 200 }),
    )).output,
  ],
  [
    "@ai-sdk/openai-compatible", "embedMany", VECTORS,
    async (url) => (await embedMany({ model: sdk(url).embeddingModel("emotion"), values: TEXTS, maxRetries: 0 }))
      .embeddings,
  ],
];

const urls = JSON.parse(process.argv[2]);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
for (const [name, call, task, run] of CALLS) {
  const version = required(`${process.cwd()}/node_modules/${name}/package.json`).version;
  const entry = { client: `${name} (JavaScript)`, version, call, task };
  console.log(JSON.stringify(entry));
  await lines.next();
  try {
    entry.result = await run(urls[task]);
  } catch (error) {
    entry.error = `${error.name}: ${error.message}`.slice(0, 2000);
  }
  console.log(JSON.stringify(entry));
}
process.exit(0);
