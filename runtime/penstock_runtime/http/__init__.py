"""The HTTP server: transport below, application and routes, APIs and pages above.

transport    listening socket, connections, limits, request and response values
application  finds the route of a request, checks its token, turns errors into responses, counts
api          one module for each API: predict (Hugging Face), openai, cohere, tei, v2 (Open Inference Protocol), health
pages        playground, reference page, OpenAPI document
route_table  all routes
"""
