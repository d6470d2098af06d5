"""/v1/responses: OpenAI's newer API over the same chat, with stored answers."""
