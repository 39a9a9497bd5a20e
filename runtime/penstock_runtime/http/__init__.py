"""The HTTP server: transport below, application and routes, APIs and pages above.

transport    listening socket, connections, limits, request and response values
application  finds the route of a request, checks its token, makes responses of errors, counts
api/core     shared by the APIs: bodies, the model, text generation, conversations
api          a folder for each API, with the same modules in each: `requests` (bodies), `answers`, `routes`
pages        playground, reference page, OpenAPI document
route_table  all routes
"""
