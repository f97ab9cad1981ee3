// The conversation that every client has: a question, calls of a tool, an answer.
export const question = "12 + 3 + 4?";
export const name = "add";
export const description = "Adds.";
export const schema = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
  additionalProperties: false,
};
export const add = ({ a, b }) => String(a + b);
export const [url, key, way] = process.argv.slice(2);
