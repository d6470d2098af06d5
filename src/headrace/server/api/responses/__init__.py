"""/v1/responses: OpenAI's newer API over the same chat, with answers that are kept."""
