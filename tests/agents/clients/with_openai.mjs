// Drives the endpoint with the npm package openai: `node with_openai.mjs URL KEY WAY`; prints the last answer.
import OpenAI from "openai";
import { add, description, key, name, question, schema, url, way } from "./conversation.mjs";

const client = new OpenAI({ baseURL: url + "/v1", apiKey: key, maxRetries: 0 });
const stream = way.endsWith("streamed");

// The package's own loop over chat completions.
async function chat() {
  const run = { name, description, parameters: schema, function: add, parse: JSON.parse };
  const tools = [{ type: "function", function: run }];
  const messages = [{ role: "user", content: question }];
  return client.chat.completions.runTools({ model: "policy", messages, tools, stream }).finalContent();
}

// A loop by hand over responses, which sends back all that it got.
async function responses() {
  const tools = [{ type: "function", name, description, parameters: schema, strict: true }];
  const input = [{ role: "user", content: question }];
  for (;;) {
    const asked = { model: "policy", input, tools };
    const response = stream
      ? await client.responses.stream(asked).finalResponse()
      : await client.responses.create(asked);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length === 0) return response.output_text;
    input.push(...response.output);
    for (const call of calls)
      input.push({ type: "function_call_output", call_id: call.call_id, output: add(JSON.parse(call.arguments)) });
  }
}

console.log(await (way.startsWith("chat") ? chat() : responses()));
