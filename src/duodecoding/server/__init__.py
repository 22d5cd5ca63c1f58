"""An OpenAI-compatible server around `LLM`, with a page to watch both processors work. Needs the extra `server`."""
