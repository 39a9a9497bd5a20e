"""Routes for gateways of language models, which ask a classifier about each request: verdicts by a policy."""
