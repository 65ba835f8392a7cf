// What a program with the `ai` package does; one line of JSON for each way to ask.
import { generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import { createOpenAI } from '@ai-sdk/openai';
import { z } from 'zod';

const [url, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: 'none' });

for (const kind of ['responses', 'chat']) {
  const model = openai[kind](name);
  const ask = { model, prompt: 'Name a city.', maxOutputTokens: 40, temperature: 0, maxRetries: 0 };
  const { text, usage } = await generateText(ask);
  let streamed = '';
  let pieces = 0;
  for await (const piece of streamText(ask).textStream) {
    streamed += piece;
    pieces += 1;
  }
  const schema = z.object({ city: z.string().max(12) });
  const { object } = await generateObject({ ...ask, schema, maxOutputTokens: 80 });
  // A call, its result, and an answer to that.
  const weather = tool({
    description: 'The weather in a city.',
    inputSchema: schema,
    execute: async () => 'sunny',
  });
  const { steps } = await generateText({
    ...ask,
    maxOutputTokens: 80,
    tools: { weather },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
    stopWhen: stepCountIs(2),
  });
  const called = steps[0].toolCalls[0].toolName;
  const found = { text, streamed, pieces, object, called, steps: steps.length, usage: usage.totalTokens };
  console.log(JSON.stringify({ [kind]: found }));
}
