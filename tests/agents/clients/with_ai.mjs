// Drives the endpoint with the npm package ai and one of its providers: `node with_ai.mjs URL KEY WAY`; prints the answer.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import { add, description, key, name, question, schema, url, way } from "./conversation.mjs";

const settings = { baseURL: url + "/v1", apiKey: key };
const model = {
  openai: () => createOpenAI(settings)("policy"),
  openai_chat: () => createOpenAI(settings).chat("policy"),
  openai_compatible: () => createOpenAICompatible({ name: "policy", ...settings })("policy"),
  anthropic: () => createAnthropic(settings)("policy"),
}[way.replace("_streamed", "")]();
const asked = {
  model,
  maxRetries: 0,
  prompt: question,
  tools: { [name]: tool({ description, inputSchema: jsonSchema(schema), execute: add }) },
  stopWhen: isStepCount(5),
};
console.log(await (way.endsWith("streamed") ? streamText(asked) : await generateText(asked)).text);
