// Drives the endpoint with the package's own loop of the npm package @anthropic-ai/sdk: `node with_anthropic.mjs URL KEY WAY`.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { add, description, key, name, question, schema, url, way } from "./conversation.mjs";

const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const last = await client.beta.messages.toolRunner({
  model: "policy",
  max_tokens: 200,
  messages: [{ role: "user", content: question }],
  tools: [betaTool({ name, description, inputSchema: schema, run: add })],
  stream: way === "streamed",
});
console.log(last.content.map((block) => block.text ?? "").join(""));
