"""Text generation: reads decoders, writes their graphs, and chooses the plan that is served.

decoder           what a decoder is, as values, read from a model folder
decoder_graph     writes a decoder as an OpenVINO graph
native_graph      writes a decoder as a file of the native engine
weights           the forms in which a graph stores its weights
"""
