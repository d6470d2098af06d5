"""Load tests of any OpenAI-compatible endpoint: requests on a schedule, and what a user saw."""
