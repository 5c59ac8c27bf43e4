"""Parts of the load test and of the soak over HTTP: a client for any OpenAI-compatible server, and what it measures."""
