// OpenAI's client for Node: a chat with a tool, whole and streamed; what it got, as JSON.
import { createRequire } from "node:module";

const [, , packages, baseURL] = process.argv;
const require = createRequire(`${packages}/index.js`);
const OpenAI = require("openai").default;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const tools = [{
  type: "function",
  function: {
    name: "weather", description: "Tell the weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const messages = [{ role: "user", content: "Will it rain in Paris?" }];
const asked = { model: "tiny", messages, tools, max_tokens: 300 };

const whole = await client.chat.completions.create(asked);
const message = whole.choices[0].message;
const runner = client.chat.completions.stream(asked);
const streamed = await runner.finalChatCompletion();
const [call] = message.tool_calls;
messages.push(message, { role: "tool", tool_call_id: call.id, content: "It will rain." });
const last = await client.chat.completions.create(asked);
const named = await client.chat.completions.create({ ...asked, temprature: 1 }).catch(error => error);
const response = await client.responses.create({ model: "tiny", input: "Will it rain in Paris?" });
const events = [];
for await (const event of await client.responses.create({ model: "tiny", input: "Will it rain?", stream: true }))
  events.push(event.type);
console.log(JSON.stringify({
  message, streamed: streamed.choices[0].message, reason: streamed.choices[0].finish_reason,
  last: last.choices[0].message.content, error: [named.status, named.param],
  response: response.output_text, events,
}));
