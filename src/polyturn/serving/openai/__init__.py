"""The endpoint for agents that know nothing of polyturn: to them it is OpenAI's or Anthropic's API.

agent's client  ->  endpoint (HTTP)  ->  chat, responses, messages (formats)  ->  AgentSession  ->  Episode (exact tokens)

chat_request    a request and its answer, in the words of no API
session    from requests to turns of one episode: which of its histories a request continues
chat, responses, messages     the three formats, pure functions on JSON data
endpoint   paths, keys, sizes, errors: one HTTP server in front of many episodes
scheduler  `rollout.scheduler: black_box`: calls the agent for every episode of a run
hosted_episodes    `polyturn serve --openai`: episodes that are created by a request, and requests without one
"""
