"""The endpoint for agents written without polyturn: they call it as OpenAI's or Anthropic's API.

agent's client  ->  endpoint (HTTP)  ->  chat, responses, messages (formats)  ->  AgentSession  ->  Episode (exact tokens)

chat_request    a request and its answer, independent of any API
session    turns requests into turns of one episode: decides which of its histories a request continues
chat, responses, messages     the three formats, pure functions on JSON data
endpoint   paths, keys, sizes, errors: one HTTP server for many episodes
scheduler  `rollout.scheduler: black_box`: calls the agent for every episode of a run
hosted_episodes    `polyturn serve --openai`: episodes created by requests, and requests without an episode
"""
