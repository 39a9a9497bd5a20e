"""Text generation: reads decoders, writes their graphs, and chooses the plan that is served.

decoder    what a decoder is, as values
families   reads the families of decoders from a model folder
graph      writes a decoder as an OpenVINO graph
weights    the forms in which a graph stores its weights
"""
