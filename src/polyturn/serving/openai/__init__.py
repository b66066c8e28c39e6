"""The endpoint for agents written without polyturn: they call it as OpenAI's or Anthropic's API.

agent's client  ->  endpoint (HTTP)  ->  chat, responses, messages (formats)  ->  AgentSession  ->  Episode (exact tokens)

chat, responses, messages   the three formats, pure functions on JSON data
chat_request                a request and its answer, independent of any API
endpoint, http              one HTTP server for many episodes: paths, keys, sizes, errors
session, turns              turn requests into turns of one episode; a request continues one of its histories, or opens one
scheduler                   `rollout.scheduler: black_box`: runs the agent for every episode of a run
agents, agent_process       command-line agents, and the processes that they run in
hosted_episodes             `polyturn serve --openai`: episodes created by requests, and requests without an episode
"""
