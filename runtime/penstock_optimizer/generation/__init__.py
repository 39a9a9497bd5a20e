"""Text generation: reads decoders, writes their graphs, and chooses the plan that is served.

decoder           what a decoder is, as values
decoder_families  reads the families of decoders from a model folder
decoder_graph     writes a decoder as an OpenVINO graph
weights           the forms in which a graph stores its weights
"""
